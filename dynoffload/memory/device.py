"""The protocol of a device: a pool of fast memory and regions that move in and out of it.

Devices differ in how they serve an access to an absent region. The pager blocks the thread in the
kernel, the mapped file lets the kernel read, an accelerator needs its regions made present first.
`serves` and `guarded` say so; some runtime features need methods of `Pager` or `Accelerator`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch

from dynoffload.planning.schedule import Schedule, Use
from dynoffload.units import format_bytes


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


@dataclass(frozen=True)
class Event:
    """One transfer or stall; times on `time.perf_counter`'s clock, in seconds."""

    start: float
    end: float
    nbytes: int
    region: int
    kind: EventKind
    cause: Cause


@dataclass(frozen=True)
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


def called(names: Mapping[int, str], region: int, nbytes: int) -> str:
    """Return the name and size of a region, for messages."""
    return f"{names.get(region, f'region {region}')} ({format_bytes(nbytes)})"


class Device(Protocol):
    """Fast memory of a fixed size, and regions that a spill file backs.

    Attributes:
        name: as the plan line shows it.
        guarded: an access to a locked region waits until its owner unlocks it. The pager reports
            the access by `Pager.handed`; an accelerator calls `Accelerator.on_locked`.
        serves: an access to an absent region waits until it is present. If False, callers must
            announce each access, and storages of absent regions are empty.
        device: the torch device of the regions' tensors.
        page_bytes: regions are padded to this.
        capacity: bytes of the pool; never exceeded.
        names: region names for messages; filled by the regions' owner.
    """

    name: str
    guarded: bool
    serves: bool
    device: torch.device
    page_bytes: int
    capacity: int
    names: dict[int, str]

    def allocate(self, nbytes: int, *, extra: bool = False) -> int:
        """Return a new region of ``nbytes`` without content or fast memory.

        Args:
            nbytes: at least one.
            extra: it is not counted in the spill file's minimum size. The file grows, so that the
                counted regions keep their room.

        Raises:
            BudgetError: the region alone is larger than the pool.
            SpillError: the spill file cannot grow.
        """

    def allocate_row(self, count: int, nbytes: int, *, extra: bool = False) -> list[int]:
        """Return ``count`` new regions of ``nbytes`` that form a row, which one storage spans.

        Args:
            count: at least one.
            nbytes: of each, a multiple of `page_bytes`.
            extra: as for `allocate`.

        Raises:
            BudgetError: a region alone is larger than the pool.
            SpillError: the spill file cannot grow.
        """

    def row_storage(self, regions: Sequence[int]) -> torch.UntypedStorage:
        """Return the storage over a whole row, in addition to those of its regions."""

    def release(self, region: int) -> None:
        """End a region and discard its bytes. The regions of a row must end together."""

    def discard(self, region: int) -> None:
        """Discard a region's bytes; the region remains, without content."""

    def clear(self, regions: Sequence[int]) -> None:
        """Set regions to zeros, which takes no fast memory and moves no byte.

        Raises:
            SpillError: the file system cannot keep zeros unwritten, and writing them fails.
        """

    def is_clear(self, regions: Sequence[int]) -> list[bool]:
        """Return for each cleared region whether it still holds only zeros; False if unknown, as
        when finding out takes a read from a lower tier."""

    def storage(self, region: int) -> torch.UntypedStorage:
        """Return the storage whose bytes are the region's; its address is fixed where the device
        `serves` accesses."""

    def owner(self, held: torch.Tensor | torch.UntypedStorage) -> int:
        """Return the region that contains the first byte of a tensor or storage, or -1."""

    def owners(self, tensor: torch.Tensor) -> list[int]:
        """Return the regions that have bytes between the first and the last of ``tensor``,
        ascending."""

    def begins(self, tensor: torch.Tensor, region: int) -> bool:
        """Return whether the first byte of ``tensor`` is the first of ``region``."""

    def size(self, region: int) -> int:
        """Return the fast memory that ``region`` takes while resident; 0 if it does not exist."""

    def nbytes(self, region: int) -> int:
        """Return the bytes of content that ``region`` has room for, present or not."""

    def padded(self, nbytes: int) -> int:
        """Return the fast memory that a region of ``nbytes`` takes."""

    def acquire(self, regions: Sequence[int], *, pin: bool = False) -> None:
        """Wait until all ``regions`` are present; pin them if ``pin``.

        Raises:
            BackendError: a region is locked, or the kernel holds its pages.
            BudgetError: the regions do not fit the pool together, or the rest stays pinned.
            SpillError: the spill file cannot be read, or not written to make room.
        """

    def unpin(self, regions: Sequence[int]) -> None:
        """Unpin regions."""

    def touch(self, regions: Sequence[int]) -> None:
        """Make as many regions as fit together present. The pager only installs regions that are
        already staged, and does not wait.

        Raises:
            SpillError: the spill file cannot be read or written.
        """

    def lock(self, regions: Sequence[int]) -> None:
        """Make every access to the regions wait until `unlock`; only where `guarded`.

        Raises:
            BackendError: the kernel holds a region's pages; none is locked.
        """

    def unlock(self, regions: Sequence[int]) -> None:
        """Allow accesses again."""

    def follow(self, uses: Sequence[Use], schedule: Schedule) -> None:
        """Prefetch and evict by ``schedule``, from position 0."""

    def advance(self, position: int) -> None:
        """Report that use ``position`` of the plan begins."""

    def reserve(self, nbytes: int) -> None:
        """Keep ``nbytes`` of the pool free of prefetches, for unpredicted accesses."""

    def resident(self) -> list[int]:
        """Return the regions that take fast memory now."""

    def resident_bytes(self) -> int:
        """Return the fast memory in use now."""

    def taken_bytes(self) -> int:
        """Return the process memory that the pool takes now, in use or empty."""

    def allocated_bytes(self) -> int:
        """Return the process's peak bytes of fast memory since the last call, by the allocator's
        count, regions and all else; 0 if there is no count."""

    def spill_bytes(self) -> int:
        """Return the disk bytes that the spill file takes."""

    def counters(self) -> Counters:
        """Return the totals.

        Raises:
            SpillError: a transfer failed since the last call; nothing was lost.
        """

    def events(self) -> list[Event]:
        """Return and clear the events since the last call."""

    def keep(self, region: int) -> bool:
        """Turn a region's storage into an ordinary one, in place and with its bytes, outside the
        budget. Return False, and leave it paged, if there is no room or the device cannot."""

    def below(self, region: int) -> torch.UntypedStorage | None:
        """Return a region's bytes as an ordinary CPU storage over the host memory that holds them,
        outside the budget; the region then has no content. Return None if there is no such memory,
        or it cannot be given away."""

    def retire(self) -> int:
        """Close once no other reference to a storage is left, at once if there is none.

        Returns:
            How many storages are still referenced. They can be read and written until then.
        """

    def close(self) -> None:
        """Release all memory and the spill file; no storage may be used afterwards."""
