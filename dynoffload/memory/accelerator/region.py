"""Tracks which tiers hold the bytes of a region: the accelerator, host memory, a file, or none.

[Note: newest]  Several tiers may have a region's newest bytes at once. A write makes one tier the
only one. A copy adds a tier as soon as it is queued on a stream, and a reader waits for its end. A
region without bytes in any tier has no content. A `zero` region holds zeros and needs no bytes.
"""

from __future__ import annotations

import errno
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from dynoffload.memory.accelerator.storages import RegionStorage
from dynoffload.memory.accelerator.streams import StreamEvent
from dynoffload.memory.region_cache import CachedRegion


class State(Enum):
    """Whether a region takes memory of the accelerator: no, yes, or until its copy out ends."""

    ABSENT = "absent"
    PRESENT = "present"
    LEAVING = "leaving"


class Slot(NamedTuple):
    """A place in host memory: the number of the piece, the first page there, and the pages."""

    piece: int
    page: int
    pages: int


@dataclass(eq=False, slots=True)
class DeviceRegion(CachedRegion):
    """One region.

    Attributes:
        storage: its bytes on the accelerator; empty while it is absent.
        state: whether it takes memory there.
        here: the accelerator has its newest bytes.
        in_host: its slot has them, once ``copied`` is reached.
        in_file: the file has them.
        zero: it holds zeros.
        slot: its place in host memory, or None.
        copied: the last copy from or to the slot, until its end was noticed.
        ready: the end of the copy in, for which the compute stream has not waited yet.
        gone: the end of the copy out, while ``state`` is LEAVING.
        io: a transfer between the slot and the file, until its end was noticed.
        reads: whether ``io`` reads into the slot; else it writes the file.
        error: errno of a failed ``io``, until reported.
        tick: the number of its last use, in the order in which work is enqueued.
    """

    storage: RegionStorage = field(kw_only=True)
    state: State = State.ABSENT
    here: bool = False
    in_host: bool = False
    in_file: bool = False
    zero: bool = False
    slot: Slot | None = None
    copied: StreamEvent | None = None
    ready: StreamEvent | None = None
    gone: StreamEvent | None = None
    io: Future[None] | None = None
    reads: bool = False
    error: int = 0
    tick: int = 0

    @property
    def is_dirty(self) -> bool:
        """Whether only the accelerator has the newest bytes."""
        return self.here and not (self.in_host or self.in_file or self.zero)

    @property
    def has_content(self) -> bool:
        """Whether there are bytes to keep."""
        return self.here or self.in_host or self.in_file

    def written(self) -> None:
        """Mark the accelerator's bytes as the only newest ones."""
        self.here, self.in_host, self.in_file, self.zero = True, False, False, False

    def forget(self) -> None:
        """Discard the content."""
        self.here = self.in_host = self.in_file = self.zero = self.prefetched = False

    def slot_is_idle(self) -> bool:
        """Return whether no transfer uses the slot."""
        if self.copied is not None and self.copied.reached():
            self.copied = None
        return self.copied is None and self.io is None

    def finish(self) -> None:
        """Wait for the slot's file transfer, if any, and record its result."""
        if self.io is None:
            return
        failed, self.io = self.io.exception(), None
        if failed is not None:
            if not isinstance(failed, OSError):
                raise failed
            self.error = failed.errno or errno.EIO
        elif self.reads:
            self.in_host = True
        else:
            self.in_file = self.in_host  # unless it was written on the accelerator meanwhile
