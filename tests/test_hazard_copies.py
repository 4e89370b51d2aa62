"""Hazard: the model and its optimizer copied, saved, loaded and pickled.

The graph: a tied network trained for some steps, of which updates wait when it is copied
(``deepcopy``, ``pickle``, ``torch.save``), its ``state_dict`` taken, or other weights loaded, also
by assignment; inside the block and after it. Copies must be plain models with values of their own,
and a ``state_dict`` must go on showing the parameters, as in plain PyTorch.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import HOME
from hazards import (
    Mlp,
    Side,
    compared,
    each_backend,
    each_backend_in_time,
    loss_of,
    stepwise,
)
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW


class Tied(Mlp):
    """Its first and last layer share a weight, and it has a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[4].weight = self.layers[0].weight
        self.register_buffer("shift", torch.randn(64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.1) + self.shift)


def _saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": _saved,
}


@compared(each_backend_in_time)
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_trains_by_itself(side: Side, how: str) -> None:
    """Taken in the block with its optimizer, and trained on beside the managed one and after."""
    with side.block(Tied) as (model, optimizer):
        side.train(model, optimizer, range(3))
        both, its = COPIES[how]((model, optimizer))
        side.see_state(both, its)
        for step in range(3, 5):
            side.step(loss_of(model, step), optimizer)
            side.step(loss_of(both, step + 10), its)
    side.step(loss_of(both, 20), its)
    again, again_its = COPIES[how]((model, optimizer))
    side.step(loss_of(again, 21), again_its)
    side.see_state(both, its)
    side.see_state(again, again_its)
    side.step(loss_of(model, 22), optimizer)
    side.see_state(model, optimizer)


@compared(each_backend)
@pytest.mark.parametrize("when", ["before", "inside"])
def test_a_state_dict_shows_later_steps(side: Side, when: str) -> None:
    """Its tensors are aliases: what was taken once is read after each step, and stays an alias when
    the block begins, and when it has ended."""
    model = Tied()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    taken = model.layers[1].state_dict() if when == "before" else {}
    with side.offload(model, optimizer):
        for step in range(6):
            side.step(loss_of(model, step), optimizer)
            taken = taken or (model.state_dict() if step == 3 else {})
            side.see("taken", taken)
    side.step(loss_of(model, 9), optimizer)
    side.see("taken", taken)


@compared(
    each_backend_in_time,
    moves=lambda assign: not assign,
    budgeted=lambda assign, kept: not (assign and kept),
    aside=lambda assign: not assign,
)
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_loading_in_mid_run(side: Side, assign: bool, kept: bool) -> None:
    """With ``assign=True`` the parameters' memory is the dict's, which the user may keep; the
    optimizer's parameters are then no longer the model's, so it is made anew."""
    model = Tied().to(HOME)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    other = {key: value.clone() * 0.5 for key, value in model.state_dict().items()}
    with side.offload(model, optimizer, share=0.6):
        for step in range(6):
            if step == 2:
                mine = other if kept else {k: v.clone() for k, v in other.items()}
                model.load_state_dict(mine, assign=assign)
                state = optimizer.state_dict()
                optimizer.load_state_dict(copy.deepcopy(state))
                del mine
            side.step(loss_of(model, step), optimizer)
        side.see("other", other)


@compared(each_backend)
def test_state_that_is_loaded(side: Side) -> None:
    """Optimizer state of an older step, loaded while updates wait."""
    with side.block() as (model, optimizer):
        side.train(model, optimizer, range(2))
        old = copy.deepcopy(optimizer.state_dict())
        weights = copy.deepcopy(model.state_dict())
        side.train(model, optimizer, range(2, 5))
        optimizer.load_state_dict(old)
        model.load_state_dict(weights)
        side.train(model, optimizer, range(2, 5))
        side.see("old", old)


@stepwise(each_backend, steps=7)
def test_shared_memory(side: Side, model: Any, optimizer: Any, step: int) -> None:
    """``share_memory_()`` moves storages: refused or exact, inside the block."""
    side.step(loss_of(model, step), optimizer)
    if step == 5:
        shared = copy.deepcopy(model).share_memory()
        side.see("shared", dict(shared.named_parameters()))
