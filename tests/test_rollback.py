"""A step that is cut off half way is undone: the state is that of the last finished step.

The optimizer's own code is made to change everything it is given and then to raise, at each call of
one step in turn. Plain PyTorch would be left with a mixture. Under ``rollback`` model and optimizer
have, right after the error, the bits that plain training had after as many finished steps; and
training goes on from there to the end as if the step had not been tried.
"""

from __future__ import annotations

import copy
import errno
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from emulated import DEVICE, accelerated
from exactness import (
    SMALL_PAGES,
    Twin,
    assert_ordinary,
    assert_same,
    footprint_of,
    least_budget,
    needs_pager,
)
from fused_networks import PAGES, Chosen, chosen_loss
from hazards import Mlp, each_paged, guarded, loss_of
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import dynoffload
from dynoffload.errors import SpillError, StepLostError
from dynoffload.runtime.updates import undo_log

pytestmark = pytest.mark.timeout(240)

STEPS = 6
HITS = [[0, 1, 2, 3, 4, 5], [2], [1, 3], [3, 4], [], [0, 5]]
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda p: AdamW(p, lr=1e-2),
    "adamw one by one": lambda p: AdamW(p, lr=1e-2, foreach=False, amsgrad=True),
    "adamw fused": lambda p: AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: SGD(p, lr=1e-1, momentum=0.9, nesterov=True),
}


class Broken(Exception):
    """What the optimizer raises."""


