"""Mutants of an accelerator's waits, and a program that each of them breaks: no tests here.

A mutant removes one wait, one event, or one reference that keeps memory. Some show on the emulated
accelerator, whose vector clocks find what is not ordered; some on the backend, whose streams are
those of torch; most on both.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from dynoffload.memory.accelerator import torch_streams
from dynoffload.memory.accelerator.accelerator import Accelerator
from dynoffload.memory.accelerator.host import HostTier
from dynoffload.memory.accelerator.pool import PAGE, RegionPool
from dynoffload.memory.accelerator.region import DeviceRegion
from dynoffload.memory.accelerator.streams import Streams
from dynoffload.memory.accelerator.torch_streams import TorchStreams
from dynoffload.planning.lookahead import LookAhead
from dynoffload.planning.schedule import Use


@dataclass(frozen=True)
class Mutant:
    """One change: in a method, the text ``old`` becomes ``new``."""

    home: type
    method: str
    old: str
    new: str
    on_emulator: bool = True
    on_backend: bool = True

    def __str__(self) -> str:
        return f"{self.home.__name__.strip('_')}.{self.method}: {self.what}"

    @property
    def what(self) -> str:
        """What was removed."""
        return " ".join(self.old.split())


MUTANTS = [
    Mutant(TorchStreams, "after", "event.hold(stream)", "pass", on_emulator=False),
    Mutant(TorchStreams, "_copy", "event.hold(stream)", "pass", on_emulator=False),
    Mutant(TorchStreams, "_compute", "_Event(self._last).hold(stream)", "pass", on_emulator=False),
    Mutant(torch_streams._Event, "reached", "bool(self._event.query())", "True", on_emulator=False),
    Mutant(torch_streams._Event, "wait", "self._event.synchronize()", "pass", on_emulator=False),
    Mutant(RegionPool, "_copy_in", "content, [now]", "content, []"),
    Mutant(RegionPool, "_use", "self._arrive(cell)", "self._streams.after(self._streams.now())"),
    Mutant(RegionPool, "_enter", "self._streams.after(cell.gone)", "pass", on_backend=False),
    Mutant(RegionPool, "_leave", "[self._after(cell.tick)]", "[]"),
    Mutant(RegionPool, "_leave", "self._arrive(cell)", "cell.ready = None", on_backend=False),
    Mutant(RegionPool, "_end", "self._streams.after(cell.gone)", "pass"),
    Mutant(RegionPool, "_forget", "self._arrive(cell)", "cell.ready = None", on_backend=False),
    Mutant(RegionPool, "_settle", "event.wait()", "pass", on_emulator=False),
    Mutant(RegionPool, "_after", "number > use != UNKNOWN", "True"),
    Mutant(HostTier, "_leave_host", "cell.copied is not None", "False", on_emulator=False),
    Mutant(HostTier, "_drain", "copied.reached()", "True", on_emulator=False),
    Mutant(DeviceRegion, "slot_is_idle", "self.copied.reached()", "True"),
    Mutant(Accelerator, "used", "cell.tick = self._now", "pass"),
    Mutant(Accelerator, "at_once", "cell.state is not State.PRESENT", "cell.state is State.ABSENT"),
    Mutant(Accelerator, "at_once", "cell.ready is not None or cell.prefetched", "False"),
]


@contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """Make one change."""
    method = inspect.unwrap(inspect.getattr_static(mutant.home, mutant.method))
    text = textwrap.dedent(inspect.getsource(method))
    assert text.count(mutant.old) == 1, f"{mutant} is not there, or more than once"
    text = text.replace(mutant.old, mutant.new).replace("super()", "super(_home, self)")
    made: dict[str, Any] = {}
    names = {**vars(inspect.getmodule(method)), "_home": mutant.home}
    exec(compile(f"from __future__ import annotations\n{text}", mutant.method, "exec"), names, made)
    with mock.patch.object(mutant.home, mutant.method, made[mutant.method]):
        yield


REGIONS, STEPS = 12, 120


class Program:
    """Writes and reads regions of an accelerator at random, and knows what they hold.

    What is read is compared on the accelerator, so that the host does not wait.

    Args:
        streams: of the accelerator.
        spill_dir: of the file, which half of the programs have.
        seed: of what is done.
        other: another stream of torch, on which some of it is done.
    """

    def __init__(
        self, streams: Streams, spill_dir: Path, seed: int, other: torch.Stream | None = None
    ) -> None:
        self._chance, self._streams = random.Random(seed), streams
        self._other = contextlib.nullcontext() if other is None else other
        files = seed % 2 == 1
        self.device = Accelerator(
            streams,
            8 * PAGE,
            spill_dir,
            need=64 * PAGE,
            host_budget=12 * PAGE if files else None,
        )
        self.sizes = [self._chance.randrange(1, 4) * PAGE for _ in range(REGIONS)]
        self.regions = [self.device.allocate(size) for size in self.sizes]
        self.holds: list[int | None] = [None] * REGIONS
        self.wrong = torch.zeros((), dtype=torch.int64, device=streams.device)
        self.order: list[int] = []
        self.position = 0

    def run(self) -> int:
        """Return how many bytes were wrong."""
        for _ in range(STEPS):
            if self.position == len(self.order):
                self._plan()
            else:
                with self._other if self._chance.random() < 0.3 else contextlib.nullcontext():
                    self._visit()
        self._streams.now()  # this stream goes on after the other
        for index in range(REGIONS):
            self._read(index)
        found = int(self.wrong.cpu())
        for region, value in zip(self.regions, self.holds, strict=True):
            below = None if value is None else self.device.below(region)
            if below is not None:
                found += int((torch.empty(0, dtype=torch.uint8).set_(below) != value).sum())
        self.device.close()
        return found

    def _plan(self) -> None:
        chosen = self._chance.choices(range(REGIONS), k=10)
        self.order, self.position = chosen, 0
        uses = [Use((self.regions[index],)) for index in chosen]
        sizes = [self.device.size(region) for region in range(max(self.regions) + 1)]
        now = self.device.resident()
        self.device.follow(uses, LookAhead().plan(uses, sizes, self.device.capacity, now, now))

    def _visit(self) -> None:
        index = self.order[self.position]
        self.device.advance(self.position)
        self.position += 1
        if self._chance.random() < 0.25:  # not as planned
            index = self._chance.randrange(REGIONS)
        self._read(index)
        if self._chance.random() < 0.5:
            self._write(index)
        if self._chance.random() < 0.25:
            self._renew(self._chance.randrange(REGIONS))

    def _view(self, index: int) -> torch.Tensor:
        made = torch.empty(0, dtype=torch.uint8, device=self._streams.device)
        return made.set_(self.device.storage(self.regions[index]))

    def _write(self, index: int) -> None:
        value = self._chance.randrange(250)
        self._work(index, lambda: self._view(index).fill_(value), writes=True)
        self.holds[index] = value

    def _read(self, index: int) -> None:
        value = self.holds[index]
        if value is not None:
            self._work(index, lambda: self.wrong.add_((self._view(index) != value).sum()))

    def _work(self, index: int, enqueue: Callable[[], object], *, writes: bool = False) -> None:
        region = self.regions[index]
        written = [region] if writes else []
        done, _ = self.device.at_once([region], written, enqueue)
        if not done:
            self.device.use([region], written)
            enqueue()
            self.device.used([region])

    def _renew(self, index: int) -> None:
        self.device.release(self.regions[index])
        self.regions[index] = self.device.allocate(self.sizes[index])
        self.holds[index] = None
