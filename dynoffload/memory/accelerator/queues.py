"""What an accelerator offers beside its memory: queues of work, moments in them, and copies.

Work that is given to an accelerator is done later, in the order of the queue that it was given to;
queues know of each other only what they are told. `Queues` is all that `Accelerator` knows of one:
the *compute* queue is the one on which torch runs operators for the calling thread, and there is
one queue for copies in each direction. `dynoffload.memory.accelerator.streams` makes them of
torch's streams; tests make them of threads, with delays, and find every moment that was not waited
for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from dynoffload.errors import BackendError


class Moment(Protocol):
    """A place in a queue: it is reached when all that was given to the queue before is done."""

    def reached(self) -> bool:
        """Return whether it is reached by now."""

    def wait(self) -> None:
        """Hold the calling thread until it is reached."""


class Copied(Moment, Protocol):
    """The end of a copy."""

    def span(self) -> tuple[float, float] | None:
        """Return when the copy began and ended, on `time.perf_counter`'s clock; None while it is
        under way."""


class Lag(Protocol):
    """How long the compute queue stood still for a moment of another."""

    def seconds(self) -> float | None:
        """Return the seconds; None while nobody knows."""


class Queues(Protocol):
    """The queues of one accelerator.

    Attributes:
        name: what plan lines and errors call the accelerator.
        device: where its tensors are.
        pinned: whether `host` gives memory that copies pass through without another copy.
    """

    name: str
    device: torch.device
    pinned: bool

    def now(self) -> Moment:
        """Return the moment after all that the compute queue has been given."""

    def after(self, moment: Moment) -> Lag:
        """Let what the compute queue is given from now on begin after ``moment``."""

    def fill(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Give an empty storage memory, whose bytes anything may be, for the compute queue.

        Raises:
            torch.OutOfMemoryError: the accelerator has none left.
        """

    def empty(self, storage: torch.UntypedStorage) -> None:
        """Take a storage's memory back, for what the compute queue is given from now on."""

    def copy_in(
        self,
        target: torch.UntypedStorage | torch.Tensor,
        source: torch.Tensor,
        after: Sequence[Moment],
    ) -> Copied:
        """Copy host memory into a storage, on the queue for that, once ``after`` are reached.

        Args:
            target: of the accelerator; or a part of a storage, as a tensor like ``source``.
            source: uint8 of the same size, of what `host` has given; it must stay as it is until
                the moment that is returned.
        """

    def copy_out(
        self,
        target: torch.Tensor,
        source: torch.UntypedStorage | torch.Tensor,
        after: Sequence[Moment],
    ) -> Copied:
        """Copy a storage, or a part of one, into host memory, on the queue for that, once ``after``
        are reached."""

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
        in all; see [Note: fragments] in `streams`."""


def check_paging(queues: Queues) -> None:
    """Try what a backend of torch may lack and paging needs, before anything is touched.

    Raises:
        BackendError: it lacks something.
    """
    storage = torch.UntypedStorage(0, device=queues.device)  # type: ignore[no-untyped-call]
    needed: list[tuple[str, Callable[[], Any]]] = [
        ("torch.accelerator.memory_stats", queues.given_bytes),
        ("torch.accelerator.get_memory_info", queues.free_bytes),
        ("UntypedStorage.resize_ to more bytes", lambda: queues.fill(storage, 64)),
        ("UntypedStorage.resize_ to no bytes", lambda: queues.empty(storage)),
    ]
    for what, call in needed:
        try:
            call()
        except RuntimeError as error:
            raise lacking(queues.device, what, error) from error


def lacking(device: torch.device, what: str, error: RuntimeError) -> BackendError:
    """Return the error for a device whose backend of torch lacks ``what``."""
    said = str(error).partition("\n")[0]
    return BackendError(
        f"dynoffload needs {what} on {str(device)!r}, and it fails there ({said}): use a release "
        "of that backend which has it, or leave device= out to train on the CPU"
    )
