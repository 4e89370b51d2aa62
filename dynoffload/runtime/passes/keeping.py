"""The count of saved tensors that stay in place: each storage once, however often it is saved.

What it is: bytes of memory that graphs hold beside the device, by storage; and which saved tensor
is the largest of them. What it is not: the decision what stays
(`dynoffload.runtime.passes.activations`).

A storage of the model's own, a buffer's or a small parameter's, is counted with the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch

from dynoffload.runtime.passes.endings import Endings


class _Held:
    """One storage, counted as long as any saved tensor of it is kept."""

    __slots__ = ("key", "nbytes", "source", "users")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.key, self.nbytes, self.users = storage._cdata, storage.nbytes(), 0
        self.source = weakref.ref(storage)


class Keeping:
    """Counts what is kept.

    Attributes:
        nbytes: of all, with what has ended since `settle`.
        peak: most of them since `take_peak`.
        largest: bytes and name of the largest that was saved before that; 0 and "" for none.
    """

    def __init__(self) -> None:
        self.nbytes = self.peak = 0
        self._held: dict[int, _Held] = {}
        self._own: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._endings: Endings[tuple[list[_Held], int]] = Endings()
        self._largest = self.largest = 0, ""

    def __len__(self) -> int:
        """Return how many have ended that are not settled."""
        return len(self._endings)

    def counted_elsewhere(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Do not count these, which are counted with the model."""
        self._own = {storage._cdata: weakref.ref(storage) for storage in storages}

    def _is_own(self, storage: torch.UntypedStorage) -> bool:
        known = self._own.get(storage._cdata)
        return known is not None and known() is storage

    def _known(self, storage: torch.UntypedStorage) -> _Held | None:
        held = self._held.get(storage._cdata)
        # Of one that has ended and is not settled, the address may be another's by now.
        return held if held is not None and held.source() is storage else None

    def adds(self, storage: torch.UntypedStorage) -> int:
        """Return the bytes by which the count would grow if ``storage`` were kept."""
        known = self._is_own(storage) or self._known(storage) is not None
        return 0 if known else storage.nbytes()

    def add(
        self,
        kept: object,
        storages: Sequence[torch.UntypedStorage],
        others: int,
        name: Callable[[], str],
    ) -> None:
        """Count ``storages``, and ``others`` bytes that lie in none, until ``kept`` ends.

        ``name`` says what it is, for `largest`.
        """
        notes = []
        for storage in storages:
            if self._is_own(storage):
                continue
            held = self._known(storage)
            if held is None:
                held = self._held[storage._cdata] = _Held(storage)
                self.nbytes += held.nbytes
            held.users += 1
            notes.append(held)
        self.nbytes += others
        self.peak = max(self.peak, self.nbytes)
        if notes or others:
            total = others + sum(held.nbytes for held in notes)
            if total > self._largest[0]:
                self._largest = total, name()
            self._endings.watch(kept, (notes, others))

    def settle(self) -> None:
        """Count what has ended since the last call."""
        for notes, others in self._endings.take():
            self.nbytes -= others
            for held in notes:
                held.users -= 1
                if not held.users:
                    self.nbytes -= held.nbytes
                    if self._held.get(held.key) is held:
                        del self._held[held.key]

    def take_peak(self) -> int:
        """Return the most bytes since the last call."""
        peak, self.peak = self.peak, self.nbytes
        self.largest, self._largest = self._largest, (0, "")
        return peak
