"""How fast the link of an accelerator is, and the tiers below it, as this library uses them.

What it is: `measure_link`: copies between the accelerator and the memory that `Streams.host` gives,
through the queues that a session has, in either direction alone and in both at once; copies from
memory that is not pinned, to compare; how long it takes to pin memory; and the file of the spill
directory. What it is not: a model of any of them. It has never run on a GPU so far.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from dynoffload.memory.accelerator import torch_streams
from dynoffload.memory.accelerator.streams import StreamEvent, Streams
from dynoffload.units import GiB, MiB

_AHEAD = 4  # copies that are given before the first is waited for
_ROUNDS = 3


@dataclass(frozen=True)
class Link:
    """What to measure.

    Attributes:
        device: the accelerator.
        spill_dir: whose file is measured.
        seconds_each: that one measurement takes at least.
        chunk: bytes of a copy.
        pinned: bytes of host memory that are pinned, and measured, at once.
    """

    device: str
    spill_dir: str
    seconds_each: float = 0.5
    chunk: int = 32 * MiB
    pinned: int = 2 * GiB


def measure_link(link: Link) -> dict[str, Any]:
    """Return bytes per second by what was measured.

    Returns:
        ``in_bps`` and ``out_bps`` of one direction alone, ``both_in_bps`` and ``both_out_bps`` of
        both at once, ``pageable_in_bps`` and ``pageable_out_bps`` of memory that is not pinned,
        ``pin_bps`` of pinning memory, whether it is ``pinned``, and ``file_read_bps``,
        ``file_write_bps`` and ``file_mixed_bps`` of the spill directory: the best of its
        measurements, and of the others the median of three.
    """
    from dynoffload.doctor import measure_tiers

    queues = torch_streams.open_streams(torch.device(link.device))
    start = time.perf_counter()
    memory = queues.host(link.pinned)
    pin_s = time.perf_counter() - start
    pair = _Pair(queues, memory, link.chunk)
    try:
        found: dict[str, Any] = {
            "device": queues.name,
            "pinned": queues.pinned,
            "chunk_bytes": link.chunk,
            "pin_bps": link.pinned / pin_s,
            "in_bps": _usual(lambda: pair.rate(link.seconds_each, into=True)),
            "out_bps": _usual(lambda: pair.rate(link.seconds_each, out=True)),
        }
        both = _usual(lambda: pair.rate(link.seconds_each, into=True, out=True))
        found |= {"both_in_bps": both / 2, "both_out_bps": both / 2}
    finally:
        pair.close()
        queues.release(memory, held=False)
    found |= {
        "pageable_in_bps": _usual(lambda: _pageable(queues.device, link, into=True)),
        "pageable_out_bps": _usual(lambda: _pageable(queues.device, link, into=False)),
    }
    tiers = measure_tiers(link.spill_dir, link.seconds_each)
    return found | {
        "file_read_bps": tiers.read_bps,
        "file_write_bps": tiers.write_bps,
        "file_mixed_bps": tiers.mixed_bps,
        "file_direct": tiers.direct,
    }


def _usual(measure: Callable[[], float]) -> float:
    return median(measure() for _ in range(_ROUNDS))


class _Pair:
    """A chunk of the accelerator's memory for each direction, and pinned memory to copy with.

    Args:
        queues: of the accelerator.
        memory: what they copy from and to, a chunk at a time.
        chunk: bytes of a copy.
    """

    def __init__(self, queues: Streams, memory: torch.Tensor, chunk: int) -> None:
        self._queues = queues
        self._chunks: list[torch.Tensor] = [
            memory[begin : begin + chunk] for begin in range(0, len(memory) - chunk + 1, chunk)
        ]
        self._storages = [
            torch.UntypedStorage(0, device=queues.device)  # type: ignore[no-untyped-call]
            for _ in range(2)
        ]
        for storage in self._storages:
            queues.fill(storage, chunk)
        self._given = queues.now()
        self._next = 0

    def rate(self, seconds: float, *, into: bool = False, out: bool = False) -> float:
        """Return the bytes per second of both directions together, where both are asked for.

        As many copies are made in either, by turns, so that each has half of the bytes.
        """
        queues, moments = self._queues, list[StreamEvent]()
        nbytes = 0
        start = time.perf_counter()
        while time.perf_counter() - start < seconds or not nbytes:
            if into:
                moments.append(queues.copy_in(self._storages[0], self._chunk(), [self._given]))
            if out:
                moments.append(queues.copy_out(self._chunk(), self._storages[1], [self._given]))
            nbytes += len(self._chunks[0]) * (into + out)
            while len(moments) > _AHEAD:
                moments.pop(0).wait()
        for moment in moments:
            moment.wait()
        took = time.perf_counter() - start
        for moment in moments[-2:]:  # the last of each direction
            queues.after(moment)
        return nbytes / took

    def _chunk(self) -> torch.Tensor:
        """Return another chunk at each call, so that no two copies under way share one."""
        self._next += 1
        return self._chunks[self._next % len(self._chunks)]

    def close(self) -> None:
        """Give the accelerator's memory back."""
        for storage in self._storages:
            self._queues.empty(storage)


def _pageable(device: torch.device, link: Link, *, into: bool) -> float:
    """Return the bytes per second of plain copies from or to memory that is not pinned."""
    here = torch.ones(link.chunk, dtype=torch.uint8)
    there = torch.ones(link.chunk, dtype=torch.uint8, device=device)
    target, source = (there, here) if into else (here, there)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < link.seconds_each or not count:
        target.copy_(source)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        count += 1
    return count * link.chunk / (time.perf_counter() - start)
