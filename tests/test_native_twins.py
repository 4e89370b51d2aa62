"""Twins: regions of the pager that trade contents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from devices import needs_pager, view

from dynoffload.memory.pager import Pager

pytestmark = [needs_pager, pytest.mark.timeout(30)]

PAGE = 4096
POOL = 64


@pytest.fixture
def pager(tmp_path: Path) -> Iterator[Pager]:
    """A pager of 64 small pages."""
    device = Pager(POOL * PAGE, PAGE, tmp_path, threads=2)
    yield device
    device.close()


def fill(device: Pager, region: int, value: int) -> None:
    device.acquire([region])
    view(device, region).fill_(value)


def holds(device: Pager, region: int, value: int) -> bool:
    return bool((view(device, region) == value).all())


def crowd(device: Pager) -> None:
    """Push everything else out of the pool, and leave it empty."""
    others = [device.allocate(30 * PAGE) for _ in range(3)]
    for other in others:
        fill(device, other, 9)
    for other in others:
        device.release(other)


@pytest.mark.parametrize("pushed_out", [False, True])
def test_an_exchange_trades_contents_wherever_they_are(pager: Pager, pushed_out: bool) -> None:
    region = pager.allocate(4 * PAGE)
    twin = pager.twin(region)
    fill(pager, region, 1)
    fill(pager, twin, 2)
    if pushed_out:
        crowd(pager)
    moved = pager.counters()
    pager.exchange([region], [twin])
    assert pager.counters().bytes_in == moved.bytes_in
    assert holds(pager, region, 2)
    assert holds(pager, twin, 1)
    crowd(pager)
    assert holds(pager, region, 2)
    assert holds(pager, twin, 1)


def test_places_in_the_file_are_not_mixed_up_when_a_pair_ends(pager: Pager) -> None:
    region, other = pager.allocate(4 * PAGE), pager.allocate(4 * PAGE)
    twin = pager.twin(region)
    fill(pager, region, 1)
    fill(pager, twin, 2)
    fill(pager, other, 3)
    pager.exchange([region], [twin])
    crowd(pager)
    pager.release(region)
    fresh = [pager.allocate(4 * PAGE) for _ in range(2)]
    for number, one in enumerate(fresh):
        fill(pager, one, 10 + number)
    crowd(pager)
    assert holds(pager, other, 3)
    assert [holds(pager, one, 10 + number) for number, one in enumerate(fresh)] == [True, True]
