"""Records a partially applied step or load, and what must be reloaded to recover from it.

A lost step leaves only part of the model and optimizer state updated. Recovery requires loading
both, in any order: the optimizer by ``load_state_dict``, and the whole model by a load without
missing keys or errors that writes every parameter of the optimizer. Until then the step is lost.

[Note: aftermath]  Inside the block a session refuses to continue. A script that catches the error
and saves afterwards would see an ordinary model. So hooks stay on model and optimizer that refuse
forward, copies and ``state_dict()`` until both are loaded. Single tensors can be read.
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
    """Records an interrupted step or load until all parts are reloaded.

    Args:
        parts: the parts that the session has.

    Attributes:
        error: the error that interrupted it, or None if nothing is lost.
        on_part: called with each part that was loaded as a whole.
        undo: restores the state before the step; returns whether it succeeded.
        within: whether a step is being made, which undoes and reports failures itself.
    """

    def __init__(self, *parts: Part) -> None:
        self._needed = set(parts)
        self.error: BaseException | None = None
        self.on_part: Callable[[Part], None] = lambda part: None
        self.undo: Callable[[], bool] = lambda: False
        self.within = False
        self._unreported: BaseException | None = None
        self._parts: set[Part] = set()  # loaded since the failure

    def __bool__(self) -> bool:
        return self.error is not None

    def set(self, error: BaseException, *, reported: bool = True) -> None:
        """Record that ``error`` interrupted a step or load; ``reported``: the user has seen it."""
        self.error, self._unreported = error, None if reported else error
        self._parts.clear()

    def make_up(self, part: Part) -> None:
        """Record that ``part`` was loaded as a whole; once all were, the failure is cleared."""
        self._parts.add(part)
        if self._parts >= self._needed:
            self.forgive()
        self.on_part(part)

    def outlast(self) -> None:
        """Keep the failure after the block, without references to the block's objects."""
        self.undo = lambda: False
        error = self.error
        if error is not None:
            first = error.__cause__ if isinstance(error, StepLostError) else None
            error = first or error
            self.error = StepLostError(f"{type(error).__name__}: {error}")
        self._unreported = None

    def has(self, part: Part) -> bool:
        """Return whether ``part`` is lost and was not reloaded."""
        return bool(self) and part not in self._parts

    def forgive(self) -> None:
        """Clear the failure: model and optimizer are consistent again."""
        self.error = self._unreported = None
        self._parts.clear()

    def check(self) -> None:
        """Raise if a step is lost; undo it first if possible.

        Raises:
            StepLostError: naming the remedy, with the original error as its cause.
        """
        self._refuse(self.error)

    def report(self) -> None:
        """Raise a failure that the user has not seen yet.

        Raises:
            StepLostError: as `check`.
        """
        self._refuse(self._unreported)

    def report_undone(self) -> None:
        """Undo an interrupted step, if possible.

        Raises:
            StepLostError: the step was undone; model and optimizer are those of the step before.
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
    """Add a note to ``error``, which is re-raised: it interrupted a step, now lost or undone."""
    outcome = f": the step is lost; {_REMEDY}"
    if undone:
        outcome = f", which is undone: {_UNDONE}. Gradients are as they were"
    error.add_note(f"dynoffload: this has cut off an optimizer step{outcome}.")


class Recovery:
    """Watches loads of a model until it is closed, and reports full loads to the failure.

    Args:
        model: the root.
        optimizer: the model's optimizer, held weakly; or None.
        failure: the failure from which loads recover.
        on_load: called when a load begins after a failure.
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
        # During a load after a failure: missing keys and errors, versions, model parameters.
        self._load: tuple[list[Any], dict[torch.Tensor, int], set[torch.Tensor]] | None = None
        self._hooks = Hook(self._begin), Hook(self._end)
        self._handles = [
            model.register_load_state_dict_pre_hook(self._hooks[0]),  # type: ignore[no-untyped-call]
            model.register_load_state_dict_post_hook(self._hooks[1]),  # type: ignore[no-untyped-call]
        ]

    def close(self) -> None:
        """Remove the hooks."""
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
        replaced = own - set(module.parameters())  # by ``assign=True``: no longer in the model
        versions = self._versions().items()
        if all(one in replaced or now != before.get(one, now) for one, now in versions):
            self._failure.make_up("model")


class Aftermath:
    """Refuses use of a model left partially updated by a block; [Note: aftermath].

    Args:
        model: the root, held weakly.
        optimizer: its optimizer, held weakly; or None.
        failure: the failure with which the block ended.
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
        """Refuse to save a lost ``model``, or ``optimizer`` with it.

        Raises:
            StepLostError: a step of theirs is lost.
        """
        for one in cls._of.get(model, ()):
            if one._failure.has("model") or one._is_of(optimizer):
                one._failure.check()

    @classmethod
    def make_up(cls, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Record that a checkpoint was loaded into ``model``, and ``optimizer`` if given."""
        for one in cls._of.get(model, ()):
            if one._failure:
                one._failure.make_up("model")
            if one._failure and one._is_of(optimizer):
                one._failure.make_up("optimizer")
        cls._of[model] = [one for one in cls._of.get(model, ()) if one._failure]