class Breaking:
    """The optimizer's code, of which one call changes all that it is given and then raises."""

    def __init__(self, session: Any, at: int) -> None:
        self._maker, self._left, self.hit = session._paging.updates.runner, at, False

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Count calls from now on."""
        step = self._maker.step

        def broken(optimizer: Optimizer) -> None:
            step(optimizer)
            self._left -= 1
            if self._left < 0 and not self.hit:
                self.hit = True
                with torch.no_grad():
                    for group in optimizer.param_groups:
                        for parameter in group["params"]:
                            parameter.add_(1.0)
                raise Broken

        self._maker.step = broken
        try:
            yield
        finally:
            self._maker.step = step


def state_of(model: nn.Module, optimizer: Optimizer) -> Any:
    """Return copies of all that a step changes."""
    state = copy.deepcopy(optimizer.state_dict()["state"])
    return [parameter.detach().clone() for parameter in model.parameters()], state


def mlp_loss(model: nn.Module, step: int) -> Tensor:
    """Return the loss of one sample."""
    return loss_of(model, step)


def experts_loss(model: nn.Module, step: int) -> Tensor:
    """Return the loss of one sample that hits some experts."""
    return chosen_loss(model, (step, HITS[step]))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], Tensor]]] = {
    "mlp": (lambda: Mlp(depth=2), mlp_loss),
    "experts": (Chosen, experts_loss),
}


def train_through(
    twin: Twin, loss_of: Any, at: int, struck: int, expected: list[Any], **options: Any
) -> tuple[bool, list[str]]:
    """Train to the end, with the ``at``-th call of the optimizer from step ``struck`` on broken;
    return whether there was one, and which parts of steps have raised."""
    config, below, device = {**PAGES, **options, "rollback": True}, nullcontext(), None
    if options.get("backend") == "emulated":
        config |= {"backend": "accelerator"}
        below, device = accelerated(elsewhere=True), DEVICE
    budget, _ = least_budget(twin.model, twin.optimizer, footprint_of(twin.model) // 2, config)
    raised = []
    model, optimizer = twin.model, twin.optimizer
    with below, twin.paged(budget, device=device, config=config) as session:
        breaking, number = Breaking(session, at), 0
        while number < STEPS:
            part = ["forward"]
            try:
                with breaking.armed() if number >= struck else nullcontext():
                    one_step(model, optimizer, partial(loss_of, step=number), part)
                number += 1
            except StepLostError as error:  # of the step before, whose update was put off
                number -= 1
                told = type(error.__cause__) is Broken and "lost and undone" in str(error)
                raised.append(f"{part[0]}, late" if told else str(error))
            except Broken as error:
                told = "which is undone" in error.__notes__[0]
                raised.append(part[0] if told else str(error))
            optimizer.zero_grad()
            if raised:
                assert_same(state_of(model, optimizer), expected[number], f"{raised}, call {at}")
    assert_same(state_of(model, optimizer), expected[STEPS], f"at the end, call {at}")
    return breaking.hit, raised


def one_step(
    model: nn.Module, optimizer: Optimizer, loss_of: Callable[[nn.Module], Tensor], part: list[str]
) -> None:
    """Make one step, noting which ``part`` of it runs."""
    loss = loss_of(model)
    part[0] = "backward"
    loss.backward()
    part[0] = "step"
    optimizer.step()


def plain_states(twin: Twin, loss_of: Any) -> list[Any]:
    """Train the reference, and return its states before and after each step."""
    states = [state_of(twin.reference, twin.its)]
    for step in range(STEPS):
        loss_of(twin.reference, step).backward()
        twin.its.step()
        twin.its.zero_grad()
        states.append(state_of(twin.reference, twin.its))
    return states


def strike_everywhere(network: str, optimizer: str, struck: int, **options: Any) -> set[str]:
    """Train once for each call that can be broken; return which parts of steps have raised."""
    make, loss_of = NETWORKS[network]
    torch.manual_seed(0)
    first = make()
    expected = plain_states(Twin(copy.deepcopy(first), OPTIMIZERS[optimizer]), loss_of)
    parts: set[str] = set()
    for at in range(13):
        twin = Twin(copy.deepcopy(first), OPTIMIZERS[optimizer])
        hit, raised = train_through(twin, loss_of, at, struck, expected, **options)
        assert len(raised) == hit, (at, raised)
        if not hit:
            break
        parts.update(raised)
    return parts


def train(model: nn.Module, optimizer: Optimizer, start: int, stop: int) -> None:
    """Make the steps from ``start`` to ``stop``."""
    for step in range(start, stop):
        mlp_loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


CASES = [
    pytest.param("pager", "adamw", 0, marks=needs_pager),
    ("mapped", "sgd", 0),
    ("emulated", "adamw", 3),
    ("mapped", "adamw one by one", 3),
    pytest.param("pager", "adamw fused", 3, marks=needs_pager),
]


@pytest.mark.parametrize(("backend", "optimizer", "struck"), CASES)
def test_an_optimizer_that_fails(backend: str, optimizer: str, struck: int) -> None:
    """In its first step, before which there was no state, and in the midst of training."""
    parts = strike_everywhere("mlp", optimizer, struck, backend=backend)
    assert parts == ({"step"} if backend == "mapped" else {"step", "forward, late"})


@each_paged
def test_fused_experts(backend: str) -> None:
    """Slices are updated one by one, and their step counts with the step."""
    parts = strike_everywhere("experts", "adamw", 2, backend=backend)
    assert parts == {"step"} if backend == "mapped" else "forward, late" in parts, parts


def test_an_optimizer_of_somebody_else(caplog: pytest.LogCaptureFixture) -> None:
    """Its step runs as a whole, and is not undone: that is said."""
    twin = Twin(Mlp(depth=2), lambda p: transformers.Adafactor(p, lr=1e-3, relative_step=False))
    with twin.paged(footprint_of(twin.model), config={**PAGES, "rollback": True}):
        assert "a step of Adafactor that is cut off is not undone" in caplog.text
        for model, optimizer in ((twin.model, twin.optimizer), (twin.reference, twin.its)):
            train(model, optimizer, 0, 2)
    twin.assert_same()


@guarded
@pytest.mark.parametrize("at", [0, 2])
def test_as_the_block_is_left(backend: str, at: int) -> None:
    """The last step is undone, and what is left is whole: nothing refuses it."""
    twin = Twin(Mlp(depth=2), OPTIMIZERS["adamw"])
    expected = plain_states(twin, mlp_loss)
    config = {**SMALL_PAGES, "backend": backend, "rollback": True, "step_aside": False}
    model, optimizer = twin.model, twin.optimizer

    def block() -> None:
        with dynoffload.offload(
            model, optimizer, budget=footprint_of(model), config=config
        ) as session:
            train(model, optimizer, 0, STEPS - 1)
            loss_of(model, STEPS - 1).backward()
            optimizer.step()  # what stays in memory is updated now, and not broken
            armed.enter_context(Breaking(session, at).armed())

    with ExitStack() as armed, pytest.raises(StepLostError, match="lost and undone"):
        block()
    assert_ordinary(model, optimizer)
    optimizer.zero_grad()
    assert_same(state_of(model, optimizer), expected[STEPS - 1], "undone")
    train(model, optimizer, STEPS - 1, STEPS)
    assert_same(state_of(model, optimizer), expected[STEPS], "at the end")


@each_paged
def test_a_checkpoint_that_was_loaded_is_not_undone(backend: str) -> None:
    """What was kept is of another run then."""
    twin = Twin(Mlp(depth=2), OPTIMIZERS["adamw"])
    config = {**SMALL_PAGES, "backend": backend, "rollback": True}
    model, optimizer = twin.model, twin.optimizer
    with twin.paged(footprint_of(model), config=config) as session:
        train(model, optimizer, 0, 2)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, 2, 4)
        optimizer.load_state_dict(saved[1])
        model.load_state_dict(saved[0])
        before = state_of(model, optimizer)
        assert session._paging is not None
        session._paging.loss.set(Broken())  # as by a load that is cut off
        with pytest.raises(StepLostError, match="half of one step and half of another"):
            loss_of(model, 4)
        optimizer.load_state_dict(saved[1])
        model.load_state_dict(saved[0])
        assert_same(state_of(model, optimizer), before, "loaded")


@each_paged
def test_a_scaled_step(backend: str) -> None:
    """Under a GradScaler all updates are made in step()."""
    twin = Twin(Mlp(depth=2), OPTIMIZERS["adamw fused"])
    config = {**SMALL_PAGES, "backend": backend, "rollback": True}

    def steps(model: nn.Module, optimizer: Optimizer, start: int, stop: int) -> None:
        for step in range(start, stop):
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
            scaler.scale(loss_of(model, step)).backward()
            scaler.step(optimizer)
            optimizer.zero_grad()

    steps(twin.reference, twin.its, 0, 3)
    model, optimizer = twin.model, twin.optimizer
    with twin.paged(footprint_of(model), config=config) as session:
        steps(model, optimizer, 0, 3)
        for at in (0, 2, 3):
            with Breaking(session, at).armed(), pytest.raises(Broken):
                steps(model, optimizer, 3, 4)
            optimizer.zero_grad()
            del optimizer.grad_scale, optimizer.found_inf  # which a scaler leaves after an error
            twin.assert_same()
        for network, its in ((model, optimizer), (twin.reference, twin.its)):
            steps(network, its, 3, 5)
    twin.assert_same()


@contextmanager
def behind(backend: str, after: int = 3) -> Iterator[tuple[Twin, Any, list[Any]]]:
    """Yield a block in which the last of some steps has lost an update behind somebody's back."""
    twin = Twin(Mlp(depth=2), OPTIMIZERS["adamw"])
    expected = plain_states(twin, mlp_loss)
    config = {"backend": backend, "rollback": True}
    with twin.paged(footprint_of(twin.model), loses=True, config=config) as session:
        train(twin.model, twin.optimizer, 0, after)
        with Breaking(session, 0).armed():
            twin.model.layers[0].weight.norm()  # type: ignore[index, union-attr, operator]
        yield twin, session, expected


