"""Copies gradients to host memory: by an accelerator's streams, or synchronously from a CPU.

Uploads need no stream of their own: they run as operators on the calling thread.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence

import torch

from dynoffload.errors import ConfigError
from dynoffload.memory.accelerator.streams import StreamEvent, Streams
from dynoffload.memory.accelerator.torch_streams import open_streams


class Done:
    """A `StreamEvent` that has already occurred."""

    def reached(self) -> bool:
        """See `StreamEvent.reached`."""
        return True

    def wait(self) -> None:
        """See `StreamEvent.wait`."""


class CpuLink:
    """The subset of `Streams` used here, for parameters on the CPU. Each copy is complete when it
    returns."""

    name = "CPU"
    device = torch.device("cpu")

    def now(self) -> StreamEvent:
        """See `Streams.now`."""
        return Done()

    def copy_out(
        self, target: torch.Tensor, source: torch.Tensor, after: Sequence[StreamEvent]
    ) -> StreamEvent:
        """See `Streams.copy_out`."""
        with torch.no_grad():
            target.copy_(source)
        return Done()

    def host(self, nbytes: int) -> torch.Tensor:
        """See `Streams.host`."""
        try:
            mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(error.strerror) from error
        return torch.frombuffer(mapping, dtype=torch.uint8)

    def release(self, memory: torch.Tensor, *, held: bool) -> None:
        """See `Streams.release`; the mapping ends with the last tensor that uses it."""


Link = Streams | CpuLink


def open_link(parameters: Iterable[torch.Tensor], device: torch.device | str | None) -> Link:
    """Return the link to ``device``, or to the device that the first parameter is on.

    Raises:
        BackendError: there is no such accelerator.
        ConfigError: ``device`` names no device.
    """
    if device is None:
        device = next((p.device for p in parameters if not p.is_meta), torch.device("cpu"))
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"device={device!r} is no device: pass 'cpu', or what "
            "torch.accelerator.current_accelerator() names, such as 'cuda'"
        ) from error
    return CpuLink() if device.type == "cpu" else open_streams(device)
