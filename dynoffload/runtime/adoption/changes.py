"""Whether the managed network itself has changed: modules and parameters added, replaced, thawed.

What it is: a note, by torch's registration hooks and by a look at the model's containers and at
what was frozen, that the network should be read again before the next sample. What it is not: the
reading (`Paging.follow_model`).

[Note: containers]  Torch's hook is called for modules that are none of the model's: a slice of a
list of layers is a new list. And it is not called where a container writes its children itself, as
``ModuleList.insert`` does. So the children of what has children, or is made for them, are compared
with those that were read: of a thousand modules in less than a percent of a forward.
"""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, methodcaller

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

_CONTAINERS = nn.ModuleList, nn.ModuleDict, nn.Sequential
_children, _values = attrgetter("_modules"), methodcaller("values")


class Changes:
    """Notes changes of one network, from `begin` until `close`."""

    def __init__(self) -> None:
        self._noted = False
        self._parents: list[nn.Module] = []
        self._ids: set[int] = set()
        self._tree: list[nn.Module | None] = []
        self._frozen: list[nn.Parameter] = []
        self._handles = [
            register_module_parameter_registration_hook(self._registered),
            register_module_module_registration_hook(self._registered),
        ]

    def _registered(self, module: nn.Module, name: str, what: object) -> None:
        self._noted = self._noted or id(module) in self._ids

    def begin(self, model: nn.Module) -> None:
        """``model`` was read; from now on note what changes."""
        self._noted = False
        modules = list(model.modules())
        self._ids = set(map(id, modules))
        self._parents = [one for one in modules if one._modules or isinstance(one, _CONTAINERS)]
        self._tree = self._children()
        self._frozen = [p for p in model.parameters() if not p.requires_grad]

    def _children(self) -> list[nn.Module | None]:
        """Return the children, in order; see [Note: containers]."""
        return list(chain.from_iterable(map(_values, map(_children, self._parents))))

    def note(self) -> None:
        """Something else has changed, for which the network is to be read again."""
        self._noted = True

    def any(self) -> bool:
        """Return whether something may have changed since."""
        if self._noted:
            return True
        return self._children() != self._tree or bool(self.thawed())

    def thawed(self) -> list[nn.Parameter]:
        """Return the parameters that were frozen when the network was read, and are not now."""
        return [parameter for parameter in self._frozen if parameter.requires_grad]

    def close(self) -> None:
        """Note nothing any more."""
        for handle in self._handles:
            handle.remove()
        self._parents, self._tree, self._frozen = [], [], []
