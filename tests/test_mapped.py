"""The mapped file: accesses that nobody announced are found, and older kernels are served.

What every device promises is in `test_device_conformance`, `_plans` and `_property`.
"""

from __future__ import annotations

import ctypes
import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from devices import HUGE, SMALL, eventually, filled, holds, schedule, uses_of, view

from dynoffload.errors import BackendError, SpillError
from dynoffload.memory import mapping
from dynoffload.memory.libc import libc
from dynoffload.memory.mapped import MappedFile
from dynoffload.memory.mapping import Mapping
from dynoffload.planning.schedule import Action, Kind, Use

PAGES = pytest.mark.parametrize("page", [SMALL, HUGE])


@pytest.fixture
def device(page: int, tmp_path: Path) -> Iterator[MappedFile]:
    """Return a device of 8 pages."""
    made = MappedFile(8 * page, page, tmp_path)
    yield made
    made.close()


def cached(device: MappedFile) -> int:
    """Return the bytes of the spill file that take memory."""
    return device._mapping.cached(0, device._extents.high * device.page_bytes)


# The page cache


@PAGES
def test_the_page_cache_holds_no_more_than_was_counted(device: MappedFile, page: int) -> None:
    regions = [device.allocate(2 * page) for _ in range(12)]
    for _ in range(2):
        for region in regions:
            filled(device, [region])
            assert cached(device) <= device.counters().resident_bytes <= device.capacity
    for region in regions:
        device.acquire([region])
        assert cached(device) == device.counters().resident_bytes
    for region in regions:
        device.discard(region)
    assert cached(device) == 0


@PAGES
def test_fetching_a_region_reads_nothing_of_its_neighbours(device: MappedFile, page: int) -> None:
    regions = [device.allocate(2 * page) for _ in range(12)]
    filled(device, regions)
    for region in regions:
        device.acquire([region])
    device.acquire([regions[3]])
    place = device._places[regions[3]]
    for neighbour in (place.page - 2, place.page + 2):
        assert device._mapping.cached(neighbour * page, 2 * page) == 0


@PAGES
def test_clean_regions_leave_without_a_write(device: MappedFile, page: int) -> None:
    regions = [device.allocate(4 * page) for _ in range(3)]
    filled(device, regions)
    for region in regions:
        device.acquire([region])
    before = device.counters()
    for region in regions:
        device.acquire([region])
    after = device.counters()
    assert after.bytes_in - before.bytes_in == 3 * 4 * page
    assert after.bytes_out == before.bytes_out


# What nobody announced


@PAGES
def test_silent_reads_are_found_while_nothing_is_asked(device: MappedFile, page: int) -> None:
    regions = [device.allocate(2 * page) for _ in range(12)]
    filled(device, regions)
    assert all(holds(device, region) for region in regions)
    assert eventually(lambda: cached(device) <= device.capacity)


@PAGES
def test_a_silent_region_stays_if_it_is_needed_before_others(device: MappedFile, page: int) -> None:
    a, b, c = (device.allocate(4 * page) for _ in range(3))
    filled(device, [a, b, c])
    for order, stay in (((b, c, a), {b, c}), ((a, b, c), {a, b})):
        device.acquire([b, c])
        device.follow([Use(()), *uses_of(*order)], schedule())
        assert holds(device, a)  # without notice
        assert device.counters().faults >= 1
        assert set(device.resident()) == stay
        assert cached(device) <= device.capacity


@PAGES
def test_touching_brings_regions_in_and_never_waits_for_pins(device: MappedFile, page: int) -> None:
    a, b, c = (device.allocate(4 * page) for _ in range(3))
    filled(device, [a, b, c])
    device.touch([a])
    assert a in device.resident()
    device.touch([a, b, c])  # more than there is room for
    assert device.resident() == [a, b]
    device.acquire([b, c], pin=True)
    device.touch([a])
    assert device.resident() == [b, c]
    device.unpin([b, c])
    device.touch([a])
    assert a in device.resident()


# What cannot be


def test_pages_smaller_than_the_systems_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="page_bytes=512"):
        MappedFile(1 << 20, 512, tmp_path)
    assert list(tmp_path.iterdir()) == []


# Failures


