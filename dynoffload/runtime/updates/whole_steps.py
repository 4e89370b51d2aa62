"""Steps that are not split: they run whole, or belong to optimizers not passed to the block."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from dynoffload.runtime.updates.kept_state import wrapped_by
from dynoffload.runtime.updates.update import takes_hooks

logger = logging.getLogger(__name__)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of ``step``, the optimizer first."""


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the closure passed to ``step``, or None."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


def with_closure(args: tuple[Any, ...], kwargs: dict[str, Any], closure: Any) -> Arguments:
    """Return the arguments of ``step`` with ``closure`` in place of its closure."""
    if len(args) > 1:
        return (args[0], closure, *args[2:]), kwargs
    return args, {**kwargs, "closure": closure}


def warn_of_others(
    optimizer: Optimizer, is_paged: Callable[[torch.Tensor], bool]
) -> RemovableHandle:
    """Warn once per optimizer that steps paged parameters but was not passed to the block."""
    seen: weakref.WeakSet[Optimizer] = weakref.WeakSet([optimizer])

    def before(other: Optimizer, args: Any, kwargs: Any) -> None:
        if other in seen:
            return
        seen.add(other)
        groups = getattr(other, "param_groups", ())
        theirs = any(is_paged(p) for group in groups for p in group["params"])
        related = wrapped_by(other) + wrapped_by(optimizer)
        if theirs and all(one not in (optimizer, other) for one in related):
            logger.warning(
                "%s, which offload() was not given, steps over parameters of the model: its state "
                "stays in memory, beyond the budget; give the block the optimizer that steps",
                type(other).__name__,
            )

    return register_optimizer_step_pre_hook(before)


class WholeSteps:
    """Handles steps that run whole: of an optimizer outside `torch.optim`, and of those it wraps.

    A wrapped optimizer may step outside the wrapper's, as with SAM's two calls: that counts too.

    Args:
        optimizer: the user's optimizer.
        on_begin: called when a step begins.
        on_end: called after a wrapped optimizer's step that is not part of a wrapper's step.
    """

    def __init__(
        self, optimizer: Optimizer, on_begin: Callable[[], None], on_end: Callable[[], None]
    ) -> None:
        logger.warning(
            "%s is not one of torch.optim: its step runs whole, and its state pages on demand; "
            "what a step makes anew is paged, and under the budget, once the step has ended; "
            "tensors in objects that are no list, tuple, deque, set, mapping, namespace or "
            "dataclass are neither paged nor counted",
            type(optimizer).__name__,
        )
        self._on_begin, self._on_end = on_begin, on_end
        self._calling: FrameType | None = None  # the caller's frame of a running step
        self.handles: list[RemovableHandle] = []
        for inner in filter(takes_hooks, wrapped_by(optimizer, lambda one: not takes_hooks(one))):
            self.handles.append(inner.register_step_pre_hook(self._before_wrapped))
            self.handles.append(inner.register_step_post_hook(self._after_wrapped))

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Begin a step: end the plan now and after each call of its closure. Prefetches for the
        next forward would otherwise take the room that the step's operands need."""
        self._calling = sys._getframe(2)  # until the step returns or fails
        self._on_begin()
        closure = closure_of(args, kwargs)
        if not callable(closure):
            return args, kwargs

        def closed(*given: Any, **named: Any) -> Any:
            loss = closure(*given, **named)
            self._on_begin()
            return loss

        return with_closure(args, kwargs, closed)

    def end(self) -> None:
        """End the step."""
        self._calling = None

    def _before_wrapped(self, *args: Any) -> None:
        if not self._is_within():
            self._on_begin()

    def _after_wrapped(self, *args: Any) -> None:
        if not self._is_within():
            self._on_end()

    def _is_within(self) -> bool:
        """Return whether this runs inside a step: its caller's frame is still on the stack."""
        frame = None if self._calling is None else sys._getframe(1)
        while frame is not None and frame is not self._calling:
            frame = frame.f_back
        if frame is None:
            self._calling = None
        return frame is not None
