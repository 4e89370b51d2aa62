"""Recorded contents and operators of DTR, and how saved tensors are dropped and recomputed.

[Note: contents]  A storage that an operator writes to gets a new content, and so a new record, a
*root*. Roots were not made by a recorded operator: parameters, inputs, storages written in place,
results of operators that cannot be recorded. A root is never dropped; once an operator has read it,
its storage is kept alive. Views are numbers (offset, size, stride): view operators are not
recorded.

[Note: who holds what]  Autograd's handles hold a `Saved`, which holds the storage, or nothing once
it is dropped. An operator holds the records of its inputs, which hold storages only of roots.

[Note: the same bits]  A repeated call uses the same overload below autograd and autocast, inputs of
the same bits and strides, and the generator in its original state.
"""

from __future__ import annotations

import heapq
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import UntypedStorage

from dynoffload.errors import BudgetError
from dynoffload.memory.region_allocator import users_of
from dynoffload.runtime.adoption.store import offset_of
from dynoffload.runtime.operators import replaced, tensors_of
from dynoffload.runtime.passes.finalization import Endings
from dynoffload.units import format_bytes

T = TypeVar("T")


def _alive(reference: weakref.ref[T] | None) -> T | None:
    return None if reference is None else reference()


class Saved:
    """A record's storage, shared by autograd's handles; None while it is dropped."""

    def __init__(self, record: Record, storage: UntypedStorage) -> None:
        self.record = record
        self.storage: UntypedStorage | None = storage


class Record:
    """One content of one storage; see [Note: contents].

    Attributes:
        nbytes, device: of the storage.
        operator: the operator that computed it; None for roots.
        kept: a root's storage, once an operator has read it.
        saved: what autograd's handles hold.
        users: the operators that read it.
        used_at: when it was last computed or used, by `time.perf_counter`.
    """

    def __init__(self, storage: UntypedStorage, operator: Operator | None) -> None:
        self._storage: weakref.ref[UntypedStorage] | None = weakref.ref(storage)
        self.nbytes, self.device = storage.nbytes(), storage.device
        self.operator = operator
        self.kept: UntypedStorage | None = None
        self.saved: weakref.ref[Saved] | None = None
        self.users: weakref.WeakSet[Operator] = weakref.WeakSet()
        self.used_at = 0.0

    def here(self) -> UntypedStorage | None:
        """Return the storage that has this content, None if it was freed."""
        return _alive(self._storage)

    def save(self, storage: UntypedStorage) -> Saved:
        """Return the `Saved` that a further handle shares."""
        saved = _alive(self.saved)
        if saved is None:
            saved = Saved(self, storage)
            self.saved = weakref.ref(saved)
        return saved

    def put(self, storage: UntypedStorage | None) -> None:
        """Set the storage of this content; None drops it."""
        self._storage = None if storage is None else weakref.ref(storage)
        saved = _alive(self.saved)
        if saved is not None:
            saved.storage = storage

    def become(self, after: Record) -> None:
        """Replace this content by ``after`` once its storage is written; handles follow."""
        saved = _alive(self.saved)
        self._storage = self.saved = None
        if saved is not None:
            saved.record, after.saved = after, weakref.ref(saved)

    def results(self) -> list[Record]:
        """Return the live records of what was computed from it."""
        made = (one() for user in self.users for one in user.outputs.values())
        return [record for record in made if record is not None]


@dataclass(frozen=True, slots=True)
class View:
    """A tensor's place in a record's storage; offset, size and stride in elements."""

    record: Record
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor, record: Record) -> View:
        """Return the place of ``tensor`` in the storage of ``record``."""
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
        args, kwargs: its arguments, tensors as views.
        inputs: the records it reads, each once.
        state: generator and its state before the call, for random operators.
        need: bytes that it allocates.
        seconds: duration of the call.
        outputs: index in the flattened result -> record of a newly allocated output.
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
        """Call it again with inputs in ``storages``; see [Note: the same bits]."""

        def view(one: View) -> torch.Tensor:
            return one.over(storages[one.record])

        args, kwargs = (replaced(given, view, View) for given in (self.args, self.kwargs))
        if self.state is None:
            return list(tensors_of(self.func(*args, **kwargs)))
        generator, state = self.state
        now = generator.get_state()
        generator.set_state(state)
        try:
            return list(tensors_of(self.func(*args, **kwargs)))
        finally:
            generator.set_state(now)


