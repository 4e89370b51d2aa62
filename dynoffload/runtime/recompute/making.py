"""Room, and what was dropped to have it: dropping saved tensors, and making them again.

What it is: the budget's keeper, and the way back, by calling operators again, the ones they need
first. What it is not: the choice of what to drop (`heuristic`), nor a record of what ran (`mode`).

[Note: the same bits]  An operator is called with what it was called with: the same overload below
autograd and autocast, tensors of the same bits, strides and alignment, and the generator in the
state in which it was, which is put back as it was found afterwards. What it wrote into is copied
first, unless it was made for it alone. PyTorch's CPU kernels give the same bits then, and those of
an accelerator where its algorithms are deterministic. In debug mode
that is checked.

[Note: chains]  What is made only on the way to something else is let go of as soon as that is made,
and may even be dropped before, where room is scarce. A chain may be as long as the network is deep,
so it is walked without recursion.
"""

from __future__ import annotations

import contextlib
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from dynoffload.errors import BudgetError, CorruptionError
from dynoffload.memory.places import users_of
from dynoffload.runtime.adoption.store import bytes_of
from dynoffload.runtime.recompute.heuristic import in_order
from dynoffload.runtime.recompute.ledger import Ledger
from dynoffload.runtime.recompute.operators import replaced, tensors_of
from dynoffload.runtime.recompute.records import Operator, Record, Saved, View
from dynoffload.units import format_bytes


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
        debug: compare checksums.
        kind: of the device on which operators run.

    Attributes:
        savers: what autograd's handles hold; the candidates.
        dropped_bytes, operators, seconds: dropped, called again, and spent on that so far.
    """

    def __init__(self, ledger: Ledger, budget: int, *, debug: bool, kind: str = "cpu") -> None:
        self._ledger, self._budget, self._debug, self._kind = ledger, budget, debug, kind
        self.savers: weakref.WeakSet[Saved] = weakref.WeakSet()
        self._locked: Counter[Record] = Counter()
        self.capped = True
        self.dropped_bytes = self.operators = 0
        self.seconds = 0.0

    # Room

    def room(self, need: int | None, what: str, site: str) -> None:
        """Drop saved tensors until ``need`` more bytes fit; all that can be for None, unknown.

        Raises:
            BudgetError: what is left cannot be dropped; says what ``what`` in or after ``site``
                needs.
        """
        ledger = self._ledger
        ledger.settle()
        if need is None and self.capped:
            for saved in list(self.savers):
                if self._may_go(saved):
                    self._drop(saved.record)
            return
        need = need or 0
        if ledger.live + need <= self._budget or not self.capped:
            return
        candidates = [saved.record for saved in list(self.savers) if self._may_go(saved)]
        for record in in_order(candidates, time.perf_counter()):
            self._drop(record)
            ledger.settle()
            if ledger.live + need <= self._budget:
                return
        lacking = ledger.live + need - self._budget
        error = BudgetError(
            f"{what} in or after module {site!r} makes {format_bytes(need)}, beside "
            f"{format_bytes(ledger.live)} that somebody holds (parameters, gradients, optimizer "
            "state, what the module works with, and what cannot be made again), and the budget is "
            f"{format_bytes(self._budget)}: raise it by {format_bytes(lacking)} or more, take a "
            "smaller sample, or use policy='pilot', which pages all of that"
        )
        error.lacking = lacking
        raise error

    def _may_go(self, saved: Saved) -> bool:
        storage, record = saved.storage, saved.record
        return (
            storage is not None
            and record.nbytes > 0
            and record.operator is not None
            and record not in self._locked
            and users_of(storage) == 1  # no tensor but our handles
        )

    def _drop(self, record: Record) -> None:
        storage = record.here()
        if storage is None:
            return
        if self._debug:
            record.checksum = _checksum(storage)
        self.dropped_bytes += record.nbytes
        del storage
        record.leave()

    # The way back

    def bring(self, wanted: Record) -> torch.UntypedStorage:
        """Return the storage of ``wanted``, made again if it was dropped.

        Raises:
            BudgetError: what it takes to make it does not fit.
            CorruptionError: it came out otherwise than it was (debug mode).
        """
        wanted.used_at = time.perf_counter()
        storage = wanted.here()
        if storage is not None:
            return storage
        began = time.perf_counter()
        with _as_it_was(self._kind), torch.no_grad():
            storage = self._make(wanted)
        self.seconds += time.perf_counter() - began
        return storage

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
        copied = [record for record in operator.written if not self._is_ours(record)]
        need = operator.need + sum(record.nbytes for record in copied)
        self.room(need, f"making {operator.func} again", operator.site)
        storages = dict(frame.held)
        for record in operator.written:
            if record in copied:
                storages[record] = _copy_of(storages[record])
                ledger.count(storages[record])
            else:
                record.leave()  # its storage is what will be written
        now = time.perf_counter()
        for record in operator.inputs:
            record.used_at = now

        with _state_of(operator):
            results = _called(operator, storages)
        self.operators += 1
        made: list[tuple[Record, torch.UntypedStorage]] = []
        for number, reference in operator.outputs.items():
            storage = results[number].untyped_storage()
            ledger.count(storage)
            made += [(one, storage) for one in (reference(),) if one is not None]
        for before, reference in operator.contents.items():
            made += [(one, storages[before]) for one in (reference(),) if one is not None]
        for record, storage in made:
            if record.here() is None:
                self._came(record, storage, now)
        storage = next(storage for record, storage in made if record is frame.record)
        self.room(0, f"making {operator.func} again", operator.site)
        return storage

    def _is_ours(self, record: Record) -> bool:
        """Return whether a record was made for the operator that runs now, and for nobody else."""
        storage = record.here()
        return (
            storage is not None
            and record.operator is not None
            and record.saver() is None
            and self._locked[record] == 1
            and users_of(storage) == 1
        )

    def _came(self, record: Record, storage: torch.UntypedStorage, now: float) -> None:
        if self._debug and record.checksum is not None and record.checksum != _checksum(storage):
            operator = record.operator
            raise CorruptionError(
                f"what {operator and operator.func} in or after module "
                f"{operator and operator.site!r} made came out otherwise when it was made again: "
                "something has written past PyTorch into what it was made from, such as a numpy "
                "view; use policy='pilot', or clone what is written"
            )
        record.place(storage)
        record.used_at = now
        known = self._ledger.count(storage)
        known.holds(record)
        known.let_go()

    def secure(self, record: Record) -> None:
        """What was made from ``record`` cannot be made from it any more: have it stay.

        Raises:
            BudgetError: that does not fit.
        """
        for reference in record.users:
            user = reference()
            for made in () if user is None else tuple(user.made()):
                if made.operator is not None:
                    made.root(self.bring(made))
        record.users.clear()


def _called(
    operator: Operator, storages: Mapping[Record, torch.UntypedStorage]
) -> list[torch.Tensor]:
    """Return what ``operator`` makes of inputs that lie in ``storages``."""

    def view(one: View) -> torch.Tensor:
        return one.over(storages[one.record])

    args, kwargs = (replaced(given, view, View) for given in (operator.args, operator.kwargs))
    return list(tensors_of(operator.func(*args, **kwargs)))


def _copy_of(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return bytes_of(storage).clone().untyped_storage()


def _checksum(storage: torch.UntypedStorage) -> int:
    return zlib.crc32(bytes_of(storage).cpu().numpy().data)


@contextlib.contextmanager
def _as_it_was(kind: str) -> Iterator[None]:
    """Call operators as they were recorded: below autocast, on the CPU and on ``kind``."""
    before = {each: torch.is_autocast_enabled(each) for each in ("cpu", kind)}
    for each in before:
        torch.set_autocast_enabled(each, False)
    try:
        yield
    finally:
        for each, on in before.items():
            torch.set_autocast_enabled(each, on)


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
