"""Twins: regions of the pager that trade contents."""

from __future__ import annotations

from pathlib import Path

import pytest
from devices import SMALL, needs_pager, opened, view

from dynoffload.memory.pager import Pager


def fill(device: Pager, region: int, value: int) -> None:
    device.acquire([region])
    view(device, region).fill_(value)


def holds(device: Pager, region: int, value: int) -> bool:
    return bool((view(device, region) == value).all())


def crowd(device: Pager) -> None:
    """Push everything else out of the pool, and leave it empty."""
    others = [device.allocate(30 * SMALL) for _ in range(3)]
    for other in others:
        fill(device, other, 9)
    for other in others:
        device.release(other)


@needs_pager
@pytest.mark.parametrize("pushed_out", [False, True])
def test_contents_are_exchanged_wherever_they_are(pushed_out: bool, tmp_path: Path) -> None:
    """No byte moves; places in the file are not mixed up when the pair ends."""
    with opened("pager", 64 * SMALL, SMALL, tmp_path) as device:
        assert isinstance(device, Pager)
        region, other = device.allocate(4 * SMALL), device.allocate(4 * SMALL)
        twin = device.twin(region)
        for value, one in enumerate((region, twin, other), 1):
            fill(device, one, value)
        for _ in range(2):
            if pushed_out:
                crowd(device)
            moved = device.counters()
            device.exchange([region], [twin])
            assert device.counters().bytes_in == moved.bytes_in
        device.exchange([region], [twin])
        for _ in range(2):
            assert holds(device, region, 2)
            assert holds(device, twin, 1)
            crowd(device)
        device.release(region)
        fresh = [device.allocate(4 * SMALL) for _ in range(2)]
        for value, one in enumerate(fresh, 10):
            fill(device, one, value)
        crowd(device)
        assert holds(device, other, 3)
        assert [holds(device, one, value) for value, one in enumerate(fresh, 10)] == [True, True]
