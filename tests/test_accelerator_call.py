"""What `offload` does of a device, and of what lies below it: where things are before, in and after
the block, how much they take, and what is refused. On the emulated accelerator; bits are compared
by `test_accelerator_training`."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
from emulated import DEVICE, Emulated, accelerated
from exactness import (
    SMALL_PAGES,
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
from torch.optim import AdamW

import dynoffload
from dynoffload.errors import BackendError, BudgetError, ConfigError
from dynoffload.memory.accelerator.workspace import WorkspaceEstimate
from dynoffload.runtime import opening
from dynoffload.runtime.adoption.held import is_between_processes
from dynoffload.units import KiB, MiB, parse_bytes

CONFIG: dict[str, Any] = {**SMALL_PAGES, "step_aside": False}


def budget_for(model: nn.Module, optimizer: Any, share: int = 3) -> int:
    """Return a share of what training keeps, or what is refused least."""
    return least_budget(model, optimizer, footprint_of(model) // share, CONFIG)[0]


def trained(
    model: nn.Module, steps: int = 3, budget: int = 0, config: Any = CONFIG, **options: Any
) -> Any:
    """Train on the emulated accelerator; return the session."""
    optimizer = AdamW(model.parameters(), lr=1e-2)
    limit = budget or budget_for(model, optimizer)
    with dynoffload.offload(
        model, optimizer, budget=limit, device=DEVICE, config=config, **options
    ) as session:
        Loop(steps=steps).run(model, optimizer, small_samples(steps), small_loss)
    return session


# Where


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cudda", "'cudda' is no device"),
        ("meta", "device='meta' has no memory to train in"),
        ("xpu:1", "'xpu:1', but torch "),
    ],
)
def test_a_device_that_is_none_is_refused(device: str, message: str) -> None:
    model = small()
    with (
        pytest.raises((ConfigError, BackendError), match=message),
        dynoffload.offload(model, budget="1MiB", device=device),
    ):
        pass


def test_a_number_beyond_the_accelerators_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch is asked for a stream of it, which ends the process with some backends."""
    here = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: here)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    for use in (
        lambda: dynoffload.offload(small(), budget="1MiB", device="cuda:2").__enter__(),
        lambda: dynoffload.HostOptimizer(small().parameters(), AdamW, device="cuda:2"),
    ):
        with pytest.raises(BackendError, match=r"finds 2 of 'cuda' .* device='cuda', or"):
            use()


@pytest.mark.parametrize(
    ("method", "named"),
    [
        ("given_bytes", "memory_stats"),
        ("free_bytes", "get_memory_info"),
        ("fill", "resize_ to more bytes"),
        ("empty", "resize_ to no bytes"),
    ],
)
def test_a_backend_that_lacks_something_is_refused_before_anything_is_touched(
    method: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(*args: Any) -> None:
        raise NotImplementedError("not supported by this backend\nException raised from here")

    model = small()
    optimizer = AdamW(model.parameters())
    before = [(one, one.data_ptr(), one.detach().clone()) for one in model.parameters()]
    with emulation() as opened:
        monkeypatch.setattr(opened.return_value, method, lacks)
        with (
            pytest.raises(BackendError, match=rf"needs .*{named}.* fails there \(not supported"),
            dynoffload.offload(model, optimizer, budget="1MiB", device=DEVICE),
        ):
            pass
    for parameter, address, value in before:
        assert parameter.data_ptr() == address
        assert torch.equal(parameter, value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": {"backend": "mapped"}}, "backend='mapped' pages memory of the CPU"),
        ({"host_budget": "many"}, "many"),
    ],
)
def test_what_is_not_for_an_accelerator_is_refused(options: dict[str, Any], message: str) -> None:
    model = small()
    with (
        emulation(),
        pytest.raises(ConfigError, match=message),
        dynoffload.offload(model, budget="1MiB", device=DEVICE, **options),
    ):
        pass


def test_a_budget_of_host_memory_is_for_accelerators() -> None:
    with (
        pytest.raises(ConfigError, match="host_budget= is for what lies below an accelerator"),
        dynoffload.offload(small(), budget="1MiB", host_budget="1MiB"),
    ):
        pass


