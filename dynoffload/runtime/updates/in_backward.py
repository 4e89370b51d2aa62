"""Optimizer in backward: each update is made as soon as its gradient is complete.

The gradient is then freed, so it is never moved. A `ConsumedGradient` takes its place until
``zero_grad()``: a loop that clips, scales, accumulates or otherwise reads gradients gets an error,
not another result.

[Note: the first step]  In the first step after the block or paging begins, gradients are kept, and
``step()`` makes its updates as without the option. Only the stand-ins show. So a loop that does
not suit the option ends before anything is changed, or as it keeps zeros, with that step made. What
comes up in a later step has changed parameters already: that step is lost.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from dynoffload.errors import ConfigError
from dynoffload.runtime.consumed import ConsumedGradient
from dynoffload.runtime.updates.failure import StepFailure, note
from dynoffload.runtime.updates.step_commit import StepCommit
from dynoffload.runtime.updates.torch_context import (
    TorchContext,
    depends_on_autocast,
    flushes_denormals,
)
from dynoffload.runtime.updates.update import Group, can_split, is_foreach, snapshot

_HALF = (torch.float16, torch.bfloat16)


def check_in_backward(optimizer: Optimizer | None, *, ranks: bool) -> None:
    """Refuse what cannot be updated in backward; ``ranks``: gradients are reduced between ranks.

    Raises:
        ConfigError: naming the reason and the remedy.
    """
    why = ""
    if optimizer is None:
        why = "needs the optimizer: pass offload(model, optimizer, ...)"
    elif ranks:
        why = "is for one process: here gradients are reduced between ranks after backward"
    elif not can_split(optimizer):
        why = f"is for optimizers of torch.optim: {type(optimizer).__name__} steps whole"
    elif type(optimizer).__name__ == "SGD" and any(
        group["momentum"] and is_foreach(group) and any(p.dtype in _HALF for p in group["params"])
        for group in optimizer.param_groups
    ):
        why = "changes bits of SGD with momentum in half precision: use float32, or no momentum"
    if why:
        raise ConfigError(f"optimizer_in_backward {why}; or leave that option off")


class InBackward:
    """Makes the updates of one optimizer in backward.

    Args:
        optimizer: the user's optimizer.
        kind: type of the device that updates run on.
        commit: makes the updates.
        failure: records a step that was changed in part.

    Attributes:
        tries: whether gradients are kept; see [Note: the first step].
    """

    def __init__(
        self, optimizer: Optimizer, kind: str, commit: StepCommit, failure: StepFailure
    ) -> None:
        self._optimizer, self._kind, self._commit = optimizer, kind, commit
        self._failure = failure
        self._groups: dict[nn.Parameter, Group] = {}  # while a backward runs
        self._used: list[tuple[Group, Group]] = []  # groups, and their options as of backward
        self._kept: dict[nn.Parameter, torch.Tensor] = {}  # see [Note: the first step]
        # Parameters whose gradient was used in this step, and versions of what must stay as it is.
        self._done: dict[nn.Parameter, list[int]] = {}
        self._new: set[nn.Parameter] = set()  # of these, those that had no state
        self._consumed: dict[nn.Parameter, ConsumedGradient] = {}
        self.tries = True

    def collect(self, parameter: nn.Parameter, name: str) -> bool:
        """Use the complete gradient of ``parameter``; return False if no step will."""
        if not self._groups:
            groups = self._optimizer.param_groups
            self._groups = {one: group for group in groups for one in group["params"]}
            self._used = [(group, snapshot(group)) for group in groups]
        group, gradient = self._groups.get(parameter), parameter.grad
        if group is None or gradient is None:
            return False
        self.check_use(parameter, name)
        if gradient.requires_grad:
            self._refuse(f"backward(create_graph=True) made the gradient of {name!r}")
        if self.tries:
            self._kept[parameter] = gradient
            self._done[parameter] = self._versions(parameter)
        else:
            if not dict.get(self._optimizer.state, parameter):
                self._new.add(parameter)
            options = next(options for one, options in self._used if one is group)
            self._done[parameter] = []
            flushes = flushes_denormals()
            with TorchContext.now().again(self._kind):
                if flushes:
                    torch.set_flush_denormal(True)
                self._commit.make_now([{**options, "params": [parameter]}])
            self._done[parameter] = self._versions(parameter)
        stand_in = self._consumed.get(parameter)
        if stand_in is None or not stand_in.is_like(parameter):
            stand_in = self._consumed[parameter] = ConsumedGradient(parameter, name, self._lose)
        parameter.grad = stand_in
        return True

    def _versions(self, parameter: nn.Parameter) -> list[int]:
        state = dict.get(self._optimizer.state, parameter) or {}
        tensors = [one for one in state.values() if isinstance(one, torch.Tensor)]
        return [one._version for one in (parameter, *tensors)]

    def _lose(self, error: BaseException) -> None:
        """Record ``error``: if updates were made, their step is lost."""
        if self._done and not self.tries and not self._failure:
            self._failure.set(error)
            note(error, undone=False)

    def _refuse(self, what: str, *, loses: bool = True) -> NoReturn:
        error = ConfigError(
            f"{what}: with optimizer_in_backward an update is made as soon as its gradient is "
            "complete. Call backward() once, then step(), then zero_grad(), and use the model and "
            "change options after step(); or leave that option off"
        )
        if loses:
            self._lose(error)
        raise error

    def check_use(self, parameter: nn.Parameter, name: str) -> None:
        """Refuse to use ``parameter``, named ``name``, in the backward that has its gradient."""
        if parameter in self._done:
            self._refuse(f"backward uses {name!r} again after its gradient was complete")

    def check(self, *, reads: bool = False) -> None:
        """Refuse to use the model between backward and ``step()``, or only to read its tensors.

        Raises:
            ConfigError: a step is not finished; unless it ``reads``, updates are lost.
        """
        if self._done:
            what = "read" if reads else "called"
            self._refuse(f"the model is {what} after backward() and before step()", loses=not reads)

    def begin_step(self) -> None:
        """Begin ``step()``: gradients are None where updates were made, else as backward made them.

        Raises:
            ConfigError: options, tensors or gradients changed since backward.
        """
        if changed := next((key for one in self._used if (key := _changed(*one))), ""):
            self._refuse(f"{changed!r} of a parameter group changed between backward() and step()")
        if depends_on_autocast(self._optimizer) and torch.is_autocast_enabled(self._kind):
            self._refuse("step() is called under autocast")
        for parameter, stand_in in self._consumed.items():
            done = parameter in self._done
            if done and parameter.grad is not stand_in:
                what = f"the gradient of {stand_in.whose!r} was replaced"
                self._refuse(f"{what} between backward() and step()")
            if done and self._versions(parameter) != self._done[parameter]:
                what = f"{stand_in.whose!r} or its optimizer state was written"
                self._refuse(f"{what} between backward() and step()")
            if not done and parameter.grad is stand_in:
                self._refuse(f"step() needs the gradient of {stand_in.whose!r} a second time")
        for parameter in self._done:
            parameter.grad = self._kept.get(parameter)

    def make_step(self) -> None:
        """Make the rest of a step, after `begin_step`."""
        self._commit.make(self._new)

    def end_step(self) -> None:
        """End ``step()``: gradients cannot be read until ``zero_grad()``."""
        for parameter in self._done:
            parameter.grad = self._consumed[parameter]
        self.tries = self.tries and not self._done
        self.forget()

    def forget(self) -> None:
        """Forget the running step: it has ended, or a load replaces what it changed."""
        self._kept, self._done, self._new, self._groups, self._used = {}, {}, set(), {}, []

    def close(self) -> None:
        """End: gradients that no step has used are restored, or their step is lost."""
        if self._done and not self.tries and not self._failure:
            self._failure.set(
                ConfigError("the block ended after backward() and before step()"), reported=False
            )
        for parameter, stand_in in self._consumed.items():
            if parameter.grad is stand_in:
                parameter.grad = self._kept.get(parameter)


def _changed(group: Group, options: Group) -> str:
    """Return the first of ``options`` that ``group`` no longer has, or ""."""
    for key, value in options.items():
        if not _is_same(group.get(key), value):
            return key
    return ""


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other)
