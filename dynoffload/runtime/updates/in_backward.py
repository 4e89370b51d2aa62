"""Optimizer in backward: each update is made as soon as its gradient is complete.

The gradient is then freed, so it is never moved. A `ConsumedGradient` takes its place until
``zero_grad()``: a loop that clips, scales, accumulates or otherwise reads gradients gets an error,
not another result.

[Note: the first step]  In the first step after the block or paging begins, gradients are kept, and
``step()`` makes its updates as without the option. Only the stand-ins show. So a loop that does
not suit the option ends before anything is changed. What comes up in a later step has changed
parameters already: that step is lost.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from dynoffload.errors import ConfigError
from dynoffload.runtime.consumed import ConsumedGradient
from dynoffload.runtime.updates.failure import StepFailure
from dynoffload.runtime.updates.step_commit import StepCommit
from dynoffload.runtime.updates.torch_context import TorchContext, depends_on_autocast
from dynoffload.runtime.updates.update import Group, can_split, snapshot

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
        group["momentum"] and any(p.dtype in _HALF for p in group["params"])
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
    """

    def __init__(
        self,
        optimizer: Optimizer,
        kind: str,
        commit: StepCommit,
        failure: StepFailure,
    ) -> None:
        self._optimizer, self._kind, self._commit = optimizer, kind, commit
        self._failure = failure
        self._groups: dict[nn.Parameter, Group] = {}  # while a backward runs
        self._used: list[tuple[Group, Group]] = []  # groups, and their options as of backward
        self._kept: dict[nn.Parameter, torch.Tensor] = {}  # see [Note: the first step]
        self._made: dict[nn.Parameter, None] = {}
        self._new: set[nn.Parameter] = set()  # whose state was made since the last step
        self._consumed: dict[nn.Parameter, ConsumedGradient] = {}
        self.tries = True  # until the first step has ended

    def collect(self, parameter: nn.Parameter, name: str) -> bool:
        """Use the complete gradient of ``parameter``; return False if no step will."""
        if not self._groups:
            groups = self._optimizer.param_groups
            self._groups = {one: group for group in groups for one in group["params"]}
            self._used = [(group, snapshot(group)) for group in groups]
        group = self._groups.get(parameter)
        gradient = parameter.grad
        if group is None or gradient is None:
            return False
        if parameter in self._kept or parameter in self._made:
            self._refuse(f"the gradient of {name!r} is made again before step()")
        if gradient.requires_grad:
            self._refuse(f"backward(create_graph=True) made the gradient of {name!r}")
        if self.tries:
            self._kept[parameter] = gradient
        else:
            if not dict.get(self._optimizer.state, parameter):
                self._new.add(parameter)
            options = next(options for one, options in self._used if one is group)
            self._made[parameter] = None
            with TorchContext.now().again(self._kind):
                self._commit.make_now([{**options, "params": [parameter]}])
        self._consume(parameter, name)
        return True

    def _consume(self, parameter: nn.Parameter, name: str) -> None:
        stand_in = self._consumed.get(parameter)
        if stand_in is None:
            stand_in = self._consumed[parameter] = ConsumedGradient(parameter, name, self._lose)
        parameter.grad = stand_in

    def _lose(self, error: BaseException) -> None:
        """Record ``error``: if updates were made, their step is lost."""
        if self._made and not self._failure:
            self._failure.set(error)

    def _refuse(self, what: str) -> NoReturn:
        error = ConfigError(
            f"{what}: with optimizer_in_backward an update is made as soon as its gradient is "
            "complete. Call backward() once, then step(), then zero_grad(), and change options "
            "after step(); or leave that option off"
        )
        self._lose(error)
        raise error

    def check(self) -> None:
        """Refuse to call the model between backward and ``step()``.

        Raises:
            ConfigError: nothing was changed.
            StepLostError: updates were made.
        """
        if self._made or self._kept:
            self._refuse("the model is called after backward() and before step()")

    def begin_step(self) -> None:
        """Begin ``step()``: gradients are None where updates were made, else as backward made them.

        Raises:
            ConfigError: options changed since backward.
        """
        if changed := next((key for one in self._used if (key := _changed(*one))), ""):
            self._refuse(f"{changed!r} of a parameter group changed between backward() and step()")
        if depends_on_autocast(self._optimizer) and torch.is_autocast_enabled(self._kind):
            self._refuse("step() is called under autocast")
        for parameter in (*self._kept, *self._made):
            if type(parameter.grad) is not ConsumedGradient:
                name = self._consumed[parameter].whose
                self._refuse(f"the gradient of {name!r} was replaced between backward() and step()")
        for parameter, gradient in self._kept.items():
            parameter.grad = gradient
        for parameter in self._made:
            parameter.grad = None
        if self._new:
            every = (one for group in self._optimizer.param_groups for one in group["params"])
            self._commit.order.created([one for one in every if one in self._new])
            self._commit.order.restore(self._optimizer.state)

    def end_step(self) -> None:
        """End ``step()``: gradients cannot be read until ``zero_grad()``."""
        for parameter in (*self._kept, *self._made):
            parameter.grad = self._consumed[parameter]
        self.tries = self.tries and not self._kept
        self.forget()

    def forget(self) -> None:
        """Forget the running step: it has ended, or a load replaces what it changed."""
        self._kept, self._made, self._new, self._groups, self._used = {}, {}, set(), {}, []

    def close(self) -> None:
        """End: gradients that were not used by a step are restored, or their step is lost."""
        if self._made and not self._failure:
            self._failure.set(
                ConfigError("the block ended after backward() and before step()"), reported=False
            )
        for parameter, gradient in self._kept.items():
            if type(parameter.grad) is ConsumedGradient:
                parameter.grad = gradient
        for parameter in self._consumed:
            if type(parameter.grad) is ConsumedGradient:
                parameter.grad = None


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
