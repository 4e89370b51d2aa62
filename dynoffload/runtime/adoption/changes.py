"""Whether the managed network itself has changed: modules and parameters added, replaced, thawed.

It is a look at who owns what, once a sample: of a thousand modules in a percent of a forward.
Torch's registration hooks would not do: containers write their children themselves.
"""

from __future__ import annotations

from itertools import chain
from operator import methodcaller

from torch import nn

_values = methodcaller("values")


class Changes:
    """Finds changes of ``model`` since `begin` was called."""

    def begin(self, model: nn.Module) -> None:
        """``model`` was read; from now on find what changes."""
        modules = list(model.modules())
        owners = [owned for one in modules for owned in (one._modules, one._parameters)]
        self._owners = [owned for owned in owners if owned]
        self._empty = [owned for owned in owners if not owned]
        # Held, so that nothing new has the identity of what is gone.
        self._owned = list(chain.from_iterable(map(_values, self._owners)))
        self._ids = list(map(id, self._owned))
        self._frozen = [p for p in model.parameters() if not p.requires_grad]

    def any(self) -> bool:
        """Return whether something has changed since."""
        now = list(map(id, chain.from_iterable(map(_values, self._owners))))
        return now != self._ids or any(self._empty) or bool(self.thawed())

    def thawed(self) -> list[nn.Parameter]:
        """Return the parameters that were frozen when the network was read, and are not now."""
        return [parameter for parameter in self._frozen if parameter.requires_grad]
