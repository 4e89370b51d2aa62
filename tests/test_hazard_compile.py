"""Hazard: compiled models, whose code runs no module's hooks after the first call.

The graph: linear layers with dropout under `torch.compile`, by the default backend where a compiler
is there, and by ``aot_eager``; the managed root compiled from outside, compiled in place, or with
compiled parts. Compared with plain PyTorch compiled the same way.
"""

from __future__ import annotations

import contextlib
import shutil
from typing import Any

import exactness
import pytest
import torch
from hazards import (
    Mlp,
    Side,
    batch,
    compared,
    each_backend_in_time,
    each_of_accelerators,
    hazard,
    loss_of,
)
from mutants import Mutant, mutated
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

from dynoffload.runtime.passes.compiled import CompiledModules

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

no_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler was found"
)


@compared(each_backend_in_time, aside=lambda what: what != "before")
@pytest.mark.parametrize(
    ("engine", "what"),
    [
        ("aot_eager", "outside"),
        ("aot_eager", "before"),
        ("aot_eager", "in place"),
        ("aot_eager", "parts"),
        pytest.param("inductor", "outside", marks=[no_compiler, pytest.mark.slow]),
    ],
)
def test_a_compiled_model(side: Side, backend: str, engine: str, what: str) -> None:
    """With an evaluation between steps, which is compiled by itself."""
    if backend == "emulated" and engine == "inductor":
        pytest.skip("on an accelerator a compiled model runs as it was written")
    torch._dynamo.reset()
    model = Mlp(depth=3)
    call: nn.Module = model
    if what == "parts":
        for layer in model.layers:
            layer.compile(backend=engine)
    elif what == "in place":
        model.compile(backend=engine)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    if what == "before":  # it has run, with its weights elsewhere
        call = torch.compile(model, backend=engine)
        side.step(loss_of(call, 10), optimizer)
    with side.offload(model, optimizer):
        if what == "outside":
            call = torch.compile(model, backend=engine)
        for step in range(4):
            side.step(loss_of(call, step), optimizer)
            if step == 2:
                with torch.no_grad():
                    side.see("score", loss_of(call, 50))
    side.step(loss_of(call, 5), optimizer)


class Block(nn.Module):
    """Three units, and a view of a parameter that is put aside."""

    def __init__(self, *, keeps: bool) -> None:
        super().__init__()
        self.wide, self.norm, self.narrow = nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 64)
        self.keeps, self.kept = keeps, torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.keeps:
            self.kept = self.wide.weight.t()
        return x + self.narrow(F.dropout(F.gelu(self.norm(self.wide(x))), 0.1, self.training))


class Blocks(nn.Module):
    """Compiled blocks, and a head that is not compiled."""

    def __init__(self, engine: str, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(keeps=how == "a view kept") for _ in range(3))
        self.head, self.how = nn.Linear(64, 5), how
        for number, block in enumerate(self.blocks):
            if how == "wrapped":
                self.blocks[number] = torch.compile(block, backend=engine)
            else:
                block.compile(backend=engine)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = (
                checkpoint(block, x, use_reentrant=False)
                if self.how == "computed again"
                else block(x)
            )
        return self.head(x)


@compared(each_of_accelerators)
@pytest.mark.parametrize(
    ("engine", "how", "share"),
    [
        pytest.param("aot_eager", "in place", 0.4, marks=pytest.mark.slow),
        ("aot_eager", "a view kept", 0.4),
        ("aot_eager", "computed again", 0.4),
        pytest.param("aot_eager", "wrapped", 0.7, marks=pytest.mark.slow),
        pytest.param("aot_eager", "under autocast", 0.5, marks=pytest.mark.slow),
        pytest.param("inductor", "in place", 0.4, marks=[no_compiler, pytest.mark.slow]),
        pytest.param("inductor", "a view kept", 0.7, marks=[no_compiler, pytest.mark.slow]),
    ],
)
def test_compiled_blocks(side: Side, backend: str, engine: str, how: str, share: float) -> None:
    """They run compiled, not as they were written."""
    if backend == "torch" and engine == "inductor":
        pytest.skip("torch makes no code for it")
    train_blocks(side, engine, how, share)


