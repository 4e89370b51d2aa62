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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynoffload.errors import BudgetError, SpillError
from dynoffload.memory import region_cache
from dynoffload.memory.device import Device, EventKind
from dynoffload.planning.lookahead import LookAhead
from dynoffload.planning.schedule import Action, Kind, Use


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


# Plans


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


# Anything at all


@st.composite
def plans(draw: st.DrawFn, count: int) -> tuple[str, list[int], list[tuple[int, int, int]]]:
    """Return a policy's name, or "wrong"; an order of regions; actions that nobody checked."""
    name = draw(st.sampled_from(["look-ahead", "on-demand", "wrong"]))
    order = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=12))
    actions = draw(
        st.lists(
            st.tuples(st.integers(0, 12), st.integers(0, 1), st.integers(0, count)), max_size=12
        )
    )
    return name, order, sorted(actions)


def steps(count: int) -> st.SearchStrategy[list[Any]]:
    """Return a list of things to do with ``count`` regions."""
    one = st.integers(0, count - 1)
    return st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["write", "read", "acquire", "touch", "pin", "unpin"]), one),
            st.tuples(st.sampled_from(["silent write", "discard", "clear"]), one),
            st.tuples(st.sampled_from(["renew", "advance"]), one),
            st.tuples(st.just("copy"), one, one),
            st.tuples(st.just("follow"), plans(count)),
        ),
        min_size=5,
        max_size=40,
    )


class Machine:
    """A device beside what its regions must hold."""

    def __init__(self, device: Device, sizes: list[int]) -> None:
        self.device, self.sizes = device, sizes
        self.regions = [device.allocate(size) for size in sizes]
        self.content: list[torch.Tensor | None] = [None] * len(sizes)
        self.pins = [0] * len(sizes)
        self.seed = 0

    def held(self) -> int:
        """Return the pages that pins hold."""
        pages = [self.device.size(r) // self.device.page_bytes for r in self.regions]
        return sum(n for n, pins in zip(pages, self.pins, strict=True) if pins)

    def write(self, i: int, announced: bool) -> None:
        self.seed += 1
        if announced:
            self.device.acquire([self.regions[i]])
        self.content[i] = pattern(self.sizes[i], self.seed)
        view(self.device, self.regions[i]).copy_(self.content[i])

    def check(self, i: int) -> None:
        expected = self.content[i]
        if expected is not None:
            assert torch.equal(view(self.device, self.regions[i]), expected)

    def run(self, step: Any) -> None:
        name, i, *rest = step
        device = self.device
        region = self.regions[i] if isinstance(i, int) else -1
        if name in ("write", "silent write"):
            self.write(i, name == "write")
        elif name == "read":
            self.check(i)
        elif name == "acquire":
            device.acquire([region])
            self.check(i)
        elif name == "touch":
            device.touch(self.regions)
        elif name == "pin":
            pages = device.size(region) // device.page_bytes
            if self.pins[i] or self.held() + pages <= 4:  # the rest must fit the largest region
                device.acquire([region], pin=True)
                self.pins[i] += 1
                assert region in device.resident()
        elif name == "unpin" and self.pins[i]:
            device.unpin([region])
            self.pins[i] -= 1
        elif name == "discard" and not self.pins[i]:
            device.discard(region)
            self.content[i] = None
        elif name == "clear" and not self.pins[i]:
            device.clear([region])
            self.content[i] = torch.zeros(self.sizes[i], dtype=torch.uint8)
            self.check(i)
        elif name == "renew" and not self.pins[i]:
            device.release(region)
            self.content[i] = None
            self.regions[i] = device.allocate(self.sizes[i])
        elif name == "copy" and self.sizes[i] == self.sizes[rest[0]] and i != rest[0]:
            both = 2 * (device.size(region) // device.page_bytes)
            if self.content[i] is not None and self.held() + both <= 8:
                view(device, self.regions[rest[0]]).copy_(view(device, region))
                self.content[rest[0]] = self.content[i]
        elif name == "advance":
            device.advance(i)
        elif name == "follow":
            self.follow(*i)

    def follow(self, name: str, order: list[int], actions: list[tuple[int, int, int]]) -> None:
        device = self.device
        uses = [Use((self.regions[i],)) for i in order]
        if name == "wrong":
            names = [*self.regions, 60000]
            plan = schedule(*(Action(at, Kind(kind), names[i]) for at, kind, i in actions))
        else:
            sizes = [device.size(region) for region in range(max(self.regions) + 1)]
            here = [region for region in device.resident() if region < len(sizes)]
            ahead = LookAhead().plan(uses, sizes, device.capacity, here, here)
            plan = ahead if name == "look-ahead" else schedule()
        device.follow(uses, plan)


@each_device()
def test_bytes_survive_anything(kind: str, page: int, tmp_path: Path) -> None:
    """On an accelerator whatever its streams do, with host memory for all or with a file below."""
    count = 5
    options = st.just({})
    if kind == "accelerator":
        budget = st.sampled_from([None, 4 * page, 9 * page, 30 * page])
        options = st.fixed_dictionaries({"seed": st.integers(0, 1000), "host_budget": budget})

    @settings(
        max_examples=80 if page == SMALL else 20,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(
        pages=st.lists(st.integers(1, 4), min_size=count, max_size=count),
        less=st.integers(0, SMALL - 1),
        work=steps(count),
        options=options,
    )
    def run(pages: list[int], less: int, work: list[Any], options: dict[str, Any]) -> None:
        with opened(kind, 8 * page, page, tmp_path, **options) as device:
            machine = Machine(device, [n * page - less for n in pages])
            for step in work:
                machine.run(step)
                counters = device.counters()
                assert counters.peak_bytes <= device.capacity
                assert counters.resident_bytes <= device.capacity
                assert sum(map(device.size, device.resident())) <= device.capacity
            for i in range(count):
                machine.check(i)

    run()


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
