"""The streams of a real accelerator, through `torch.accelerator`.

[Note: fragments]  Regions of many sizes come and go, and torch's allocator splits the blocks that
it keeps. So the memory that it keeps and cannot use grows. Once it reserves the budget plus
`_SLACK` of it, whole unused blocks are released. That waits for the accelerator, and allocating
memory again takes time, so it is not done for less.

[Note: other streams]  The compute stream is the current one. When the user changes it, the new one
waits for all work enqueued on the last one, from the next requested event on. Operators that need
no copy request no event: a user of two streams must make each wait for the other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from dynoffload.errors import BackendError
from dynoffload.memory.accelerator.pinned import HostMemory
from dynoffload.memory.accelerator.streams import Bytes, Streams, hidden, lacking

_SLACK = 0.125
_ORIGIN_S = 600.0


class _Event:
    """A `StreamEvent` of torch."""

    def __init__(self, stream: torch.Stream, *, timed: bool = False) -> None:
        self._event = torch.Event(stream.device, enable_timing=timed)
        self._event.record(stream)

    def reached(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def hold(self, stream: torch.Stream) -> None:
        """Make ``stream`` wait for it."""
        stream.wait_event(self._event)

    def since(self, other: _Event) -> float:
        """Return the seconds since another event; both must be timed and reached."""
        return float(other._event.elapsed_time(self._event)) / 1e3


class _Timed(_Event):
    """A `CopyEvent`, or the end of a wait.

    Args:
        begin: a timed event.
        stream: its current point is the end.
        origin: a timed event that was reached at ``clock``.
        clock: seconds on `time.perf_counter`'s clock.
    """

    def __init__(self, begin: _Event, stream: torch.Stream, origin: _Event, clock: float) -> None:
        super().__init__(stream, timed=True)
        self._begin, self._origin, self._clock = begin, origin, clock

    def span(self) -> tuple[float, float] | None:
        if not self.reached():
            return None
        begin = self._clock + self._begin.since(self._origin)
        return begin, begin + self.since(self._begin)


def open_streams(device: torch.device) -> Streams:
    """Return the streams of an accelerator.

    Raises:
        BackendError: there is no such accelerator.
    """
    return TorchStreams(device)


class TorchStreams:
    """`Streams` of the accelerator on which a device's tensors are.

    Args:
        device: of the type that `torch.accelerator` names.

    Raises:
        BackendError: there is no such accelerator, or it has no streams with timed events.
    """

    def __init__(self, device: torch.device) -> None:
        here = torch.accelerator.current_accelerator(check_available=True)
        if here is None or here.type != device.type:
            if here is None:
                why = (
                    f"torch {torch.__version__} finds no accelerator here, or was built for none: "
                    "leave device= out (--device, on the command line) to train on the CPU"
                )
            else:
                why = f"torch has {here.type!r} as its accelerator: pass device={here.type!r}"
            raise BackendError(f"parameters are to be on {str(device)!r}, but {why}")
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        count = torch.accelerator.device_count()
        if index >= count:  # some backends end the process for such an index
            raise BackendError(
                f"parameters are to be on {str(device)!r}, but torch finds {count} of "
                f"{here.type!r} here: pass device='{here.type}', or a number below {count} with it"
            )
        self.device = torch.device(device.type, index)
        self.name = str(self.device)
        self._host = HostMemory(self.device)
        self._copying = threading.Lock()  # a stream is entered by one thread at a time
        self._last: torch.Stream | None = None  # the last compute stream
        self.pinned = True
        try:
            self._in, self._out = torch.Stream(self.device), torch.Stream(self.device)
            self._set_origin()
        except RuntimeError as error:
            raise lacking(self.device, "streams with timed events", error) from error

    def _set_origin(self) -> None:
        """Time copies relative to now."""
        self._origin = _Event(self._compute(), timed=True)
        self._origin.wait()
        self._clock = time.perf_counter()

    # Events

    def now(self) -> _Event:
        """See `Streams.now`."""
        return _Event(self._compute())

    def after(self, event: Any) -> _Timed:
        """See `Streams.after`."""
        stream = self._compute()
        begin = _Event(stream, timed=True)
        event.hold(stream)
        return _Timed(begin, stream, self._origin, self._clock)

    def _compute(self) -> torch.Stream:
        """Return the stream of the calling thread; see [Note: other streams]."""
        stream = torch.accelerator.current_stream(self.device)
        if self._last is not None and stream.stream_id != self._last.stream_id:
            _Event(self._last).hold(stream)
        self._last = stream
        return stream

    # Memory of the accelerator

    def fill(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """See `Streams.fill`."""
        storage.resize_(nbytes)

    def empty(self, storage: torch.UntypedStorage) -> None:
        """See `Streams.empty`. The allocator reuses it for later work of the same stream only."""
        self._compute()  # after what another stream has done with it
        storage.resize_(0)

    def peak_bytes(self) -> int:
        """See `Streams.peak_bytes`."""
        peak = self._count("allocated_bytes", "peak")
        torch.accelerator.reset_peak_memory_stats(self.device)
        if time.perf_counter() - self._clock > _ORIGIN_S:  # elapsed time is a 32-bit float
            self._set_origin()
        return peak

    def given_bytes(self) -> int:
        """See `Streams.given_bytes`."""
        return self._count("allocated_bytes")

    def free_bytes(self) -> int:
        """See `Streams.free_bytes`."""
        free, total = torch.accelerator.get_memory_info(self.device)
        reserved = self._count("reserved_bytes")
        if self.device.type == "cuda":  # a process may be limited to a share of it
            share = torch.cuda.get_per_process_memory_fraction(self.device)
            free = min(int(free), int(share * total) - reserved)
        return max(0, int(free)) + self._kept_bytes()

    def trim(self, limit: int) -> None:
        """See `Streams.trim`."""
        slack = int(_SLACK * limit)
        reserved = self._count("reserved_bytes")
        if reserved > limit + slack and self._kept_bytes() > slack:
            torch.accelerator.empty_cache()

    def _kept_bytes(self) -> int:
        return self._count("reserved_bytes") - self._count("allocated_bytes")

    def _count(self, what: str, when: str = "current") -> int:
        """Return bytes that the allocator counts. `torch.accelerator` has the same, but it copies
        all counts into a flat dictionary first, which takes seven times as long."""
        if not torch._C._accelerator_isAllocatorInitialized():
            return 0
        return int(torch._C._accelerator_getDeviceStats(self.device.index)[what]["all"][when])

    # Copies

    def copy_in(self, target: Bytes, source: torch.Tensor, after: Sequence[Any]) -> _Timed:
        """See `Streams.copy_in`."""
        return self._copy(self._in, target, source, after)

    def copy_out(self, target: torch.Tensor, source: Bytes, after: Sequence[Any]) -> _Timed:
        """See `Streams.copy_out`."""
        return self._copy(self._out, target, source, after)

    def _copy(
        self, stream: torch.Stream, target: Bytes, source: Bytes, after: Sequence[Any]
    ) -> _Timed:
        # Hidden from guards, which would take it for a use, on the compute stream.
        with self._copying, hidden(), torch.no_grad():
            for event in after:
                event.hold(stream)
            begin = _Event(stream, timed=True)
            with stream:
                _bytes_of(target).copy_(_bytes_of(source), non_blocking=True)
            return _Timed(begin, stream, self._origin, self._clock)

    # Host memory

    def host(self, nbytes: int) -> torch.Tensor:
        """See `Streams.host`."""
        memory = self._host.take(nbytes)
        self.pinned = self._host.pinned
        return memory

    def release(self, memory: torch.Tensor, *, held: bool) -> None:
        """See `Streams.release`. A mapping is freed with the last tensor over it."""
        self._host.give_back(memory)


def _bytes_of(storage: Bytes) -> torch.Tensor:
    if isinstance(storage, torch.Tensor):
        return storage
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
