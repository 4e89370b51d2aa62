"""Whether the managed network itself has changed: modules and parameters added, replaced, thawed.

What it is: a note, by torch's registration hooks and by a look at what was frozen, that the network
should be read again before the next sample. What it is not: the reading (`Paging.follow_model`).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from dynoffload.runtime.adoption.store import Slot


class Changes:
    """Notes changes of any network in this process, from now until `close`."""

    def __init__(self) -> None:
        self._noted = False
        self._frozen: list[nn.Parameter] = []
        self._handles = [
            register_module_parameter_registration_hook(self._note),
            register_module_module_registration_hook(self._note),
        ]

    def _note(self, module: nn.Module, name: str, what: object) -> None:
        self._noted = True

    def begin(self, slots: Iterable[Slot]) -> None:
        """The network was read, with ``slots``; from now on note what changes."""
        self._noted = False
        self._frozen = [s.parameter for s in slots if not s.parameter.requires_grad]

    def any(self) -> bool:
        """Return whether something may have changed since."""
        return self._noted or bool(self.thawed())

    def thawed(self) -> list[nn.Parameter]:
        """Return the parameters that were frozen when the network was read, and are not now."""
        return [parameter for parameter in self._frozen if parameter.requires_grad]

    def close(self) -> None:
        """Note nothing any more."""
        for handle in self._handles:
            handle.remove()