def test_state_that_was_made_and_not_written_is_undone() -> None:
    """The optimizer raises between making its state and the first write."""
    model = Mlp(depth=2)
    optimizer = AdamW(model.parameters(), lr=1e-2)

    def broken(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            optimizer._init_group(group, *([] for _ in range(6)))
        raise Broken

    config = {**SMALL_PAGES, "backend": "mapped", "rollback": True}
    with dynoffload.offload(
        model, optimizer, budget=footprint_of(model), pilot=None, config=config
    ) as session:
        before = state_of(model, optimizer)
        loss_of(model, 0).backward()
        session._paging.updates.runner.step = broken  # type: ignore[union-attr]
        with pytest.raises(Broken):
            optimizer.step()
        assert_same(state_of(model, optimizer), before, "undone")


def go_on(twin: Twin, expected: list[Any], start: int) -> None:
    """Train to the end from a state that must be that of ``start`` steps."""
    twin.optimizer.zero_grad()
    assert_same(state_of(twin.model, twin.optimizer), expected[start], "undone")
    train(twin.model, twin.optimizer, start, STEPS)
    assert_same(state_of(twin.model, twin.optimizer), expected[STEPS], "at the end")


USES: dict[str, Callable[[nn.Module, Optimizer], Any]] = {
    "forward": lambda model, optimizer: loss_of(model, 3),
    "step": lambda model, optimizer: optimizer.step(),
    "copy": lambda model, optimizer: copy.deepcopy(model),
}


@guarded
@pytest.mark.parametrize("use", USES)
def test_an_update_made_behind_somebodys_back(backend: str, use: str) -> None:
    """A read of a weight gives the old value; training on raises an error."""
    with behind(backend) as (twin, _, expected):
        with pytest.raises(StepLostError, match="lost and undone"):
            USES[use](twin.model, twin.optimizer)
        go_on(twin, expected, 2)


@guarded
def test_weights_that_are_swapped_are_not_written(backend: str) -> None:
    """As for an evaluation of averaged weights: the step is undone once the old are back."""
    with behind(backend) as (twin, _, expected):
        parameters = list(twin.model.parameters())
        old = [parameter.data for parameter in parameters]
        averaged = [torch.full_like(parameter, 0.5) for parameter in parameters]
        for parameter, average in zip(parameters, averaged, strict=True):
            parameter.data = average
        with pytest.raises(StepLostError, match="half of one step and half of another"):
            loss_of(twin.model, 3)
        assert all(bool((average == 0.5).all()) for average in averaged)
        for parameter, data in zip(parameters, old, strict=True):
            parameter.data = data
        del parameter, data, old
        with pytest.raises(StepLostError, match="lost and undone"):
            loss_of(twin.model, 3)
        go_on(twin, expected, 2)


@guarded
def test_a_load_of_a_part_comes_after_the_undoing(backend: str) -> None:
    """It loads into the last finished step."""
    with behind(backend) as (twin, _, expected):
        head = {name: value for name, value in Mlp(depth=2).state_dict().items() if "head" in name}
        twin.model.load_state_dict(head, strict=False)
        loss_of(twin.model, 3)
        found = state_of(twin.model, twin.optimizer)
        assert_same((found[0][:-2], found[1]), (expected[2][0][:-2], expected[2][1]), "undone")
        assert torch.equal(twin.model.head.weight, head["head.weight"])  # type: ignore[union-attr]


@each_paged
@pytest.mark.parametrize("what", ["parameters", "state"])
@pytest.mark.parametrize("paged", [True, False])
def test_what_stays_in_memory(backend: str, what: str, paged: bool) -> None:
    """Changed in its state alone, beside paged parameters or by itself."""
    twin = Twin(Mlp(depth=2), OPTIMIZERS["adamw one by one"])
    for model in (twin.model, twin.reference):
        for parameter in model.parameters():
            parameter.requires_grad_(paged or parameter.dim() == 1)
    expected = plain_states(twin, mlp_loss)
    config = {"backend": backend, "rollback": True}
    with twin.paged(footprint_of(twin.model), config=config) as session:
        train(twin.model, twin.optimizer, 0, 3)
        loss_of(twin.model, 3).backward()
        if what == "parameters":
            with Breaking(session, 0).armed(), pytest.raises(Broken):
                twin.optimizer.step()
        else:
            twin.optimizer.param_groups[0]["eps"] = "no number"
            with pytest.raises(TypeError):
                twin.optimizer.step()
            twin.optimizer.param_groups[0]["eps"] = 1e-8
        go_on(twin, expected, 3)


@each_paged
def test_no_room_for_images_leaves_nothing_behind(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block does not begin, and plain training goes on."""

    def full(*args: Any, **options: Any) -> Any:
        raise SpillError(errno.ENOSPC, "no room for images")

    twin = Twin(Mlp(depth=2), OPTIMIZERS["adamw"])
    config = {**SMALL_PAGES, "backend": backend, "rollback": True}
    monkeypatch.setattr(undo_log, "SpillFile", full)
    with (
        pytest.raises(SpillError, match="no room for images"),
        dynoffload.offload(twin.model, twin.optimizer, budget="256KiB", config=config),
    ):
        pass
    assert_ordinary(twin.model, twin.optimizer)
    for model, optimizer in ((twin.model, twin.optimizer), (twin.reference, twin.its)):
        train(model, optimizer, 0, 2)
    twin.assert_same()
