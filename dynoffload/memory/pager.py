"""The CPU's device: a user-space pager over userfaultfd (see ``native/pager.h``).

An access to an absent region sleeps in the kernel until the region is there, whoever makes it. So
a use that nobody announced costs time, never a wrong bit. This module gives regions their place in
the arena and in the spill file (the same page number in both) and speaks to the native part.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from dynoffload.errors import BackendError, BudgetError, SpillError
from dynoffload.memory import native_pager
from dynoffload.memory.device import Cause, Counters, Event, EventKind
from dynoffload.memory.extents import Extents
from dynoffload.memory.spill import SpillFile
from dynoffload.planning.schedule import Schedule, Use
from dynoffload.units import GiB, MiB, format_bytes

_ARENA_BYTES = {True: 1024 * GiB, False: 64 * GiB}
_REGIONS = 65536


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


class Pager:
    """A `Device` whose absent memory waits.

    Args:
        capacity: bytes of the pool; taken from the system at once and never more.
        page_bytes: power of two, 4 KiB to 2 MiB; 2 MiB pages are huge pages.
        spill_dir: where the spill file lies.
        need: bytes that the spill file will take at least.
        threads: transfer threads.
        record: keep events.

    Raises:
        BackendError: the system refuses the pager.
        SpillError: the spill directory cannot be used.
    """

    name = "pager"
    guarded = True

    def __init__(
        self,
        capacity: int,
        page_bytes: int,
        spill_dir: Path,
        *,
        need: int = 0,
        threads: int = 4,
        record: bool = True,
    ) -> None:
        reason = probe()
        if reason:
            raise BackendError(f"{reason}; use backend='mapped'")
        self._native = native_pager.load()
        self._spill = SpillFile(spill_dir, need)
        self.page_bytes = page_bytes
        pages = capacity // page_bytes
        self.capacity = pages * page_bytes
        arena_pages = _ARENA_BYTES[page_bytes == 2 * MiB] // page_bytes
        error = ctypes.c_int()
        self._handle = self._native.pager_open(
            self._spill.fd,
            page_bytes,
            arena_pages,
            pages,
            _REGIONS,
            threads,
            record,
            ctypes.byref(error),
        )
        if not self._handle:
            self._spill.close()
            raise BackendError(
                f"the pager cannot take its pool of {format_bytes(self.capacity)}: "
                f"{os.strerror(error.value)}; lower the budget, or use backend='mapped'"
            )
        self._process = os.getpid()
        self._base = int(self._native.pager_base(self._handle))
        self._extents = Extents(arena_pages)
        self._free_ids = list(range(_REGIONS - 1, -1, -1))
        self._places: dict[int, tuple[int, int, int]] = {}  # region -> first page, pages, bytes
        self._owners = np.full(1024, -1, dtype=np.int32)  # region of each arena page
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._aliases: dict[int, int] = {}  # region shown elsewhere -> first page there
        self._events = (native_pager.NativeEvent * native_pager.EVENT_CAPACITY)()

    # Places

    def padded(self, nbytes: int) -> int:
        """See `Device.padded`."""
        return max(1, -(-nbytes // self.page_bytes)) * self.page_bytes

    def size(self, region: int) -> int:
        """See `Device.size`."""
        place = self._places.get(region)
        return place[1] * self.page_bytes if place else 0

    def allocate(self, nbytes: int) -> int:
        """See `Device.allocate`."""
        pages = self.padded(nbytes) // self.page_bytes
        if pages * self.page_bytes > self.capacity:
            raise BudgetError(
                f"a region of {format_bytes(nbytes)} does not fit the pool of "
                f"{format_bytes(self.capacity)}: raise the budget"
            )
        if not self._free_ids:
            raise BudgetError(f"more than {_REGIONS} regions are alive: raise min_paged_bytes")
        page = self._take(pages)
        try:
            self._spill.grow(self._extents.high * self.page_bytes)
        except SpillError:
            self._extents.give(page, pages)
            raise
        region = self._free_ids.pop()
        offset = page * self.page_bytes
        if self._native.pager_create(self._handle, region, page, pages, nbytes, offset):
            raise MemoryError("no memory for a region's bookkeeping")
        self._places[region] = (page, pages, nbytes)
        if page + pages > len(self._owners):
            grown = np.full(2 * (page + pages), -1, dtype=np.int32)
            grown[: len(self._owners)] = self._owners
            self._owners = grown
        self._owners[page : page + pages] = region
        return region

    def _take(self, pages: int) -> int:
        page = self._extents.take(pages)
        if page is None:
            raise BudgetError(f"the arena has no {pages} pages in a row left")
        return page

    def release(self, region: int) -> None:
        """See `Device.release`."""
        self._native.pager_release(self._handle, region)
        self._storages.pop(region, None)
        page, pages, _ = self._places.pop(region)
        self._owners[page : page + pages] = -1
        self._extents.give(page, pages)
        self._free_ids.append(region)

    def discard(self, region: int) -> None:
        """See `Device.discard`."""
        self._native.pager_discard(self._handle, region)

    def storage(self, region: int) -> torch.UntypedStorage:
        """See `Device.storage`."""
        storage = self._storages.get(region)
        if storage is None:
            page, _, nbytes = self._places[region]
            storage = self._storages[region] = self._at(page, nbytes)
        return storage

    def _at(self, page: int, nbytes: int) -> torch.UntypedStorage:
        memory = (ctypes.c_char * nbytes).from_address(self._base + page * self.page_bytes)
        return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()

    def owner(self, address: int) -> int:
        """See `Device.owner`."""
        page = (address - self._base) // self.page_bytes
        return int(self._owners[page]) if 0 <= page < len(self._owners) else -1

    # Residency

    def acquire(self, regions: Sequence[int], *, pin: bool = False) -> None:
        """See `Device.acquire`."""
        ids = _ids(regions)
        error = self._native.pager_acquire(self._handle, ids, len(ids), pin)
        if error:
            raise BackendError(
                f"the pager cannot bring regions {list(regions)} in place: {os.strerror(error)}"
            )

    def unpin(self, regions: Sequence[int]) -> None:
        """See `Device.unpin`."""
        ids = _ids(regions)
        self._native.pager_unpin(self._handle, ids, len(ids))

    def touch(self, regions: Sequence[int]) -> None:
        """See `Device.touch`."""
        ids = _ids(regions)
        self._native.pager_touch(self._handle, ids, len(ids))

    def lock(self, regions: Sequence[int]) -> None:
        """See `Device.lock`."""
        ids = _ids(regions)
        error = self._native.pager_lock(self._handle, ids, len(ids))
        if error:
            raise BackendError(
                f"the pager cannot withdraw regions {list(regions)}: {os.strerror(error)}"
            )

    def unlock(self, regions: Sequence[int]) -> None:
        """See `Device.unlock`."""
        ids = _ids(regions)
        self._native.pager_unlock(self._handle, ids, len(ids))

    def handed(self, timeout: float) -> int:
        """See `Device.handed`."""
        return int(self._native.pager_handed(self._handle, timeout))

    def show(self, regions: Sequence[int]) -> list[torch.UntypedStorage]:
        """See `Device.show`."""
        storages = []
        for region in regions:
            _, pages, nbytes = self._places[region]
            alias = self._take(pages)
            self._aliases[region] = alias
            error = self._native.pager_show(self._handle, region, alias)
            if error:
                raise BackendError(f"the pager cannot show region {region}: {os.strerror(error)}")
            storages.append(self._at(alias, nbytes))
        return storages

    def hide(self, regions: Sequence[int]) -> None:
        """See `Device.hide`."""
        for region in regions:
            alias = self._aliases.pop(region)
            error = self._native.pager_hide(self._handle, region, alias)
            if error:
                raise BackendError(f"the pager cannot hide region {region}: {os.strerror(error)}")
            self._extents.give(alias, self._places[region][1])

    # The plan

    def follow(self, uses: Sequence[Use], schedule: Schedule) -> None:
        """See `Device.follow`."""
        actions = schedule.actions
        position = np.fromiter((a.position for a in actions), np.int64, len(actions))
        kind = np.fromiter((a.kind for a in actions), np.uint8, len(actions))
        region = np.fromiter((a.region for a in actions), np.uint32, len(actions))
        pairs = [(at, r) for at, use in enumerate(uses) for r in (*use.regions, *use.creates)]
        table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        use_position = np.ascontiguousarray(table[:, 0])
        use_region = np.ascontiguousarray(table[:, 1], dtype=np.uint32)
        error = self._native.pager_plan(
            self._handle,
            position.ctypes.data,
            kind.ctypes.data,
            region.ctypes.data,
            len(actions),
            use_position.ctypes.data,
            use_region.ctypes.data,
            len(use_region),
        )
        if error:
            raise MemoryError("no memory for a plan")

    def advance(self, position: int) -> None:
        """See `Device.advance`."""
        self._native.pager_advance(self._handle, position)

    def reserve(self, nbytes: int) -> None:
        """See `Device.reserve`."""
        self._native.pager_set_reserve(self._handle, -(-nbytes // self.page_bytes))

    def resident(self) -> list[int]:
        """See `Device.resident`."""
        states = np.zeros(_REGIONS, dtype=np.uint8)
        self._native.pager_states(self._handle, states.ctypes.data, _REGIONS)
        return [int(region) for region in np.flatnonzero(states >= 2)]

    # What happened

    def resident_bytes(self) -> int:
        """See `Device.resident_bytes`."""
        return int(self._native.pager_in_use(self._handle)) * self.page_bytes

    def counters(self) -> Counters:
        """See `Device.counters`."""
        native = native_pager.NativeCounters()
        self._native.pager_counters(self._handle, ctypes.byref(native))
        if native.error:
            raise SpillError(
                native.error,
                f"the spill file failed on region {native.error_region}: "
                f"{os.strerror(native.error)}; the step is lost, go on from the last checkpoint",
            )
        return Counters(
            bytes_in=native.bytes_in,
            bytes_out=native.bytes_out,
            prefetched_bytes=native.prefetched_bytes,
            used_bytes=native.used_bytes,
            wasted_bytes=native.wasted_bytes,
            faults=native.faults,
            stalls=native.stalls,
            stall_s=native.stall_s,
            resident_bytes=native.pages_in_use * self.page_bytes,
            peak_bytes=native.peak_pages * self.page_bytes,
        )

    def events(self) -> list[Event]:
        """See `Device.events`."""
        count = self._native.pager_events(self._handle, self._events)
        return [
            Event(e.start, e.end, e.nbytes, e.region, EventKind(e.kind), Cause(e.cause))
            for e in self._events[:count]
        ]

    def close(self) -> None:
        """See `Device.close`."""
        if self._handle and os.getpid() == self._process:
            self._storages.clear()
            self._native.pager_close(self._handle)
            self._spill.close()
        self._handle = None


def _ids(regions: Sequence[int]) -> ctypes.Array[ctypes.c_uint32]:
    return (ctypes.c_uint32 * len(regions))(*regions)
