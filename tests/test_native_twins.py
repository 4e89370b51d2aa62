"""Twins: regions of the pager that lend each other pages and trade contents."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from devices import eventually, needs_pager, schedule, uses_of, view

from dynoffload.memory.pager import Pager
from dynoffload.planning.schedule import Action, Kind

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


def read_ahead(device: Pager, region: int) -> None:
    """Have ``region`` read by plan, without a visit."""
    assert eventually(lambda: region not in device.resident())  # else it is not fetched by plan
    device.follow(uses_of(region, region), schedule(Action(0, Kind.FETCH, region)))
    assert eventually(lambda: device.counters().bytes_in > 0 and region in device.resident())
    time.sleep(0.01)


def test_lent_pages_carry_the_content_and_leave_it_in_the_file(pager: Pager) -> None:
    region = pager.allocate(4 * PAGE)
    fill(pager, region, 1)
    crowd(pager)
    read_ahead(pager, region)
    twin = pager.twin(region)
    moved = pager.counters()
    assert pager.lend([region], [twin])
    assert not pager.lend([region], [twin])
    assert region not in pager.resident()
    assert twin in pager.resident()
    assert holds(pager, twin, 1)
    assert pager.counters().bytes_in == moved.bytes_in
    fill(pager, twin, 2)
    assert holds(pager, region, 1)


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
