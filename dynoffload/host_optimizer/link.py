"""How gradients reach host memory: the part of an accelerator's queues that is used, and a CPU's.

Uploads need no queue of their own: they are operators of the calling thread.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from dynoffload.errors import ConfigError
from dynoffload.memory.accelerator.streams import StreamEvent
from dynoffload.memory.accelerator.torch_streams import open_streams


class Link(Protocol):
    """What the optimizer uses of `dynoffload.memory.accelerator.streams.Streams`.

    Attributes:
        name: what logs and errors call the device.
        device: where parameters and gradients are.
    """

    name: str
    device: torch.device

    def now(self) -> StreamEvent:
        """See `Streams.now`."""

    def copy_out(
        self, target: torch.Tensor, source: torch.Tensor, after: Sequence[StreamEvent]
    ) -> StreamEvent:
        """See `Streams.copy_out`."""

    def host(self, nbytes: int) -> torch.Tensor:
        """See `Streams.host`."""

    def release(self, memory: torch.Tensor, *, held: bool) -> None:
        """See `Streams.release`."""


class Done:
    """A `StreamEvent` that is reached."""

    def reached(self) -> bool:
        """See `StreamEvent.reached`."""
        return True

    def wait(self) -> None:
        """See `StreamEvent.wait`."""


class CpuLink:
    """A `Link` for parameters on the CPU: each copy is over when it returns."""

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
        """See `Streams.release`: the mapping ends with the last tensor over it."""


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
