"""Locked regions: an access waits until the owner has brought the region up to date elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from devices import HUGE, SMALL, eventually, filled, holds, needs_pager, opened, schedule, view

from dynoffload.errors import BackendError
from dynoffload.memory.device import Device
from dynoffload.planning.schedule import Action, Kind, Use

pytestmark = needs_pager


@pytest.fixture(params=[SMALL, HUGE], ids=["4k", "2m"])
def device(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Device]:
    """Return a pager of 8 pages."""
    with opened("pager", 8 * request.param, request.param, tmp_path) as made:
        yield made


@pytest.fixture
def region(device: Device) -> int:
    """Return a region of three pages with its pattern."""
    made = device.allocate(3 * device.page_bytes - 7)
    filled(device, [made])
    return made


class Reader(threading.Thread):
    """Reads a region once; `seen` is its sum."""

    def __init__(self, device: Device, region: int) -> None:
        super().__init__(daemon=True)
        self.tensor, self.seen = view(device, region), None
        self.start()

    def run(self) -> None:
        self.seen = int(self.tensor.sum(dtype=torch.int64))


def test_an_access_is_handed_to_the_owner_and_sees_what_he_made(
    device: Device, region: int
) -> None:
    device.lock([region])
    reader = Reader(device, region)
    assert device.handed(10.0) == region
    assert device.handed(0.05) == -1  # once is enough
    (storage,) = device.show([region])
    shown = torch.empty(0, dtype=torch.uint8).set_(storage)
    assert storage.data_ptr() != device.storage(region).data_ptr()
    assert len(shown) == 3 * device.page_bytes - 7
    before = int(shown.sum(dtype=torch.int64))
    shown[-1] += 1
    assert reader.is_alive()
    assert reader.seen is None
    device.hide([region])
    device.unlock([region])
    reader.join(100)
    assert reader.seen in (before + 1, before - 255)
    device.acquire([region])
    assert device.counters().peak_bytes <= device.capacity


def test_every_reader_is_woken(device: Device, region: int) -> None:
    device.lock([region])
    readers = [Reader(device, region) for _ in range(4)]
    assert device.handed(10.0) == region
    time.sleep(0.05)
    assert all(reader.is_alive() for reader in readers)
    device.unlock([region])  # without show: as it was
    for reader in readers:
        reader.join(100)
    assert len({reader.seen for reader in readers}) == 1
    assert readers[0].seen is not None


def test_a_locked_region_cannot_be_acquired_nor_pinned(device: Device, region: int) -> None:
    device.lock([region])
    with pytest.raises(BackendError, match="cannot bring"):
        device.acquire([region], pin=True)
    device.unlock([region])
    others = [device.allocate(4 * device.page_bytes) for _ in range(2)]
    filled(device, others)
    assert region not in device.resident()  # no pin was left behind
    assert holds(device, region)


def test_a_locked_region_is_prefetched_but_not_admitted(device: Device, region: int) -> None:
    others = [device.allocate(4 * device.page_bytes) for _ in range(2)]
    filled(device, others)
    device.lock([region])
    device.follow(
        [Use(()), Use((region,))],
        schedule(Action(0, Kind.EVICT, others[0]), Action(0, Kind.FETCH, region)),
    )
    assert eventually(lambda: region in device.resident())
    device.touch([region])
    reader = Reader(device, region)
    assert device.handed(10.0) == region
    assert reader.seen is None
    device.unlock([region])
    reader.join(100)
    assert reader.seen is not None
    assert holds(device, region)
