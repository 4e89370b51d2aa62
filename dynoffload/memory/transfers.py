"""The mapped-file device's transfers and the threads that make them.

The counterpart in Python of ``native/transfer.c``: first what somebody waits for, then what the
plan says, then the reserve. Every method is called with the account's mutex held and returns with
it held, but lets go of it while bytes move.

[Note: interrupts]  A thread that waits lends a hand, and may be the one that Ctrl-C interrupts. A
transfer that is cut off leaves its region in a state that is true: what was being read is absent,
what was being written is still there.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from dynoffload.errors import SpillError
from dynoffload.memory.account import Account, Holding, State
from dynoffload.memory.debug import Checksums
from dynoffload.memory.device import Cause, EventKind, called
from dynoffload.memory.mapping import Mapping
from dynoffload.memory.spill import SpillFile, reason
from dynoffload.planning.cursor import NEVER
from dynoffload.planning.schedule import Kind

_INSPECT_S = 0.1  # how long an unannounced access may stay unseen while nothing else is to do
_ATTEMPTS = 3


class Transfers:
    """Moves the regions of ``account`` in and out of ``mapping``.

    Args:
        account: says what is where.
        mapping: moves bytes.
        spill: the file behind it.
        threads: how many transfers may run at once, besides those of waiting threads.
        names: what messages call regions.
        sums: compares what comes back with what left, in debug mode.
    """

    def __init__(
        self,
        account: Account,
        mapping: Mapping,
        spill: SpillFile,
        threads: int,
        names: dict[int, str],
        sums: Checksums | None = None,
    ) -> None:
        self._account, self._mapping, self._spill = account, mapping, spill
        self._names = names
        self._sums = sums
        self._stopping = False
        self._threads = [
            threading.Thread(
                target=self._run, args=(index == 0,), name=f"dynoffload-mapped-{index}", daemon=True
            )
            for index in range(max(1, threads))
        ]
        for thread in self._threads:
            thread.start()

    def run_here(self) -> bool:
        """Return whether the calling thread is one of the threads, which cannot end themselves."""
        return threading.current_thread() in self._threads

    def stop(self) -> None:
        """End the threads; called by another, without the mutex."""
        with self._account.mutex:
            self._stopping = True
            self._account.work.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self, inspects: bool) -> None:
        account = self._account
        with account.mutex:
            while not self._stopping:
                if self.serve_urgent() or (not account.urgent and self._follow()):
                    continue
                woken = account.work.wait(_INSPECT_S if inspects else None)
                if not woken and not self._stopping:
                    self.inspect()

    def _follow(self) -> bool:
        """Make one transfer of the plan or for the reserve; False if there is none now."""
        account = self._account
        due = self._due()
        if due is not None:
            kind, h = due
            if kind is Kind.FETCH:
                self._fetch(h, Cause.PLAN)
            else:
                self._evict(h, Cause.PLAN)
            return True
        if account.free + account.writing < account.reserve:
            victim = account.victim(account.plan.position)
            if victim is not None:
                self._evict(victim, Cause.ROOM)
                return True
        return False

    def _due(self) -> tuple[Kind, Holding] | None:
        """Return the planned transfer that can start now; skip what reality has overtaken."""
        account = self._account
        plan = account.plan
        while (action := plan.due()) is not None:
            h = account.holdings.get(action.region)
            next_use = plan.next_use(action.region)
            if action.kind is Kind.EVICT:
                plan.done()
                if h is not None and h.may_leave() and next_use > plan.position:
                    return Kind.EVICT, h
                continue
            if h is None or h.state is not State.ABSENT or h.queued or next_use == NEVER:
                plan.done()
                continue
            need = h.pages + account.reserve
            if account.free >= need:
                plan.done()
                return Kind.FETCH, h
            if account.free + account.writing >= need or next_use > plan.position + 1:
                return None  # room is on its way, or there is time to wait for it
            victim = account.victim(next_use)
            return None if victim is None else (Kind.EVICT, victim)
        return None

    def serve_urgent(self) -> bool:
        """Do one thing for the first region that somebody waits for; False if nothing can be."""
        account = self._account
        if not account.urgent:
            return False
        h = account.urgent[0]
        if h.state is State.ABSENT and account.free < h.pages:
            if account.free + account.writing >= h.pages:
                return False
            victim = account.victim(account.plan.position) or account.victim(-1)
            if victim is None:
                return False  # all is pinned or in flight: somebody will let go
            self._evict(victim, Cause.ROOM)
            return True
        account.urgent.popleft()
        h.queued = False
        if h.state is State.ABSENT:
            self._fetch(h, Cause.FAULT)
        else:
            account.done.notify_all()
        return True

    def hope(self) -> None:
        """Somebody needs room, or the file takes bytes again: what could not be written may be
        written now."""
        if self._account.write_error is not None:
            for h in self._account.holdings.values():
                h.busy = False

    def refused(self) -> tuple[int, str] | None:
        """Return why nothing leaves, if that is because the file takes nothing; tried again from
        now on."""
        account = self._account
        holdings = account.holdings.values()
        if account.write_error is None or account.victim(-1) is not None:
            return None
        if any(h.state.moving for h in holdings) or not any(h.busy for h in holdings):
            return None
        for h in holdings:
            h.busy = False
        return account.write_error

    def _fetch(self, h: Holding, cause: Cause) -> None:
        account = self._account
        account.charge(h)
        h.state = State.READING
        start = time.perf_counter()
        try:
            with self._unlocked():
                failure = self._read(h)
        except BaseException:  # see [Note: interrupts]
            account.discharge(h)
            account.settle(h, State.ABSENT)
            raise
        if failure:
            account.error = failure, self.unreadable(h, failure)
            if h.pins:
                h.error = failure
            account.discharge(h)
            account.settle(h, State.ABSENT)
            return
        if h.content:
            account.bytes_in += h.nbytes
            account.note(EventKind.FETCH, cause, h.region, start, h.nbytes)
            if cause is Cause.PLAN:
                h.prefetched = True
                account.prefetched_bytes += h.nbytes
        h.content, h.cleared = True, False
        if h.pins:
            account.use(h)
        account.settle(h, State.PRESENT)

    def _read(self, h: Holding) -> int:
        """Return 0, or the errno that did not pass by trying again."""
        failure = 0
        sums = self._sums
        if sums is not None and self._mapping.touched(h.offset, h.length):
            sums = None
        for _ in range(_ATTEMPTS):
            try:
                if h.content:
                    self._mapping.fetch(h.offset, h.length)
                else:
                    self._mapping.create(h.offset, h.length)
                if sums is not None:
                    sums.compare(h.offset, h.length)
                return 0
            except OSError as error:
                if sums is not None:  # read anew, and compared anew, by whoever asks next
                    self._mapping.drop(h.offset, h.length)
                failure = error.errno or errno.EIO
        return failure

    def _evict(self, h: Holding, cause: Cause, *, charged: bool = True) -> None:
        """Send a region out; it stays if by the time it is written somebody wants it."""
        account = self._account
        h.state = State.WRITING
        account.writing += h.pages if charged else 0
        leaves = False
        try:
            leaves = self._send_out(h, cause)
        finally:  # see [Note: interrupts]
            if charged:
                account.writing -= h.pages
                if leaves:
                    account.discharge(h)
            account.settle(h, State.ABSENT if leaves or not charged else State.PRESENT)

    def _send_out(self, h: Holding, cause: Cause) -> bool:
        """Write a region back and drop its pages unless somebody wants it; whether they went."""
        account = self._account
        start, failure, dirty = time.perf_counter(), 0, 0
        with self._unlocked():
            try:
                dirty = min(h.nbytes, self._mapping.modified(h.offset, h.length))
                if dirty:
                    self._mapping.write_back(h.offset, h.length)
                if self._sums is not None:
                    self._sums.take(h.offset, h.length)
            except OSError as error:
                failure = error.errno or errno.EIO
        if failure:  # what could not be written stays; the owner is told
            h.busy = True
            account.write_error = account.error = failure, self._unwritable(h, failure)
        elif dirty:
            self.hope()
            account.write_error = None
            account.bytes_out += dirty
            account.note(EventKind.EVICT, cause, h.region, start, dirty)
        leaves = not failure and not h.pins
        if leaves:
            account.waste(h)
            with self._unlocked():
                self._mapping.drop(h.offset, h.length)
        return leaves

    def forget(self, h: Holding) -> None:
        """Let go of a region's pages, and of the bytes in them."""
        account = self._account
        while h.state.moving or h.queued:
            account.done.wait()
        charged = h.state is State.PRESENT
        if charged or h.content or self._mapping.cached(h.offset, h.length):
            account.waste(h)
            h.state = State.WRITING
            try:
                with self._unlocked():
                    if self._sums is not None:
                        self._sums.forget(h.offset)
                    self._mapping.forget(h.offset, h.length)
            except OSError as error:
                failure = error.errno or errno.EIO
                account.error = failure, self._unwritable(h, failure)
            finally:
                if charged:
                    account.discharge(h)
                h.content = h.busy = h.cleared = False
                account.settle(h, State.ABSENT)
        else:
            h.content = h.busy = h.cleared = False
            account.settle(h, State.ABSENT)

    def clear(self, h: Holding) -> None:
        """Let a region hold zeros, which nobody has to read or write.

        Raises:
            SpillError: the file refuses them.
        """
        if self.is_clear(h):
            return
        self.forget(h)
        try:
            if self._mapping.holds_data(h.offset, h.length):
                self._mapping.clear(h.offset, h.length)
        except OSError as error:
            failure = error.errno or errno.EIO
            raise SpillError(failure, self._unwritable(h, failure)) from error
        h.cleared = True

    def is_clear(self, h: Holding) -> bool:
        """Return whether a region was cleared and no page of it written since."""
        if not h.cleared or not h.left_alone():
            return False
        if self._mapping.cached(h.offset, h.length):  # perhaps only read, or read ahead
            if self._mapping.modified(h.offset, h.length):
                return False
            self._mapping.drop(h.offset, h.length)
        return not self._mapping.holds_data(h.offset, h.length)

    # What nobody announced

    def inspect(self) -> None:
        """Find absent regions with pages in memory. They were touched without notice: they stay if
        they deserve the room more than others do, else they are sent out."""
        account = self._account
        for h in self._surprises():
            if h.busy or not h.left_alone():
                continue  # things have moved on meanwhile
            account.faults += 1
            h.content, h.cleared = True, False
            next_use = account.plan.next_use(h.region)
            while h.left_alone() and account.free < h.pages:
                if account.free + account.writing >= h.pages:
                    account.done.wait()  # room is on its way
                elif (victim := account.victim(next_use - 1)) is not None:
                    self._evict(victim, Cause.ROOM)
                else:
                    break
            if not h.left_alone():
                continue
            if account.free < h.pages:
                self._evict(h, Cause.ROOM, charged=False)
            else:
                account.charge(h)
                account.use(h)
                account.settle(h, State.PRESENT)

    def _surprises(self) -> list[Holding]:
        """Return absent regions with pages in memory, asking once for each run of neighbours."""
        absent = [h for h in self._account.holdings.values() if h.state is State.ABSENT]
        absent.sort(key=lambda h: h.offset)
        found: list[Holding] = []
        first = 0
        for index, h in enumerate(absent):
            end = h.offset + h.length
            if index + 1 < len(absent) and absent[index + 1].offset == end:
                continue
            run, first = absent[first : index + 1], index + 1
            if self._mapping.cached(run[0].offset, end - run[0].offset):
                found += [x for x in run if self._mapping.cached(x.offset, x.length)]
        return found

    def unreadable(self, h: Holding, failure: int) -> str:
        """Return the message for a region that cannot be read back."""
        return self._spill.unreadable(self._called(h), reason(failure))

    def _unwritable(self, h: Holding, failure: int) -> str:
        told = self._spill.unwritable(self._called(h), reason(failure))
        return f"{told}; until then it stays in memory"

    @contextmanager
    def _unlocked(self) -> Iterator[None]:
        self._account.mutex.release()
        try:
            yield
        finally:
            interrupt: BaseException | None = None
            while True:
                try:
                    self._account.mutex.acquire()
                    break
                except BaseException as error:  # raised while it waited: the mutex is not held
                    interrupt = error
            if interrupt is not None:
                raise interrupt

    def _called(self, h: Holding) -> str:
        return called(self._names, h.region, h.nbytes)
