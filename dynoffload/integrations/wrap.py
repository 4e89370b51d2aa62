"""Runs an offload() block around an unmodified script: ``dynoffload run --wrap``.

While the script runs, `Wrap` records the optimizers that it creates. Before the first training call
of a module that holds an optimizer's parameters, it enters a block with that module and optimizer.
The block is left when the script ends. Training with an optimizer created later is not offloaded,
and a warning reports it. A script with two optimizers, or one that calls its model in parts, is
ambiguous, and is refused.
"""

from __future__ import annotations

import logging
import weakref
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dynoffload.errors import ConfigError
from dynoffload.integrations.block import EventBlock
from dynoffload.managed import is_managed
from dynoffload.runtime.updates.update import innermost

logger = logging.getLogger(__name__)


class Wrap:
    """Enters one offload() block for the code that runs inside ``with``; leaves it at the end.

    Attributes:
        entered: whether a block was entered.
    """

    def __init__(self) -> None:
        self._block = EventBlock()  # with the command line's options
        self._optimizer_refs: list[weakref.ref[Optimizer]] = []
        self._undo = ExitStack()
        self._managed: set[int] = set()
        self._warned = False
        self.entered = False

    def __enter__(self) -> Wrap:
        init, call = Optimizer.__init__, nn.Module.__call__

        def watched_init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            self._optimizer_refs.append(weakref.ref(optimizer))
            init(optimizer, *args, **kwargs)
            self._warn_if_late(optimizer)

        def watched_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self.entered and self._optimizer_refs and torch.is_grad_enabled():
                self._enter_if_model(module)
            return call(module, *args, **kwargs)

        self._undo.callback(setattr, Optimizer, "__init__", init)
        self._unwatch_calls = partial(setattr, nn.Module, "__call__", call)
        self._undo.callback(self._unwatch_calls)
        Optimizer.__init__ = watched_init  # type: ignore[method-assign, assignment]
        nn.Module.__call__ = watched_call  # type: ignore[method-assign]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._undo.close()
        self._block.leave(error)

    def _enter_if_model(self, module: nn.Module) -> None:
        """Enter the block before a training call of ``module``, if it is the model.

        Raises:
            ConfigError: the model or optimizer is ambiguous; or as `dynoffload.offload` raises.
        """
        optimizers = self._optimizers()
        held = _ids(module)
        if not any(_ids(optimizer) & held for optimizer in optimizers):
            return
        if is_managed(module):
            raise ConfigError(
                f"the script offloads its {type(module).__name__} by itself: run it without --wrap"
            )
        optimizer = self._only_optimizer(module, optimizers)
        self._unwatch_calls()
        self.entered = True
        self._managed = held
        self._block.enter(module, optimizer)

    def _warn_if_late(self, optimizer: Optimizer) -> None:
        """Warn once if an optimizer was created too late for the block."""
        if not self.entered or self._warned or not _ids(optimizer):
            return
        if isinstance(getattr(optimizer, "optimizer", None), Optimizer):
            return  # it wraps a known optimizer
        self._warned = True
        whose = "the model that it offloads" if _ids(optimizer) & self._managed else "another model"
        logger.warning(
            "the script makes another optimizer (%s), of %s, after the first training call: --wrap "
            "offloads one model with one optimizer, so what this one keeps is outside of the "
            "budget, and its steps are not in the report; write 'with dynoffload.offload(model, "
            "optimizer)' around each training in the script",
            type(optimizer).__name__,
            whose,
        )

    def _optimizers(self) -> list[Optimizer]:
        """Return the live optimizers, each once; a wrapper counts as the optimizer it wraps."""
        alive = [optimizer for ref in self._optimizer_refs if (optimizer := ref()) is not None]
        ready = [innermost(o) for o in alive if "param_groups" in o.__dict__]
        return list({id(optimizer): optimizer for optimizer in ready}.values())

    def _only_optimizer(self, module: nn.Module, optimizers: list[Optimizer]) -> Optimizer:
        """Return the only optimizer, after checking that ``module`` holds all its parameters."""
        remedy = "write 'with dynoffload.offload(model, optimizer)' around training in the script"
        if len(optimizers) > 1:
            raise ConfigError(
                f"the script makes {len(optimizers)} optimizers "
                f"({', '.join(type(o).__name__ for o in optimizers)}), and --wrap offloads one "
                f"model with one: {remedy}"
            )
        (optimizer,) = optimizers
        lacking = len(_ids(optimizer) - _ids(module))
        if lacking:
            raise ConfigError(
                f"the first module that the script calls to train is a {type(module).__name__}, "
                f"which lacks {lacking} of the {len(_ids(optimizer))} parameters of its "
                f"{type(optimizer).__name__}: {remedy}"
            )
        return optimizer


def _ids(holder: nn.Module | Optimizer) -> set[int]:
    """Return the ids of the parameters of a module or an optimizer."""
    if isinstance(holder, nn.Module):
        return {id(parameter) for parameter in holder.parameters()}
    return {id(parameter) for group in holder.param_groups for parameter in group["params"]}
