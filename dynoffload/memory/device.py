"""What a device offers the runtime: a pool of fast memory and regions that move in and out of it.

The runtime speaks only this protocol. It never learns how an absent region is kept from being
read: the pager sleeps the reader in the kernel, the mapped file lets the kernel read, an
accelerator needs its regions made present first. What differs above is one fact, `guarded`.
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

    `events_lost` were more than a device keeps between two calls of `Device.events`.
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
    """Return what messages call a region."""
    return f"{names.get(region, f'region {region}')} ({format_bytes(nbytes)})"


class Device(Protocol):
    """Fast memory of a fixed size, and regions that a spill file backs.

    Attributes:
        name: what the plan line calls it.
        guarded: an access to a locked region waits until its owner unlocks it. The pager reports
            the access by `Pager.handed`; an accelerator calls `Accelerator.on_locked`.
        serves: an access to an absent region waits until it is present, whoever makes it; where it
            does not, whoever is about to make one has to say so, and storages are empty meanwhile.
        device: where torch has the regions' tensors.
        page_bytes: regions are padded to this.
        capacity: bytes of the pool; never exceeded.
        names: what messages call regions; filled by their owner.
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
            extra: it was not counted in what the spill file will take at least, so it must not take
                the room of what was, and the file grows.

        Raises:
            BudgetError: the region alone is larger than the pool.
            SpillError: the spill file cannot grow.
        """

    def allocate_row(self, count: int, nbytes: int, *, extra: bool = False) -> list[int]:
        """Return ``count`` new regions of ``nbytes`` whose addresses follow one another.

        Args:
            count: at least one.
            nbytes: of each, a multiple of `page_bytes`.
            extra: as for `allocate`.

        Raises:
            BudgetError: a region alone is larger than the pool.
            SpillError: the spill file cannot grow.
        """

    def row_storage(self, regions: Sequence[int]) -> torch.UntypedStorage:
        """Return the storage over a whole row, beside those of its regions."""

    def release(self, region: int) -> None:
        """End a region; its bytes are forgotten. The regions of a row end together."""

    def discard(self, region: int) -> None:
        """Forget a region's bytes; it stays, without content."""

    def clear(self, regions: Sequence[int]) -> None:
        """Let regions hold zeros, which takes no fast memory and moves no byte.

        Raises:
            SpillError: zeros cannot be written where the file system keeps none unwritten.
        """

    def is_clear(self, regions: Sequence[int]) -> list[bool]:
        """Return of each region that was cleared whether it holds only zeros still; in doubt, as
        where the answer would have to be read from below, it is not clear."""

    def storage(self, region: int) -> torch.UntypedStorage:
        """Return the storage whose bytes are the region's; where the device serves accesses, at the
        same address for life."""

    def owner(self, held: torch.Tensor | torch.UntypedStorage) -> int:
        """Return the region that has the first byte of a tensor or storage, or -1."""

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
        """Wait until all ``regions`` are present; hold them there if ``pin``.

        Raises:
            BackendError: a region is locked, or the kernel holds its pages.
            BudgetError: the regions do not fit the pool together, or the rest stays pinned.
            SpillError: the spill file cannot be read, or not written to make room.
        """

    def unpin(self, regions: Sequence[int]) -> None:
        """Let go of pinned regions."""

    def touch(self, regions: Sequence[int]) -> None:
        """Make the regions usable, as many as fit together: present, or where the device serves
        accesses to what is absent, with what is at hand finished and no wait for the rest.

        Raises:
            SpillError: the spill file cannot be read or written.
        """

    def lock(self, regions: Sequence[int]) -> None:
        """Let every access to the regions wait until `unlock`; only where `guarded`.

        Raises:
            BackendError: the kernel holds a region's pages; none is locked.
        """

    def unlock(self, regions: Sequence[int]) -> None:
        """Admit accesses again."""

    def follow(self, uses: Sequence[Use], schedule: Schedule) -> None:
        """Prefetch and evict by ``schedule`` from position 0 on."""

    def advance(self, position: int) -> None:
        """Use ``position`` of what is followed begins."""

    def reserve(self, nbytes: int) -> None:
        """Keep ``nbytes`` of the pool free of prefetches, for accesses nobody predicted."""

    def resident(self) -> list[int]:
        """Return the regions that take fast memory now."""

    def resident_bytes(self) -> int:
        """Return the fast memory in use now."""

    def taken_bytes(self) -> int:
        """Return the memory that the process has for the pool now, in use or empty."""

    def allocated_bytes(self) -> int:
        """Return the most bytes of fast memory that all of the process has taken since the last
        call, regions and all else, by the count of who gives it; 0 where nobody counts."""

    def spill_bytes(self) -> int:
        """Return the bytes that the spill file takes on its disk."""

    def counters(self) -> Counters:
        """Return the totals.

        Raises:
            SpillError: a transfer failed since the last call; nothing was lost.
        """

    def events(self) -> list[Event]:
        """Return and forget what happened since the last call."""

    def keep(self, region: int) -> bool:
        """Have a region's storage be an ordinary one from now on, with the bytes that it has and
        where it is, under no budget; False, and nothing is done, where there is no room for that,
        or none can be."""

    def below(self, region: int) -> torch.UntypedStorage | None:
        """Return a region's bytes as an ordinary storage of the CPU, made of the memory that the
        device has for them there, under no budget; the region has no content then. None, and
        nothing is done, where there is none."""

    def retire(self) -> int:
        """Close as soon as nobody else holds a storage, at once if nobody does.

        Returns:
            How many storages are still held. Until they are gone they can be read and written.
        """

    def close(self) -> None:
        """Give all memory and the spill file back; no storage may be used any more."""
