"""The protocol of an accelerator's streams: events, copies, and memory for them.

Work that is enqueued on an accelerator runs later, in the order of its stream; streams are ordered
among each other only by the events that they wait for. The *compute* stream is the one on which
torch runs operators for the calling thread, and there is one stream for copies in each direction.
`torch_streams` implements this for real accelerators. Tests implement it with threads and vector
clocks, which detect every missing wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from dynoffload.errors import BackendError

Bytes = torch.UntypedStorage | torch.Tensor
"""A storage of the accelerator, or a part of one as a uint8 tensor."""


class StreamEvent(Protocol):
    """A point in a stream, reached when all work enqueued before it is done."""

    def reached(self) -> bool:
        """Return whether it has been reached."""

    def wait(self) -> None:
        """Block the calling thread until it is reached."""


class TimedEvent(Protocol):
    """The end of a copy or of a wait whose time is measured."""

    def span(self) -> tuple[float, float] | None:
        """Return its begin and end on `time.perf_counter`'s clock; None until it has ended."""


class CopyEvent(StreamEvent, TimedEvent, Protocol):
    """The end of a copy."""


class Streams(Protocol):
    """The streams of one accelerator.

    Attributes:
        name: of the accelerator, in plan lines and errors.
        device: the torch device of its tensors.
        pinned: whether `host` returns pinned memory, which copies use without a staging copy.
    """

    name: str
    device: torch.device
    pinned: bool

    def now(self) -> StreamEvent:
        """Return an event after all work enqueued on the compute stream."""

    def after(self, event: StreamEvent) -> TimedEvent:
        """Make the compute stream wait for ``event``; return the end of the wait."""

    def fill(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Allocate uninitialized memory for an empty storage, for use by the compute stream.

        Raises:
            torch.OutOfMemoryError: the accelerator has none left.
        """

    def empty(self, storage: torch.UntypedStorage) -> None:
        """Free a storage's memory, for reuse by later work of the compute stream."""

    def copy_in(
        self, target: Bytes, source: torch.Tensor, after: Sequence[StreamEvent]
    ) -> CopyEvent:
        """Copy host memory into a storage, on the stream for that, once ``after`` are reached.

        Args:
            target: of the accelerator.
            source: uint8 of the same size, memory from `host`; it must not change until the
                returned event is reached.
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
        """Release memory from `host`; no copy from or to it may be under way.

        Args:
            memory: all of it.
            held: other storages go on using parts of it, as ordinary memory."""

    def peak_bytes(self) -> int:
        """Return the peak bytes allocated by the accelerator's own allocator since the last call;
        0 if it does not count."""

    def given_bytes(self) -> int:
        """Return the bytes that the accelerator's own allocator has allocated now, regions and all
        else; 0 if it does not count."""

    def free_bytes(self) -> int:
        """Return the bytes of the accelerator that the process can still take: free ones, and those
        that its own allocator keeps unused."""

    def trim(self, limit: int) -> None:
        """Release memory that the allocator keeps unused, if it has far more than ``limit`` bytes
        in all; see [Note: fragments] in `torch_streams`."""


def hidden() -> AbstractContextManager[Any]:
    """Return a context in which no dispatch mode sees operators, and no transform of
    ``torch.func``, which would differentiate them."""
    transforms = torch._C._functorch.peek_interpreter_stack() is not None
    return _outside_transforms() if transforms else torch._C._DisableTorchDispatch()


@contextmanager
def _outside_transforms() -> Iterator[None]:
    with temporarily_clear_interpreter_stack(), torch._C._DisableTorchDispatch():
        yield


def check_paging(streams: Streams) -> None:
    """Probe what paging needs and a backend of torch may lack, before anything is changed.

    Raises:
        BackendError: the backend lacks it.
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
