"""A device that keeps nobody waiting: what of `Device` it cannot do, and says so.

Where accesses are not seen, or are seen only as they happen, nothing can be locked, withdrawn or
traded behind the back of whoever holds it. The runtime asks whether a device is `guarded` first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

from dynoffload.errors import BackendError


class Unguarded:
    """The ground of a `Device` that guards nothing."""

    name: str
    guarded = False

    def lock(self, regions: Sequence[int]) -> None:
        """Refuse: nothing is guarded here."""
        self._refuse()

    def unlock(self, regions: Sequence[int]) -> None:
        """Refuse: nothing is guarded here."""
        self._refuse()

    def handed(self, timeout: float) -> int:
        """Refuse: nothing is guarded here."""
        self._refuse()

    def show(self, regions: Sequence[int]) -> list[torch.UntypedStorage]:
        """Refuse: nothing is guarded here."""
        self._refuse()

    def hide(self, regions: Sequence[int]) -> None:
        """Refuse: nothing is guarded here."""
        self._refuse()

    def withdraw(self, regions: Sequence[int]) -> list[int]:
        """Refuse: nothing is guarded here."""
        self._refuse()

    def visits(self, regions: Sequence[int]) -> list[int]:
        """Refuse: nothing is guarded here."""
        self._refuse()

    def lend(self, regions: Sequence[int], twins: Sequence[int]) -> bool:
        """Refuse: nothing is guarded here."""
        self._refuse()

    def exchange(self, regions: Sequence[int], twins: Sequence[int]) -> None:
        """Refuse: nothing is guarded here."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise BackendError(
            f"the {self.name} device cannot do this: ask a device whether it is `guarded`, and "
            "whether it `serves`, before"
        )
