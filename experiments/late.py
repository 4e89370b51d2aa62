"""Randomly delayed streams over poisoned memory: races become wrong results.

Before some copies, scratch copies are enqueued on the same stream; before some events of the
compute stream, extra work is. Memory is filled with `POISON` when it is allocated and when it is
released, in compute-stream order; host memory too. So a read that is too early or too late, or
memory allocated twice, computes with poison. A race that changes no result is not detected; the
tests' emulated accelerator finds those.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from dynoffload.memory.accelerator.streams import CopyEvent, StreamEvent, Streams

POISON = 0xFB
"""Value of each byte: as float32 -2.6e36, as an index far out of range."""
_COPIES, _PRODUCTS = 8, 12  # maximum scratch copies before a copy, and products before an event
WIDTH = 512
"""Of the matrices that keep the compute stream busy."""


class Late:
    """`Streams` with random delays; other methods are delegated to the accelerator's streams.

    Args:
        streams: of the accelerator.
        seed: of the delays.
        scratch: bytes of the delaying copies.

    Attributes:
        delays: number of delays so far.
    """

    def __init__(self, streams: Streams, seed: int, scratch: int) -> None:
        self._streams, self._random = streams, random.Random(seed)
        self.name, self.delays = f"{streams.name}, late", 0
        self._storages = [
            torch.UntypedStorage(0, device=streams.device)  # type: ignore[no-untyped-call]
            for _ in range(2)
        ]
        for storage in self._storages:
            self.fill(storage, scratch)
        self._memory = [streams.host(scratch) for _ in range(2)]
        self._matrix = torch.zeros(WIDTH, WIDTH, device=streams.device)
        self._last: dict[str, StreamEvent] = {}  # direction -> the end of its last scratch copy

    @staticmethod
    def taken_bytes(scratch: int) -> int:
        """Return the bytes of the accelerator that the delays take."""
        return 2 * scratch + 4 * WIDTH**2

    def __getattr__(self, name: str) -> Any:
        return getattr(self._streams, name)

    def close(self) -> None:
        """Release the scratch memory, once no copy uses it."""
        for event in self._last.values():
            self._streams.after(event)
            event.wait()
        for storage, memory in zip(self._storages, self._memory, strict=True):
            self._streams.empty(storage)
            self._streams.release(memory, held=False)

    def now(self) -> StreamEvent:
        """See `Streams.now`; preceded by random extra work."""
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            for _ in range(self._draw(_PRODUCTS)):
                torch.mm(self._matrix, self._matrix, out=self._matrix)
        return self._streams.now()

    def fill(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """See `Streams.fill`; the memory holds poison."""
        self._streams.fill(storage, nbytes)
        _poison(storage)

    def empty(self, storage: torch.UntypedStorage) -> None:
        """See `Streams.empty`; the memory is poisoned first."""
        _poison(storage)
        self._streams.empty(storage)

    def host(self, nbytes: int) -> torch.Tensor:
        """See `Streams.host`; the memory holds poison."""
        return self._streams.host(nbytes).fill_(POISON)

    def release(self, memory: torch.Tensor, *, held: bool) -> None:
        """See `Streams.release`; the memory is poisoned first unless it is held."""
        if not held:
            memory.fill_(POISON)
        self._streams.release(memory, held=held)

    def copy_in(self, target: Any, source: torch.Tensor, after: Sequence[StreamEvent]) -> CopyEvent:
        """See `Streams.copy_in`; preceded by random scratch copies."""
        for _ in range(self._draw(_COPIES)):
            self._last["in"] = self._streams.copy_in(self._storages[0], self._memory[0], after)
        return self._streams.copy_in(target, source, after)

    def copy_out(
        self, target: torch.Tensor, source: Any, after: Sequence[StreamEvent]
    ) -> CopyEvent:
        """See `Streams.copy_out`; preceded by random scratch copies."""
        for _ in range(self._draw(_COPIES)):
            self._last["out"] = self._streams.copy_out(self._memory[1], self._storages[1], after)
        return self._streams.copy_out(target, source, after)

    def _draw(self, most: int) -> int:
        """Return the number of delaying operations: zero in half of all cases."""
        if self._random.random() < 0.5:
            return 0
        count = self._random.randint(1, most)
        self.delays += 1
        return count


def _poison(storage: torch.UntypedStorage) -> None:
    """Fill a storage with poison in compute-stream order, hidden from dispatch modes."""
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
        empty.set_(storage).fill_(POISON)
