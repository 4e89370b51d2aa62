"""What is known of a step: storages, the operators that made them, and the bytes that are live.

The names are those of DTR's simulator: storage, operator, and tensors, which are views.

[Note: contents]  A storage that an operator writes into has another content afterwards, so it gets
another record, which is a *root*. What was made from the content before is made again from the
record of that. Roots are what no recorded operator has made: parameters, inputs, what was written
in place, results of operators that cannot be followed. What is made from a root keeps it, and it is
never dropped. Views are numbers: their operators are not recorded.

[Note: who holds what]  Autograd's handles hold a `Saved`, which holds the storage, or nothing once
that was dropped. An operator holds the records of its inputs, which hold no storage but roots'.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from dynoffload.runtime.adoption.store import offset_of
from dynoffload.runtime.passes.finalization import Endings


class Saved:
    """The storage of a record of which autograd holds handles; None while it is dropped."""

    __slots__ = ("__weakref__", "record", "storage")

    def __init__(self, record: Record, storage: torch.UntypedStorage) -> None:
        self.record = record
        self.storage: torch.UntypedStorage | None = storage


class Record:
    """One content of one storage; see [Note: contents].

    Attributes:
        nbytes: of the storage.
        operator: what made it; None for roots.
        kept: a root's storage, once something was made from it.
        saved: what autograd's handles hold.
        users: the operators that read it.
        used_at: when it was last made or used, by `time.perf_counter`.
    """

    __slots__ = (
        *("__weakref__", "_storage", "kept", "nbytes", "operator", "saved", "used_at", "users"),
    )

    def __init__(self, storage: torch.UntypedStorage, operator: Operator | None) -> None:
        self._storage: weakref.ref[torch.UntypedStorage] | None = weakref.ref(storage)
        self.nbytes = storage.nbytes()
        self.operator = operator
        self.kept: torch.UntypedStorage | None = None
        self.saved: weakref.ref[Saved] | None = None
        self.users: list[weakref.ref[Operator]] = []
        self.used_at = 0.0

    def here(self) -> torch.UntypedStorage | None:
        """Return the storage that has this content, if anybody holds it."""
        return None if self._storage is None else self._storage()

    def saver(self) -> Saved | None:
        """Return what autograd's handles hold, if there are any."""
        return None if self.saved is None else self.saved()

    def save(self, storage: torch.UntypedStorage) -> Saved:
        """Return what another handle is to hold."""
        saved = self.saver()
        if saved is None:
            saved = Saved(self, storage)
            self.saved = weakref.ref(saved)
        return saved

    def place(self, storage: torch.UntypedStorage) -> None:
        """The content was made again, in ``storage``."""
        self._storage = weakref.ref(storage)
        saved = self.saver()
        if saved is not None:
            saved.storage = storage

    def leave(self) -> None:
        """The storage is given up."""
        self._storage = None
        saved = self.saver()
        if saved is not None:
            saved.storage = None

    def become(self, after: Record) -> None:
        """The storage was written: what it holds now is ``after``, which handles ask for."""
        self._storage = None
        saved, self.saved = self.saver(), None
        if saved is not None:
            saved.record, after.saved = after, weakref.ref(saved)

    def root(self, storage: torch.UntypedStorage) -> None:
        """What made it cannot make it again from now on: it stays."""
        self.operator, self.kept = None, storage

    def add_user(self, operator: Operator) -> None:
        """``operator`` reads it."""
        users = self.users
        if len(users) >= 32 and len(users) & (len(users) - 1) == 0:
            users[:] = [user for user in users if user() is not None]
        users.append(weakref.ref(operator))

    def results(self) -> Iterator[Record]:
        """Yield what was made from it and somebody still refers to."""
        for reference in self.users:
            user = reference()
            if user is not None:
                yield from user.made()


@dataclass(frozen=True, slots=True)
class View:
    """A tensor: how it lies in a record's storage; offset, size and stride in elements."""

    record: Record
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor, record: Record) -> View:
        """Return how ``tensor`` lies in the storage of ``record``."""
        return cls(record, tensor.dtype, offset_of(tensor), tensor.size(), tensor.stride())

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor in ``storage``."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(eq=False, slots=True, weakref_slot=True)
class Operator:
    """One executed ATen call.

    Attributes:
        func: the overload.
        args: its arguments, tensors as views.
        kwargs: those by name.
        inputs: the records it reads, each once.
        state: generator and its state before, for what draws random numbers.
        need: bytes of what it makes.
        seconds: it took.
        outputs: by the number of the flattened result, what it made anew.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[Record, ...]
    state: tuple[torch.Generator, torch.Tensor] | None
    need: int
    seconds: float = 0.0
    outputs: dict[int, weakref.ref[Record]] = field(default_factory=dict)

    def made(self) -> Iterator[Record]:
        """Yield those of the records it made that somebody still refers to."""
        for reference in self.outputs.values():
            record = reference()
            if record is not None:
                yield record


class Known:
    """One live storage: its bytes as counted, and the record of its content if anybody asked.

    Until the end of a forward it holds the record; from then on whoever may need that does, so that
    a result which outlives its graph keeps nothing of it.
    """

    __slots__ = ("held", "nbytes", "record_of")

    def __init__(self) -> None:
        self.nbytes = 0
        self.held: Record | None = None
        self.record_of: Callable[[], Record | None] = lambda: None

    @property
    def record(self) -> Record | None:
        """The record of what it holds now."""
        return self.record_of()


class Ledger:
    """Counts the storages that are known and live.

    Attributes:
        live: their bytes.
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
        known = self.find(storage)
        if known is None:
            known = self._known[storage._cdata] = Known()
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
        known.held, known.record_of = record, weakref.ref(record)
        self._recent.append(known)
        return record

    def end_forward(self) -> None:
        """What is not needed for a backward needs no record any more."""
        for known in self._recent:
            known.held = None
        self._recent.clear()

    def take_peak(self) -> int:
        """Return the most bytes since the last call."""
        self.settle()
        peak, self.peak = self.peak, self.live
        return peak
