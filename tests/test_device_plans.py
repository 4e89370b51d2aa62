"""What every device promises of a plan: what it prefetches, when, and what is wasted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from devices import (
    each_device,
    each_of_the_cpu,
    eventually,
    filled,
    holds,
    opened,
    schedule,
    uses_of,
)

from dynoffload.memory.device import Device
from dynoffload.planning.lookahead import LookAhead
from dynoffload.planning.schedule import Action, Kind, Use


@pytest.fixture
def device(kind: str, page: int, tmp_path: Path) -> Iterator[Device]:
    """Return a device of 8 pages."""
    with opened(kind, 8 * page, page, tmp_path) as made:
        yield made


@each_of_the_cpu()
def test_a_plan_prefetches_and_what_is_used_is_counted(device: Device, page: int) -> None:
    regions = [device.allocate(2 * page) for _ in range(8)]
    filled(device, regions)
    uses = uses_of(*regions)
    before = device.counters()
    resident = device.resident()
    plan = LookAhead().plan(
        uses, [2 * page] * (max(regions) + 1), device.capacity, resident, resident
    )
    device.follow(uses, plan)
    for position, region in enumerate(regions):
        device.advance(position)
        assert eventually(lambda r=region: r in device.resident())
        device.acquire([region])
        assert holds(device, region)
    after = device.counters()
    fetched = sum(action.kind is Kind.FETCH for action in plan.actions)
    assert fetched >= 4
    assert after.prefetched_bytes - before.prefetched_bytes == fetched * 2 * page
    assert after.used_bytes - before.used_bytes == fetched * 2 * page
    assert after.wasted_bytes == 0
    assert after.peak_bytes <= device.capacity


@each_of_the_cpu()
def test_planned_fetches_wait_for_their_position_and_for_room(device: Device, page: int) -> None:
    a, b, c = (device.allocate(4 * page) for _ in range(3))
    filled(device, [a, b, c])
    device.acquire([b, c])
    assert sorted(device.resident()) == sorted([b, c])
    device.follow(
        [Use((b,)), Use((c,)), Use(()), Use(()), Use((a,))],
        schedule(Action(2, Kind.FETCH, a), Action(3, Kind.EVICT, b)),
    )
    time.sleep(0.05)
    assert sorted(device.resident()) == sorted([b, c])  # position 2 is not reached
    device.advance(2)
    time.sleep(0.05)
    assert sorted(device.resident()) == sorted([b, c])  # there is no room, and time to wait
    device.advance(4)
    assert eventually(lambda: a in device.resident())
    assert device.counters().peak_bytes <= device.capacity
    assert all(holds(device, region) for region in (a, b, c))


@each_of_the_cpu()
def test_what_is_prefetched_for_nothing_is_wasted(device: Device, page: int) -> None:
    regions = [device.allocate(4 * page) for _ in range(3)]
    filled(device, regions)
    absent = next(region for region in regions if region not in device.resident())
    other = device.resident()[0]
    device.follow(
        [Use(()), Use((absent,)), *uses_of(*regions)],
        schedule(Action(0, Kind.EVICT, other), Action(0, Kind.FETCH, absent)),
    )
    assert eventually(lambda: device.counters().prefetched_bytes == 4 * page)
    device.follow([Use(())], schedule(Action(0, Kind.EVICT, absent)))
    assert eventually(lambda: device.counters().wasted_bytes == 4 * page)
    assert device.counters().used_bytes == 0


@each_of_the_cpu()
def test_the_reserve_is_kept_free_of_prefetches(device: Device, page: int) -> None:
    regions = [device.allocate(2 * page) for _ in range(6)]
    filled(device, regions)
    device.reserve(4 * page)
    assert eventually(lambda: device.counters().resident_bytes <= 4 * page)
    absent = [region for region in regions if region not in device.resident()]
    device.follow(
        [Use(()), Use(()), Use(()), *(Use((r,)) for r in regions)],
        schedule(*(Action(0, Kind.FETCH, region) for region in absent)),
    )
    time.sleep(0.1)
    assert device.counters().resident_bytes <= 4 * page
    assert device.counters().prefetched_bytes == 0
    assert all(holds(device, region) for region in regions)


@each_device()
def test_what_no_use_needs_is_not_prefetched(device: Device, page: int) -> None:
    """The plan's use of it is past: the step went faster than the prefetch."""
    a, b, c = (device.allocate(4 * page) for _ in range(3))
    filled(device, [a, b, c])
    device.discard(b)  # there is room
    device.follow([Use((a,)), *uses_of(c, c)], schedule(Action(1, Kind.FETCH, a)))
    device.advance(2)
    time.sleep(0.05)
    assert device.resident() == [c]


@each_of_the_cpu()
def test_following_backwards_prefetches_again(device: Device, page: int) -> None:
    a, b = device.allocate(6 * page), device.allocate(6 * page)
    filled(device, [a, b])
    device.follow(
        uses_of(b, a, b),
        schedule(
            Action(1, Kind.EVICT, b),
            Action(1, Kind.FETCH, a),
            Action(2, Kind.EVICT, a),
            Action(2, Kind.FETCH, b),
        ),
    )
    for _ in range(3):
        device.advance(1)
        assert eventually(lambda: device.resident() == [a])
        device.acquire([a])
        device.advance(2)
        assert eventually(lambda: device.resident() == [b])
        device.acquire([b])
        device.advance(0)
    assert holds(device, a)
    assert holds(device, b)
