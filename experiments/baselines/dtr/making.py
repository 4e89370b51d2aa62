"""Room, and what was dropped to have it: dropping saved tensors, and making them again.

[Note: h-DTR]  The published heuristic, with the exact neighbourhood. The score of a tensor is
c / (m · s): seconds c to make it again with all its dropped neighbourhood e* (dropped ancestors
that would have to be made first, and dropped descendants that would need it); its bytes m; seconds
s since it was last used. The lowest leaves first.

[Note: the same bits]  An operator is called with what it was called with: the same overload below
autograd and autocast, tensors of the same bits, strides and alignment, and the generator in the
state in which it was. Operators that write in place are not called again.

[Note: chains]  What is made only on the way to something else is let go of as soon as that is made,
and may be dropped before. A chain may be as long as the network is deep, so it is walked without
recursion.
"""

from __future__ import annotations

import contextlib
import heapq
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from dynoffload.errors import BudgetError
from dynoffload.experiments.baselines.dtr.records import Ledger, Operator, Record, Saved, View
from dynoffload.memory.region_allocator import users_of
from dynoffload.runtime.operators import replaced, tensors_of
from dynoffload.units import format_bytes

_AT_LEAST_S = 1e-9


@dataclass(eq=False)
class _Frame:
    """A record that is being made: what it is made from, as far as that is there."""

    record: Record
    operator: Operator
    held: dict[Record, torch.UntypedStorage] = field(default_factory=dict)


class Making:
    """Keeps live bytes within a budget, and makes again what that takes away.

    Args:
        ledger: counts what is live.
        budget: bytes that it may count.
        kind: of the device on which operators run.

    Attributes:
        savers: what autograd's handles hold; the candidates.
        operators: called again so far.
    """

    def __init__(self, ledger: Ledger, budget: int, kind: str) -> None:
        self._ledger, self._budget, self._kind = ledger, budget, kind
        self.savers: weakref.WeakSet[Saved] = weakref.WeakSet()
        self._locked: Counter[Record] = Counter()
        self.operators = 0

    # Room

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
            record.leave()
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

    # The way back

    def bring(self, wanted: Record) -> torch.UntypedStorage:
        """Return the storage of ``wanted``, made again if it was dropped.

        Raises:
            BudgetError: what it takes to make it does not fit.
        """
        wanted.used_at = time.perf_counter()
        storage = wanted.here()
        if storage is not None:
            return storage
        with torch.autocast(self._kind, enabled=False), torch.no_grad():
            return self._make(wanted)

    def secure(self, record: Record) -> None:
        """``record`` is about to be written: have what was made from it stay."""
        for made in tuple(record.results()):
            if made.operator is not None:
                made.root(self.bring(made))
        record.users.clear()

    def _make(self, wanted: Record) -> torch.UntypedStorage:
        frames = [self._frame(wanted)]
        try:
            while True:
                frame = frames[-1]
                missing = self._gather(frame)
                if missing is not None:
                    frames.append(self._frame(missing))
                    continue
                storage = self._call(frame)
                self._release(frames.pop())
                if not frames:
                    return storage
                self._hold(frames[-1], frame.record, storage)
        finally:
            for frame in frames:
                self._release(frame)

    def _frame(self, record: Record) -> _Frame:
        assert record.operator is not None, "a root is never dropped"
        self._locked[record] += 1
        return _Frame(record, record.operator)

    def _gather(self, frame: _Frame) -> Record | None:
        """Hold what ``frame`` is made from; return the first of it that is not there, or None.

        What is there is held once all is, so until then it may be dropped for the rest: it is made
        again next, and then held.
        """
        here: dict[Record, torch.UntypedStorage] = {}
        for record in frame.operator.inputs:
            if record not in frame.held:
                storage = record.here()
                if storage is None:
                    return record
                here[record] = storage
        for record, storage in here.items():
            self._hold(frame, record, storage)
        return None

    def _hold(self, frame: _Frame, record: Record, storage: torch.UntypedStorage) -> None:
        frame.held[record] = storage
        self._locked[record] += 1

    def _release(self, frame: _Frame) -> None:
        for record in (*frame.held, frame.record):
            self._locked[record] -= 1
            if not self._locked[record]:
                del self._locked[record]
        frame.held.clear()

    def _call(self, frame: _Frame) -> torch.UntypedStorage:
        """Call the operator of ``frame`` again, and return the storage of its record."""
        operator, ledger = frame.operator, self._ledger
        self.room(operator.need)
        now = time.perf_counter()
        for record in operator.inputs:
            record.used_at = now
        with _state_of(operator):
            results = _called(operator, frame.held)
        self.operators += 1
        made: dict[Record, torch.UntypedStorage] = {}
        for number, reference in operator.outputs.items():
            storage, one = results[number].untyped_storage(), reference()
            known = ledger.count(storage)
            if one is not None:
                made[one] = storage
                if one.here() is None:
                    one.place(storage)
                    one.used_at, known.record_of = now, weakref.ref(one)
        self.room(0)
        return made[frame.record]


def _called(
    operator: Operator, storages: Mapping[Record, torch.UntypedStorage]
) -> list[torch.Tensor]:
    """Return what ``operator`` makes of inputs that lie in ``storages``."""

    def view(one: View) -> torch.Tensor:
        return one.over(storages[one.record])

    args, kwargs = (replaced(given, view, View) for given in (operator.args, operator.kwargs))
    return list(tensors_of(operator.func(*args, **kwargs)))


@contextlib.contextmanager
def _state_of(operator: Operator) -> Iterator[None]:
    """Draw the random numbers that ``operator`` drew, and leave the stream where it was."""
    if operator.state is None:
        yield
        return
    generator, state = operator.state
    now = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(now)


# The choice, see [Note: h-DTR]


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
    return _cost(record) / (record.nbytes * max(now - record.used_at, _AT_LEAST_S))


def _cost(record: Record) -> float:
    """Return the seconds to make ``record`` and its dropped neighbourhood again."""
    assert record.operator is not None, "roots are never dropped"
    seen: set[Operator] = {record.operator}
    for neighbours in (_sources, Record.results):
        ahead = list(neighbours(record))
        while ahead:
            other = ahead.pop()
            if other.operator is None or other.operator in seen or other.here() is not None:
                continue
            seen.add(other.operator)
            ahead += neighbours(other)
    return sum(one.seconds for one in seen)


def _sources(record: Record) -> Iterable[Record]:
    return () if record.operator is None else record.operator.inputs
