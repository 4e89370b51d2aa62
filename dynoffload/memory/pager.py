"""The CPU device: a user-space pager over userfaultfd (see ``native/pager.h``).

Any thread that accesses an absent region sleeps in the kernel until the region is fetched. So an
unannounced access may stall but never reads wrong data. `region_allocator` assigns addresses.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dynoffload.errors import BackendError, BudgetError, DynOffloadError, SpillError
from dynoffload.memory import native_pager
from dynoffload.memory.device import Cause, Counters, Device, Event, EventKind
from dynoffload.memory.native_pager import FailureKind
from dynoffload.memory.region_allocator import REGIONS, Place, arena_pages, called
from dynoffload.memory.sources import Extent, SourceFile, unread
from dynoffload.memory.spill import UNWRITTEN, SpillFile
from dynoffload.memory.spill import reason as reason_of
from dynoffload.planning.schedule import Schedule, Use
from dynoffload.units import format_bytes

_NO_BOOKS = "the system has no memory, beyond the pager's pool, for the bookkeeping of"
_MORE_MEMORY = "end other programs, or lower the budget"
_USER_MODE = 2  # returned by `pager_probe`


def probe() -> str:
    """Return "" if the pager can work on this system, else the reason why not."""
    try:
        answer = native_pager.load().pager_probe()
    except BackendError as error:
        return str(error)
    except OSError as error:
        return f"the native pager does not load: {error}"
    if answer < 0:
        return f"userfaultfd with UFFDIO_MOVE is refused here: {os.strerror(-answer)}"
    return ""


def in_user_mode() -> bool:
    """Return whether system calls on absent memory fail here with EFAULT instead of waiting."""
    return bool(native_pager.load().pager_probe() == _USER_MODE)


class Pager(Device):
    """A `Device` on which an access to an absent region waits until it is fetched.

    Args:
        capacity: bytes of the pool, never exceeded; populated on demand and kept until `close`,
            or until `limit` lowers it.
        page_bytes: power of two, 4 KiB to 2 MiB; 2 MiB pages are huge pages.
        spill_dir: directory of the spill file.
        need: minimum bytes of the spill file.
        threads: transfer threads.
        debug: checksum all bytes of each transfer, and poison free slots.

    Raises:
        BackendError: the system refuses the pager.
        SpillError: the spill directory cannot be used.
    """

    name = "pager"
    guarded = True
    _spill: SpillFile

    def __init__(
        self,
        capacity: int,
        page_bytes: int,
        spill_dir: Path,
        *,
        need: int = 0,
        threads: int = 4,
        debug: bool = False,
    ) -> None:
        reason = probe()
        if reason:
            raise BackendError(f"{reason}; use backend='mapped'")
        self._native = native_pager.load()
        spill = SpillFile(spill_dir, need)
        pages = capacity // page_bytes
        error = ctypes.c_int()
        self._handle = self._native.pager_open(
            spill.fd,
            page_bytes,
            arena_pages(page_bytes),
            pages,
            REGIONS,
            threads,
            debug,
            ctypes.byref(error),
        )
        if not self._handle:
            spill.close()
            raise BackendError(
                f"the pager cannot take its pool of {format_bytes(capacity)}: "
                f"{os.strerror(error.value)}; lower the budget, or use backend='mapped'"
            )
        self._process = os.getpid()
        base = int(self._native.pager_base(self._handle))
        super().__init__(pages * page_bytes, page_bytes, spill, base)
        self._sources: dict[int, list[SourceFile]] = {}
        self._aliases: dict[int, int] = {}  # shown region -> first page of its alias
        self._events = (native_pager.NativeEvent * native_pager.EVENT_CAPACITY)()

    def _admit(self, region: int, place: Place) -> None:
        offset = place.page * self.page_bytes
        if self._native.pager_create(self._handle, region, *place, offset):
            raise BudgetError(f"{_NO_BOOKS} one more region: {_MORE_MEMORY}")

    def _dismiss(self, region: int) -> None:
        self._native.pager_release(self._handle, region)
        self._sources.pop(region, None)

    def discard(self, region: int) -> None:
        """See `Device.discard`."""
        self._native.pager_discard(self._handle, region)

    def source(self, region: int, extents: Sequence[Extent]) -> None:
        """Let a region's content be that of ``extents``, read there until the region is written.

        Args:
            extents: as many bytes as the region has. They must not change meanwhile: `SpillError`
                is raised by whoever waits for bytes of a file that did.
        """
        assert sum(extent.nbytes for extent in extents) == self.nbytes(region)
        native = (native_pager.NativeExtent * len(extents))()
        for one, (file, offset, nbytes) in zip(native, extents, strict=True):
            one.fd, one.direct, one.offset, one.nbytes = file.fd, file.direct, offset, nbytes
            one.size, one.modified_ns = file.size, file.modified_ns
        name = self.names.get(region, f"region {region}").encode()
        if self._native.pager_source(self._handle, region, native, len(extents), name):
            raise BudgetError(f"{_NO_BOOKS} a region's place in a checkpoint: {_MORE_MEMORY}")
        self._sources[region] = list(dict.fromkeys(extent.file for extent in extents))

    def check_files(self, regions: Collection[int] | None = None) -> None:
        """Raise `SpillError` if a file that is the source of ``regions``, by default of all, has
        changed: an access that finds it out ends the process."""
        known = self._sources.copy() if regions is None else regions
        files = {file for region in known for file in self._sources.get(region, ())}
        changed = {file for file in files if file.has_changed()}
        held = set(self.resident()) if changed else set()  # trained already, or read
        for region in known if changed else ():
            sources = changed.intersection(self._sources.get(region, ()))
            if sources and region not in held and self.is_sourced(region):
                raise self._unread(errno.ESTALE, region)

    def spill_bytes(self) -> int:
        """See `Device.spill_bytes`; with what was written of regions that are not backed."""
        beyond = (r for r in self._sources if not self.is_sourced(r) and not self._is_backed(r))
        return super().spill_bytes() + sum(map(self.size, beyond))

    def _is_backed(self, region: int) -> bool:
        return self._places[region].page * self.page_bytes < self._spill.size

    def is_sourced(self, region: int) -> bool:
        """Return whether the lower tier of a region is that of `source` still."""
        return bool(self._native.pager_sourced(self._handle, region))

    def clear(self, regions: Sequence[int]) -> None:
        """See `Device.clear`."""
        self._native.pager_clear(self._handle, _ids(regions), len(regions))

    def is_clear(self, regions: Sequence[int]) -> list[bool]:
        """See `Device.is_clear`."""
        answers = (ctypes.c_uint8 * len(regions))()
        self._native.pager_is_clear(self._handle, _ids(regions), len(regions), answers)
        return [bool(answer) for answer in answers]

    # Residency

    def acquire(self, regions: Sequence[int], *, pin: bool = False) -> None:
        """See `Device.acquire`."""
        self._check_room(regions)
        ids, failure = _ids(regions), native_pager.NativeFailure()
        acquire, report, count = self._native.pager_acquire, ctypes.byref(failure), len(ids)
        try:  # a Ctrl-C during the call is raised as soon as the call returns
            failed = acquire(self._handle, ids, count, pin, report)
        except BaseException:
            if pin and not failure.kind:
                self.unpin(regions)
            raise
        if failed:
            raise self._failed(failure, regions)

    def unpin(self, regions: Sequence[int]) -> None:
        """See `Device.unpin`."""
        self._native.pager_unpin(self._handle, _ids(regions), len(regions))

    def touch(self, regions: Sequence[int]) -> None:
        """See `Device.touch`."""
        if self._sources:
            self.check_files(regions)
        self._native.pager_touch(self._handle, _ids(regions), len(regions))

    def lock(self, regions: Sequence[int]) -> None:
        """See `Device.lock`. All are locked or none."""
        self._try(self._native.pager_lock, regions)

    def unlock(self, regions: Sequence[int]) -> None:
        """See `Device.unlock`."""
        self._native.pager_unlock(self._handle, _ids(regions), len(regions))

    def handed(self, timeout: float) -> int:
        """Return a locked region that a thread waits for, -1 after ``timeout`` s, -2 on close."""
        return int(self._native.pager_handed(self._handle, timeout))

    def show(self, regions: Sequence[int]) -> list[torch.UntypedStorage]:
        """Move locked regions to alias addresses until `hide`, all or none; return their storages.

        Raises:
            BackendError: a region is not locked, or the kernel holds its pages.
            BudgetError: there are no addresses or no room in the pool.
            SpillError: the spill file cannot be read, or not written to make room.
        """
        self._check_room(regions)
        storages: list[torch.UntypedStorage] = []
        shown: list[int] = []
        try:
            for region in regions:
                pages, nbytes = self._places[region][1:]
                alias = self._take(pages)
                failure = native_pager.NativeFailure()
                if self._native.pager_show(self._handle, region, alias, ctypes.byref(failure)):
                    self._give(alias, pages)
                    raise self._failed(failure, regions)
                self._aliases[region] = alias
                shown.append(region)
                storages.append(self._at(alias, nbytes))
        except BaseException:
            storages.clear()
            self.hide(shown)
            raise
        return storages

    def hide(self, regions: Sequence[int]) -> None:
        """End `show`: move the pages from the aliases back to the pool."""
        for region in regions:
            alias = self._aliases.pop(region)
            self._native.pager_hide(self._handle, region, alias)
            self._give(alias, self._places[region].pages)

    def exchange(self, regions: Sequence[int], twins: Sequence[int]) -> None:
        """Exchange the contents of each region and its twin, in any tier; moves no byte.

        Raises:
            BackendError: the kernel holds a region's pages; nothing was exchanged.
        """
        self._try(self._native.pager_exchange, regions, _ids(twins))
        for pair in zip(regions, twins, strict=True):
            for one, files in [(one, self._sources.pop(one, [])) for one in pair]:
                if files:
                    self._sources[sum(pair) - one] = files

    def _try(
        self, function: Callable[..., int], regions: Sequence[int], *arguments: object
    ) -> None:
        """Call a native function; raise the error if it fails."""
        failure = native_pager.NativeFailure()
        report = ctypes.byref(failure)
        if function(self._handle, _ids(regions), len(regions), *arguments, report):
            raise self._failed(failure, regions)

    def _failed(
        self, failure: native_pager.NativeFailure, regions: Sequence[int]
    ) -> DynOffloadError:
        """Return the error for a native call on ``regions`` that failed."""
        kind, why = FailureKind(failure.kind), reason_of(failure.error)
        if kind is FailureKind.READ:
            return self._unread(failure.error, failure.region)
        need = format_bytes(sum(map(self.size, set(regions))))
        one = self._called(failure.region)
        if kind is FailureKind.WRITE:
            return SpillError(
                failure.error,
                f"no room can be made for {need} of regions in the pool of "
                f"{format_bytes(self.capacity)}: {self._spill.unwritable(one, why)}; {UNWRITTEN}",
            )
        if kind is FailureKind.PINNED:
            return self._no_room(regions, np.flatnonzero(self._states()[1]).tolist())
        if kind is FailureKind.LOCKED:
            return BackendError(
                f"the pager cannot bring {one} in place: it is locked, or gone; unlock it first"
            )
        return BackendError(
            f"the kernel holds pages of {one}, which can neither be brought nor taken: {why}; do "
            "not give the memory of parameters to drivers or io_uring, or use backend='mapped'"
        )

    def _unread(self, number: int, region: int) -> SpillError:
        """Return the error for a region that cannot be read back."""
        one = self._called(region)
        if not self.is_sourced(region):
            return self._spill.failed(number, one, reads=True)
        return unread(self._sources[region], number, one)

    # The plan

    def follow(self, uses: Sequence[Use], schedule: Schedule) -> None:
        """See `Device.follow`."""
        actions = schedule.actions  # position, kind and region: ``struct action`` of pager.h
        planned = np.fromiter(chain.from_iterable(actions), np.int64, 3 * len(actions))
        touched = [use.regions + use.creates for use in uses]
        counts = [len(regions) for regions in touched]
        used = np.zeros((sum(counts), 3), np.int64)  # position, region, next: ``struct use``
        used[:, 0] = np.repeat(np.arange(len(touched)), counts)
        used[:, 1] = np.fromiter(chain.from_iterable(touched), np.int64, len(used))
        error = self._native.pager_plan(
            self._handle, planned.ctypes.data, len(actions), used.ctypes.data, len(used)
        )
        if error:
            raise BudgetError(f"{_NO_BOOKS} a plan of {len(actions)} transfers: {_MORE_MEMORY}")

    def advance(self, position: int) -> None:
        """See `Device.advance`."""
        self._native.pager_advance(self._handle, position)

    def reserve(self, nbytes: int) -> None:
        """See `Device.reserve`."""
        self._native.pager_set_reserve(self._handle, -(-nbytes // self.page_bytes))

    def limit(self, capacity: int) -> bool:
        """See `Device.limit`."""
        largest = max((place.pages for place in list(self._places.values())), default=0)
        pages = max(capacity // self.page_bytes, largest)
        self.capacity = min(self.capacity, pages * self.page_bytes)
        self._native.pager_limit(self._handle, pages)
        return True

    def resident(self) -> list[int]:
        """See `Device.resident`."""
        return [int(region) for region in np.flatnonzero(self._states()[0] >= 2)]

    def _states(self) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
        """Return each region's state, numbered as in pager.h, and its number of pins."""
        states, pins = np.zeros(REGIONS, dtype=np.uint8), np.zeros(REGIONS, dtype=np.uint32)
        self._native.pager_states(self._handle, states.ctypes.data, pins.ctypes.data, REGIONS)
        return states, pins

    # What happened

    def resident_bytes(self) -> int:
        """See `Device.resident_bytes`."""
        return int(self._counters().pages_in_use) * self.page_bytes

    def taken_bytes(self) -> int:
        """See `Device.taken_bytes`: empty pages stay in the pool."""
        return int(self._counters().pages_taken) * self.page_bytes

    def _called(self, region: int) -> str:
        return called(self.names, region, self.size(region))

    def _counters(self, *, reset: bool = False) -> native_pager.NativeCounters:
        found = native_pager.NativeCounters()
        self._native.pager_counters(self._handle, ctypes.byref(found), reset)
        return found

    def counters(self) -> Counters:
        """See `Device.counters`."""
        native = self._counters(reset=True)
        if native.error:
            region = native.error_region
            if not native.error_is_write:
                raise self._unread(native.error, region)
            raise self._spill.failed(native.error, self._called(region), reads=False)
        return Counters(
            **{name: getattr(native, name) for name in native_pager.TOTALS},
            resident_bytes=native.pages_in_use * self.page_bytes,
            peak_bytes=native.peak_pages * self.page_bytes,
        )

    def events(self) -> list[Event]:
        """See `Device.events`."""
        count = self._native.pager_events(self._handle, self._events)
        form, kinds, causes = np.dtype(native_pager.NativeEvent), tuple(EventKind), tuple(Cause)
        told = np.frombuffer(memoryview(self._events), form, count).tolist()
        return [Event(s, e, n, r, kinds[k], causes[c]) for s, e, n, r, k, c in told]

    def close(self) -> None:
        """See `Device.close`."""
        if self._handle and os.getpid() == self._process:
            self._storages.clear()
            self._rows.clear()
            self._sources.clear()
            self._native.pager_close(self._handle)
            self._spill.close()
        self._handle = None


def _ids(regions: Sequence[int]) -> ctypes.Array[ctypes.c_uint32]:
    return (ctypes.c_uint32 * len(regions))(*regions)
