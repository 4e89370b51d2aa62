"""Hazard: compiled models, whose code runs no module's hooks after the first call.

The graph: linear layers with dropout under `torch.compile`, by the default backend where a compiler
is there, and by ``aot_eager``; the managed root compiled from outside, compiled in place, or with
compiled parts. Compared with plain PyTorch compiled the same way.
"""

from __future__ import annotations

import shutil

import pytest
import torch
from hazards import Mlp, Side, batch, compared, each_backend_in_time, loss_of
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW

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
def test_an_exported_model(side: Side, strict: bool) -> None:
    """Exported while updates wait, which are made as at their step; it shares the weights."""
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
