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
from typing import Any

import pytest
import torch
import transformers
from emulated import DEVICE, accelerated
from exactness import Twin, assert_ordinary, assert_same, footprint_of, least_budget, needs_pager
from faulty import state_of
from fused_networks import PAGES, Chosen
from hazards import Mlp, each_paged, guarded, loss_of
from slice_cases import chosen_step
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from dynoffload.errors import SpillError, StepLostError
from dynoffload.runtime.updates import undo_log

pytestmark = pytest.mark.timeout(240)

STEPS = 6
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda p: AdamW(p, lr=1e-2),
    "adamw one by one": lambda p: AdamW(p, lr=1e-2, foreach=False, amsgrad=True),
    "adamw fused": lambda p: AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: SGD(p, lr=1e-1, momentum=0.9, nesterov=True),
}
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], Tensor]]] = {
    "mlp": (lambda: Mlp(depth=2), loss_of),
    "experts": (Chosen, chosen_step),
}


class Broken(Exception):
    """What the optimizer raises."""


@contextmanager
def broken(session: Any, at: int = 0, *, writes: bool = True) -> Iterator[list[int]]:
    """Let the ``at``-th call of the optimizer's code change all that it is given, or make its state
    and write nothing, and then raise; yield the calls so far."""
    runner, calls = session._paging.updates.pending, []
    plain = runner.step

    def step(optimizer: Any) -> None:
        calls.append(len(calls))
        if calls[-1] != at:
            plain(optimizer)
            return
        for group in optimizer.param_groups:
            if not writes:
                optimizer._init_group(group, *([] for _ in range(6)))
        if writes:
            plain(optimizer)
            with torch.no_grad():
                torch._foreach_add_([p for g in optimizer.param_groups for p in g["params"]], 1.0)
        raise Broken

    runner.step = step
    try:
        yield calls
    finally:
        runner.step = plain


def states_of(twin: Twin, loss_of: Any) -> list[Any]:
    """Train the reference, and return its states before and after each step."""
    states = [state_of(twin.reference, twin.its)]
    for step in range(STEPS):
        train(twin.reference, twin.its, step, step + 1, loss_of)
        states.append(state_of(twin.reference, twin.its))
    return states


def train(model: nn.Module, optimizer: Any, start: int, stop: int, loss_of: Any = loss_of) -> None:
    """Make the steps from ``start`` to ``stop``."""
    for step in range(start, stop):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def go_on(twin: Twin, expected: list[Any], start: int) -> None:
    """Train to the end from a state that must be that of ``start`` steps."""
    twin.optimizer.zero_grad()
    assert_same(state_of(twin.model, twin.optimizer), expected[start], "undone")
    train(twin.model, twin.optimizer, start, STEPS)
    assert_same(state_of(twin.model, twin.optimizer), expected[STEPS], "at the end")