def test_a_model_on_two_devices_is_refused() -> None:
    model = small()
    places = {"one": torch.device("cpu"), "other": torch.device("cuda", 0)}
    model.__dict__["named_parameters"] = lambda: iter(
        (name, _Elsewhere(place)) for name, place in places.items()
    )
    with (
        pytest.raises(
            ConfigError, match=r"'one' is on cpu and .* cuda:0.*move all parameters to one"
        ),
        dynoffload.offload(model, budget="1MiB"),
    ):
        pass


class _Elsewhere:
    """Of a parameter what is asked before anything is done with it; there is no second device."""

    layout, is_meta, is_nested = torch.strided, False, False

    def __init__(self, device: torch.device) -> None:
        self.device = device


def emulation() -> Any:
    """An emulated accelerator that no session needs to begin on."""
    from unittest import mock

    from dynoffload.runtime import target

    return mock.patch.object(target, "open_streams", return_value=Emulated())


# How much


def test_the_host_is_asked_before_anything_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    before = {name: p.clone() for name, p in model.named_parameters()}
    monkeypatch.setattr(opening, "available_bytes", lambda: 64 * KiB)
    with (
        emulation(),
        pytest.raises(BudgetError, match=r"takes .* of host memory.*pass host_budget= what can be"),
    ):
        trained(model)
    assert_same(dict(model.named_parameters()), before, "parameters")


def test_a_budget_larger_than_the_accelerator_is_lowered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with accelerated(memory=MiB, elsewhere=True):
        session = trained(small(), budget=1 << 40)
    assert session.sizing.budget == MiB
    assert "more than the 1.00 MiB that emulated has left" in caplog.text


def test_one_that_is_too_small_for_it_says_so() -> None:
    with (
        pytest.raises(BudgetError, match=r"emulated has left.*accelerator's memory that lacks"),
        accelerated(memory=16 * KiB, elsewhere=True),
    ):
        trained(small(), budget=1 << 40)


def test_the_plan_line_names_the_tiers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "dynoffload"), accelerated():
        trained(small(), host_budget="128KiB")
    plan = next(line for line in caplog.messages if line.startswith("Small: "))
    assert "on the accelerator emulated" in plan
    assert "128.00 KiB of host memory below it (pinned), spilling to" in plan


# The pool, and what operators take beside it


@pytest.mark.parametrize("budget", ["1MiB", "64MiB"])
def test_chunks_of_activations_fit_host_memory(budget: str) -> None:
    """A chunk grows with the budget, and leaves for host memory, which may be smaller."""
    model = small()
    host_budget = footprint_of(model) // 2
    with accelerated():
        session = trained(model, budget=parse_bytes(budget), host_budget=host_budget)
    assert 8 * session.sizing.chunk_bytes <= host_budget
    assert len(session.log.steps) == 3


def test_a_budget_that_operators_pass_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """The pool has its least."""
    temporaries = WorkspaceEstimate(most=1000, least=700, budget=1200)
    for _ in range(2):
        assert temporaries.after(1500, 700) == 700
    assert caplog.text.count("the budget of 1.17 KiB is passed by 300 B") == 1


@pytest.mark.parametrize("when", ["before the block", "in the first step"])
def test_a_workspace_that_libraries_keep_is_within_the_budget(when: str) -> None:
    """As that of cuBLAS. If nobody knows of it before, the first step may pass the budget, and its
    peak is not the next step's."""
    model = small()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    size = footprint_of(model) // 4
    budget = budget_for(model, optimizer) + size
    with accelerated() as queues:
        storage = torch.UntypedStorage(0)

        def keep(*_: Any) -> None:
            if not storage.nbytes():
                queues.fill(storage, size)

        keep() if when == "before the block" else model.register_forward_hook(keep)
        with dynoffload.offload(
            model, optimizer, budget=budget, device=DEVICE, config=CONFIG
        ) as session:
            Loop(steps=4).run(model, optimizer, small_samples(4), small_loss)
    peaks = list(session.stats["peak_allocated_bytes"])
    within = [size < peak <= budget for peak in peaks]
    assert within == [when == "before the block", True, True, True], (peaks, budget)


def test_a_block_begins_though_more_is_held_than_its_regions_leave() -> None:
    """The model is on the accelerator already; what is beyond the pool leaves later."""
    twin = Twin(small(), partial(AdamW, lr=1e-2))
    held = footprint_of(twin.model)
    with accelerated() as queues:
        storage = torch.UntypedStorage(0)
        queues.fill(storage, held)
        budget, samples = held * 5 // 4, small_samples(3)
        options: Any = {"device": DEVICE, "config": CONFIG}
        session = compare_runs(twin, Loop(steps=3), samples, small_loss, budget, **options)
    assert (session.stats["peak_allocated_bytes"] <= budget).all()


