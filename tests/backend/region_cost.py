"""What the host takes for an event of an accelerator's pool, by how many regions there are: no
tests here.

    python tests/backend/region_cost.py 500 5000

Time for which it waits is not counted, nor the backend's allocator, which looks at all its blocks.
Each region is a page. The pool holds half of them, host memory with a budget three quarters.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from accelerator import DEVICE

from dynoffload.memory.accelerator.accelerator import Accelerator
from dynoffload.memory.accelerator.pool import PAGE
from dynoffload.memory.accelerator.torch_streams import TorchStreams
from dynoffload.planning.lookahead import LookAhead
from dynoffload.planning.schedule import Use

BATCHES, EVENTS = 5, 80


def _visit(device: Accelerator, region: int, *, writes: bool) -> None:
    device.use([region], [region] if writes else [])
    device.used([region])


class _Streams(TorchStreams):
    """Streams that count the seconds of the allocator."""

    allocating_s = 0.0

    def fill(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        begin = time.thread_time()
        super().fill(storage, nbytes)
        self.allocating_s += time.thread_time() - begin

    def empty(self, storage: torch.UntypedStorage) -> None:
        begin = time.thread_time()
        super().empty(storage)
        self.allocating_s += time.thread_time() - begin


def _microseconds(streams: _Streams, do: Callable[[], object]) -> float:
    """Return the microseconds that this thread works in one call, by the median of batches."""
    taken = []
    for _ in range(BATCHES):
        torch.accelerator.synchronize()
        begin = time.thread_time() - streams.allocating_s
        for _ in range(EVENTS):
            do()
        taken.append((time.thread_time() - streams.allocating_s - begin) / EVENTS * 1e6)
    return statistics.median(taken)


def _planned(device: Accelerator, regions: list[int]) -> Iterator[None]:
    """Follow a plan, in which what is absent comes first."""
    now = set(device.resident())
    order = sorted(regions, key=now.__contains__)
    uses = [Use((region,)) for region in order]
    plan = LookAhead().plan(uses, [PAGE] * (max(regions) + 1), device.capacity, sorted(now), ())
    device.follow(uses, plan)
    for position, region in enumerate(order):
        device.advance(position)
        _visit(device, region, writes=False)
        yield


def _measure(streams: _Streams, device: Accelerator, count: int) -> Iterator[tuple[str, float]]:
    regions = [device.allocate(PAGE) for _ in range(count)]
    for region in regions:
        _visit(device, region, writes=True)
    turns = itertools.cycle(regions)
    yield (
        "one that was written makes way",
        _microseconds(streams, lambda: _visit(device, next(turns), writes=True)),
    )
    for region in regions:
        _visit(device, region, writes=False)
    yield (
        "one that was read makes way",
        _microseconds(streams, lambda: _visit(device, next(turns), writes=False)),
    )
    (last,) = device.resident()[-1:]
    yield "one that is present is touched", _microseconds(streams, lambda: device.touch([last]))
    plan = _planned(device, regions)
    next(plan)
    yield "a use of a plan", _microseconds(streams, lambda: next(plan))
    plan.close()


def measure(count: int) -> dict[str, float]:
    """Return microseconds by event."""
    found: dict[str, float] = {}
    for where, budget in (
        ("host memory below", None),
        ("host memory and a file below", count * 3 // 4 * PAGE),
    ):
        with tempfile.TemporaryDirectory() as folder:
            streams = _Streams(DEVICE)
            device = Accelerator(
                streams,
                count // 2 * PAGE,
                Path(folder),
                need=count * PAGE,
                host_budget=budget,
            )
            for what, taken in _measure(streams, device, count):
                found[f"{what}, {where}"] = taken
            device.close()
    return found


def main() -> None:
    """Measure and print."""
    counts = [int(one) for one in sys.argv[1:]]
    rows = [measure(count) for count in counts]
    for name in rows[0]:
        figures = "".join(f"{row[name]:10.1f}" for row in rows)
        sys.stdout.write(f"{name:66}{figures} us\n")


if __name__ == "__main__":
    main()
