"""Which modules the runtime watches: those that own paged parameters.

A *unit* is a module with paged parameters of its own, under every path it is reached by. Its
forward is one use of its regions. Modules without any are not watched: they move nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from dynoffload.runtime.store import Slot


@dataclass(frozen=True, eq=False)
class Unit:
    """A module that owns paged parameters.

    Attributes:
        index: place in the session's list of units.
        path: the module's path in the model; "" is the root.
        module: the module.
        slots: its paged parameters.
    """

    index: int
    path: str
    module: nn.Module
    slots: tuple[Slot, ...]

    @property
    def regions(self) -> list[int]:
        """Return the regions of its parameters."""
        return [slot.region for slot in self.slots]


def units_of(model: nn.Module, slots: Mapping[nn.Parameter, Slot]) -> list[Unit]:
    """Return the units of ``model`` in the order of its modules."""
    units: list[Unit] = []
    for path, module in model.named_modules():
        own = {id(p): slots[p] for p in module._parameters.values() if p is not None and p in slots}
        if own:
            units.append(Unit(len(units), path, module, tuple(own.values())))
    return units