def test_the_pool_keeps_a_margin_for_what_the_allocator_rounds() -> None:
    temporaries = WorkspaceEstimate(most=1000, least=0, budget=1200)
    assert temporaries.capacity == 1000 - 1200 // 8
    assert temporaries.begin(held=300) == 1200 - 300 - 1200 // 8
    assert temporaries.after(peak=500, regions=100) == 1200 - 400 - 1200 // 32


@pytest.mark.parametrize("when", ["before", "as it begins", "by itself"])
def test_what_was_taken_before_the_first_step_is_not_what_operators_take(
    when: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as the model itself, or what it is initialised with: the pool would be at its least for
    as long as steps are remembered, and the budget called too small."""
    with accelerated() as queues:

        def take(module: nn.Module) -> None:
            for parameter in module.parameters(recurse=False):
                nn.init.normal_(parameter, std=0.1)
            storage = torch.UntypedStorage(0)
            queues.fill(storage, 8 * MiB)
            queues.empty(storage)

        with torch.device("cpu" if when == "before" else "meta"):
            model = small()
        if when == "before":
            take(model)
        elif when == "as it begins":
            dynoffload.materialize(model, take)
        elif when == "by itself":
            for module in model.modules():
                object.__setattr__(module, "reset_parameters", partial(take, module))
        optimizer = AdamW(model.parameters(), lr=1e-2)
        with dynoffload.offload(
            model, optimizer, budget=budget_for(model, optimizer, 2), device=DEVICE, config=CONFIG
        ) as session:
            Loop(steps=3).run(model, optimizer, small_samples(3), small_loss)
            paging = session._paging
            assert paging is not None
            capacity = paging.device.capacity
        assert capacity > session.sizing.least_bytes
        assert (session.stats["peak_allocated_bytes"] < 8 * MiB).all()
    assert "the budget of" not in caplog.text


def test_what_was_taken_while_paging_stepped_aside_is_not_what_operators_take(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A larger sample is paged again, and all is adopted anew."""
    model = small()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    few, many = (torch.arange(count) for count in (4, 16))
    with (
        accelerated() as queues,
        dynoffload.offload(
            model,
            optimizer,
            budget=4 * footprint_of(model) + MiB,
            device=DEVICE,
            config={**CONFIG, "step_aside": True},
        ) as session,
    ):
        for step, tokens in enumerate([few] * 6 + [many] * 2):
            if step == 6:
                assert not session.paging
                storage = torch.UntypedStorage(0)
                queues.fill(storage, 64 * MiB)
                queues.empty(storage)
            small_loss(model, (tokens, tokens)).backward()
            assert session.paging or step != 6
            optimizer.step()
            optimizer.zero_grad()
    assert (session.stats["peak_allocated_bytes"] < 64 * MiB).all()
    assert "the budget of" not in caplog.text


# Before, and after


def test_without_a_file_nothing_is_copied_as_a_block_ends() -> None:
    """Host memory of the slab becomes the tensors'."""
    with accelerated(elsewhere=True) as queues:
        model = small()
        trained(model)
        held = queues.host_bytes
    assert held == 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)  # theirs to write
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_fits_is_not_paged_and_comes_home(elsewhere: bool) -> None:
    twin = Twin(small(), partial(AdamW, lr=1e-2))
    with accelerated(elsewhere=elsewhere):
        session = compare_runs(
            twin,
            Loop(steps=6),
            small_samples(6),
            small_loss,
            4 * footprint_of(twin.model) + MiB,
            device=DEVICE,
            config={"step_aside": True},
        )
    assert not session.paging


def test_memory_of_an_accelerator_is_not_taken_for_shared() -> None:
    """torch says of all memory of CUDA devices that it is; a storage that does stands for one."""

    class OfCuda:
        device = torch.device("cuda", 0)

        def is_shared(self) -> bool:
            return True

    storage: Any = OfCuda()
    assert not is_between_processes(storage)
    shared = torch.zeros(4)
    assert not is_between_processes(shared.untyped_storage())
    assert is_between_processes(shared.share_memory_().untyped_storage())
