"""Memory that numpy or another process sees too: tensors over it stay where it is.

What writes there is no tensor, so nobody could tell it of another place.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hazards import Mlp, Side, compared, each_of_the_cpu, loss_of
from torch import nn
from torch.optim import SGD, AdamW, Optimizer


def arrays_under_gradients(model: nn.Module) -> list[np.ndarray]:
    """Give every parameter a gradient over an array; return the arrays."""
    arrays = [np.zeros(tuple(p.shape), np.float32) for p in model.parameters()]
    for parameter, array in zip(model.parameters(), arrays, strict=True):
        parameter.grad = torch.from_numpy(array)
    return arrays


def arrays_under_parameters(model: nn.Module) -> list[np.ndarray]:
    """Put every parameter over an array of the same values; return the arrays."""
    arrays = [parameter.detach().numpy().copy() for parameter in model.parameters()]
    for parameter, array in zip(model.parameters(), arrays, strict=True):
        parameter.data = torch.from_numpy(array)
    return arrays


@compared(each_of_the_cpu, budgeted=False)
@pytest.mark.parametrize("made", ["before the block", "in each step"])
def test_gradients_over_arrays(side: Side, made: str) -> None:
    """As who exchanges gradients by MPI has them: numpy clips them before the step."""
    model = Mlp()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    arrays = arrays_under_gradients(model)
    with side.offload(model, optimizer):
        for step in range(4):
            if made == "in each step":
                arrays = arrays_under_gradients(model)
            loss = loss_of(model, step)
            loss.backward()
            for array in arrays:
                array[array > 0] = 0
            optimizer.step()
            for array in arrays:
                array[...] = 0
            side.see("loss", loss)


@compared(each_of_the_cpu, budgeted=False)
def test_parameters_put_over_arrays_in_mid_run(side: Side) -> None:
    """numpy clips the weights after each step."""
    model = Mlp()
    optimizer = SGD(model.parameters(), lr=1e-1)
    with side.offload(model, optimizer):
        side.step(loss_of(model, 0), optimizer)
        arrays = arrays_under_parameters(model)
        for step in range(1, 5):
            side.step(loss_of(model, step), optimizer)
            for array in arrays:
                np.clip(array, -0.02, 0.02, out=array)


@compared(each_of_the_cpu, budgeted=False, aside=lambda when: when == "before")
@pytest.mark.parametrize("when", ["before", "inside"])
def test_shared_memory_stays_shared(side: Side, when: str) -> None:
    """A model whose weights other processes read and write."""
    model = Mlp()
    if when == "before":
        model.share_memory()
    optimizer = SGD(model.parameters(), lr=1e-1)
    share = 0.62 if when == "before" else 0.3  # room for the largest activation
    with side.offload(model, optimizer, share=share):
        for step in range(6):
            side.step(loss_of(model, step), optimizer)
            if step == 1:
                model.share_memory()
            if step >= 1 or when == "before":
                side.see("shared", [p.is_shared() for p in model.parameters()])


LOOKS: dict[str, Callable[[Optimizer], list[dict[str, torch.Tensor]]]] = {
    "entries": lambda optimizer: list(optimizer.state.values()),
    "state_dict": lambda optimizer: list(optimizer.state_dict()["state"].values()),
    "tensors": lambda optimizer: [dict(entry) for entry in optimizer.state.values()],
}


@compared(each_of_the_cpu)
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("make", [AdamW, torch.optim.NAdam])
def test_entries_of_state_that_the_user_keeps(
    side: Side, make: Callable[..., Optimizer], look: str
) -> None:
    """They show every step, also counts and products that are no large tensors."""
    model = Mlp()
    optimizer = make(model.parameters(), lr=1e-2)
    with side.offload(model, optimizer):
        kept: list[dict[str, torch.Tensor]] = []
        for step in range(4):
            side.step(loss_of(model, step), optimizer)
            kept = kept or LOOKS[look](optimizer)
            small = [k for k in kept[0] if kept[0][k].numel() == 1]
            side.see("small", [[entry[key].item() for key in small] for entry in kept])


@compared(each_of_the_cpu)
def test_every_way_into_the_state(side: Side) -> None:
    """`setdefault`, `popitem`, `==`, `|` and `update` find what a step has left."""
    with side.block() as (model, optimizer):
        state = optimizer.state
        for step in range(5):
            side.step(loss_of(model, step), optimizer)
            if step == 1:
                found = [state.setdefault(p, {})["step"].item() for p in model.parameters()]
            elif step == 2:
                found = [entry["step"].item() for entry in (state | {}).values()]
            elif step == 3:
                key, entry = state.popitem()
                found = [entry["step"].item(), len(state)]
                state.update({key: entry})
            else:
                found = [state == dict(state.items()), len({} | state)]
            side.see("found", found)


@compared(each_of_the_cpu)
def test_an_alias_of_the_state_has_its_entries(side: Side) -> None:
    """As wrappers of optimizers keep it; it is the optimizer's own again after the block."""
    model = Mlp()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    alias = optimizer.state
    with side.offload(model, optimizer):
        side.train(model, optimizer, range(6))
        len(optimizer.state)  # a look, after which all updates are made
        side.see("inside", [alias[p]["step"].item() for p in model.parameters()])
    side.see("after", [sorted(alias[p]) for p in model.parameters()])
    side.see("is", alias is optimizer.state)