class Known:
    """One live storage: its bytes as counted, and the record of its content if one was requested.

    It holds the record until the end of forward; afterwards only operators and handles do. So a
    result that outlives its graph keeps no records alive.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.held: Record | None = None
        self.record_of: weakref.ref[Record] | None = None

    @property
    def record(self) -> Record | None:
        """The record of its current content."""
        return _alive(self.record_of)


class Ledger:
    """Counts the bytes of known live storages.

    Attributes:
        live: their bytes.
        peak: maximum of ``live`` since `take_peak`.
    """

    def __init__(self) -> None:
        self.live = self.peak = 0
        self._known: dict[int, Known] = {}  # by address of the StorageImpl
        self._endings: Endings[int] = Endings()
        self._recent: list[Known] = []  # those that hold their record

    def settle(self) -> None:
        """Subtract freed storages. Addresses are reused, so this precedes each lookup."""
        if self._endings:
            for address in self._endings.take():
                self.live -= self._known.pop(address).nbytes

    def find(self, storage: UntypedStorage) -> Known | None:
        """Return the entry of ``storage``, or None."""
        self.settle()
        return self._known.get(storage._cdata)

    def know(self, storage: UntypedStorage) -> Known:
        """Return the entry of ``storage``, created with zero bytes if absent."""
        known = self.find(storage)
        if known is None:
            known = self._known[storage._cdata] = Known()
            self._endings.watch(storage, storage._cdata)
        return known

    def count(self, storage: UntypedStorage) -> Known:
        """Count ``storage`` by its current size, and return its entry."""
        known, nbytes = self.know(storage), storage.nbytes()
        if known.nbytes != nbytes:
            self.live += nbytes - known.nbytes
            known.nbytes = nbytes
            self.peak = max(self.peak, self.live)
        return known

    def holds(self, storage: UntypedStorage, record: Record) -> Record:
        """Set the content of ``storage`` to ``record``, and return ``record``."""
        known = self.know(storage)
        known.held, known.record_of = record, weakref.ref(record)
        self._recent.append(known)
        return record

    def end_forward(self) -> None:
        """Release the records that no backward needs."""
        for known in self._recent:
            known.held = None
        self._recent.clear()

    def take_peak(self) -> int:
        """Return the peak bytes since the last call, and reset the peak."""
        self.settle()
        peak, self.peak = self.peak, self.live
        return peak


class Making:
    """Keeps live bytes within a budget by dropping saved tensors, and recomputes them.

    Args:
        ledger: counts live bytes.
        budget: limit of the ledger's live bytes.

    Attributes:
        savers: what autograd's handles hold; the candidates for dropping.
        operators: operators called again so far.
    """

    def __init__(self, ledger: Ledger, budget: int) -> None:
        self._ledger, self._budget = ledger, budget
        self.savers: weakref.WeakSet[Saved] = weakref.WeakSet()
        self._locked: set[Record] = set()
        self.operators = 0

    def room(self, need: int) -> None:
        """Drop saved tensors until ``need`` more bytes fit.

        Raises:
            BudgetError: the remaining bytes cannot be dropped.
        """
        ledger = self._ledger
        ledger.settle()
        if ledger.live + need <= self._budget:
            return
        candidates = [saved.record for saved in list(self.savers) if self._is_droppable(saved)]
        for record in _in_drop_order(candidates, time.perf_counter()):
            record.put(None)
            ledger.settle()
            if ledger.live + need <= self._budget:
                return
        raise BudgetError(
            f"dtr: an operator makes {format_bytes(need)}, beside {format_bytes(ledger.live)} that "
            f"cannot be dropped, and the budget is {format_bytes(self._budget)}: raise it"
        )

    def _is_droppable(self, saved: Saved) -> bool:
        storage, record = saved.storage, saved.record
        return (
            storage is not None
            and record.nbytes > 0
            and record.operator is not None
            and record not in self._locked
            and users_of(storage) == 1  # only the `Saved` refers to it
        )

    def bring(self, wanted: Record) -> UntypedStorage:
        """Return the storage of ``wanted``, recomputed if it was dropped.

        Raises:
            BudgetError: its recomputation does not fit.
        """
        wanted.used_at = time.perf_counter()
        storage = wanted.here()
        if storage is not None:
            return storage
        try:
            with torch.autocast(wanted.device.type, enabled=False), torch.no_grad():
                return self._recompute(wanted)
        finally:
            self._locked = set()

    def secure(self, record: Record) -> None:
        """Pin the results made from ``record``, which is about to be written."""
        for made in record.results():
            if made.operator is not None:
                made.kept = self.bring(made)
                made.operator = None
        record.users.clear()

    def _recompute(self, wanted: Record) -> UntypedStorage:
        """Recompute ``wanted`` and its dropped inputs. Iterative, as a chain may be as long as the
        network is deep. Intermediate results may be dropped once their consumer is computed."""
        held: dict[Record, dict[Record, Any]] = {wanted: {}}  # being computed -> inputs held for it
        while True:
            record = next(reversed(held))
            own, operator = held[record], record.operator
            assert operator is not None, "a root is never dropped"
            storages = {one: one.here() for one in operator.inputs if one not in own}
            missing = next((one for one, storage in storages.items() if storage is None), None)
            if missing is not None:  # inputs are locked only once all exist; until then droppable
                held[missing] = {}
                continue
            own.update(storages)
            self._locked = {*held, *(one for each in held.values() for one in each)}
            storage = self._call(operator, own)[record]
            del held[record], own, storages
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


def _in_drop_order(records: Iterable[Record], now: float) -> Iterator[Record]:
    """Yield ``records`` in the order to drop them, lowest score first.

    The caller drops each record before it asks for the next. Dropping only raises the scores of the
    others, so a record that is still lowest after its score is updated is the lowest of all.
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
    """Return h-DTR's score with the exact neighbourhood: the seconds to recompute ``record`` with
    its dropped ancestors and descendants, over its bytes times the seconds since its last use."""
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
    return cost / (record.nbytes * max(now - record.used_at, 1e-9))


def _sources(record: Record) -> Iterable[Record]:
    return () if record.operator is None else record.operator.inputs
