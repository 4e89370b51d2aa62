"""Detects changes of the managed network: modules or parameters added, replaced or unfrozen.

Each sample compares the modules' children and parameters; for a thousand modules this takes 1% of
a forward. Torch's registration hooks do not suffice: containers write their children directly.
"""

from __future__ import annotations

from itertools import chain
from operator import methodcaller

from torch import nn

_values = methodcaller("values")


class Changes:
    """Finds changes of ``model`` since `begin` was called."""

    def begin(self, model: nn.Module) -> None:
        """Record the current structure of ``model``."""
        modules = list(model.modules())
        owners = [owned for one in modules for owned in (one._modules, one._parameters)]
        self._owners = [owned for owned in owners if owned]
        self._empty = [owned for owned in owners if not owned]
        # Strong references, so that no new object reuses the id of a freed one.
        self._owned = list(chain.from_iterable(map(_values, self._owners)))
        self._ids = list(map(id, self._owned))
        self._frozen = [p for p in model.parameters() if not p.requires_grad]

    def any(self) -> bool:
        """Return whether the structure has changed since `begin`."""
        now = list(map(id, chain.from_iterable(map(_values, self._owners))))
        return now != self._ids or any(self._empty) or bool(self.thawed())

    def thawed(self) -> list[nn.Parameter]:
        """Return the parameters that were frozen at `begin` and no longer are."""
        return [parameter for parameter in self._frozen if parameter.requires_grad]
