"""Streams that are late at random, over memory that is poisoned: races become wrong results.

`Late` wraps the queues of any accelerator. Before some copies it puts others, of scratch memory, on
the same queue; before some moments of the compute queue it puts work there. Memory is filled with
`POISON` as it is given and as it is taken back, in the order of the compute queue, and host memory
as well. Whoever reads too early or too late, or has memory given to two at once, computes with
poison. What is late is drawn from a seed, and a race that changes nothing is not seen.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from dynoffload.memory.accelerator.streams import CopyEvent, StreamEvent, Streams, TimedEvent

POISON = 0xFB
"""Of each byte: as float32 -2.6e36, as an index far outside."""
_COPIES, _PRODUCTS = 8, 12  # at most, of scratch before one copy and before one moment
WIDTH = 512
"""Of the matrices that keep the compute queue busy."""


class Late:
    """`Streams` that are late.

    Args:
        queues: of the accelerator.
        seed: of what is late, and by how much.
        scratch: bytes of the copies that make others late.

    Attributes:
        delays: how often something was made late.
    """

    def __init__(self, queues: Streams, seed: int, scratch: int) -> None:
        self._queues, self._random = queues, random.Random(seed)
        self.name, self.device = f"{queues.name}, late", queues.device
        self.pinned, self.delays = queues.pinned, 0
        self._in = self._storage(scratch)
        self._out = self._storage(scratch)
        self._from, self._to = queues.host(scratch), queues.host(scratch)
        self._matrix = torch.zeros(WIDTH, WIDTH, device=queues.device)
        self._last: dict[str, StreamEvent] = {}  # direction -> the end of its last scratch copy

    def close(self) -> None:
        """Give the scratch memory back, once nothing uses it."""
        for moment in self._last.values():
            self._queues.after(moment)
            moment.wait()
        for storage in (self._in, self._out):
            self._queues.empty(storage)
        for memory in (self._from, self._to):
            self._queues.release(memory, held=False)

    # Moments

    def now(self) -> StreamEvent:
        """See `Streams.now`; what came before may take longer."""
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            for _ in range(self._draw(_PRODUCTS)):
                torch.mm(self._matrix, self._matrix, out=self._matrix)
        return self._queues.now()

    def after(self, event: StreamEvent) -> TimedEvent:
        """See `Streams.after`."""
        return self._queues.after(event)

    # Memory

    def fill(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """See `Streams.fill`; it holds poison."""
        self._queues.fill(storage, nbytes)
        _poison(storage)

    def empty(self, storage: torch.UntypedStorage) -> None:
        """See `Streams.empty`; whoever still reads it reads poison."""
        _poison(storage)
        self._queues.empty(storage)

    def host(self, nbytes: int) -> torch.Tensor:
        """See `Streams.host`; it holds poison."""
        memory = self._queues.host(nbytes)
        self.pinned = self._queues.pinned
        return memory.fill_(POISON)

    def release(self, memory: torch.Tensor, *, held: bool) -> None:
        """See `Streams.release`."""
        if not held:
            memory.fill_(POISON)
        self._queues.release(memory, held=held)

    def peak_bytes(self) -> int:
        """See `Streams.peak_bytes`."""
        return self._queues.peak_bytes()

    def given_bytes(self) -> int:
        """See `Streams.given_bytes`; the scratch memory is among them."""
        return self._queues.given_bytes()

    def free_bytes(self) -> int:
        """See `Streams.free_bytes`."""
        return self._queues.free_bytes()

    def trim(self, limit: int) -> None:
        """See `Streams.trim`."""
        self._queues.trim(limit)

    # Copies

    def copy_in(
        self,
        target: torch.UntypedStorage | torch.Tensor,
        source: torch.Tensor,
        after: Sequence[StreamEvent],
    ) -> CopyEvent:
        """See `Streams.copy_in`; others may come first."""
        for _ in range(self._draw(_COPIES)):
            self._last["in"] = self._queues.copy_in(self._in, self._from, after)
        return self._queues.copy_in(target, source, after)

    def copy_out(
        self,
        target: torch.Tensor,
        source: torch.UntypedStorage | torch.Tensor,
        after: Sequence[StreamEvent],
    ) -> CopyEvent:
        """See `Streams.copy_out`; others may come first."""
        for _ in range(self._draw(_COPIES)):
            self._last["out"] = self._queues.copy_out(self._to, self._out, after)
        return self._queues.copy_out(target, source, after)

    def _draw(self, most: int) -> int:
        """Return how often to delay: not at all in half of all cases."""
        if self._random.random() < 0.5:
            return 0
        count = self._random.randint(1, most)
        self.delays += 1
        return count

    def _storage(self, nbytes: int) -> torch.UntypedStorage:
        storage = torch.UntypedStorage(0, device=self.device)  # type: ignore[no-untyped-call]
        self._queues.fill(storage, nbytes)
        return storage


def _poison(storage: torch.UntypedStorage) -> None:
    """Fill a storage's memory, in the order of the compute queue, out of every mode's sight."""
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
        empty.set_(storage).fill_(POISON)
