"""The optimizer on the host under a session: its state is not paged, and no bit differs."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import DEVICE, Emulated, accelerated
from exactness import (
    Loop,
    Twin,
    assert_same,
    compare_runs,
    footprint_of,
    least_budget,
    small,
    small_loss,
    small_samples,
)
from torch import nn
from torch.optim import SGD, Adam, AdamW

import dynoffload
from dynoffload.errors import CheckpointError, ConfigError
from dynoffload.host_optimizer import HostOptimizer
from dynoffload.runtime.counting import States, ordinary_bytes, whole_bytes

SMALL: dict[str, Any] = {"page_bytes": 4096, "min_paged_bytes": 1024}
MAPPED: dict[str, Any] = {**SMALL, "backend": "mapped"}


def halves() -> nn.Module:
    """Return a small network in bfloat16."""
    return small().bfloat16()


def twin_on(queues: Emulated, model: nn.Module | None = None, **options: Any) -> Twin:
    """Return a network and its reference, each with an optimizer on the host."""
    made = {"kind": AdamW, "lr": 1e-2, "tile_bytes": 4096, "queues": queues}
    made["threads"] = 1
    return Twin(halves() if model is None else model, partial(HostOptimizer, **{**made, **options}))


def close(twin: Twin) -> None:
    """End both optimizers."""
    for optimizer in (twin.optimizer, twin.its):
        assert isinstance(optimizer, HostOptimizer)
        optimizer.close()


def least(twin: Twin) -> int:
    """Return the least budget that a session takes, or a third of parameters and gradients."""
    wanted = footprint_of(twin.model, states=0) // 3
    return least_budget(twin.model, twin.optimizer, wanted, SMALL)[0]


@pytest.mark.parametrize(("accumulate", "delayed"), [(1, False), (1, True), (2, False)])
def test_no_bit_differs(accumulate: int, delayed: bool, caplog: pytest.LogCaptureFixture) -> None:
    """And nothing is said of state that is not paged."""
    loop = Loop(steps=4 // accumulate, accumulate=accumulate)
    with accelerated() as queues, caplog.at_level(logging.WARNING, "dynoffload"):
        twin = twin_on(queues, delayed=delayed)
        session = compare_runs(twin, loop, small_samples(4), small_loss, least(twin), device=DEVICE)
        assert session.stats["bytes_in"].sum() > 0
        close(twin)
    assert not caplog.messages


def test_a_file_below_and_clipping(tmp_path: Path) -> None:
    with accelerated(seed=3) as queues:
        twin = twin_on(queues, kind=SGD, momentum=0.9, spill_dir=tmp_path)

        def clip(step: int, model: nn.Module, optimizer: Any) -> None:
            small_loss(model, small_samples(1)[0]).backward()
            optimizer.clip_grad_norm_(0.1)
            optimizer.step()

        loop = Loop(steps=2, seeded=True, peek=clip)
        compare_runs(twin, loop, small_samples(16), small_loss, least(twin), device=DEVICE)
        close(twin)


def test_a_model_that_a_session_brings_to_the_accelerator() -> None:
    """And back to the CPU as the block ends, where training goes on."""
    with accelerated(elsewhere=True) as queues:
        twin = twin_on(queues)
        samples = small_samples(4)
        compare_runs(twin, Loop(steps=2), samples, small_loss, least(twin), device=DEVICE)
        for model, optimizer in twin.sides:
            Loop(steps=2, seeded=True).run(model, optimizer, samples, small_loss)
        twin.assert_same()
        close(twin)


def test_the_budget_counts_nothing_of_it() -> None:
    """Neither state, nor what stays of it, and no gradient after backward."""
    with accelerated() as queues:
        twin = twin_on(queues)
        ours, plain = twin.optimizer, AdamW(twin.reference.parameters())
        parameter = twin.model.head.weight
        assert States(ours).sizes(parameter) == []
        assert sum(States(plain).sizes(twin.reference.head.weight)) == 2 * parameter.nbytes
        small_loss(twin.model, small_samples(1)[0]).backward()
        assert ordinary_bytes(twin.model, ours) == sum(p.nbytes for p in twin.model.parameters())
        assert whole_bytes(twin.model, ours) == 2 * ordinary_bytes(twin.model, ours)
        budget = least(twin)
        with twin.paged(budget, device=DEVICE):
            small_loss(twin.model, small_samples(1)[0]).backward()
            assert all(p.grad is None for p in twin.model.parameters())
            twin.optimizer.step()
            assert twin.optimizer.state[parameter]["exp_avg"].untyped_storage().nbytes() > 0
        close(twin)


def test_checkpoints_go_on_bit_for_bit(tmp_path: Path) -> None:
    """Saved in a session and loaded outside of one, into a file; delayed, so parameters lag."""
    loop, samples = Loop(steps=3, seeded=True), small_samples(3)
    with accelerated() as queues:
        twin = twin_on(queues, delayed=True)
        with twin.paged(least(twin), device=DEVICE) as session:
            loop.run(twin.model, twin.optimizer, samples, small_loss)
            session.save(tmp_path / "checkpoint")
        loop.run(twin.reference, twin.its, samples, small_loss)
        assert isinstance(twin.optimizer, HostOptimizer)
        twin.optimizer.close()
        (tmp_path / "spill").mkdir()
        again = small(seed=9).bfloat16()
        optimizer = HostOptimizer(
            again.parameters(), AdamW, lr=3.0, delayed=True, spill_dir=tmp_path / "spill"
        )
        loop.run(again, optimizer, small_samples(3, seed=5), small_loss)  # one is under way
        dynoffload.load_checkpoint(again, optimizer, tmp_path / "checkpoint")
        for model, its in ((again, optimizer), (twin.reference, twin.its)):
            loop.run(model, its, small_samples(3, seed=1), small_loss)
        assert_same(optimizer.state_dict(), twin.its.state_dict(), "state")
        assert_same(dict(again.named_parameters()), dict(twin.reference.named_parameters()), "p")
        assert isinstance(twin.its, HostOptimizer)
        twin.its.close()


def test_checkpoints_of_another_optimizer_are_refused(tmp_path: Path) -> None:
    model = halves()
    optimizer = HostOptimizer(model.parameters(), AdamW)
    dynoffload.save_checkpoint(model, optimizer, tmp_path / "checkpoint")
    for other in (Adam(model.parameters()), HostOptimizer(model.parameters(), SGD)):
        with pytest.raises(CheckpointError, match="HostOptimizer of AdamW"):
            dynoffload.load_checkpoint(model, other, tmp_path / "checkpoint")


def test_a_checkpoint_of_another_memory_format(tmp_path: Path) -> None:
    """What does not fit in place is taken over nevertheless."""
    states = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 3).to(memory_format=layout)
        optimizer = HostOptimizer(model.parameters(), AdamW)
        if layout is torch.contiguous_format:
            model(torch.ones(1, 3, 3, 3)).sum().backward()
            optimizer.step()
            dynoffload.save_checkpoint(model, optimizer, tmp_path / "checkpoint")
        else:
            dynoffload.load_checkpoint(model, optimizer, tmp_path / "checkpoint")
        states.append(optimizer.state_dict()["state"])
    assert_same(states[1], states[0], "state")


# What is refused


def test_the_cpus_memory_is_what_is_to_be_saved() -> None:
    model = halves()
    optimizer = HostOptimizer(model.parameters(), AdamW)
    with pytest.raises(ConfigError, match="fast memory is host memory"):
        with dynoffload.offload(model, optimizer, budget="1MiB", config=MAPPED):
            pass
    assert small_loss(model, small_samples(1)[0]).isfinite()
