"""Hazard: fused experts, which are paged by slices, converted in mid-run.

The graph: twenty-four experts of which a sample hits two, and a head. All, or one parameter, get
another dtype while updates of slices wait: rows of slices have other sizes from then on, optimizer
state stays in the dtype that it had unless the user forgets it, and hooks on autograd's nodes are
gone. Slices of half the bytes may be no whole pages any more.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fused_networks import Chosen, fused_of, paging_of
from hazards import Side, each_with_slices_in_time, hazard
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

from dynoffload.errors import BudgetError, StepLostError

CHANGES: dict[str, Callable[[Chosen], object]] = {
    "double": lambda model: model.double(),
    "bfloat16": lambda model: model.bfloat16(),
    "half": lambda model: model.half(),
    "experts": lambda model: model.experts.double(),
    "data": lambda model: setattr(model.experts.up, "data", model.experts.up.data.double()),
}


class Casting(Chosen):
    """Takes any dtype of each parameter."""

    def forward(self, x: Tensor, hit: list[int]) -> Tensor:
        """Return ``[rows, width]`` for the same."""
        experts, out = self.experts, torch.zeros_like(x)
        for number in hit:
            up, down = experts.up[number], experts.down[number]
            hidden = F.gelu(F.linear(x.to(up.dtype), up))
            out = out + F.linear(hidden.to(down.dtype), down).to(x.dtype)
        return (x + out).to(self.head.dtype) @ self.head


def loss_of(model: nn.Module, step: int) -> Tensor:
    """Return a loss in single precision, of a sample that hits two experts."""
    rows = torch.randn(5, 32, generator=torch.Generator().manual_seed(step))
    return (model(rows, [step, 5 + step]).float() ** 2).mean()


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-2, foreach=False)


def momentum(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=1e-2, momentum=0.9)


@each_with_slices_in_time
@pytest.mark.parametrize("change", CHANGES)
def test_converted_between_steps(backend: str, change: str) -> None:
    """What was paged by slices is so again, in the new dtype, from the next sample on."""

    def program(side: Side) -> None:
        model = Casting(count=24)
        optimizer = adamw(model)
        with side.offload(model, optimizer, share=0.17) as session:
            for step in range(7):
                if step == 3:
                    CHANGES[change](model)
                    optimizer.state.clear()
                side.step(loss_of(model, step), optimizer)
                if session is not None:
                    fused = fused_of(session)
                    assert fused.keys() == {"experts.up", "experts.down"}
                    for one in fused.values():
                        owner = session._paging.device.owner(one.parameter)
                        assert owner == one.row[0]
                        assert not one.retired

    hazard(backend, program)


@each_with_slices_in_time
@pytest.mark.parametrize("change", CHANGES)
def test_state_that_keeps_its_dtype(backend: str, change: str) -> None:
    """Momentum takes gradients of another dtype: torch goes on with both, and so it is here, with
    updates of whole parameters, until the state is forgotten."""

    def program(side: Side) -> None:
        model = Casting(count=24)
        optimizer = momentum(model)
        with side.offload(model, optimizer, states=1, share=0.4):
            for step in range(8):
                if step == 3:
                    CHANGES[change](model)
                if step == 5:
                    for parameter in model.parameters():
                        side.see("momentum", optimizer.state[parameter]["momentum_buffer"])
                    optimizer.state.clear()
                side.step(loss_of(model, step), optimizer)

    hazard(backend, program)


@each_with_slices_in_time
@pytest.mark.parametrize("change", ["double", "bfloat16", "half"])
def test_converted_between_backward_and_step(backend: str, change: str) -> None:
    """Gradients follow their parameters; drafts that were made of them count no more."""

    def program(side: Side) -> None:
        model = Casting(count=24)
        optimizer = momentum(model)
        with side.offload(model, optimizer, states=1, share=0.4):
            for step in range(7):
                loss = loss_of(model, step)
                loss.backward()
                if step == 3:
                    CHANGES[change](model)
                    optimizer.state.clear()
                    side.see("gradient", model.experts.up.grad)
                optimizer.step()
                optimizer.zero_grad()
                side.see("loss", loss)

    hazard(backend, program)


@each_with_slices_in_time
def test_converted_between_forward_and_backward(backend: str) -> None:
    """By ``.data``, as torch lets it be: backward goes by what forward has used."""

    def program(side: Side) -> None:
        model = Casting(count=24)
        optimizer = momentum(model)
        with side.offload(model, optimizer, states=1, share=0.4):
            for step in range(6):
                loss = loss_of(model, step)
                if step == 3:
                    CHANGES["data"](model)
                side.fails("backward", loss.backward)
                side.see("gradient", model.experts.up.grad)
                side.fails("step", optimizer.step)
                optimizer.zero_grad()
                side.see("loss", loss)

    hazard(backend, program)


@each_with_slices_in_time
def test_state_that_the_optimizer_cannot_mix_loses_the_step(backend: str) -> None:
    """Adam's state of another dtype: torch's own error, and a step that is lost."""
    side = Side(backend)
    model = Casting(count=24)
    optimizer = adamw(model)

    def train() -> None:
        with side.offload(model, optimizer, share=0.3):
            for step in range(4):
                if step == 2:
                    model.double()
                side.step(loss_of(model, step), optimizer)

    with pytest.raises((RuntimeError, StepLostError), match=r"expected dtype|the step is lost"):
        train()


@each_with_slices_in_time
@pytest.mark.parametrize("back", [False, True])
def test_what_does_not_fit_is_refused_before_the_sample(backend: str, back: bool) -> None:
    """Nothing is changed by the refusal: the user converts back and trains on, or leaves."""

    def program(side: Side) -> None:
        model = Casting(count=12)
        optimizer = adamw(model)
        with side.offload(model, optimizer, share=0.0):
            for step in range(4):
                side.step(loss_of(model, step), optimizer)
                if step == 1:
                    model.double()
                    optimizer.state.clear()
                    for _ in range(2 if side.backend else 0):
                        with pytest.raises(
                            BudgetError,
                            match=r"experts\.up, which has .* now and had .* needs .* at once .* "
                            "the pool has .*: raise the budget, or change it back",
                        ):
                            loss_of(model, 2)
                    side.see("converted", dict(model.named_parameters()))
                    if not back:
                        break
                    model.float()

    hazard(backend, program)


@each_with_slices_in_time
def test_slices_that_are_no_whole_pages_any_more(backend: str) -> None:
    """In half precision a slice is half a page: the parameter is paged as a whole."""

    def program(side: Side) -> None:
        model = Casting(count=24, width=32)
        model.experts.up = nn.Parameter(torch.randn(24, 32, 32) / 8)
        model.experts.down = nn.Parameter(torch.randn(24, 32, 32) / 8)
        optimizer = adamw(model)
        with side.offload(model, optimizer, share=0.8) as session:
            for step in range(7):
                if step == 3:
                    if session is not None:
                        assert fused_of(session)
                    model.bfloat16()
                    optimizer.state.clear()
                side.step(loss_of(model, step), optimizer)
            if session is not None:
                assert not fused_of(session)
                store = paging_of(session).store
                assert {slot.name for slot in store.slots.values()} >= {"experts.up"}

    hazard(backend, program)


@each_with_slices_in_time
def test_one_of_two_is_paged_whole_when_it_is_evaluated(backend: str) -> None:
    """Converted between backward and ``step()``: its slices' regions are no more, and nothing that
    watched them may ask for them, also in a forward that is no sample."""

    def program(side: Side) -> None:
        model = Casting(count=24, width=32)
        model.experts.up = nn.Parameter(torch.randn(24, 32, 32) / 8)
        model.experts.down = nn.Parameter(torch.randn(24, 32, 32) / 8)
        optimizer = adamw(model)
        with side.offload(model, optimizer, share=0.8):
            for step in range(7):
                loss_of(model, step).backward()  # type: ignore[no-untyped-call]
                if step == 3:
                    up = model.experts.up
                    gradient, up.grad = up.grad, None
                    up.data = up.data.bfloat16()
                    up.grad = None if gradient is None else gradient.bfloat16()
                    optimizer.state.clear()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    side.see("evaluated", loss_of(model, step + 1))

    hazard(backend, program)


@each_with_slices_in_time
def test_old_rows_live_as_long_as_somebody_holds_them(backend: str) -> None:
    """A view of the parameter, and its state, from before the conversion."""

    def program(side: Side) -> None:
        model = Casting(count=24)
        optimizer = momentum(model)
        with side.offload(model, optimizer, states=1, share=0.4) as session:
            for step in range(6):
                if step == 3:
                    view = model.experts.up.detach()[3]
                    before = view.clone()
                    model.double()
                side.step(loss_of(model, step), optimizer)
            side.see("view", view)
            side.see("what it was", before)
            up = None if session is None else fused_of(session)["experts.up"]
            assert up is None or len(up.retired) == 2  # the view's, and that of the state
            del view
            optimizer.state.clear()
            side.step(loss_of(model, 6), optimizer)
            assert up is None or not up.retired

    hazard(backend, program)