@PAGES
def test_a_prefetch_that_fails_is_told_later_and_tried_again_at_the_use(
    device: MappedFile, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = device.allocate(6 * page), device.allocate(6 * page)
    filled(device, [first, second])
    fetch = Mapping.fetch

    def fail(self: Mapping, offset: int, nbytes: int) -> None:
        raise OSError(errno.EIO, "as if the disk were broken")

    monkeypatch.setattr(Mapping, "fetch", fail)
    device.follow(
        [Use(()), Use((first,))],
        schedule(Action(0, Kind.EVICT, second), Action(0, Kind.FETCH, first)),
    )

    def told() -> bool:
        try:
            device.counters()
        except SpillError as error:
            return error.errno == errno.EIO
        return False

    assert eventually(told)
    device.counters()  # told once
    monkeypatch.setattr(Mapping, "fetch", fetch)
    device.acquire([first])
    assert holds(device, first)
    assert holds(device, second)


@PAGES
def test_what_was_not_written_leaves_once_another_was(
    device: MappedFile, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that failed for a moment: the region that met it is no more in the way after."""
    regions = [device.allocate(4 * page) for _ in range(4)]
    filled(device, regions[:2])
    write, written = Mapping.write_back, [0]

    def fail_first(self: Mapping, offset: int, nbytes: int) -> None:
        written[0] += 1
        if written[0] == 1:
            raise OSError(errno.ENOSPC, "as if the disk were full")
        write(self, offset, nbytes)

    monkeypatch.setattr(Mapping, "write_back", fail_first)
    device.acquire([regions[2]], pin=True)  # the first was to go, the second went
    assert regions[0] in device.resident()
    device.acquire([regions[3]], pin=True)
    assert regions[0] not in device.resident()
    device.unpin(regions[2:])
    assert holds(device, regions[0])
    assert holds(device, regions[1])


# Other kernels, other file systems


@PAGES
def test_a_write_that_signals_cut_off_is_made_again(
    device: MappedFile, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, cut = libc().sync_file_range, 0

    def interrupted(*arguments: int) -> int:
        nonlocal cut
        cut += 1
        if cut % 4:
            ctypes.set_errno(errno.EINTR)
            return -1
        return int(real(*arguments))

    monkeypatch.setattr(libc(), "sync_file_range", interrupted)
    regions = [device.allocate(2 * page - 3) for _ in range(9)]
    filled(device, regions)
    assert all(holds(device, region) for region in regions)
    assert cut >= 8
    device.counters()  # which would raise the error of a failed write


@pytest.mark.parametrize("page", [SMALL, HUGE])
@pytest.mark.parametrize(
    "lacking",
    [
        {"_POPULATE_READ": 999, "_POPULATE_WRITE": 998},
        {"_CACHESTAT": 9999},
        {"_SYNC_WAIT_WRITE_WAIT": 0x80},
        {"_ZERO_RANGE_KEEP_SIZE": 0x4000},
        {"_HUGEPAGE": 999},
        {
            "_POPULATE_READ": 999,
            "_POPULATE_WRITE": 998,
            "_CACHESTAT": 9999,
            "_SYNC_WAIT_WRITE_WAIT": 0x80,
            "_ZERO_RANGE_KEEP_SIZE": 0x4000,
            "_HUGEPAGE": 999,
        },
    ],
    ids=["populate", "cachestat", "sync_file_range", "zero_range", "huge pages", "all"],
)
def test_it_works_where_the_kernel_lacks(
    lacking: dict[str, int],
    page: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Numbers that this kernel does not know stand for calls that an older one does not."""
    for name, value in lacking.items():
        assert getattr(mapping, name) != value
        monkeypatch.setattr(mapping, name, value)
    device: MappedFile = request.getfixturevalue("device")  # with what the kernel lacks
    regions = [device.allocate(2 * page - 3) for _ in range(9)]
    filled(device, regions)
    for region in regions:
        device.acquire([region])
        assert holds(device, region)
    device.discard(regions[-1])
    assert all(holds(device, region) for region in regions[:-1])
    counters = device.counters()
    assert counters.peak_bytes <= device.capacity
    assert counters.bytes_in > 0
    assert counters.bytes_out > 0
    assert eventually(lambda: cached(device) <= device.capacity)  # read without notice
    if "_HUGEPAGE" in lacking:
        assert not device._mapping.whole_pages


def test_huge_pages_are_huge(tmp_path: Path) -> None:
    """One byte of a region of 2 MiB pages brings whole pages, where the file system can."""
    page = HUGE
    device = MappedFile(8 * page, page, tmp_path)
    if not device._mapping.whole_pages:
        pytest.skip("this kernel or file system reads no whole 2 MiB pages")
    regions = [device.allocate(2 * page) for _ in range(8)]
    filled(device, regions)
    place = device._places[regions[0]]
    assert device._mapping.cached(place.page * page, 2 * page) == 0
    assert int(view(device, regions[0])[5]) == int(view(device, regions[0])[5])
    assert device._mapping.cached(place.page * page, 2 * page) == page
    device.close()


@PAGES
def test_a_thread_of_its_own_that_collects_the_last_storage(
    device: MappedFile, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cannot wait for its own end: another thread closes the device."""
    region = device.allocate(page)
    filled(device, [region])
    held = [view(device, region)]
    names: list[str] = []
    join = device._thread.join

    def collect() -> None:
        held.clear()
        names.append(threading.current_thread().name)

    def noted() -> None:
        names.append(threading.current_thread().name)
        join()

    monkeypatch.setattr(device, "_inspect", collect)
    monkeypatch.setattr(device._thread, "join", noted)
    assert device.retire() == 1
    assert eventually(lambda: not device._thread.is_alive(), 20)
    assert "dynoffload-closing" in names, names
    assert any(name.startswith("dynoffload-mapped") for name in names), names
