"""An offload() block around an unmodified script: ``dynoffload run --wrap``.

While the script runs, it is seen which optimizers it makes, and for the first training call of a
module that holds an optimizer's parameters: before that call the block is entered, with the module
and the optimizer, and it is left when the script ends. What the script trains besides, with an
optimizer that it makes later, is trained as ever, and a warning says so.

[Note: what is ambiguous]  One optimizer whose parameters all belong to the module that is called
first says by itself what to offload. Two optimizers, or a call of a part of the model, do not; then
the user names the model, as the variable that holds it where it is called.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dynoffload.errors import ConfigError
from dynoffload.integrations.block import EventBlock
from dynoffload.managed import is_managed
from dynoffload.runtime.updates.update import innermost
from dynoffload.units import format_bytes

logger = logging.getLogger(__name__)


class Wrap:
    """Enters one offload() block in whatever runs inside ``with``, and leaves it at the end.

    Args:
        script: the file whose variables are meant first.
        name: the variable that holds the model, with attributes if need be (``trainer.model``);
            None takes the module that is called.

    Attributes:
        entered: whether a block was entered.
    """

    def __init__(self, script: Path, name: str | None = None) -> None:
        self._script, self._name = str(script), name
        self._block = EventBlock()  # of what the command line says
        self._made: list[weakref.ref[Optimizer]] = []
        self._undo = ExitStack()
        self._managed: set[int] = set()
        self._said = False
        self.entered = False

    def __enter__(self) -> Wrap:
        init, call = Optimizer.__init__, nn.Module.__call__

        def watched_init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            self._made.append(weakref.ref(optimizer))
            init(optimizer, *args, **kwargs)
            self._say_of_another(optimizer)

        def watched_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self.entered and self._made and torch.is_grad_enabled():
                self._consider(module, sys._getframe(1))
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

    def _consider(self, module: nn.Module, frame: FrameType) -> None:
        """A module is called to train: enter the block if it is the model.

        Raises:
            ConfigError: what is to be offloaded is ambiguous; or as `dynoffload.offload` raises.
        """
        optimizers = self._optimizers()
        trained = _ids(module)
        if not any(_ids(optimizer) & trained for optimizer in optimizers):
            return
        if is_managed(module):
            raise ConfigError(
                f"the script offloads its {type(module).__name__} by itself: run it without --wrap"
            )
        if self._name is None:
            root, optimizer = module, self._of_all(module, optimizers, frame)
        else:
            root = self._named(self._name, frame)
            optimizer = self._of_one(root, optimizers)
        self._unwatch_calls()
        self.entered = True
        self._managed = _ids(root)
        self._say_of_what_stays(root, optimizers, frame)
        self._block.enter(root, optimizer)

    def _say_of_what_stays(
        self, root: nn.Module, optimizers: list[Optimizer], frame: FrameType
    ) -> None:
        """Name what the script trains besides ``root``, which is not offloaded."""
        outside = {
            id(one): one
            for optimizer in optimizers
            for group in optimizer.param_groups
            for one in group["params"]
            if id(one) not in self._managed
        }
        if not outside:
            return
        owners = [name for name, held in self._models(frame) if held and held <= outside.keys()]
        logger.warning(
            "--wrap --model %s offloads this %s alone: %d parameters (%s)%s are trained too and "
            "stay outside of the budget, with their gradients, optimizer state and activations; "
            "to offload all, give both to one module with one optimizer, or write 'with "
            "dynoffload.offload(model, optimizer)' for each in the script",
            self._name,
            type(root).__name__,
            len(outside),
            format_bytes(sum(one.nbytes for one in outside.values())),
            f" of {', '.join(owners)}" if owners else "",
        )

    def _say_of_another(self, optimizer: Optimizer) -> None:
        """An optimizer was made: say so, once, if it comes too late for the block."""
        if not self.entered or self._said or not _ids(optimizer):
            return
        if isinstance(getattr(optimizer, "optimizer", None), Optimizer):
            return  # it wraps one of those we know
        self._said = True
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
        """Return the optimizers there are, each once; one that wraps another counts as that."""
        alive = [optimizer for ref in self._made if (optimizer := ref()) is not None]
        ready = [innermost(o) for o in alive if "param_groups" in o.__dict__]
        return list({id(optimizer): optimizer for optimizer in ready}.values())

    def _of_all(
        self, module: nn.Module, optimizers: list[Optimizer], frame: FrameType
    ) -> Optimizer:
        """Return the one optimizer, all of whose parameters ``module`` holds."""
        names = self._names_of_models(optimizers, frame)
        remedy = f"--model {names[0]}" if names else "--model and the variable that holds it"
        known = f" (such as {', '.join(names)})" if len(names) > 1 else ""
        if len(optimizers) > 1:
            raise ConfigError(
                f"the script makes {len(optimizers)} optimizers "
                f"({', '.join(type(o).__name__ for o in optimizers)}), and --wrap offloads one "
                f"model with one: name the model with {remedy}{known}, or write 'with "
                "dynoffload.offload(model, optimizer)' in the script"
            )
        (optimizer,) = optimizers
        lacking = len(_ids(optimizer) - _ids(module))
        if lacking:
            raise ConfigError(
                f"the first module that the script calls to train is a {type(module).__name__}, "
                f"which lacks {lacking} of the {len(_ids(optimizer))} parameters of its "
                f"{type(optimizer).__name__}: name the module that holds them all with "
                f"{remedy}{known}"
            )
        return optimizer

    def _of_one(self, root: nn.Module, optimizers: list[Optimizer]) -> Optimizer:
        """Return the one optimizer of parameters of ``root``."""
        held = _ids(root)
        theirs = [optimizer for optimizer in optimizers if _ids(optimizer) & held]
        if len(theirs) != 1:
            raise ConfigError(
                f"--model {self._name}: {len(theirs)} optimizers "
                f"{'have' if len(theirs) != 1 else 'has'} parameters of this "
                f"{type(root).__name__}, and offload() takes one: name another module, or write "
                "'with dynoffload.offload(model, optimizer)' in the script"
            )
        return theirs[0]

    def _named(self, name: str, frame: FrameType) -> nn.Module:
        """Return the module that a variable holds, from the script's innermost function outwards,
        then from whatever else is running."""
        first, *attributes = name.split(".")
        for variables in self._scopes(frame):
            if first in variables:
                found = variables[first]
                for attribute in attributes:
                    found = getattr(found, attribute, None)
                if isinstance(found, nn.Module):
                    return found
        known = self._names_of_models(self._optimizers(), frame)
        raise ConfigError(
            f"--model {name}: no variable of that name holds a module where {self._script} trains "
            f"first{'; known are ' + ', '.join(known) if known else ''}"
        )

    def _scopes(self, frame: FrameType) -> Iterator[dict[str, Any]]:
        frames = _callers(frame)
        for own in (True, False):
            for each in frames:
                if (each.f_code.co_filename == self._script) is own:
                    yield each.f_locals
                    if own:
                        yield each.f_globals

    def _names_of_models(self, optimizers: list[Optimizer], frame: FrameType) -> list[str]:
        """Return the script's variables that hold all parameters of one of ``optimizers``."""
        wanted = [_ids(optimizer) for optimizer in optimizers]
        return [
            name for name, held in self._models(frame) if any(ids and ids <= held for ids in wanted)
        ]

    def _models(self, frame: FrameType) -> list[tuple[str, set[int]]]:
        """Return the script's variables that hold modules, with the identities of their
        parameters."""
        found: dict[str, set[int]] = {}
        for each in _callers(frame):
            if each.f_code.co_filename == self._script:
                for name, value in {**each.f_globals, **each.f_locals}.items():
                    if isinstance(value, nn.Module):
                        found.setdefault(name, _ids(value))
        return list(found.items())


def _callers(frame: FrameType | None) -> list[FrameType]:
    """Return ``frame`` and those that called it, innermost first."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _ids(holder: nn.Module | Optimizer) -> set[int]:
    """Return the identities of the parameters of a module or an optimizer."""
    if isinstance(holder, nn.Module):
        return {id(parameter) for parameter in holder.parameters()}
    return {id(parameter) for group in holder.param_groups for parameter in group["params"]}
