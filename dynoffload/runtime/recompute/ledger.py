"""The count of live bytes: every storage of this memory that is known, until its true end.

What it is: for each storage its bytes and its record, found by address, with the sum and the peak.
What it is not: a cap; room is made by `dynoffload.runtime.recompute.making` before this is told.
"""

from __future__ import annotations

import weakref

import torch

from dynoffload.runtime.passes.endings import Endings
from dynoffload.runtime.recompute.records import Record


class Known:
    """One live storage: its bytes as counted, and its content now if anybody has asked for it.

    Until the end of a forward it holds the record; from then on whoever may need that does, so that
    a result which outlives its graph keeps nothing of it.
    """

    __slots__ = ("_held", "_record", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._held: Record | None = None
        self._record: weakref.ref[Record] | None = None

    @property
    def record(self) -> Record | None:
        """The record of what it holds now, None for a root that nobody has asked for."""
        return None if self._record is None else self._record()

    def holds(self, record: Record | None) -> None:
        """From now on it holds this content."""
        self._held = record
        self._record = None if record is None else weakref.ref(record)

    def let_go(self) -> None:
        """Leave the record to whoever needs it."""
        self._held = None


class Ledger:
    """Counts storages.

    Attributes:
        live: bytes of all that are known and live.
        peak: most of them since `take_peak`.
    """

    def __init__(self) -> None:
        self.live = self.peak = 0
        self._known: dict[int, Known] = {}  # by address of the storage's own structure
        self._endings: Endings[int] = Endings()
        self._recent: list[Known] = []  # whose records are held

    def settle(self) -> None:
        """Count off what has ended. Addresses are used again, so this comes before each look."""
        if self._endings:
            for address in self._endings.take():
                self.live -= self._known.pop(address).nbytes

    def find(self, storage: torch.UntypedStorage) -> Known | None:
        """Return what is known of ``storage``, or None."""
        self.settle()
        return self._known.get(storage._cdata)

    def know(self, storage: torch.UntypedStorage) -> Known:
        """Return what is known of ``storage``, which is not counted yet if that is nothing."""
        self.settle()
        known = self._known.get(storage._cdata)
        if known is None:
            known = self._known[storage._cdata] = Known(0)
            self._endings.watch(storage, storage._cdata)
        return known

    def count(self, storage: torch.UntypedStorage) -> Known:
        """Count ``storage`` from now on, by its size now, and return what is known of it."""
        known, nbytes = self.know(storage), storage.nbytes()
        if known.nbytes != nbytes:
            self.live += nbytes - known.nbytes
            known.nbytes = nbytes
            self.peak = max(self.peak, self.live)
        return known

    def holds(self, storage: torch.UntypedStorage, record: Record) -> Record:
        """Note that the content of ``storage`` is ``record`` from now on, and return that."""
        known = self.know(storage)
        known.holds(record)
        self._recent.append(known)
        return record

    def end_forward(self) -> None:
        """What is not needed for a backward needs no record any more."""
        for known in self._recent:
            known.let_go()
        self._recent.clear()

    def take_peak(self) -> int:
        """Return the most bytes since the last call."""
        self.settle()
        peak, self.peak = self.peak, self.live
        return peak
