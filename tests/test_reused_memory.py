"""Memory that comes back: who gets it, how much there is, and that others can have it."""

from __future__ import annotations

import copy
import gc
import resource
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
from hazards import Side, compared, each_paged
from torch.autograd.profiler import profile

from dynoffload.experiments.allocations import Allocations
from dynoffload.experiments.baselines.cgroup import memory_group, why_unavailable
from dynoffload.memory import reused as module
from dynoffload.memory.reused import Blocks, reused
from dynoffload.moe import MoE
from dynoffload.moe.slices import Slices
from dynoffload.units import MiB

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="madvise of Linux")
PAGE = 4096


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Blocks:
    own = Blocks()
    monkeypatch.setattr(module, "BLOCKS", own)
    return own


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_the_second_gradient_costs_no_page(blocks: Blocks) -> None:
    whole = torch.zeros(9, MiB, requires_grad=True)
    for step in range(3):
        slices = Slices(whole)
        loss = slices[2].sum() + (step + 1) * slices[7].sum()
        before = faults()
        loss.backward()
        made = faults() - before
        assert whole.grad is not None
        found = whole.grad.sum(1).tolist()
        assert found == [MiB * {2: 1.0, 7: step + 1.0}.get(row, 0.0) for row in range(9)]
        assert (made > 9 * MiB // PAGE) if step == 0 else (made < 9 * MiB * 4 // PAGE // 4)
        whole.grad = None
    assert blocks.idle == {36 * MiB: [mock.ANY]}


@pytest.mark.parametrize(
    "like",
    [
        torch.empty(8 * MiB),
        torch.empty(6 * MiB, 3, dtype=torch.bfloat16).t(),
        torch.empty(2, 4, 1024, 1024, dtype=torch.float64).to(memory_format=torch.channels_last),
        torch.empty(8 * MiB + 1),
    ],
)
def test_it_is_what_empty_like_returns(blocks: Blocks, like: torch.Tensor) -> None:
    made, plain = reused(like), torch.empty_like(like)
    assert (made.shape, made.stride(), made.dtype) == (plain.shape, plain.stride(), plain.dtype)
    assert blocks.used
    made.fill_(3)
    assert bool((made == 3).all())
    assert made.data_ptr() % PAGE == 0
    assert not made._is_view()
    assert made.untyped_storage().nbytes() == like.nbytes


def test_others_stay_with_torch(blocks: Blocks) -> None:
    for like in (torch.empty(4), torch.empty(0), torch.empty(8 * MiB, device="meta")):
        assert reused(like).shape == like.shape
    gaps = torch.empty(2, 8 * MiB)[:, ::2]
    assert reused(gaps).stride() == torch.empty_like(gaps).stride()
    with Allocations() as watch:
        kept = reused(torch.empty(8 * MiB))
    assert watch.peak == 64 * MiB, "a mode does not see it"
    with profile():
        kept = reused(torch.empty(8 * MiB))
    assert kept.nbytes == 32 * MiB
    kept = reused(torch.empty(2, 4 * MiB).expand(3, 2, 4 * MiB)[0])
    assert blocks.used, "this one has no gaps, and nobody watches"


def test_threads_and_the_collector_take_nothing_twice() -> None:
    blocks, wrong = Blocks(), []

    def work(mark: int) -> None:
        for turn in range(300):
            buffer = blocks.take(PAGE * (1 + turn % 3))
            buffer[0] = bytes([mark])
            cycle: list[object] = [buffer]
            cycle.append(cycle)
            if buffer[0] != bytes([mark]):
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert not wrong
    gc.collect()
    assert not blocks.used, "what came back is in the books"


@pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable())
@pytest.mark.parametrize("keeps", [False, True])
def test_what_came_back_is_there_for_whoever_needs_it(keeps: bool) -> None:
    """A block and other memory are more together than a real limit allows: only if the block came
    back, the other is had."""
    limit = 1024 * MiB
    code = f"""
        import torch
        from dynoffload.memory.reused import BLOCKS, reused
        lines = open("/proc/self/status").read().splitlines()
        (anonymous,) = [int(one.split()[1]) for one in lines if one.startswith("RssAnon")]
        left = {limit} - 1024 * anonymous
        assert left > 200 << 20, left
        like = torch.empty(int(0.6 * left) // 4)
        block = reused(like).fill_(1)
        assert BLOCKS.used
        if not {keeps}:
            del block
        other = torch.empty_like(like).fill_(2)
        assert bool((other[::1024] == 2).all())
        del other
        again = reused(like).fill_(3)
        assert bool((again[::1024] == 3).all())
        assert not any(BLOCKS.idle.values()), "another block was made"
    """
    with memory_group(limit) as group:
        command = group.command([sys.executable, "-P", "-c", textwrap.dedent(code)])
        done = subprocess.run(command, timeout=120, check=False)
        assert (group.usage().oom_kills > 0) is keeps, done
    assert (done.returncode == 0) is not keeps, done


@compared(each_paged)
def test_a_gradient_from_before_a_session_is_paged(
    side: Side, blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_OWN", 1)
    layer, x = MoE(32, 64, 8, 2), torch.randn(16, 32)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    layer(x).hidden.square().sum().backward()
    assert layer.up.grad is not None
    assert layer.up.grad.data_ptr() in blocks.used
    made = sum(map(len, blocks.idle.values())) + len(blocks.used)
    with side.offload(layer, optimizer, share=0.5):
        for _ in range(3):
            side.step(layer(x).hidden.square().sum(), optimizer)
        now = sum(map(len, blocks.idle.values())) + len(blocks.used)
        assert not side.sessions or now == made, "a session's gradients are its own"


def test_whoever_holds_a_gradient_keeps_its_block(
    blocks: Blocks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "_OWN", 1)
    torch.manual_seed(0)
    layer = MoE(32, 64, 8, 2)

    def gradient() -> torch.Tensor:
        layer.zero_grad()
        layer(torch.randn(4, 32)).hidden.sum().backward()
        assert layer.up.grad is not None
        return layer.up.grad

    array = gradient().numpy()
    capsule = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(gradient()))
    wanted = [torch.from_numpy(array.copy()), capsule.clone()]
    copied = copy.deepcopy(gradient())
    torch.save(layer.up.grad, tmp_path / "gradient")
    assert torch.equal(torch.load(tmp_path / "gradient"), copied)
    shared = gradient()
    kept = shared.clone()
    shared.share_memory_()
    for _ in range(3):
        gradient()
    found = [torch.from_numpy(array), capsule]
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert torch.equal(shared, kept)
