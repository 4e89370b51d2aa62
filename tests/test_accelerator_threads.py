"""What an accelerator's session meets beyond the calling thread and the CPU's tensors: threads of
autograd's and of the user's, evictions in the midst of a step, saved tensors of another device.

The emulated accelerator has the CPU's tensors and runs backward in the calling thread, as the CPU
does. Here backward runs in another one, which has the caller's modes, as autograd does it there.
"""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import eventually
from emulated import DEVICE, Emulated, accelerated, emulated
from exactness import (
    SMALL_PAGES,
    Loop,
    Twin,
    assert_same,
    compare_runs,
    footprint_of,
    least_budget,
)
from fused_networks import Chosen, chosen_loss
from test_accelerator_training import budget_for, mlp, mlp_loss
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import dynoffload
from dynoffload.errors import BackendError
from dynoffload.managed import managers
from dynoffload.memory.accelerator.accelerator import Accelerator
from dynoffload.memory.accelerator.pool import PAGE
from dynoffload.memory.accelerator.storages import RegionStorage
from dynoffload.runtime.adoption.buffers import Buffers
from dynoffload.runtime.adoption.relocation import Homes
from dynoffload.runtime.placing import put
from dynoffload.units import KiB

CONFIG: dict[str, Any] = {**SMALL_PAGES, "step_aside": False}


