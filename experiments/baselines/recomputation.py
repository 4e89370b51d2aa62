"""What DTR knows of a step, and how it drops what is saved and makes it again.

[Note: contents]  A storage that an operator writes into has another content afterwards, and so
another record, a *root*. Roots are what no recorded operator has made: parameters, inputs, what was
written in place, results of operators that cannot be followed. What is made from a root keeps it,
and it is never dropped. Views are numbers: their operators are not recorded.

[Note: who holds what]  Autograd's handles hold a `Saved`, which holds the storage, or nothing once
that was dropped. An operator holds the records of its inputs, which hold no storage but roots'.

[Note: the same bits]  An operator is called with what it was called with: the same overload below
autograd and autocast, tensors of the same bits and strides, and the generator in the state in which
it was.
"""

from __future__ import annotations

import contextlib
import heapq
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import UntypedStorage

from dynoffload.errors import BudgetError
from dynoffload.memory.region_allocator import users_of
from dynoffload.runtime.adoption.store import offset_of
from dynoffload.runtime.operators import replaced, tensors_of
from dynoffload.runtime.passes.finalization import Endings
from dynoffload.units import format_bytes

_AT_LEAST_S = 1e-9


class Saved:
    """The storage of a record of which autograd holds handles; None while it is dropped."""

    __slots__ = ("__weakref__", "record", "storage")

    def __init__(self, record: Record, storage: UntypedStorage) -> None:
        self.record = record
        self.storage: UntypedStorage | None = storage


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

    def __init__(self, storage: UntypedStorage, operator: Operator | None) -> None:
        self._storage: weakref.ref[UntypedStorage] | None = weakref.ref(storage)
        self.nbytes = storage.nbytes()
        self.operator = operator
        self.kept: UntypedStorage | None = None
        self.saved: weakref.ref[Saved] | None = None
        self.users: weakref.WeakSet[Operator] = weakref.WeakSet()
        self.used_at = 0.0

    def here(self) -> UntypedStorage | None:
        """Return the storage that has this content, if anybody holds it."""
        return self._storage and self._storage()

    def save(self, storage: UntypedStorage) -> Saved:
        """Return what another handle is to hold."""
        saved = self.saved and self.saved()
        if saved is None:
            saved = Saved(self, storage)
            self.saved = weakref.ref(saved)
        return saved

    def put(self, storage: UntypedStorage | None) -> None:
        """The content is in ``storage`` from now on; None: it is dropped."""
        self._storage = None if storage is None else weakref.ref(storage)
        saved = self.saved and self.saved()
        if saved is not None:
            saved.storage = storage

    def become(self, after: Record) -> None:
        """The storage was written: what it holds now is ``after``, which handles ask for."""
        saved = self.saved and self.saved()
        self._storage = self.saved = None
        if saved is not None:
            saved.record, after.saved = after, weakref.ref(saved)

    def results(self) -> list[Record]:
        """Return what was made from it and somebody still refers to."""
        made = (one() for user in self.users for one in user.outputs.values())
        return [record for record in made if record is not None]


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

    def over(self, storage: UntypedStorage) -> torch.Tensor:
        """Return the tensor in ``storage``."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(eq=False)
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

    def again(self, storages: Mapping[Record, UntypedStorage]) -> list[torch.Tensor]:
        """Call it with inputs that lie in ``storages``; see [Note: the same bits]."""

        def view(one: View) -> torch.Tensor:
            return one.over(storages[one.record])

        args, kwargs = (replaced(given, view, View) for given in (self.args, self.kwargs))
        with self._drawing():
            return list(tensors_of(self.func(*args, **kwargs)))

    @contextlib.contextmanager
    def _drawing(self) -> Iterator[None]:
        """Draw the random numbers that it drew, and leave the stream where it was."""
        if self.state is None:
            yield
            return
        generator, state = self.state
        now = generator.get_state()
        generator.set_state(state)
        try:
            yield
        finally:
            generator.set_state(now)


class Known:
    """One live storage: its bytes as counted, and the record of its content if anybody asked.

    Until the end of a forward it holds the record; from then on whoever may need that does, so that
    a result which outlives its graph keeps nothing of it.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.held: Record | None = None
        self.record_of: weakref.ref[Record] | None = None

    @property
    def record(self) -> Record | None:
        """The record of what it holds now."""
        return self.record_of and self.record_of()


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

    def find(self, storage: UntypedStorage) -> Known | None:
        """Return what is known of ``storage``, or None."""
        self.settle()
        return self._known.get(storage._cdata)

    def know(self, storage: UntypedStorage) -> Known:
        """Return what is known of ``storage``, which is not counted yet if that is nothing."""
        known = self.find(storage)
        if known is None:
            known = self._known[storage._cdata] = Known()
            self._endings.watch(storage, storage._cdata)
        return known

    def count(self, storage: UntypedStorage) -> Known:
        """Count ``storage`` from now on, by its size now, and return what is known of it."""
        known, nbytes = self.know(storage), storage.nbytes()
        if known.nbytes != nbytes:
            self.live += nbytes - known.nbytes
            known.nbytes = nbytes
            self.peak = max(self.peak, self.live)
        return known

    def holds(self, storage: UntypedStorage, record: Record) -> Record:
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


