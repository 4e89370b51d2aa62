"""After a lost step, ``load_state_dict`` of the model and of the optimizer together make up for it.

A step is lost as a hyperparameter makes updates fail half way. What is loaded then is a checkpoint
of the user's own, in every order; from there the run must have the bits of plain PyTorch. Whatever
loads less than all leaves the step lost. Until then nobody gets what is half of two steps, inside
the block or after it.
"""

from __future__ import annotations

import copy
import errno
import gc
import io
import os
import pickle
import signal
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import SMALL_PAGES, Twin, assert_ordinary, footprint_of
from hazards import Mlp, each_paged, guarded, loss_of
from torch import nn
from torch.optim import AdamW, Optimizer

import dynoffload
from dynoffload.checkpoint.reading import Opened
from dynoffload.errors import CheckpointError, SpillError, StepLostError
from dynoffload.runtime.adopting import Adoption
from dynoffload.units import MiB

pytestmark = pytest.mark.timeout(120)

Saved = tuple[dict[str, Any], dict[str, Any]]


def optimizer_of(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return an optimizer whose first group has what is paged."""
    every = list(parameters)
    groups = [{"params": [p for p in every if (p.dim() > 1) is paged]} for paged in (True, False)]
    return AdamW(groups, lr=1e-2, foreach=False)


def step_and_read(model: nn.Module, optimizer: Optimizer) -> None:
    """Make a step, and whichever updates of it were put off."""
    optimizer.step()
    loss_of(model, 9)


def lose(model: nn.Module, optimizer: Optimizer) -> None:
    """Lose a step, of which some updates are still to be made, and would fail too."""
    loss_of(model, 9).backward()
    group = optimizer.param_groups[0]
    eps, group["eps"] = group["eps"], "no number"  # which is found out when moments are changed
    with pytest.raises(TypeError, match="not str") as caught:
        step_and_read(model, optimizer)
    assert "the step is lost; go on from the last checkpoint" in caught.value.__notes__[0]
    group["eps"] = eps
    optimizer.zero_grad()


@contextmanager
def lost(backend: str, *, for_good: bool = False) -> Iterator[tuple[Twin, Saved]]:
    """Yield twins of which the first has lost its third step, and a checkpoint of the second."""
    model = Mlp(depth=2)
    model.register_buffer("seen", torch.ones(3))
    twin = Twin(model, optimizer_of)
    config = {"backend": backend}
    with twin.paged(footprint_of(twin.model), loses=for_good, config=config):
        twin.train(loss_of, range(2))
        saved = copy.deepcopy((twin.model.state_dict(), twin.optimizer.state_dict()))
        lose(twin.model, twin.optimizer)
        assert_lost(twin)
        yield twin, saved


def assert_lost(twin: Twin) -> None:
    """Assert that another step is refused."""
    with pytest.raises(StepLostError, match=r"session\.load\(\), or by load_state_dict\(\) of"):
        twin.optimizer.step()


@each_paged
@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_both_loaded_make_up_for_it(backend: str, first: str) -> None:
    """In either order, and only both."""
    with lost(backend) as (twin, (weights, state)):
        loads: dict[str, Callable[[], Any]] = {
            "model": lambda: twin.model.load_state_dict(weights),
            "optimizer": lambda: twin.optimizer.load_state_dict(state),
        }
        loads.pop(first)()
        assert_lost(twin)
        loads.popitem()[1]()
        twin.train(loss_of, range(2, 5))
    twin.assert_same()


def all_but(name: str) -> Callable[[nn.Module, dict[str, Any]], None]:
    """Return a load of all but one tensor."""

    def load(model: nn.Module, weights: dict[str, Any]) -> None:
        part = {key: value for key, value in weights.items() if key != name}
        assert model.load_state_dict(part, strict=False).missing_keys == [name]

    return load


def with_a_wrong_size(model: nn.Module, weights: dict[str, Any]) -> None:
    """Load all but one parameter, whose size differs."""
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**weights, "head.weight": torch.zeros(3, 3)})


def by_parts(model: nn.Module, weights: dict[str, Any]) -> None:
    """Load one module after the other, of which nobody knows when it is all."""
    for name, module in model.named_children():
        start = f"{name}."
        part = {k.removeprefix(start): v for k, v in weights.items() if k.startswith(start)}
        module.load_state_dict(part)


def with_one_left_out(model: nn.Module, weights: dict[str, Any]) -> None:
    """Load all but one parameter, of which a hook of the user's says that nothing is missing."""
    handle = model.head.register_load_state_dict_post_hook(  # type: ignore[union-attr, operator]
        lambda module, keys: keys.missing_keys.clear()
    )
    model.load_state_dict({name: v for name, v in weights.items() if name != "head.weight"})
    handle.remove()


@each_paged
@pytest.mark.parametrize("inside", [True, False])
def test_new_parameters_in_the_place_of_the_old(backend: str, inside: bool) -> None:
    """By ``assign=True``: what the optimizer still holds is nobody's any more."""
    with lost(backend, for_good=not inside) as (twin, (weights, state)):
        if inside:
            twin.model.load_state_dict(weights, assign=True)
            twin.optimizer.load_state_dict(state)
            loss_of(twin.model, 2)
    twin.model.load_state_dict(weights, assign=True)
    twin.optimizer = optimizer_of(twin.model.parameters())
    twin.optimizer.load_state_dict(state)
    twin.train(loss_of, range(2, 4))
    twin.assert_same()


LESS: dict[str, Callable[[nn.Module, dict[str, Any]], None]] = {
    "without a parameter": all_but("head.weight"),
    "without a buffer, which a load may have cut off too": all_but("seen"),
    "with a wrong size": with_a_wrong_size,
    "by parts": by_parts,
    "with one left out": with_one_left_out,
}


@guarded
@pytest.mark.parametrize("load", LESS)
def test_less_does_not(backend: str, load: str) -> None:
    """Until all is loaded at once."""
    with lost(backend) as (twin, (weights, state)):
        twin.optimizer.load_state_dict(state)
        LESS[load](twin.model, weights)
        assert_lost(twin)
        twin.model.load_state_dict(weights)
        twin.train(loss_of, range(2, 3))
    twin.assert_same()


def test_a_parameter_outside_of_the_model_is_not_loaded_with_it() -> None:
    """So a model's load does not make up for a step that may have changed it."""
    model, outside = Mlp(depth=2), nn.Parameter(torch.ones(64, 64))
    optimizer = optimizer_of([*model.parameters(), outside])
    config = {**SMALL_PAGES, "step_aside": False}
    with dynoffload.offload(model, optimizer, budget=footprint_of(model), config=config):
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        lose(model, optimizer)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        with pytest.raises(StepLostError, match="the step is lost"):
            optimizer.step()


OF_MODEL: dict[str, Callable[[Twin], Any]] = {
    "forward": lambda twin: loss_of(twin.model, 3),
    "forward of a part": lambda twin: twin.model.layers[0](torch.ones(2, 64)),  # type: ignore[index, union-attr, operator]
    "compiled": lambda twin: torch.compile(twin.model, backend="eager")(torch.ones(2, 64)),
    "state": lambda twin: twin.model.state_dict(),
    "state of a part": lambda twin: twin.model.head.state_dict(),  # type: ignore[union-attr, operator]
    "deepcopy": lambda twin: copy.deepcopy(twin.model),
    "pickle": lambda twin: pickle.dumps(twin.model),
    "torch.save": lambda twin: torch.save(twin.model, io.BytesIO()),
    "checkpoint": lambda twin: dynoffload.save_checkpoint(twin.model, None, "/nowhere"),
}
OF_OPTIMIZER: dict[str, Callable[[Twin], Any]] = {
    "step": lambda twin: twin.optimizer.step(),
    "state of the optimizer": lambda twin: twin.optimizer.state_dict(),
}
EVERY = {**OF_MODEL, **OF_OPTIMIZER}


def assert_refused(twin: Twin, uses: dict[str, Callable[[Twin], Any]] = EVERY) -> None:
    """Assert that nobody gets what is half of two steps."""
    for use in uses.values():
        with pytest.raises(StepLostError, match="half of one step and half of another"):
            use(twin)


def go_on(twin: Twin, stop: int) -> None:
    """Train both from the third step on, plainly."""
    twin.train(loss_of, range(2, stop))
    twin.assert_same()


def left(backend: str) -> tuple[Twin, Saved]:
    """Return twins of which the first has left its block with a lost step."""
    with lost(backend, for_good=True) as (twin, saved):
        assert_refused(twin)
    return twin, saved


@each_paged
def test_after_the_block_too(backend: str) -> None:
    """Whoever catches the error and saves what there is gets an error, and no mixture."""
    twin, (weights, state) = left(backend)
    assert_refused(twin)
    twin.optimizer.load_state_dict(state)
    assert_refused(twin)
    LESS["without a parameter"](twin.model, weights)
    assert_refused(twin)
    twin.model.load_state_dict(weights)
    go_on(twin, 4)
    assert_ordinary(twin.model, twin.optimizer)


@guarded
def test_a_model_that_was_loaded_is_free_of_its_optimizer(backend: str, tmp_path: Path) -> None:
    """Which may be made anew."""
    twin, (weights, state) = left(backend)
    twin.model.load_state_dict(weights)
    assert_refused(twin, OF_OPTIMIZER)
    with pytest.raises(StepLostError):
        dynoffload.save_checkpoint(twin.model, twin.optimizer, tmp_path / "run")
    old = weakref.ref(twin.optimizer)
    weights_of = weakref.ref(twin.model)
    twin.optimizer = optimizer_of(twin.model.parameters())
    twin.optimizer.load_state_dict(state)
    go_on(twin, 4)
    assert_ordinary(twin.model, twin.optimizer)
    dynoffload.save_checkpoint(twin.model, twin.optimizer, tmp_path / "run")
    gc.collect()
    assert old() is None
    del twin
    gc.collect()
    assert weights_of() is None


@contextmanager
def cut_off(patch: pytest.MonkeyPatch, reads: int) -> Iterator[None]:
    """Let reading a checkpoint fail after some tensors."""
    real, left = Opened.read, reads

    def read(self: Opened, *args: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.EIO, "Input/output error")
        return real(self, *args)

    with patch.context() as inner:
        inner.setattr(Opened, "read", read)
        yield


@each_paged
@pytest.mark.parametrize("by", ["checkpoint", "state"])
def test_a_model_without_an_optimizer(
    backend: str, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which a load was cut off: it is refused until another is whole."""
    twin = Twin(Mlp(depth=2), optimizer_of)
    dynoffload.save_checkpoint(twin.reference, None, tmp_path / "run")
    uses = {name: use for name, use in OF_MODEL.items() if name != "forward of a part"}
    config = {**SMALL_PAGES, "backend": backend, "step_aside": False}
    with dynoffload.offload(twin.model, budget="256KiB", config=config) as session:
        with cut_off(monkeypatch, 3), pytest.raises(CheckpointError, match="half-way"):
            session.load(tmp_path / "run")
        assert_refused(twin, uses)
        if by == "checkpoint":
            session.load(tmp_path / "run")
        else:
            twin.model.load_state_dict(twin.reference.state_dict())
        assert torch.equal(twin.model(torch.ones(2, 64)), twin.reference(torch.ones(2, 64)))
    assert_ordinary(twin.model)


@guarded
@pytest.mark.parametrize("how", ["interrupted", "fails", "fails as paging steps aside"])
def test_a_block_that_is_left_by_an_error(
    backend: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while tensors are given back waits, and leaves them whole; a disk that fails then
    does not, as the block ends or as paging steps aside."""
    twin = Twin(Mlp(depth=2), optimizer_of)
    real, aside = Adoption.restore, how.endswith("aside")
    error = KeyboardInterrupt if how == "interrupted" else SpillError

    def restore(self: Adoption, *where: Any) -> str:
        if how == "interrupted":
            os.kill(os.getpid(), signal.SIGINT)
            return real(self, *where)
        real(self, *where)
        raise SpillError(errno.EIO, "one could not be read")

    def block() -> None:
        config = {"backend": backend, "step_aside": aside}
        budget = 64 * MiB if aside else footprint_of(twin.model)
        with twin.paged(budget, loses=aside, config=config) as session:
            twin.train(loss_of, range(2))
            monkeypatch.setattr(Adoption, "restore", restore)
            if aside:
                with pytest.raises(error):
                    twin.train(loss_of, range(2, 8))
                assert not session.paging
                assert_refused(twin)

    if aside:
        block()
    else:
        with pytest.raises(error):
            block()
    if how == "interrupted":
        go_on(twin, 4)
    else:
        assert_refused(twin)


@each_paged
def test_state_that_was_changed_and_no_parameter(backend: str) -> None:
    """Of what stays in memory, Adam changes the moments first: the others are a step behind."""
    twin = Twin(Mlp(depth=2), lambda p: AdamW(p, lr=1e-2, foreach=True))
    config = {"backend": backend}
    with twin.paged(footprint_of(twin.model), loses=True, config=config):
        twin.train(loss_of, range(2))
        loss_of(twin.model, 2).backward()
        twin.optimizer.param_groups[0]["eps"] = "no number"
        with pytest.raises(TypeError):
            twin.optimizer.step()
        assert_refused(twin)


@guarded
@pytest.mark.parametrize("inside", [True, False])
def test_a_checkpoint_makes_up_for_it(backend: str, inside: bool, tmp_path: Path) -> None:
    """After the block, and in another."""
    twin, _ = left(backend)
    dynoffload.save_checkpoint(twin.reference, twin.its, tmp_path / "run")
    if inside:
        budget, config = footprint_of(twin.model), {"backend": backend}
        with twin.paged(budget, config=config) as session:
            assert_refused(twin)
            session.load(tmp_path / "run")
            go_on(twin, 4)
    else:
        dynoffload.load_checkpoint(twin.model, twin.optimizer, tmp_path / "run")
        go_on(twin, 4)
    assert_ordinary(twin.model, twin.optimizer)
