"""Devices to test, and what tests do with them: no tests here.

`DEVICES` is every device of the CPU with the page sizes that differ in kind. The pager is left out,
with its reason, only where the system refuses it.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import script as script

from dynoffload.memory.accelerator.guarded import fit
from dynoffload.memory.device import Device
from dynoffload.memory.mapped import MappedFile
from dynoffload.memory.pager import Pager, probe
from dynoffload.planning.schedule import Action, Schedule, Use
from dynoffload.units import KiB, MiB

SMALL, HUGE = 4 * KiB, 2 * MiB
NO_PAGER = probe()
KINDS: dict[str, type[Pager] | type[MappedFile]] = {"pager": Pager, "mapped": MappedFile}

_PERIOD = (torch.arange(4001) * 7 % 251).to(torch.uint8)  # no divisor in common with pages

needs_pager = pytest.mark.skipif(bool(NO_PAGER), reason=NO_PAGER or "never")


def each_of_the_cpu(*pages: int) -> pytest.MarkDecorator:
    """Run a test with `kind` and `page` set to every device of the CPU and each of ``pages``."""
    return _each([(kind, page) for kind in KINDS for page in (pages or (SMALL, HUGE))])


def each_device(*pages: int) -> pytest.MarkDecorator:
    """The same, and an emulated accelerator with small pages."""
    of_the_cpu = [(kind, page) for kind in KINDS for page in (pages or (SMALL, HUGE))]
    return _each([*of_the_cpu, ("accelerator", SMALL)])


def _each(cases: Sequence[tuple[str, int]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("kind", "page"),
        [
            pytest.param(
                kind,
                page,
                id=f"{kind}-{page // KiB}k",
                marks=[needs_pager] if kind == "pager" else [],
            )
            for kind, page in cases
        ],
    )


@contextmanager
def opened(
    kind: str, capacity: int, page: int, spill_dir: Path, **options: Any
) -> Iterator[Device]:
    """Open a device, and close it whatever happens."""
    if kind == "accelerator":
        with _accelerator(capacity, page, spill_dir, **options) as device:
            yield device
        return
    device = KINDS[kind](capacity, page, spill_dir, **options)
    try:
        yield device
    finally:
        device.close()


@contextmanager
def _accelerator(
    capacity: int, page: int, spill_dir: Path, *, seed: int = 0, **options: Any
) -> Iterator[Device]:
    """Open an accelerator's device, whose operators are heard of and watched for races."""
    from emulated import Watcher, emulated

    from dynoffload.memory.accelerator.accelerator import Accelerator
    from dynoffload.runtime.residency import Residency

    with emulated(seed) as streams:
        device = Accelerator(streams, capacity, spill_dir, page_bytes=page, **options)
        with Watcher(streams, lambda storage: device.owner(storage) >= 0).watching():
            residency = Residency(device)
            try:
                yield device
            finally:
                residency.end()
        device.close()


def view(device: Device, region: int) -> torch.Tensor:
    """Return a region's bytes as a tensor."""
    if not device.serves:
        device.touch([region])
    return fit(torch.empty(0, dtype=torch.uint8).set_(device.storage(region)))


def byte_at(address: int) -> torch.Tensor:
    """Return the byte at an address, which is not looked at."""
    return torch.frombuffer((ctypes.c_char * 1).from_address(address), dtype=torch.uint8)


def pattern(length: int, seed: int) -> torch.Tensor:
    """Return ``length`` bytes that differ from page to page and seed to seed."""
    return _PERIOD.repeat(-(-length // len(_PERIOD)))[:length] + seed * 31 % 256


def filled(device: Device, regions: list[int]) -> None:
    """Give each region a pattern of its own, by its number."""
    for region in regions:
        device.acquire([region])
        target = view(device, region)
        target.copy_(pattern(len(target), region))


def holds(device: Device, region: int) -> bool:
    """Return whether a region still has the pattern that `filled` gave it."""
    found = view(device, region)
    return torch.equal(found, pattern(len(found), region))


def schedule(*actions: Action) -> Schedule:
    """Return a schedule of bare actions; what it claims beyond them is not looked at."""
    return Schedule(tuple(actions))


def next_use(uses: Sequence[Use], action: Action) -> int:
    """Return the position of the use for which ``action`` fetches its region."""
    ahead = range(action.position, len(uses))
    return next(p for p in ahead if action.region in uses[p].regions + uses[p].creates)


def uses_of(*regions: int) -> list[Use]:
    """Return one use for each region."""
    return [Use((region,)) for region in regions]


def eventually(condition: Callable[[], bool], seconds: float = 100.0) -> bool:
    """Wait until ``condition()`` holds; False if it does not within ``seconds``."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.002)
    return True
