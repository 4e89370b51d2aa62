"""What paging needs of an accelerator beside its memory: streams, events in them, and copies.

Work that is given to an accelerator is done later, in the order of its stream; streams know of each
other only by the events that they wait for. The *compute* stream is the one on which torch runs
operators for the calling thread, and there is one stream for copies in each direction.
`torch_streams` implements this for real accelerators. Tests implement it with threads and vector
clocks, which find every event that was not waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from dynoffload.errors import BackendError

Bytes = torch.UntypedStorage | torch.Tensor
"""A storage of the accelerator, or a part of one as a tensor of bytes."""


class StreamEvent(Protocol):
    """A place in a stream, reached when all that the stream was given before is done."""

    def reached(self) -> bool:
        """Return whether it is reached by now."""

    def wait(self) -> None:
        """Hold the calling thread until it is reached."""


class TimedEvent(Protocol):
    """The end of a copy or of a wait whose time is measured."""

    def span(self) -> tuple[float, float] | None:
        """Return its begin and end on `time.perf_counter`'s clock; None until it is over."""


class CopyEvent(StreamEvent, TimedEvent, Protocol):
    """The end of a copy."""


class Streams(Protocol):
    """The streams of one accelerator.

    Attributes:
        name: what plan lines and errors call the accelerator.
        device: where its tensors are.
        pinned: whether `host` gives memory that copies pass through without another copy.
    """

    name: str
    device: torch.device
    pinned: bool

    def now(self) -> StreamEvent:
        """Return an event after all that the compute stream has been given."""

    def after(self, event: StreamEvent) -> TimedEvent:
        """Let the compute stream go on after ``event``; return the wait."""

    def fill(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Give an empty storage memory, whose bytes anything may be, for the compute stream.

        Raises:
            torch.OutOfMemoryError: the accelerator has none left.
        """

    def empty(self, storage: torch.UntypedStorage) -> None:
        """Take a storage's memory back, for what the compute stream is given from now on."""

    def copy_in(
        self, target: Bytes, source: torch.Tensor, after: Sequence[StreamEvent]
    ) -> CopyEvent:
        """Copy host memory into a storage, on the stream for that, once ``after`` are reached.

        Args:
            target: of the accelerator.
            source: uint8 of the same size, of what `host` has given; it must stay as it is until
                the event that is returned.
        """

    def copy_out(
        self, target: torch.Tensor, source: Bytes, after: Sequence[StreamEvent]
    ) -> CopyEvent:
        """Copy a storage, or a part of one, into host memory, on the stream for that, once
        ``after`` are reached."""

    def host(self, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` of host memory that copies can use, uint8, aligned to 4 KiB.

        Raises:
            MemoryError: there is none left.
        """

    def release(self, memory: torch.Tensor, *, held: bool) -> None:
        """Give memory back that `host` has given; no copy of it is under way.

        Args:
            memory: all of it.
            held: others read and write parts of it from now on: it is ordinary memory, theirs."""

    def peak_bytes(self) -> int:
        """Return the most bytes that the accelerator's own allocator had given since the last
        call; 0 where it does not count."""

    def given_bytes(self) -> int:
        """Return the bytes that the accelerator's own allocator has given by now, regions and all
        else; 0 where it does not count."""

    def free_bytes(self) -> int:
        """Return the bytes of the accelerator that the process can still take: those that nobody
        has, and those that its own allocator keeps unused."""

    def trim(self, limit: int) -> None:
        """Hand memory that the allocator keeps unused back, if it has far more than ``limit`` bytes
        in all; see [Note: fragments] in `torch_streams`."""


def check_paging(streams: Streams) -> None:
    """Try what a backend of torch may lack and paging needs, before anything is touched.

    Raises:
        BackendError: it lacks something.
    """
    storage = torch.UntypedStorage(0, device=streams.device)  # type: ignore[no-untyped-call]
    needed: list[tuple[str, Callable[[], Any]]] = [
        ("torch.accelerator.memory_stats", streams.given_bytes),
        ("torch.accelerator.get_memory_info", streams.free_bytes),
        ("UntypedStorage.resize_ to more bytes", lambda: streams.fill(storage, 64)),
        ("UntypedStorage.resize_ to no bytes", lambda: streams.empty(storage)),
    ]
    for what, call in needed:
        try:
            call()
        except RuntimeError as error:
            raise lacking(streams.device, what, error) from error


def lacking(device: torch.device, what: str, error: RuntimeError) -> BackendError:
    """Return the error for a device whose backend of torch lacks ``what``."""
    said = str(error).partition("\n")[0]
    return BackendError(
        f"dynoffload needs {what} on {str(device)!r}, and it fails there ({said}): use a release "
        "of that backend which has it, or leave device= out to train on the CPU"
    )