def train_blocks(side: Side, engine: str, how: str, share: float) -> None:
    """Train `Blocks`, with an evaluation and a look between steps."""
    torch._dynamo.reset()
    counted = torch._dynamo.utils.counters["stats"]
    counted.clear()
    model = Blocks(engine, how)
    optimizer = AdamW(model.parameters(), lr=1e-2)

    def loss(step: int) -> torch.Tensor:
        kind = exactness.HOME.type
        with torch.autocast(kind, torch.bfloat16, enabled=how == "under autocast"):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(16, 64, generator=generator).to(exactness.HOME)
            y = torch.randint(5, (16,), generator=generator).to(exactness.HOME)
            return F.cross_entropy(model(x), y)

    with side.offload(model, optimizer, watched=False, share=share):
        for step in range(4):
            side.step(loss(step), optimizer)
            if how == "a view kept":
                side.see("view", model.blocks[1].kept * 2)
            if step == 2:
                model.eval()
                with torch.no_grad():
                    side.see("score", loss(50))
                model.train()
    side.see("graphs", counted["unique_graphs"])
    assert counted["unique_graphs"] >= 2


COMPILED = [
    Mutant(
        CompiledModules,
        "_open",
        "self._device.use(regions)",
        "[setattr(cell, 'pins', cell.pins + 1) for cell in self._device._all(regions)]",
    ),
    Mutant(
        CompiledModules,
        "hold",
        "self._held.append(region)",
        "self._device.used([region])",
        on_backend=False,
    ),
    Mutant(CompiledModules, "_guard_others", "fit(tensor)", "pass", on_emulator=False),
]


@each_of_accelerators
@pytest.mark.slow
@pytest.mark.parametrize("mutant", COMPILED, ids=str)
def test_a_mutant_of_compiled_modules_is_caught(backend: str, mutant: Mutant) -> None:
    def program(side: Side) -> None:
        train_blocks(side, "aot_eager", "a view kept", 0.2)

    if not (mutant.on_emulator if backend == "emulated" else mutant.on_backend):
        pytest.skip("it does not show there, or ends the process")
    hazard(backend, program)
    with mutated(mutant), pytest.raises((AssertionError, RuntimeError)):
        hazard(backend, program)


@torch.compiler.disable
def written_by_data(weight: torch.Tensor) -> None:
    """Write past the version counter."""
    with torch.no_grad():
        weight.data.mul_(0.9)


class Odd(nn.Module):
    """A compiled block that does what its ``what`` names, with a head that is not its own."""

    def __init__(self, what: str, head: nn.Linear) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 96), nn.Linear(96, 64)
        self.what, self.others = what, [head]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.what == "a write by data":
            written_by_data(self.wide.weight)
        if self.what == "the weight of another":
            x = F.linear(x, self.others[0].weight)
        y = self.narrow(F.gelu(self.wide(x)))
        if self.what == "a stance" and torch.compiler.is_dynamo_compiling():
            y = y * 2
        return x + y


