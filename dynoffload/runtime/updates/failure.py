"""Records a step or a load that was cut off half-way, and what must be loaded to make up for it.

A lost step leaves part of the model and of the optimizer's state changed, and part not. All is
whole again once both have been loaded since, in any order: the optimizer by its
``load_state_dict``, and the model as a whole, by a load without missing keys and errors that has
written every parameter of the optimizer. Anything less leaves the step lost.

[Note: aftermath]  Inside the block a session refuses to go on. A script that catches the error and
saves what it has would find an ordinary model. So hooks stay on the model and on the optimizer
that refuse forward, copies and ``state_dict()`` until all is loaded. Single tensors can be read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dynoffload.errors import StepLostError
from dynoffload.runtime.passes.hooks import Hook

Part = Literal["model", "optimizer"]

_REMEDY = (
    "go on from the last checkpoint, by session.load(), or by load_state_dict() of the whole model "
    "and of the optimizer"
)
_UNDONE = (
    "parameters and optimizer state are those of the step before it (what a scheduler or a scaler "
    "has counted is not undone)"
)


class StepFailure:
    """What cut a step or a load off half-way, until all parts were loaded since.

    Args:
        parts: those that there are.

    Attributes:
        error: what cut it off, or None where nothing is lost.
        on_part: called with each part that was loaded as a whole.
        undo: makes all of one step again, and returns whether it could.
        within: whether a step is being made, which undoes and reports by itself.
    """

    def __init__(self, *parts: Part) -> None:
        self._needed = set(parts)
        self.error: BaseException | None = None
        self.on_part: Callable[[Part], None] = lambda part: None
        self.undo: Callable[[], bool] = lambda: False
        self.within = False
        self._unreported: BaseException | None = None
        self._parts: set[Part] = set()  # loaded since

    def __bool__(self) -> bool:
        return self.error is not None

    def set(self, error: BaseException, *, reported: bool = True) -> None:
        """A step or a load was cut off by ``error``; the user has seen it, if ``reported``."""
        self.error, self._unreported = error, None if reported else error
        self._parts.clear()

    def make_up(self, part: Part) -> None:
        """``part`` was loaded as a whole: a failure is made up for once all were."""
        self._parts.add(part)
        if self._parts >= self._needed:
            self.forgive()
        self.on_part(part)

    def outlast(self) -> None:
        """The block is over: keep what refuses, and nothing that was alive in it."""
        self.undo = lambda: False
        error = self.error
        if error is not None:
            first = error.__cause__ if isinstance(error, StepLostError) else None
            error = first or error
            self.error = StepLostError(f"{type(error).__name__}: {error}")
        self._unreported = None

    def has(self, part: Part) -> bool:
        """Return whether ``part`` is lost, and was not loaded since."""
        return bool(self) and part not in self._parts

    def forgive(self) -> None:
        """All is of one step again."""
        self.error = self._unreported = None
        self._parts.clear()

    def check(self) -> None:
        """Refuse whatever needs all to be of one step, unless the step can be undone.

        Raises:
            StepLostError: naming the remedy, from what cut the step off.
        """
        self._refuse(self.error)

    def report(self) -> None:
        """Raise what the user has not seen so far.

        Raises:
            StepLostError: as `check`.
        """
        self._refuse(self._unreported)

    def report_undone(self) -> None:
        """Undo what was cut off, if that is possible.

        Raises:
            StepLostError: all is of one step again, the one before.
        """
        error = self.error
        if error is not None and self.undo():
            raise StepLostError(
                "the last step was cut off, as an update that it had put off could not be made: it "
                f"is lost and undone, and {_UNDONE}; call zero_grad(), and go on from there"
            ) from error

    def _refuse(self, error: BaseException | None) -> None:
        self._unreported = None
        if error is None:
            return
        self.report_undone()
        raise StepLostError(
            "a step, an update that it had put off, or a load was cut off, so model and optimizer "
            f"are half of one step and half of another: the step is lost; {_REMEDY}"
        ) from error


def note(error: BaseException, *, undone: bool) -> None:
    """Say in ``error``, which is raised on, that it has cut a step off, which is lost or undone."""
    outcome = f": the step is lost; {_REMEDY}"
    if undone:
        outcome = f", which is undone: {_UNDONE}. Gradients are as they were"
    error.add_note(f"dynoffload: this has cut off an optimizer step{outcome}.")


class Recovery:
    """Watches loads of a model, until it is closed.

    Args:
        model: the root.
        optimizer: whose parameters it holds, or None; it is not kept alive.
        failure: what loads make up for.
        on_load: called as a load begins after a failure.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        failure: StepFailure,
        on_load: Callable[[], None],
    ) -> None:
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self._failure, self._on_load = failure, on_load
        # Of a load after a failure: its faults, the parameters' versions and the model's own.
        self._load: tuple[list[Any], dict[torch.Tensor, int], set[torch.Tensor]] | None = None
        self._hooks = Hook(self._begin), Hook(self._end)
        self._handles = [
            model.register_load_state_dict_pre_hook(self._hooks[0]),  # type: ignore[no-untyped-call]
            model.register_load_state_dict_post_hook(self._hooks[1]),  # type: ignore[no-untyped-call]
        ]

    def close(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.end()
        for handle in self._handles:
            handle.remove()

    def _versions(self) -> dict[torch.Tensor, int]:
        optimizer = None if self._optimizer is None else self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        return {parameter: parameter._version for group in groups for parameter in group["params"]}

    def _begin(self, *args: Any) -> None:
        module, _state, _prefix, _metadata, _strict, missing, _unexpected, errors = args
        self._load = None
        if self._failure:
            self._on_load()
            self._load = [missing, errors], self._versions(), set(module.parameters())

    def _end(self, module: nn.Module, keys: Any) -> None:
        load, self._load = self._load, None
        if load is None or any(load[0]):
            return
        _, before, own = load
        replaced = own - set(module.parameters())  # by ``assign=True``: they are nobody's any more
        versions = self._versions().items()
        if all(one in replaced or now != before.get(one, now) for one, now in versions):
            self._failure.make_up("model")


class Aftermath:
    """Refuses what a block has left half of one step and half of another; [Note: aftermath].

    Args:
        model: the root.
        optimizer: its optimizer, or None; neither is kept alive.
        failure: what the block has left with.
    """

    _of: ClassVar[weakref.WeakKeyDictionary[nn.Module, list[Aftermath]]] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, failure: StepFailure) -> None:
        failure.outlast()
        self._failure = failure
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self._recovery = Recovery(model, optimizer, failure, lambda: None)
        refusing = Hook(lambda *_: failure.check(), failure.check, compiled=True)
        self._of_model: list[RemovableHandle] = []
        for inner in model.modules():
            self._of_model += [
                inner.register_forward_pre_hook(refusing, prepend=True),
                inner.register_state_dict_pre_hook(refusing),  # type: ignore[no-untyped-call]
            ]
        self._of_optimizer: list[RemovableHandle] = []
        if optimizer is not None:
            self._of_optimizer += [
                optimizer.register_step_pre_hook(refusing),
                optimizer.register_state_dict_pre_hook(refusing),
                optimizer.register_load_state_dict_post_hook(
                    lambda _: failure.make_up("optimizer")
                ),
            ]
        failure.on_part = self._admit
        self._of.setdefault(model, []).append(self)

    def _admit(self, part: Part) -> None:
        if part == "model":
            for handle in self._of_model:
                handle.remove()
        if not self._failure:
            self._failure.on_part = lambda part: None
            self._recovery.close()
            for handle in self._of_optimizer:
                handle.remove()

    def _is_of(self, optimizer: Optimizer | None) -> bool:
        mine = None if self._optimizer is None else self._optimizer()
        return optimizer is not None and mine is optimizer

    @classmethod
    def check(cls, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Refuse to save ``model``, or ``optimizer`` with it, if it is lost.

        Raises:
            StepLostError: it is.
        """
        for one in cls._of.get(model, ()):
            if one._failure.has("model") or one._is_of(optimizer):
                one._failure.check()

    @classmethod
    def make_up(cls, model: nn.Module, optimizer: Optimizer | None) -> None:
        """A checkpoint was loaded into ``model``, and into ``optimizer`` if there is one."""
        for one in cls._of.get(model, ()):
            if one._failure:
                one._failure.make_up("model")
            if one._failure and one._is_of(optimizer):
                one._failure.make_up("optimizer")
        cls._of[model] = [one for one in cls._of.get(model, ()) if one._failure]