class Making:
    """Keeps live bytes within a budget, and makes again what that takes away.

    Args:
        ledger: counts what is live.
        budget: bytes that it may count.

    Attributes:
        savers: what autograd's handles hold; the candidates.
        operators: called again so far.
    """

    def __init__(self, ledger: Ledger, budget: int) -> None:
        self._ledger, self._budget = ledger, budget
        self.savers: weakref.WeakSet[Saved] = weakref.WeakSet()
        self._locked: set[Record] = set()
        self.operators = 0

    def room(self, need: int) -> None:
        """Drop saved tensors until ``need`` more bytes fit.

        Raises:
            BudgetError: what is left cannot be dropped.
        """
        ledger = self._ledger
        ledger.settle()
        if ledger.live + need <= self._budget:
            return
        candidates = [saved.record for saved in list(self.savers) if self._may_go(saved)]
        for record in _in_order(candidates, time.perf_counter()):
            record.put(None)
            ledger.settle()
            if ledger.live + need <= self._budget:
                return
        raise BudgetError(
            f"dtr: an operator makes {format_bytes(need)}, beside {format_bytes(ledger.live)} that "
            f"cannot be dropped, and the budget is {format_bytes(self._budget)}: raise it"
        )

    def _may_go(self, saved: Saved) -> bool:
        storage, record = saved.storage, saved.record
        return (
            storage is not None
            and record.nbytes > 0
            and record.operator is not None
            and record not in self._locked
            and users_of(storage) == 1  # no tensor but our handles
        )

    def bring(self, wanted: Record) -> UntypedStorage:
        """Return the storage of ``wanted``, made again if it was dropped.

        Raises:
            BudgetError: what it takes to make it does not fit.
        """
        wanted.used_at = time.perf_counter()
        storage = wanted.here()
        if storage is not None:
            return storage
        try:
            with torch.autocast("cpu", enabled=False), torch.no_grad():
                return self._make(wanted)
        finally:
            self._locked = set()

    def secure(self, record: Record) -> None:
        """``record`` is about to be written: have what was made from it stay."""
        for made in record.results():
            if made.operator is not None:
                made.kept = self.bring(made)
                made.operator = None
        record.users.clear()

    def _make(self, wanted: Record) -> UntypedStorage:
        """Make ``wanted`` and what it takes, without recursion: a chain may be as long as the
        network is deep. What is made on the way may be dropped as soon as that is made."""
        held: dict[Record, dict[Record, Any]] = {wanted: {}}  # being made -> its inputs, held
        while True:
            record = next(reversed(held))
            own, operator = held[record], record.operator
            assert operator is not None, "a root is never dropped"
            there = {one: one.here() for one in operator.inputs if one not in own}
            missing = next((one for one, storage in there.items() if storage is None), None)
            if missing is not None:  # until all is there, the rest may be dropped for it
                held[missing] = {}
                continue
            own.update(there)
            self._locked = {*held, *(one for each in held.values() for one in each)}
            storage = self._call(operator, own)[record]
            del held[record], own, there
            if not held:
                return storage
            held[next(reversed(held))][record] = storage
            del storage

    def _call(
        self, operator: Operator, held: Mapping[Record, UntypedStorage]
    ) -> dict[Record, UntypedStorage]:
        """Call ``operator`` again, and return the storages of its records."""
        self.room(operator.need)
        now = time.perf_counter()
        for record in operator.inputs:
            record.used_at = now
        results = operator.again(held)
        self.operators += 1
        made: dict[Record, UntypedStorage] = {}
        for number, reference in operator.outputs.items():
            storage, one = results[number].untyped_storage(), reference()
            known = self._ledger.count(storage)
            if one is not None:
                made[one] = storage
                if one.here() is None:
                    one.put(storage)
                    one.used_at, known.record_of = now, weakref.ref(one)
        self.room(0)
        return made


def _in_order(records: Iterable[Record], now: float) -> Iterator[Record]:
    """Yield ``records`` as they should be dropped, each time the lowest score.

    The caller drops what it is given before it asks for the next. By that the scores of the others
    can only rise, so one that is lowest still when it is reckoned anew is the lowest of all.
    """
    heap = [(_score(record, now), number, record) for number, record in enumerate(records)]
    heapq.heapify(heap)
    while heap:
        _, number, record = heap[0]
        score = _score(record, now)
        if len(heap) > 1 and score > min(heap[1:3])[0]:
            heapq.heapreplace(heap, (score, number, record))
            continue
        heapq.heappop(heap)
        yield record


def _score(record: Record, now: float) -> float:
    """Return h-DTR, with the exact neighbourhood: the seconds to make ``record`` again with its
    dropped ancestors and descendants, over its bytes and the seconds since it was last used."""
    assert record.operator is not None, "roots are never dropped"
    near: set[Operator] = {record.operator}
    for neighbours in (_sources, Record.results):
        ahead = list(neighbours(record))
        while ahead:
            other = ahead.pop()
            if other.operator is None or other.operator in near or other.here() is not None:
                continue
            near.add(other.operator)
            ahead += neighbours(other)
    cost = sum(one.seconds for one in near)
    return cost / (record.nbytes * max(now - record.used_at, _AT_LEAST_S))


def _sources(record: Record) -> Iterable[Record]:
    return () if record.operator is None else record.operator.inputs