class Raises(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise ValueError("in backward")


@compared(each_of_accelerators)
@pytest.mark.parametrize(
    "what",
    [
        "frozen",
        "a graph of the gradient",
        "the weight of another",
        "a write by data",
        "a stance",
        "backward raises",
    ],
)
def test_what_compiled_blocks_may_meet(side: Side, backend: str, what: str) -> None:
    """With an evaluation between steps. As a step ends nothing is pinned."""
    torch._dynamo.reset()
    head = nn.Linear(64, 64)
    model = nn.Sequential(*(Odd(what, head) for _ in range(3)), nn.Sequential(head))
    for block in model[:3]:
        block.compile(backend="eager" if what == "a graph of the gradient" else "aot_eager")
        block.requires_grad_(what != "frozen" or block is model[2])
    optimizer = AdamW(model.parameters(), lr=1e-2)
    force = torch.compiler.set_stance if what == "a stance" else lambda _: contextlib.nullcontext()
    with side.offload(model, optimizer, watched=False, share=0.4):
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(16, 64, generator=generator).to(exactness.HOME).requires_grad_()
            with force("force_eager"):
                y = model(x)
            loss = y.square().mean()
            if what == "a graph of the gradient":
                (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
                loss = loss + gradient.square().mean()
            if what == "backward raises":
                with pytest.raises(ValueError, match="in backward"):
                    model(Raises.apply(model[0](x))).sum().backward()
                optimizer.zero_grad()
                loss = model(x).square().mean()
            side.step(loss, optimizer)
            if (paging := side.paging) is not None:
                pinned = [cell for cell in paging.device._cells.values() if cell.pins]
                assert not pinned
            with torch.no_grad(), force("force_eager"):
                side.see("score", model(x))


@compared(each_of_accelerators)
def test_a_compiled_block_that_fails(side: Side, backend: str) -> None:
    """An error within a compiled call leaves nothing pinned, and the next call is compiled."""
    torch._dynamo.reset()
    model = Blocks("aot_eager", "in place")
    optimizer = AdamW(model.parameters(), lr=1e-2)
    with side.offload(model, optimizer, watched=False, share=0.4):
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(16, 64, generator=generator).to(exactness.HOME)
            with pytest.raises(RuntimeError, match="size"):
                model(x[:, : 32 + step])
            if (paging := side.paging) is not None:
                assert not any(cell.pins for cell in paging.device._cells.values())
            side.step(model(x).square().mean(), optimizer)


@compared(each_of_accelerators)
def test_a_compiled_block_larger_than_half_of_the_pool(
    side: Side, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It runs as it was written, and a warning names it."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]), nn.Linear(64, 5))
    model[0].compile(backend="eager")
    optimizer = AdamW(model.parameters(), lr=1e-2)
    with side.offload(model, optimizer, watched=False, share=0.2):
        for step in range(3):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
            side.step(model(x.to(exactness.HOME)).square().mean(), optimizer)
    if side.backend is not None:
        assert "Sequential is compiled, and runs as it was written" in caplog.text


@compared(each_backend_in_time)
def test_a_compiled_function_over_the_weights(side: Side, backend: str) -> None:
    """A penalty that reads all parameters outside of any module."""
    torch._dynamo.reset()
    model = Mlp(depth=3)

    @torch.compile(backend="aot_eager")
    def penalty(weights: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([w.square().sum() for w in weights]).sum()

    optimizer = AdamW(model.parameters(), lr=1e-2)
    with side.offload(model, optimizer):
        for step in range(6):
            x, y = batch(step)
            loss = F.cross_entropy(model(x), y) + 1e-3 * penalty(list(model.parameters()))
            side.step(loss, optimizer)


@compared(each_backend_in_time)
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_model(side: Side, backend: str, strict: bool) -> None:
    """Exported while updates wait, which are made as at their step; it shares the weights."""
    if strict and backend in ("emulated", "torch"):
        pytest.skip("torch cannot trace guarded parameters")
    torch._dynamo.reset()
    with side.block(lambda: Mlp(depth=3)) as (model, optimizer):
        for step in range(4):
            side.step(loss_of(model, step), optimizer)
            if step in (1, 2):
                with torch.set_grad_enabled(step == 1):
                    exported = torch.export.export(model, (batch(0)[0],), strict=strict)
                kept = exported.module()
                side.see("score", kept(batch(1)[0]))
        side.see("kept", kept(batch(2)[0]))
    side.see("after the block", kept(batch(2)[0]))