@pytest.fixture
def backward_elsewhere(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run every backward in a thread of its own, with the caller's modes; return their names."""
    plain: Callable[..., Any] = torch.autograd.backward
    names: list[str] = []

    def elsewhere(*args: Any, **kwargs: Any) -> None:
        modes, enabled = _get_current_dispatch_mode_stack(), torch.is_grad_enabled()
        failed: list[BaseException] = []

        def work() -> None:
            names.append(threading.current_thread().name)
            try:
                with contextlib.ExitStack() as stack:
                    for mode in modes:
                        stack.enter_context(mode)
                    stack.enter_context(torch.set_grad_enabled(enabled))
                    plain(*args, **kwargs)
            except BaseException as error:
                failed.append(error)

        profile = threading.getprofile()
        threading.setprofile(None)  # type: ignore[arg-type]  # autograd's threads are not Python's
        try:
            thread = threading.Thread(target=work, name="autograd's")
            thread.start()
        finally:
            threading.setprofile(profile)  # type: ignore[arg-type]
        thread.join()
        if failed:
            raise failed[0]

    monkeypatch.setattr(torch.autograd, "backward", elsewhere)
    return names


@pytest.mark.parametrize("reentrant", [False, True])
def test_backward_in_a_thread_of_autograds(reentrant: bool, backward_elsewhere: list[str]) -> None:
    """What a checkpoint makes again, it makes there."""

    class Checkpointed(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for module in self:
                x = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=reentrant)
            return x

    loop = Loop(steps=3, accumulate=2, clip=0.5, autocast=torch.bfloat16)
    twin = Twin(Checkpointed(*mlp()), partial(SGD, lr=1e-2, momentum=0.9))
    samples = [torch.randn(8, 48, requires_grad=True) for _ in range(6)]
    with accelerated(elsewhere=True):
        compare_runs(twin, loop, samples, mlp_loss, budget_for(twin, 3), device=DEVICE)
    assert set(backward_elsewhere) == {"autograd's"}


def test_an_update_is_made_in_the_midst_of_backward(backward_elsewhere: list[str]) -> None:
    """Of experts that forward did not use, a hook in backward reads the weights: the update that
    waits is made there, and what it reads and writes of rows is heard of."""
    torch.manual_seed(0)
    twin = Twin(Chosen(), partial(AdamW, lr=1e-2))
    samples = [(step, hits) for step, hits in enumerate([[0, 1, 2, 3, 4, 5], [2], [1], [4, 5]])]
    seen: dict[nn.Module, list[torch.Tensor]] = {twin.model: [], twin.reference: []}

    def loss_of(model: nn.Module, sample: Any) -> torch.Tensor:
        loss = chosen_loss(model, sample)
        fused = [p for p in model.parameters() if p.dim() == 3]
        loss.register_hook(
            lambda gradient: seen[model].extend(p.detach().abs().amax((1, 2)) for p in fused)
        )
        return loss

    with accelerated(elsewhere=True):
        compare_runs(
            twin,
            Loop(steps=4),
            samples,
            loss_of,
            least_budget(twin.model, twin.optimizer, footprint_of(twin.model) // 2, CONFIG)[0],
            device=DEVICE,
        )
    assert_same(seen[twin.model], seen[twin.reference], "what the hook saw")
    assert len(seen[twin.model]) > 0


def paged_mlp() -> tuple[nn.Module, AdamW, int]:
    """Return a network, its optimizer, and a quarter of what they take."""
    model = mlp()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, least_budget(model, optimizer, footprint_of(model) // 4, CONFIG)[0]


def test_threads_that_begin_in_the_block_are_heard_of() -> None:
    """Such as one that logs norms. One that was there before is not: the page on accelerators says
    so."""
    model, optimizer, budget = paged_mlp()
    found: list[list[torch.Tensor]] = []
    before = threading.getprofile()
    with (
        accelerated(elsewhere=True),
        dynoffload.offload(model, optimizer, budget=budget, device=DEVICE, config=CONFIG),
    ):
        Loop(steps=2).run(model, optimizer, [torch.randn(8, 48)] * 2, mlp_loss)
        for _ in range(2):
            thread = threading.Thread(
                target=lambda: found.append([p.detach().norm() for p in model.parameters()])
            )
            thread.start()
            thread.join()
        found.append([p.detach().norm() for p in model.parameters()])
    assert len(found) == 3
    assert_same(found[0], found[2], "norms")
    assert_same(found[1], found[2], "norms")
    assert threading.getprofile() == before


def test_memory_that_is_paged_is_not_shared_with_processes() -> None:
    model, optimizer, budget = paged_mlp()
    with (
        accelerated(elsewhere=True),
        dynoffload.offload(model, optimizer, budget=budget, device=DEVICE, config=CONFIG),
    ):
        Loop(steps=1).run(model, optimizer, [torch.randn(8, 48)], mlp_loss)
        storage = model[0][0].weight.untyped_storage()
        for share in (storage.share_memory_, storage._share_cuda_):
            with pytest.raises(BackendError, match="cannot be shared with another process"):
                share()


def test_sessions_that_overlap_leave_nothing_in_later_threads() -> None:
    """The first ends before the second, which puts back what it found."""
    first, second = paged_mlp(), paged_mlp()
    found: list[int] = []
    before = threading.getprofile()
    try:
        with (
            accelerated(elsewhere=True),
            contextlib.ExitStack() as one,
            contextlib.ExitStack() as two,
        ):
            for stack, (model, optimizer, budget) in ((one, first), (two, second)):
                block = dynoffload.offload(
                    model, optimizer, budget=budget, device=DEVICE, config=CONFIG
                )
                stack.enter_context(block)
                mlp_loss(model, torch.randn(8, 48)).backward()
            one.close()
            two.close()
            thread = threading.Thread(
                target=lambda: found.append(len(_get_current_dispatch_mode_stack()))
            )
            thread.start()
            thread.join()
    finally:
        threading.setprofile(before)
    assert found == [0]


def modes_are_called() -> bool:
    """Return whether torch calls dispatch modes in this thread; without one, that is an error."""
    return torch._C._dispatch_tls_is_dispatch_key_included("Python")


@pytest.mark.parametrize("begun", [False, True])
def test_a_block_that_fails_leaves_torch_as_it_was(
    begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it begins, and in its midst, with updates that still wait."""
    model, optimizer, budget = paged_mlp()
    if not begun:
        monkeypatch.setattr(Homes, "bring", lambda self: 1 / 0)

    def fail() -> None:
        with dynoffload.offload(model, optimizer, budget=budget, device=DEVICE, config=CONFIG):
            Loop(steps=1).run(model, optimizer, [torch.randn(8, 48)], mlp_loss)
            raise ZeroDivisionError

    with accelerated(elsewhere=True, watched=False):
        with pytest.raises(ZeroDivisionError):
            fail()
        assert not modes_are_called()
        assert torch.empty(2).shape == (2,)
    assert _get_current_dispatch_mode_stack() == []


def regions_with_memory() -> set[int]:
    """Return the ids of all storages of regions that take memory."""
    gc.collect()
    return {
        id(one)
        for one in gc.get_objects()
        if type(one) is RegionStorage and torch.UntypedStorage.nbytes(one)
    }


def test_a_block_gives_memory_back_though_its_session_lives_on() -> None:
    """Also what a graph held as the block ended, once that is gone."""
    model, optimizer, budget = paged_mlp()
    before = regions_with_memory()
    with accelerated(elsewhere=True):
        with dynoffload.offload(
            model, optimizer, budget=budget, device=DEVICE, config=CONFIG
        ) as session:
            Loop(steps=2).run(model, optimizer, [torch.randn(8, 48)] * 2, mlp_loss)
            loss = mlp_loss(model, torch.randn(8, 48))
            assert regions_with_memory() - before
        del loss
        assert eventually(lambda: not regions_with_memory() - before)  # a queue may still hold it
    assert len(session.log.steps) == 2


class Whole(SGD):
    """An optimizer that is not of torch's, so its steps run whole."""


@pytest.mark.parametrize("first", ["step", "whole step", "forward", "evaluation"])
def test_a_thread_from_before_brings_what_it_touches(first: str) -> None:
    """Whatever it calls first, also under the user's inference mode."""
    twin = Twin(mlp(), partial(Whole if first == "whole step" else AdamW, lr=1e-2))
    sample, go, come = torch.randn(8, 48), threading.Event(), threading.Event()

    def work() -> None:
        assert go.wait(60)
        calls = {
            "step": twin.optimizer.step,
            "whole step": twin.optimizer.step,
            "forward": lambda: twin.model(sample),
            "evaluation": lambda: torch.inference_mode()(twin.model)(sample),
        }
        calls[first]()
        if first == "evaluation":
            with torch.no_grad():
                twin.model(sample)
        come.set()

    thread = threading.Thread(target=work)
    thread.start()
    with accelerated(elsewhere=True, watched=False):
        with twin.paged(budget_for(twin, 3), device=DEVICE):
            mlp_loss(twin.model, sample).backward()
            mlp_loss(twin.reference, sample).backward()
            go.set()
            assert come.wait(60)
            if "step" in first:
                twin.its.step()
        thread.join()
    twin.assert_same()


@pytest.mark.parametrize("seed", range(2))
def test_an_interrupt_while_something_enters_spoils_nothing(seed: int) -> None:
    """Forward and backward are interrupted as a copy is queued, and made again."""
    twin = Twin(mlp(), partial(AdamW, lr=1e-2))
    samples = [torch.randn(8, 48) for _ in range(12)]
    chance, cut = random.Random(seed), [0]
    with accelerated(seed, elsewhere=True) as queues:
        plain, armed = queues.copy_in, [False]

        def copy_in(*args: Any) -> Any:
            if armed[0] and chance.random() < 0.2:
                armed[0] = False
                cut[0] += 1
                signal.raise_signal(signal.SIGINT)
            return plain(*args)

        queues.copy_in = copy_in  # type: ignore[method-assign]
        with twin.paged(budget_for(twin, 4), device=DEVICE, config=CONFIG):
            for sample in samples:
                mlp_loss(twin.reference, sample).backward()
                twin.its.step()
                twin.its.zero_grad()
                armed[0] = True
                try:
                    mlp_loss(twin.model, sample).backward()
                except KeyboardInterrupt:
                    twin.optimizer.zero_grad()
                    mlp_loss(twin.model, sample).backward()
                armed[0] = False
                twin.optimizer.step()
                twin.optimizer.zero_grad()
        queues.copy_in = plain  # type: ignore[method-assign]
    assert cut[0] > 4
    twin.assert_same()


def test_a_pool_that_shrinks_evicts_what_waits_for_an_update() -> None:
    """Regions whose update waits leave with the bytes that they had, and the update is made on
    them; the allocator's peak grows in the third step."""
    capacities: list[int] = []

    def look(step: int, model: nn.Module, optimizer: Any) -> None:
        for session in managers.values():
            capacities.append(session._paging.device.capacity)

    twin = Twin(mlp(64), partial(AdamW, lr=1e-2))  # of whole pages: no padding
    samples = [torch.randn(8, 64) for _ in range(6)]
    budget = footprint_of(twin.model) * 4 // 5
    with accelerated(elsewhere=True) as queues:
        _grow(queues, after=5, by=budget // 3)  # one call as the block begins, two a step
        session = compare_runs(
            twin, Loop(steps=6, peek=look), samples, mlp_loss, budget, device=DEVICE, config=CONFIG
        )
    assert budget // 3 < session.stats["peak_allocated_bytes"].iloc[-1] <= budget
    assert session.log.headroom >= budget // 3 - (session.sizing.budget - session.sizing.pool_bytes)
    assert capacities[-1] < capacities[1]


def _grow(queues: Emulated, *, after: int, by: int) -> None:
    """Let the allocator's peak be larger from a step on."""
    plain, steps = queues.peak_bytes, iter(range(1 << 20))
    queues.peak_bytes = lambda: plain() + (by if next(steps) >= after else 0)  # type: ignore[method-assign]


def test_buffers_go_home_to_another_device(tmp_path: Path) -> None:
    """The meta device stands for a home whose tensors torch keeps in another way."""
    module = nn.Linear(4, 4)
    with emulated() as queues:
        device = Accelerator(queues, 16 * PAGE, tmp_path)
        buffers = Buffers(module, device, KiB, {}, enough=lambda nbytes: nbytes)
        module.register_buffer("mask", torch.ones(PAGE))
        mask = module.mask
        assert device.owner(mask) >= 0
        for tensor in buffers.end().values():
            put(tensor, tensor.data.to("meta"))
        assert module.mask is mask
        assert mask.is_meta
        device.close()
