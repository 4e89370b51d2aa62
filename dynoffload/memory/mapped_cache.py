"""The mapped file's cache: which regions are in fast memory, their fetches and evictions.

Its methods require the mutex; see [Note: one transfer] in `mapped`.

[Note: touched]  The kernel serves an access to an absent region by itself, and it may be a write.
So a region with pages in memory, or with pages that the kernel has reclaimed, is not compared.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dynoffload.errors import SpillError
from dynoffload.memory.device import Cause, EventKind
from dynoffload.memory.mapping import Mapping
from dynoffload.memory.region_allocator import Place, called
from dynoffload.memory.region_cache import CachedRegion, RegionCache
from dynoffload.memory.spill import SpillFile
from dynoffload.units import MiB

_ATTEMPTS = 3
_SUMMED = 1 * MiB


@dataclass(eq=False, slots=True)
class MappedRegion(CachedRegion):
    """One region of the mapped file.

    Attributes:
        present: its pages are in memory, and counted.
        content: the file or memory may hold bytes of its own.
        cleared: the file holds zeros, unless an unannounced write has happened since.
        sum: in debug mode, the checksum at eviction; see [Note: touched].
    """

    present: bool = False
    content: bool = False
    cleared: bool = False
    sum: int | None = None


class MappedCache(RegionCache[MappedRegion]):
    """Fetches and evicts regions of a mapping.

    Args:
        capacity: bytes of the pool, a multiple of ``page_bytes``.
        page_bytes: regions are padded to this.
        spill: the file.
        mapping: of the file.
        debug: checksum regions as they are evicted, and compare as they are fetched.
    """

    _spill: SpillFile

    def __init__(
        self, capacity: int, page_bytes: int, spill: SpillFile, mapping: Mapping, debug: bool
    ) -> None:
        super().__init__(capacity, page_bytes, spill, mapping.address)
        self._mapping = mapping
        self._debug = debug
        self._work = threading.Condition(self._mutex)  # the plan may have work
        self._unpinned = threading.Condition(self._mutex)
        # Errors of regions that could not be written, which stay until the next attempt.
        self._busy: dict[int, SpillError] = {}
        self._error: SpillError | None = None  # of the last failed transfer, until reported
        self._inspected = 0.0

    def _admit(self, region: int, place: Place) -> None:
        offset, length = place.page * self.page_bytes, place.pages * self.page_bytes
        with self._mutex:
            self._cells[region] = made = MappedRegion(region, offset, length, place.nbytes)
            self._use(made)

    def _dismiss(self, region: int) -> None:
        with self._mutex:
            self._forget(self._remove(region))

    def _forget(self, cell: MappedRegion) -> None:
        """Release a region's pages, and discard the bytes in them."""
        try:
            if cell.present or cell.content or self._mapping.cached(cell.offset, cell.padded):
                self._mapping.forget(cell.offset, cell.padded)
        except OSError as error:
            self._error = self._failed(cell, error, reads=False)
        finally:
            self._leave(cell)
            self._busy.pop(cell.region, None)
            cell.content, cell.cleared, cell.sum = False, False, None

    def _is_clear(self, cell: MappedRegion) -> bool:
        """Return whether a region was cleared and no page of it written since."""
        if not cell.cleared or cell.present:
            return False
        if self._mapping.cached(cell.offset, cell.padded):  # perhaps only read, or read ahead
            if self._mapping.modified(cell.offset, cell.padded):
                return False
            self._mapping.drop(cell.offset, cell.padded)
        return not self._mapping.holds_data(cell.offset, cell.padded)

    def _pin(self, some: Iterable[MappedRegion], by: int) -> None:
        super()._pin(some, by)
        if by < 0:
            self._unpinned.notify_all()
            self._work.notify()

    # Room and transfers; the mutex is held

    def _enter(self, cell: MappedRegion) -> None:
        """Count a region's pages, for which there is room."""
        self._used += cell.padded
        assert self._used <= self.capacity, "the cache would pass the capacity"
        self._peak = max(self._peak, self._used)
        self._order.add(cell)
        cell.present, cell.content, cell.cleared = True, True, False

    def _leave(self, cell: MappedRegion) -> None:
        """Stop counting a region's pages, which are gone."""
        if cell.present:
            cell.present = False
            self._used -= cell.padded
        self._unused(cell)

    def _is_evictable(self, cell: MappedRegion) -> bool:
        return cell.present

    def _may_leave(self, cell: MappedRegion) -> bool:
        return cell.present and not cell.pins and cell.region not in self._busy

    def _may_come(self, cell: MappedRegion) -> bool:
        return not cell.present

    def _room_for(self, cell: MappedRegion, later_than: Sequence[int]) -> bool:
        """Evict regions used after the first position of ``later_than``, then those after the
        next, until there is room for ``cell``; return whether there is."""
        for position in later_than:
            while self._free < cell.padded and (victim := self._victim(position)) is not None:
                self._evict(victim, Cause.ROOM)
        return self._free >= cell.padded

    def _fetch(self, cell: MappedRegion, cause: Cause) -> None:
        """Fetch a region, for which there is room.

        Raises:
            SpillError: it cannot be read.
        """
        start = time.perf_counter()
        known = cell.sum
        if known is not None and self._mapping.touched(cell.offset, cell.padded):
            known = None
        for attempt in range(_ATTEMPTS):
            try:
                if cell.content:
                    self._mapping.fetch(cell.offset, cell.padded)
                else:
                    self._mapping.create(cell.offset, cell.padded)
                if known is not None and self._checksum(cell) != known:
                    raise OSError(errno.EBADMSG, os.strerror(errno.EBADMSG))
                break
            except OSError as error:
                if known is not None:  # the next fetch reads and compares it again
                    self._mapping.drop(cell.offset, cell.padded)
                if attempt == _ATTEMPTS - 1:
                    raise self._failed(cell, error, reads=True) from error
        if cell.content:
            self._tally.bytes_in += cell.nbytes
            self._tally.note(EventKind.FETCH, cause, cell.region, start, cell.nbytes)
            if cause is Cause.PLAN:
                cell.prefetched = True
                self._tally.prefetched_bytes += cell.nbytes
        self._enter(cell)

    def _evict(self, cell: MappedRegion, cause: Cause) -> None:
        """Write a region back and drop its pages; if the write fails, it stays, with an error."""
        start = time.perf_counter()
        try:
            dirty = min(cell.nbytes, self._mapping.modified(cell.offset, cell.padded))
            if dirty:
                self._mapping.write_back(cell.offset, cell.padded)
            if self._debug:
                cell.sum = self._checksum(cell)
        except OSError as error:
            self._error = self._busy[cell.region] = self._failed(cell, error, reads=False)
            return
        if dirty:
            self._busy.clear()  # writes succeed again
            self._tally.bytes_out += dirty
            self._tally.note(EventKind.EVICT, cause, cell.region, start, dirty)
        self._leave(cell)
        self._mapping.drop(cell.offset, cell.padded)

    def _checksum(self, cell: MappedRegion) -> int:
        """Return the CRC-32 of a region's bytes in the file."""
        found, at, end = 0, cell.offset, cell.offset + cell.padded
        while at < end:
            piece = os.pread(self._spill.fd, min(_SUMMED, end - at), at)
            if not piece:
                raise OSError(errno.EIO, os.strerror(errno.EIO))  # the file was truncated
            found = zlib.crc32(piece, found)
            at += len(piece)
        return found

    def _failed(self, cell: MappedRegion, error: OSError, *, reads: bool) -> SpillError:
        what = called(self.names, cell.region, cell.nbytes)
        return self._spill.failed(error.errno, what, reads=reads)

    # Unannounced accesses

    def _inspect(self) -> None:
        """Find absent regions with pages in memory, left by unannounced accesses. Keep each one if
        the eviction order favours it over others; else evict it."""
        for cell in self._unannounced():
            self._tally.faults += 1
            cell.content, cell.cleared = True, False
            if self._room_for(cell, (self._plan.next_use(cell.region) - 1,)):
                self._enter(cell)
                self._use(cell)
            else:
                self._evict(cell, Cause.ROOM)
        self._inspected = time.monotonic()
        self._used = sum(cell.padded for cell in self._cells.values() if cell.present)

    def _unannounced(self) -> list[MappedRegion]:
        """Return absent regions with pages in memory; each run of neighbours is queried first."""
        absent = [c for c in self._cells.values() if not (c.present or c.region in self._busy)]
        absent.sort(key=lambda cell: cell.offset)
        found: list[MappedRegion] = []
        first = 0
        for index, cell in enumerate(absent):
            end = cell.offset + cell.padded
            if index + 1 < len(absent) and absent[index + 1].offset == end:
                continue
            run, first = absent[first : index + 1], index + 1
            if self._mapping.cached(run[0].offset, end - run[0].offset):
                found += [x for x in run if self._mapping.cached(x.offset, x.padded)]
        return found
