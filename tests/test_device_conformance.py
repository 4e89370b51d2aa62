"""What every CPU device promises: bytes survive, and fast memory never passes its capacity."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import (
    SMALL,
    byte_at,
    each_device,
    each_of_the_cpu,
    eventually,
    filled,
    holds,
    opened,
    pattern,
    schedule,
    script,
    uses_of,
    view,
)

from dynoffload.errors import BudgetError, SpillError
from dynoffload.memory import region_cache
from dynoffload.memory.device import Device, EventKind


@pytest.fixture
def device(kind: str, page: int, tmp_path: Path) -> Iterator[Device]:
    """Return a device of 8 pages."""
    with opened(kind, 8 * page, page, tmp_path) as made:
        yield made


# One region


@each_of_the_cpu()
def test_storages_keep_their_address_and_their_views(device: Device, page: int) -> None:
    first, second = device.allocate(6 * page), device.allocate(6 * page)
    storage = device.storage(first)
    address = storage.data_ptr()
    assert address % 64 == 0
    whole = view(device, first)
    part = whole[page - 3 : page + 3]
    filled(device, [first])
    kept = part.clone()
    for _ in range(3):
        filled(device, [second])  # pushes the other out
        assert first not in device.resident()
        device.acquire([first])
        assert device.storage(first).data_ptr() == address == whole.data_ptr()
        assert torch.equal(part, kept)
        part.add_(0)
    assert device.owner(storage) == device.owner(whole[6 * page - 1 :]) == first
    assert device.owner(device.storage(second)) == second
    assert device.owner(byte_at(address - 1)) != first
    assert device.owner(torch.zeros(1)) == -1
    assert device.owners(whole) == device.owners(part) == [first]
    assert device.owners(torch.zeros(1)) == []
    assert device.begins(whole, first)
    assert not device.begins(part, first)
    assert not device.begins(whole, second)
    device.release(first)
    assert device.owner(byte_at(address)) == -1


@each_of_the_cpu()
def test_what_was_only_read_leaves_without_a_write(device: Device, page: int) -> None:
    regions = [device.allocate(6 * page) for _ in range(2)]
    filled(device, regions)
    device.acquire([regions[0]])
    written = device.counters().bytes_out
    for _ in range(4):
        for region in regions[::-1]:
            device.acquire([region])
            assert holds(device, region)
    assert device.counters().bytes_out == written


@each_of_the_cpu(SMALL)
@pytest.mark.parametrize("at", [0, 4095, -1])
@pytest.mark.parametrize("reads", [0, 7])
def test_one_bit_that_changed_is_written(device: Device, page: int, at: int, reads: int) -> None:
    """Also where it was only read, or written, at many visits before; and back again."""
    region, other = device.allocate(6 * page), device.allocate(6 * page)
    filled(device, [region, other])
    expected = pattern(6 * page, region)
    for turn in range(6):
        for _ in range(reads):
            device.acquire([other])
            device.acquire([region])
        expected[at] ^= 1 << turn % 2
        view(device, region)[at] ^= 1 << turn % 2
        device.acquire([other])
        assert region not in device.resident()
        device.acquire([region])
        assert torch.equal(view(device, region), expected)


@each_of_the_cpu(SMALL)
@pytest.mark.parametrize("bit", [63, 62, 31, 0])
def test_two_bits_that_changed_are_written(device: Device, page: int, bit: int) -> None:
    """Of words that a hash takes one after the other: no change hides another."""
    region, other = device.allocate(6 * page), device.allocate(6 * page)
    filled(device, [region, other])
    expected = pattern(6 * page, region).view(torch.int64)
    for second in range(64):
        for word, place in ((16, bit), (24, second)):
            flipped = torch.tensor(1).bitwise_left_shift(place)
            expected[word] ^= flipped
            view(device, region).view(torch.int64)[word] ^= flipped
        device.acquire([other])
        device.acquire([region])
        assert torch.equal(view(device, region).view(torch.int64), expected), second


@each_device()
def test_discarded_bytes_cost_no_write_and_no_read(device: Device, page: int) -> None:
    absent, *regions = (device.allocate(4 * page) for _ in range(3))
    filled(device, [absent, *regions])
    before = device.counters()
    for region in (absent, *regions):
        device.discard(region)
        device.discard(region)  # again: nothing left to forget
    assert device.resident() == []
    assert device.counters().resident_bytes == 0
    device.acquire(regions)
    device.acquire([absent])
    after = device.counters()
    assert after.bytes_in == before.bytes_in
    filled(device, regions)
    assert all(holds(device, region) for region in regions)


# Room


@each_device()
def test_what_cannot_fit_is_refused_with_need_have_and_remedy(device: Device, page: int) -> None:
    with pytest.raises(BudgetError, match="raise the budget"):
        device.allocate(9 * page)
    assert device.allocate(8 * page) >= 0
    with pytest.raises(ValueError, match="at least one byte"):
        device.allocate(0)


@each_device()
def test_acquiring_more_than_the_pool_is_refused_and_pins_nothing(
    device: Device, page: int
) -> None:
    regions = [device.allocate(3 * page) for _ in range(3)]
    filled(device, regions)
    with pytest.raises(BudgetError, match="raise the budget"):
        device.acquire(regions, pin=True)
    filled(device, regions)  # would hang if one were still pinned
    assert all(holds(device, region) for region in regions)


@each_device(SMALL)
def test_waiting_for_room_that_never_comes_ends(
    device: Any, kind: str, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name, with what is lacking; and no pin is left."""
    monkeypatch.setattr("dynoffload.memory.mapped._GRACE_S", 0.1)
    if kind == "pager":
        device._native.pager_set_patience(device._handle, 1)
    a, b, c = (device.allocate(4 * page) for _ in range(3))
    filled(device, [a, b, c])
    device.acquire([b, c], pin=True)
    device.names.update({a: "one", b: "two"})
    with pytest.raises(BudgetError, match=r"32\.00 KiB is pinned; raise the budget") as told:
        device.acquire([a], pin=True)
    assert f"for one (16.00 KiB) beside two (16.00 KiB), region {c} (16.00 KiB)" in str(told.value)
    assert str(told.value).endswith("it lacks 16.00 KiB")
    device.unpin([b])
    device.acquire([a])
    assert device.resident() == [a, c]
    device.unpin([c])
    filled(device, [b, c])  # no pin was left on a
    assert a not in device.resident()