def strike(
    twin: Twin, loss_of: Any, at: int, struck: int, expected: list[Any], backend: str
) -> str | None:
    """Train to the end, with the ``at``-th call of the optimizer from step ``struck`` on broken;
    return which part of a step has raised, or None."""
    config, below, device = {**PAGES, "rollback": True}, nullcontext(), None
    if backend == "emulated":
        below, device = accelerated(elsewhere=True), DEVICE
    else:
        config["backend"] = backend
    budget, _ = least_budget(twin.model, twin.optimizer, footprint_of(twin.model) // 2, config)
    model, optimizer = twin.model, twin.optimizer
    raised: list[str] = []
    with below, twin.paged(budget, device=device, config=config) as session:
        train(model, optimizer, 0, struck, loss_of)
        with broken(session, at):
            number, part = struck, ""
            while number < STEPS:
                try:
                    part = "forward"
                    loss = loss_of(model, number)
                    part = "backward"
                    loss.backward()
                    part = "step"
                    optimizer.step()
                    number += 1
                except StepLostError as error:  # of an update that was put off
                    number -= 1
                    told = type(error.__cause__) is Broken and "lost and undone" in str(error)
                    raised.append(f"{part}, late" if told else str(error))
                except Broken as error:
                    raised.append(part if "which is undone" in error.__notes__[0] else str(error))
                optimizer.zero_grad()
                if raised:
                    assert_same(state_of(model, optimizer), expected[number], f"{raised}, {at}")
    assert_same(state_of(model, optimizer), expected[STEPS], f"at the end, call {at}")
    assert len(raised) <= 1
    return raised[0] if raised else None


CASES = [
    pytest.param("pager", "mlp", "adamw", 0, marks=needs_pager),
    ("mapped", "mlp", "sgd", 0),
    ("emulated", "mlp", "adamw", 3),
    pytest.param("pager", "experts", "adamw", 2, marks=needs_pager),
    ("mapped", "experts", "adamw", 2),
]


@pytest.mark.parametrize(("backend", "network", "optimizer", "struck"), CASES)
def test_an_optimizer_that_fails(backend: str, network: str, optimizer: str, struck: int) -> None:
    """At each call that can be broken (for experts, at every other one): in its first step, before
    which there was no state, and in the midst of training; slices are updated one by one."""
    make, loss_of = NETWORKS[network]
    torch.manual_seed(0)
    first = make()
    expected = states_of(Twin(copy.deepcopy(first), OPTIMIZERS[optimizer]), loss_of)
    parts: set[str] = set()
    for at in range(0, 13, 1 if network == "mlp" else 2):
        twin = Twin(copy.deepcopy(first), OPTIMIZERS[optimizer])
        raised = strike(twin, loss_of, at, struck, expected, backend)
        if raised is None:
            break
        parts.add(raised)
    assert parts == {"step"} if backend == "mapped" else "forward, late" in parts, parts


def test_an_optimizer_of_somebody_else(caplog: pytest.LogCaptureFixture) -> None:
    """Its step runs as a whole, and is not undone: that is said."""
    twin = Twin(Mlp(depth=2), lambda p: transformers.Adafactor(p, lr=1e-3, relative_step=False))
    with twin.paged(footprint_of(twin.model), config={**PAGES, "rollback": True}):
        assert "a step of Adafactor that is cut off is not undone" in caplog.text
        twin.train(loss_of, range(2))
    twin.assert_same()


@contextmanager
def undoing(
    backend: str, optimizer: str = "adamw", *, loses: bool = False, only_small: bool = False
) -> Iterator[tuple[Twin, Any, list[Any]]]:
    """Yield a block of three steps, and the states that there should be."""
    twin = Twin(Mlp(depth=2), OPTIMIZERS[optimizer])
    for parameter in (*twin.model.parameters(), *twin.reference.parameters()):
        parameter.requires_grad_(not only_small or parameter.dim() == 1)
    expected = states_of(twin, loss_of)
    config = {"backend": backend, "rollback": True}
    with twin.paged(footprint_of(twin.model), loses=loses, config=config) as session:
        train(twin.model, twin.optimizer, 0, 3)
        yield twin, session, expected


@guarded
@pytest.mark.parametrize("at", [0, 2])
def test_as_the_block_is_left(backend: str, at: int) -> None:
    """The last step is undone, and what is left is whole: nothing refuses it."""
    found: list[Any] = []

    def block(armed: ExitStack) -> None:
        with undoing(backend) as (twin, session, expected):
            found.extend([twin, expected])
            loss_of(twin.model, 3).backward()
            twin.optimizer.step()  # what stays in memory is updated now, and not broken
            armed.enter_context(broken(session, at))

    with ExitStack() as armed, pytest.raises(StepLostError, match="lost and undone"):
        block(armed)
    twin, expected = found
    assert_ordinary(twin.model, twin.optimizer)
    go_on(twin, expected, 3)


@each_paged
def test_a_checkpoint_that_was_loaded_is_not_undone(backend: str) -> None:
    """What was kept is of another run then."""
    with undoing(backend) as (twin, session, _):
        model, optimizer = twin.model, twin.optimizer
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, 3, 5)
        optimizer.load_state_dict(saved[1])
        model.load_state_dict(saved[0])
        before = state_of(model, optimizer)
        session._paging.loss.set(Broken())  # as by a load that is cut off
        with pytest.raises(StepLostError, match="half of one step and half of another"):
            loss_of(model, 4)
        optimizer.load_state_dict(saved[1])
        model.load_state_dict(saved[0])
        assert_same(state_of(model, optimizer), before, "loaded")


@each_paged
def test_a_scaled_step(backend: str) -> None:
    """Under a GradScaler all updates are made in step()."""

    def scaled(model: nn.Module, optimizer: Optimizer, step: int) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        scaler.scale(loss_of(model, step)).backward()
        scaler.step(optimizer)
        optimizer.zero_grad()

    twin = Twin(Mlp(depth=2), OPTIMIZERS["adamw fused"])
    config = {"backend": backend, "rollback": True}
    with twin.paged(footprint_of(twin.model), config=config) as session:
        for step in range(5):
            for at in (0, 2, 3) if step == 3 else ():
                with broken(session, at), pytest.raises(Broken):
                    scaled(twin.model, twin.optimizer, step)
                twin.optimizer.zero_grad()
                del twin.optimizer.grad_scale, twin.optimizer.found_inf  # left after an error
                twin.assert_same()
            for model, optimizer in twin.sides:
                scaled(model, optimizer, step)
    twin.assert_same()


