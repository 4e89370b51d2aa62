"""Which optimizer a parameter's gradients go to: the one that was made last.

What it is: the claims of host optimizers on parameters, and the refusal of steps that would train
nothing without a word: of one whose parameters another has claimed since, and of any other
optimizer whose gradients have left. What it is not: a lock; who closes an optimizer, or lets go of
it, gives its parameters back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from dynoffload.errors import ConfigError
from dynoffload.optim.shelves import Entry

# Of each parameter, who claimed it last and its entry: weakly, as the entry has the parameter, and
# neither would ever be let go of.
_claims: Any = WeakTensorKeyDictionary()
_hooks: list[Any] = []


class Claims:
    """The parameters of one optimizer.

    Args:
        optimizer: whose they are.
        taken: whether an entry's gradient has left for it, and waits for its step.
    """

    def __init__(self, optimizer: Optimizer, taken: Callable[[Entry], bool]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._taken = taken
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_refuse_step))

    def add(self, entries: Iterable[Entry]) -> None:
        """Claim parameters, also such as another has claimed."""
        for entry in entries:
            _claims[entry.parameter] = self, weakref.ref(entry)

    def has(self, entry: Entry) -> bool:
        """Return whether the parameter's gradients are for this optimizer."""
        found = _claims.get(entry.parameter)
        return found is not None and found[0] is self

    def check(self, entries: Iterable[Entry]) -> None:
        """Refuse to go on with parameters that another optimizer has claimed since.

        Raises:
            ConfigError: naming the first.
        """
        for entry in entries:
            if not self.has(entry):
                raise ConfigError(
                    f"another HostOptimizer was made over {entry.name} since this one, and takes "
                    "its gradients: use that one alone, with this one's state_dict() if training "
                    "goes on"
                )

    def release(self, entries: Iterable[Entry]) -> None:
        """Let go of parameters."""
        for entry in entries:
            if self.has(entry):
                del _claims[entry.parameter]

    def lacks(self, entry: Entry) -> bool:
        """Return whether a parameter has no gradient, as it is with this optimizer."""
        return self._optimizer() is not None and entry.parameter.grad is None and self._taken(entry)

    def is_of(self, optimizer: Optimizer) -> bool:
        """Return whether these are the claims of ``optimizer``."""
        return self._optimizer() is optimizer


def _refuse_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse the step of an optimizer whose gradients have left for another.

    Raises:
        ConfigError: it would train nothing.
    """
    if not _claims:
        return
    parameters: list[torch.Tensor] = [
        p for group in optimizer.param_groups for p in group["params"]
    ]
    for parameter in parameters:
        claims, held = _claims.get(parameter, (None, None))
        entry = None if held is None else held()
        if entry is None or claims.is_of(optimizer):
            continue
        if claims.lacks(entry):
            raise ConfigError(
                f"this {type(optimizer).__name__} would train nothing of {entry.name}, of shape "
                f"{list(parameter.shape)}, as a HostOptimizer has taken its gradient: step that "
                "one, or close() it before backward"
            )