@each_device()
def test_pinned_regions_stay_until_unpinned(device: Device, page: int) -> None:
    held = device.allocate(3 * page)
    others = [device.allocate(4 * page) for _ in range(4)]
    filled(device, [held])
    device.acquire([held], pin=True)
    device.acquire([held], pin=True)
    device.unpin([held])  # one pin is left
    for _ in range(2):
        filled(device, others)
        assert held in device.resident()
    device.unpin([held])
    device.acquire(others[:2], pin=True)
    assert held not in device.resident()
    device.unpin(others[:2])
    assert holds(device, held)


@each_device()
def test_without_a_plan_the_least_recently_used_leaves(device: Device, page: int) -> None:
    regions = [device.allocate(2 * page) for _ in range(5)]
    filled(device, regions[:4])
    device.acquire([regions[0]])  # used again: the second is now the oldest
    before = device.counters().bytes_out
    device.acquire([regions[4]])
    assert regions[1] not in device.resident()
    assert regions[0] in device.resident()
    assert device.counters().bytes_out - before == 2 * page  # and no more is written than that


@each_device()
def test_with_a_plan_the_farthest_next_use_leaves(device: Device, page: int) -> None:
    a, b, c, d, e = (device.allocate(2 * page) for _ in range(5))
    filled(device, [a, b, c, d])
    device.follow(uses_of(e, a, b, d, c), schedule())
    device.acquire([e])
    assert sorted(device.resident()) == sorted([a, b, d, e])
    device.advance(4)  # now c's use is next, and nobody else has one
    device.acquire([c])
    assert c in device.resident()
    assert all(holds(device, region) for region in (a, b, c, d))


# What is told


@each_device()
def test_events_tell_every_transfer_within_its_time(device: Device, page: int) -> None:
    started = time.perf_counter()
    regions = [device.allocate(3 * page) for _ in range(5)]
    filled(device, regions)
    assert all(holds(device, region) for region in regions if device.acquire([region]) is None)
    counters, events = device.counters(), device.events()
    totals = {EventKind.FETCH: counters.bytes_in, EventKind.EVICT: counters.bytes_out}

    def told() -> bool:  # the last copies of an accelerator may be under way
        events.extend(device.events())
        return all(sum(e.nbytes for e in events if e.kind is k) == n > 0 for k, n in totals.items())

    assert eventually(told, 20)
    ended = time.perf_counter()
    assert all(started <= e.start <= e.end <= ended for e in events)
    assert {e.region for e in events} <= set(regions)
    assert sum(e.kind is EventKind.STALL for e in events) == counters.stalls > 0
    stalled = sum(e.end - e.start for e in events if e.kind is EventKind.STALL)
    assert 0 < counters.stall_s <= stalled + 1e-3
    assert device.events() == []


