"""The mapped file's transfers and the threads that make them.

The counterpart in Python of ``native/transfer.c``: first what somebody waits for, then what the
plan says, then the reserve. Every method is called with the mutex held and returns with it held,
but releases it while bytes move.

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
from dynoffload.memory.debug import Checksums
from dynoffload.memory.device import Cause, EventKind
from dynoffload.memory.mapped_cache import CachedRegion, MappedCache, State
from dynoffload.memory.mapping import Mapping
from dynoffload.memory.spill import SpillFile, reason
from dynoffload.planning.cursor import NEVER
from dynoffload.planning.schedule import Kind

_INSPECT_S = 0.1  # how long an unannounced access may stay unseen while nothing else is to do
_ATTEMPTS = 3


class TransferQueue(MappedCache):
    """Moves regions in and out of a mapping.

    Args:
        pages: of the pool.
        page_bytes: of each.
        spill: the file.
        mapping: of it.
        threads: how many transfers may run at once, besides those of waiting threads.
        sums: compares what comes back with what left, in debug mode.
    """

    _spill: SpillFile

    def __init__(
        self,
        pages: int,
        page_bytes: int,
        spill: SpillFile,
        mapping: Mapping,
        threads: int,
        sums: Checksums | None,
    ) -> None:
        super().__init__(pages, page_bytes, spill, mapping.address)
        self._mapping, self._sums = mapping, sums
        self._stopping = False
        self._threads = [
            threading.Thread(
                target=self._run, args=(index == 0,), name=f"dynoffload-mapped-{index}", daemon=True
            )
            for index in range(max(1, threads))
        ]
        for thread in self._threads:
            thread.start()

    def _stop(self) -> None:
        """End the threads; called by another, without the mutex."""
        with self._mutex:
            self._stopping = True
            self._work.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self, inspects: bool) -> None:
        with self._mutex:
            while not self._stopping:
                if self._serve_urgent() or (not self._urgent and self._serve_plan()):
                    continue
                woken = self._work.wait(_INSPECT_S if inspects else None)
                if not woken and not self._stopping:
                    self._inspect()

    def _serve_plan(self) -> bool:
        """Make one transfer of the plan or for the reserve; False if there is none now."""
        due = self._due()
        if due is not None:
            kind, h = due
            if kind is Kind.FETCH:
                self._fetch(h, Cause.PLAN)
            else:
                self._evict(h, Cause.PLAN)
            return True
        if self._free + self._writing < self._reserve:
            victim = self._victim(self._plan.position)
            if victim is not None:
                self._evict(victim, Cause.ROOM)
                return True
        return False

    def _due(self) -> tuple[Kind, CachedRegion] | None:
        """Return the planned transfer that can start now; skip what reality has overtaken."""
        plan = self._plan
        while (action := plan.due()) is not None:
            h = self._cached.get(action.region)
            next_use = plan.next_use(action.region)
            if action.kind is Kind.EVICT:
                plan.done()
                if h is not None and h.may_leave() and next_use > plan.position:
                    return Kind.EVICT, h
                continue
            if h is None or not h.left_alone() or next_use == NEVER:
                plan.done()
                continue
            need = h.pages + self._reserve
            if self._free >= need:
                plan.done()
                return Kind.FETCH, h
            if self._free + self._writing >= need or next_use > plan.position + 1:
                return None  # room is on its way, or there is time to wait for it
            victim = self._victim(next_use)
            return None if victim is None else (Kind.EVICT, victim)
        return None

    def _serve_urgent(self) -> bool:
        """Do one thing for the first region that somebody waits for; False if nothing can be."""
        if not self._urgent:
            return False
        h = self._urgent[0]
        if h.state is State.ABSENT and self._free < h.pages:
            if self._free + self._writing >= h.pages:
                return False
            victim = self._victim(self._plan.position) or self._victim(-1)
            if victim is None:
                return False  # all is pinned or in flight: somebody will let go
            self._evict(victim, Cause.ROOM)
            return True
        self._urgent.popleft()
        h.queued = False
        if h.state is State.ABSENT:
            self._fetch(h, Cause.FAULT)
        else:
            self._done.notify_all()
        return True

    def _hope(self) -> None:
        """Somebody needs room, or the file takes bytes again: what could not be written may be
        written now."""
        if self._write_error is not None:
            for h in self._cached.values():
                h.busy = False

    def _refused(self) -> tuple[int, str] | None:
        """Return why nothing leaves, if that is because the file takes nothing; tried again from
        now on."""
        error, cached = self._write_error, self._cached.values()
        if error is None or self._victim(-1) is not None:
            return None
        if any(h.state.moving for h in cached) or not any(h.busy for h in cached):
            return None
        self._hope()
        return error

    def _fetch(self, h: CachedRegion, cause: Cause) -> None:
        self._charge(h)
        h.state = State.READING
        start = time.perf_counter()
        try:
            with self._unlocked():
                failure = self._read(h)
        except BaseException:  # see [Note: interrupts]
            self._discharge(h)
            self._settle(h, State.ABSENT)
            raise
        if failure:
            self._error = failure, self._unreadable(h, failure)
            if h.pins:
                h.error = failure
            self._discharge(h)
            self._settle(h, State.ABSENT)
            return
        if h.content:
            self._tally.bytes_in += h.nbytes
            self._tally.note(EventKind.FETCH, cause, h.region, start, h.nbytes)
            if cause is Cause.PLAN:
                h.prefetched = True
                self._tally.prefetched_bytes += h.nbytes
        h.content, h.cleared = True, False
        if h.pins:
            self._use(h)
        self._settle(h, State.PRESENT)

    def _read(self, h: CachedRegion) -> int:
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

    def _evict(self, h: CachedRegion, cause: Cause, *, charged: bool = True) -> None:
        """Send a region out; it stays if by the time it is written somebody wants it."""
        h.state = State.WRITING
        self._writing += h.pages if charged else 0
        leaves = False
        try:
            leaves = self._send_out(h, cause)
        finally:  # see [Note: interrupts]
            if charged:
                self._writing -= h.pages
                if leaves:
                    self._discharge(h)
            self._settle(h, State.ABSENT if leaves or not charged else State.PRESENT)

    def _send_out(self, h: CachedRegion, cause: Cause) -> bool:
        """Write a region back and drop its pages unless somebody wants it; whether they went."""
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
            self._write_error = self._error = failure, self._unwritable(h, failure)
        elif dirty:
            self._hope()
            self._write_error = None
            self._tally.bytes_out += dirty
            self._tally.note(EventKind.EVICT, cause, h.region, start, dirty)
        leaves = not failure and not h.pins
        if leaves:
            self._waste(h)
            with self._unlocked():
                self._mapping.drop(h.offset, h.length)
        return leaves

    def _forget(self, h: CachedRegion) -> None:
        """Let go of a region's pages, and of the bytes in them."""
        while h.state.moving or h.queued:
            self._done.wait()
        charged = h.state is State.PRESENT
        try:
            if charged or h.content or self._mapping.cached(h.offset, h.length):
                self._waste(h)
                h.state = State.WRITING
                with self._unlocked():
                    if self._sums is not None:
                        self._sums.forget(h.offset)
                    self._mapping.forget(h.offset, h.length)
        except OSError as error:
            failure = error.errno or errno.EIO
            self._error = failure, self._unwritable(h, failure)
        finally:
            if charged:
                self._discharge(h)
            h.content = h.busy = h.cleared = False
            self._settle(h, State.ABSENT)

    def _clear(self, h: CachedRegion) -> None:
        """Let a region hold zeros, which nobody has to read or write.

        Raises:
            SpillError: the file refuses them.
        """
        if self._is_clear(h):
            return
        self._forget(h)
        try:
            if self._mapping.holds_data(h.offset, h.length):
                self._mapping.clear(h.offset, h.length)
        except OSError as error:
            failure = error.errno or errno.EIO
            raise SpillError(failure, self._unwritable(h, failure)) from error
        h.cleared = True

    def _is_clear(self, h: CachedRegion) -> bool:
        """Return whether a region was cleared and no page of it written since."""
        if not h.cleared or not h.left_alone():
            return False
        if self._mapping.cached(h.offset, h.length):  # perhaps only read, or read ahead
            if self._mapping.modified(h.offset, h.length):
                return False
            self._mapping.drop(h.offset, h.length)
        return not self._mapping.holds_data(h.offset, h.length)

    # What nobody announced

    def _inspect(self) -> None:
        """Find absent regions with pages in memory. They were touched without notice: they stay if
        they deserve the room more than others do, else they are sent out."""
        for h in self._surprises():
            if h.busy or not self._is_left(h):
                continue  # things have moved on meanwhile
            self._tally.faults += 1
            h.content, h.cleared = True, False
            next_use = self._plan.next_use(h.region)
            while self._is_left(h) and self._free < h.pages:
                if self._free + self._writing >= h.pages:
                    self._done.wait()  # room is on its way
                elif (victim := self._victim(next_use - 1)) is not None:
                    self._evict(victim, Cause.ROOM)
                else:
                    break
            if not self._is_left(h):
                continue
            if self._free < h.pages:
                self._evict(h, Cause.ROOM, charged=False)
            else:
                self._charge(h)
                self._use(h)
                self._settle(h, State.PRESENT)

    def _is_left(self, h: CachedRegion) -> bool:
        """Return whether a region is absent, left alone, and not released meanwhile."""
        return h.left_alone() and self._cached.get(h.region) is h

    def _surprises(self) -> list[CachedRegion]:
        """Return absent regions with pages in memory, asking once for each run of neighbours."""
        absent = [h for h in self._cached.values() if h.state is State.ABSENT]
        absent.sort(key=lambda h: h.offset)
        found: list[CachedRegion] = []
        first = 0
        for index, h in enumerate(absent):
            end = h.offset + h.length
            if index + 1 < len(absent) and absent[index + 1].offset == end:
                continue
            run, first = absent[first : index + 1], index + 1
            if self._mapping.cached(run[0].offset, end - run[0].offset):
                found += [x for x in run if self._mapping.cached(x.offset, x.length)]
        return found

    def _unreadable(self, h: CachedRegion, failure: int) -> str:
        return self._spill.unreadable(self._called(h), reason(failure))

    def _unwritable(self, h: CachedRegion, failure: int) -> str:
        told = self._spill.unwritable(self._called(h), reason(failure))
        return f"{told}; until then it stays in memory"

    @contextmanager
    def _unlocked(self) -> Iterator[None]:
        self._mutex.release()
        try:
            yield
        finally:
            interrupt: BaseException | None = None
            while True:
                try:
                    self._mutex.acquire()
                    break
                except BaseException as error:  # raised while it waited: the mutex is not held
                    interrupt = error
            if interrupt is not None:
                raise interrupt
