"""A device: a pool of fast memory and regions that move in and out of it.

Devices differ in how they serve an access to an absent region. The pager blocks the thread in the
kernel, the mapped file lets the kernel read, an accelerator needs its regions made present first.
`serves` and `guarded` say so; some runtime features need methods of `Pager` or `Accelerator`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from dynoffload.memory.region_allocator import RegionAllocator
from dynoffload.planning.schedule import Schedule, Use


class Cause(IntEnum):
    """Why bytes moved."""

    PLAN = 0
    FAULT = 1
    ROOM = 2


class EventKind(IntEnum):
    """What a device reports."""

    FETCH = 0
    EVICT = 1
    STALL = 2


class Event(NamedTuple):
    """One transfer or stall; times on `time.perf_counter`'s clock, in seconds."""

    start: float
    end: float
    nbytes: int
    region: int
    kind: EventKind
    cause: Cause


@dataclass
class Counters:
    """Totals since the device was opened; `peak_bytes` since the counters were last read.

    `events_lost` counts events beyond those a device keeps between two calls of `Device.events`.
    """

    bytes_in: int = 0
    bytes_out: int = 0
    prefetched_bytes: int = 0
    used_bytes: int = 0
    wasted_bytes: int = 0
    faults: int = 0
    stalls: int = 0
    stall_s: float = 0.0
    resident_bytes: int = 0
    peak_bytes: int = 0
    events_lost: int = 0


class Device(RegionAllocator):
    """Fast memory of a fixed size, and regions that a spill file backs.

    Attributes:
        name: as the plan line shows it.
        guarded: an access to a locked region waits until its owner unlocks it. The pager reports
            the access by `Pager.handed`; an accelerator calls `Accelerator.on_locked`.
        serves: an access to an absent region waits until it is present. If False, callers must
            announce each access, and storages of absent regions are empty.
        device: the torch device of the regions' tensors.
        page_bytes: regions are padded to this.
        capacity: bytes of the pool; never exceeded, but while `limit` waits for memory to be free.
        names: region names for messages; filled by the regions' owner.
    """

    name: str
    guarded: bool

    @abstractmethod
    def discard(self, region: int) -> None:
        """Discard a region's bytes; the region remains, without content."""

    @abstractmethod
    def clear(self, regions: Sequence[int]) -> None:
        """Set regions to zeros, which takes no fast memory and moves no byte.

        Raises:
            SpillError: the file system cannot keep zeros unwritten, and writing them fails.
        """

    @abstractmethod
    def is_clear(self, regions: Sequence[int]) -> list[bool]:
        """Return for each cleared region whether it still holds only zeros; False if unknown, as
        when finding out takes a read from a lower tier."""

    @abstractmethod
    def acquire(self, regions: Sequence[int], *, pin: bool = False) -> None:
        """Wait until all ``regions`` are present; pin them if ``pin``.

        Raises:
            BackendError: a region is locked, or the kernel holds its pages.
            BudgetError: the regions do not fit the pool together, or the rest stays pinned.
            SpillError: the spill file cannot be read, or not written to make room.
        """

    @abstractmethod
    def unpin(self, regions: Sequence[int]) -> None:
        """Unpin regions."""

    @abstractmethod
    def touch(self, regions: Sequence[int]) -> None:
        """Make as many regions as fit together present. The pager only installs regions that are
        already staged, and does not wait.

        Raises:
            SpillError: the spill file cannot be read or written.
        """

    @abstractmethod
    def lock(self, regions: Sequence[int]) -> None:
        """Make every access to the regions wait until `unlock`; only where `guarded`.

        Raises:
            BackendError: the kernel holds a region's pages; none is locked.
        """

    @abstractmethod
    def unlock(self, regions: Sequence[int]) -> None:
        """Allow accesses again."""

    @abstractmethod
    def follow(self, uses: Sequence[Use], schedule: Schedule) -> None:
        """Prefetch and evict by ``schedule``, from position 0."""

    @abstractmethod
    def advance(self, position: int) -> None:
        """Report that use ``position`` of the plan begins."""

    @abstractmethod
    def reserve(self, nbytes: int) -> None:
        """Keep ``nbytes`` of the pool free of prefetches, for unpredicted accesses."""

    def limit(self, capacity: int) -> bool:
        """Lower the capacity; the memory beyond it goes back to the system as it becomes free.
        Return whether the device can: not if its pool is a file's pages, or an accelerator's."""
        return False

    @abstractmethod
    def resident(self) -> list[int]:
        """Return the regions that take fast memory now."""

    @abstractmethod
    def resident_bytes(self) -> int:
        """Return the fast memory in use now."""

    @abstractmethod
    def taken_bytes(self) -> int:
        """Return the process memory that the pool takes now, in use or empty."""

    @abstractmethod
    def counters(self) -> Counters:
        """Return the totals.

        Raises:
            SpillError: a transfer failed since the last call; nothing was lost.
        """

    @abstractmethod
    def events(self) -> list[Event]:
        """Return and clear the events since the last call."""