USES: dict[str, Callable[[nn.Module, Optimizer], Any]] = {
    "forward": lambda model, optimizer: loss_of(model, 3),
    "step": lambda model, optimizer: optimizer.step(),
    "copy": lambda model, optimizer: copy.deepcopy(model),
}


@contextmanager
def behind(backend: str) -> Iterator[tuple[Twin, list[Any]]]:
    """Yield a block in which the third step has lost an update behind somebody's back."""
    with undoing(backend, loses=True) as (twin, session, expected):
        with broken(session):
            twin.model.layers[0].weight.norm()  # type: ignore[index, union-attr, operator]
        yield twin, expected


@guarded
@pytest.mark.parametrize("use", USES)
def test_an_update_made_behind_somebodys_back(backend: str, use: str) -> None:
    """A read of a weight gives the old value; training on raises an error."""
    with behind(backend) as (twin, expected):
        with pytest.raises(StepLostError, match="lost and undone"):
            USES[use](twin.model, twin.optimizer)
        go_on(twin, expected, 2)


@guarded
def test_weights_that_are_swapped_are_not_written(backend: str) -> None:
    """As for an evaluation of averaged weights: the step is undone once the old are back."""
    with behind(backend) as (twin, expected):
        old = [parameter.data for parameter in twin.model.parameters()]
        averaged = [torch.full_like(data, 0.5) for data in old]
        for weights, told in ((averaged, "half of one step and"), (old, "lost and undone")):
            for parameter, data in zip(twin.model.parameters(), weights, strict=True):
                parameter.data = data
            with pytest.raises(StepLostError, match=told):
                loss_of(twin.model, 3)
            assert all(bool((average == 0.5).all()) for average in averaged)
        del parameter, data, weights, old
        go_on(twin, expected, 2)


@guarded
def test_a_load_of_a_part_comes_after_the_undoing(backend: str) -> None:
    """It loads into the last finished step."""
    with behind(backend) as (twin, expected):
        head = {name: value for name, value in Mlp(depth=2).state_dict().items() if "head" in name}
        twin.model.load_state_dict(head, strict=False)
        loss_of(twin.model, 3)
        found = state_of(twin.model, twin.optimizer)
        assert_same((found[0][:-2], found[1]), (expected[2][0][:-2], expected[2][1]), "undone")
        assert torch.equal(twin.model.head.weight, head["head.weight"])  # type: ignore[union-attr]


@each_paged
@pytest.mark.parametrize("what", ["parameters", "state"])
@pytest.mark.parametrize("only_small", [False, True])
def test_what_stays_in_memory(backend: str, what: str, only_small: bool) -> None:
    """Changed in its state alone, beside paged parameters or by itself."""
    with undoing(backend, "adamw one by one", only_small=only_small) as (twin, session, expected):
        loss_of(twin.model, 3).backward()
        if what == "parameters":
            with broken(session), pytest.raises(Broken):
                twin.optimizer.step()
        else:
            twin.optimizer.param_groups[0]["eps"] = "no number"
            with pytest.raises(TypeError):
                twin.optimizer.step()
            twin.optimizer.param_groups[0]["eps"] = 1e-8
        go_on(twin, expected, 3)


def test_state_that_was_made_and_not_written_is_undone() -> None:
    """The optimizer raises between making its state and the first write."""
    twin = Twin(Mlp(depth=2), OPTIMIZERS["adamw"])
    config = {"backend": "mapped", "rollback": True}
    with twin.paged(footprint_of(twin.model), config=config) as session:
        before = state_of(twin.model, twin.optimizer)
        loss_of(twin.model, 0).backward()
        with broken(session, writes=False), pytest.raises(Broken):
            twin.optimizer.step()
        assert_same(state_of(twin.model, twin.optimizer), before, "undone")


@each_paged
def test_no_room_for_images_leaves_nothing_behind(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block does not begin, and plain training goes on."""

    def full(*args: Any, **options: Any) -> Any:
        raise SpillError(errno.ENOSPC, "no room for images")

    twin = Twin(Mlp(depth=2), OPTIMIZERS["adamw"])
    config = {"backend": backend, "rollback": True}
    monkeypatch.setattr(undo_log, "SpillFile", full)
    with pytest.raises(SpillError, match="no room for images"):
        with twin.paged(footprint_of(twin.model), config=config):
            pass
    assert_ordinary(twin.model, twin.optimizer)
    twin.train(loss_of, range(2))
    twin.assert_same()