@each_of_the_cpu(SMALL)
def test_events_past_what_is_kept_are_counted(
    device: Device, kind: str, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 65536 if kind == "pager" else 200
    monkeypatch.setattr(region_cache, "_EVENTS", most)
    regions = [device.allocate(page) for _ in range(16)]
    filled(device, regions)
    assert device.events()
    assert device.counters().events_lost == 0
    for _ in range(most // 25):  # each time all are waited for, fetched, and evicted
        device.acquire(regions[:8])
        device.acquire(regions[8:])
    assert len(device.events()) == most
    lost = device.counters().events_lost
    assert lost > 0
    device.acquire(regions[:8])
    assert device.events()
    assert device.counters().events_lost == lost


@each_device(SMALL)
def test_the_peak_begins_anew_with_each_reading(device: Device, page: int) -> None:
    region = device.allocate(6 * page)
    device.acquire([region])
    device.discard(region)
    assert device.counters().peak_bytes == 6 * page
    assert device.counters().peak_bytes == 0


@each_of_the_cpu(SMALL)
def test_closing_twice_is_closing_once(kind: str, page: int, tmp_path: Path) -> None:
    with opened(kind, 8 * page, page, tmp_path) as made:
        made.allocate(page)
        made.close()
    assert list(tmp_path.iterdir()) == []


# Many at once


@each_of_the_cpu()
def test_readers_in_threads_see_whole_regions(device: Device, page: int) -> None:
    regions = [device.allocate(2 * page - 11) for _ in range(10)]
    filled(device, regions)
    wrong: list[int] = []
    stop = time.monotonic() + 0.5

    def read(start: int) -> None:
        turn = start
        while time.monotonic() < stop:
            region = regions[turn % len(regions)]
            turn += start + 1
            if not holds(device, region):
                wrong.append(region)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    turn, peak = 0, 0
    while time.monotonic() < stop:
        pair = [regions[turn % 10], regions[(turn + 3) % 10]]
        device.acquire(pair, pin=True)
        assert all(holds(device, region) for region in pair)
        device.unpin(pair)
        turn += 1
        peak = max(peak, device.counters().peak_bytes)
    for thread in threads:
        thread.join()
    assert wrong == []
    assert turn > 0
    assert 0 < peak <= device.capacity


@each_of_the_cpu(SMALL)
def test_regions_come_and_go_in_several_threads(device: Device, page: int) -> None:
    wrong: list[int] = []

    def live(seed: int) -> None:
        for turn in range(60):
            region = device.allocate((1 + (seed + turn) % 2) * page)
            mine = view(device, region)
            device.acquire([region])
            mine.copy_(pattern(len(mine), seed * 100 + turn))
            if turn % 3 == 0:
                device.touch([region])
            if not torch.equal(mine, pattern(len(mine), seed * 100 + turn)):
                wrong.append(region)
            del mine
            device.release(region)

    threads = [threading.Thread(target=live, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert device.resident() == []


# The disk


@each_of_the_cpu()
def test_what_cannot_be_read_is_told_to_whoever_waits(device: Any, page: int) -> None:
    """The file is cut off, and what is written then does not make it long enough again."""
    second, first = device.allocate(6 * page), device.allocate(6 * page)
    filled(device, [first, second])
    assert device.resident() == [second]
    size = os.fstat(device._spill.fd).st_size
    os.ftruncate(device._spill.fd, 0)
    for _ in range(2):
        with pytest.raises(SpillError, match=rf"region {first} \(.*\) back.*spill_dir="):
            device.acquire([first], pin=True)
    device.counters()  # it has been told already
    os.ftruncate(device._spill.fd, size)
    for region in (first, second):
        device.discard(region)  # no pin was left
    filled(device, [first, second])
    assert holds(device, first)
    assert holds(device, second)
    assert device.counters().peak_bytes <= device.capacity


@each_of_the_cpu(SMALL)
def test_an_acquire_ends_when_the_disk_takes_nothing(kind: str, page: int, tmp_path: Path) -> None:
    """What cannot be written stays in memory, so there is no room; it is soon told, and passes."""
    found = script(
        """
        import errno, resource
        from dynoffload.errors import SpillError
        from dynoffload.memory.mapping import Mapping
        kind, page, directory = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
        written = Mapping.write_back
        def refuse(refused):
            limit = 0 if refused else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            Mapping.write_back = full if refused else written  # there the kernel has no such limit
        def full(self, offset, nbytes):
            raise OSError(errno.ENOSPC, "as on a full disk")
        with opened(kind, 8 * page, page, directory) as device:
            a, b, c = (device.allocate(4 * page) for _ in range(3))
            filled(device, [a, b, c])
            refuse(True)
            told = []
            for turn in range(2):
                start = time.monotonic()
                try:
                    device.acquire([a], pin=True)
                except SpillError as error:
                    told.append(error)
                assert time.monotonic() - start < 50  # and not the minute for which room is awaited
            assert sorted(device.resident()) == [b, c]
            refuse(False)
            device.acquire([a])
            assert all(holds(device, region) for region in (a, b, c))
        for line in (*told, "whole"):
            print(line)
        """,
        kind,
        page,
        tmp_path,
        fresh=True,  # its output is no file, which the limit would hold for
    )
    assert found.returncode == 0, found.stderr
    *told, last = found.stdout.splitlines()
    assert len(told) == 2
    for line in told:
        assert "cannot write region" in line
        assert "free): free space there, or pass spill_dir= another disk" in line
    assert last == "whole"
