"""The accelerator's device, over an emulated one: bytes survive, no queue is outrun, and each tier
keeps to its budget."""

from __future__ import annotations

import contextlib
import copy
import errno
import io
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from devices import pattern
from emulated import Emulated, Race, Watcher, emulated
from exactness import assert_same

from dynoffload.errors import BudgetError, SpillError
from dynoffload.memory.accelerator import host as host_tier
from dynoffload.memory.accelerator.accelerator import Accelerator
from dynoffload.memory.accelerator.guarded import fit
from dynoffload.memory.accelerator.pool import PAGE
from dynoffload.planning.lookahead import LookAhead
from dynoffload.planning.schedule import Use
from dynoffload.runtime.residency import Residency


@pytest.fixture
def streams() -> Iterator[Emulated]:
    with emulated() as made:
        yield made


@pytest.fixture
def device(streams: Emulated, tmp_path: Path) -> Iterator[Accelerator]:
    """Return a device of 8 pages, with host memory for everything."""
    made = Accelerator(streams, 8 * PAGE, tmp_path)
    yield made
    made.close()


@pytest.fixture
def tiered(streams: Emulated, tmp_path: Path) -> Iterator[Accelerator]:
    """Return a device of 8 pages, with host memory for 8 more, and a file."""
    made = Accelerator(streams, 8 * PAGE, tmp_path, need=64 * PAGE, host_budget=8 * PAGE)
    yield made
    made.close()


def view(device: Accelerator, region: int) -> torch.Tensor:
    """Return the bytes of a region that is present."""
    return torch.empty(0, dtype=torch.uint8).set_(device.storage(region))


def write(device: Accelerator, region: int, seed: int) -> None:
    """Fill a region with a pattern, as an operator does."""
    device.use([region], [region])
    target = view(device, region)
    target.copy_(pattern(len(target), seed))
    device.used([region])


def filled(device: Accelerator, count: int, pages: int) -> list[int]:
    """Return regions of so many pages, each with the pattern of its number."""
    regions = [device.allocate(pages * PAGE) for _ in range(count)]
    for region in regions:
        write(device, region, region)
    return regions


def holds(device: Accelerator, region: int, seed: int) -> bool:
    """Return whether a region has the pattern, as an operator sees it."""
    device.use([region])
    found = view(device, region).clone()
    device.used([region])
    return torch.equal(found, pattern(len(found), seed))


def held(device: Accelerator, count: int) -> dict[int, torch.Tensor]:
    """Return regions of three pages with their bytes."""
    tensors = {}
    for region in filled(device, count, 3):
        device.acquire([region])
        tensors[region] = view(device, region)
    return tensors


def full(*args: object) -> None:
    """Have no memory."""
    raise torch.OutOfMemoryError("as planned")


# One region


def test_an_absent_region_takes_no_memory_and_its_tensors_come_back(
    device: Accelerator, streams: Emulated
) -> None:
    first, second = device.allocate(6 * PAGE - 3), device.allocate(6 * PAGE)
    assert streams.given == 0
    write(device, first, 1)
    storage = device.storage(first)
    whole = view(device, first)
    part = whole[PAGE - 3 : PAGE + 3]
    kept = part.clone()
    assert device.owner(part) == device.owner(storage) == first
    assert device.owners(part) == [first]
    assert device.begins(whole, first)
    assert not device.begins(part, first)
    assert device.owner(torch.zeros(3)) == -1
    write(device, second, 2)
    assert device.resident() == [second]
    assert torch.UntypedStorage.nbytes(storage) == 0
    assert device.owner(part) == first  # absent as well
    device.acquire([first])
    assert torch.equal(part, kept)
    assert streams.given == device.storage(first).nbytes() == 6 * PAGE - 3


def test_what_was_only_read_leaves_without_a_copy(device: Accelerator, streams: Emulated) -> None:
    regions = [device.allocate(6 * PAGE) for _ in range(2)]
    for seed, region in enumerate(regions):
        write(device, region, seed)
    out = device.counters().bytes_out
    for _ in range(3):
        assert all(holds(device, region, seed) for seed, region in enumerate(regions))
    assert device.counters().bytes_out == out + 6 * PAGE  # the second left as it was written


def test_a_region_larger_than_host_memory_is_refused(streams: Emulated, tmp_path: Path) -> None:
    device = Accelerator(streams, 8 * PAGE, tmp_path, host_budget=2 * PAGE)
    with pytest.raises(BudgetError, match="raise host_budget"):
        device.allocate(3 * PAGE)
    region = device.allocate(2 * PAGE)  # its place was not lost
    write(device, region, 1)
    assert holds(device, region, 1)
    device.close()


def test_an_accelerator_that_is_full_says_what_to_do(tmp_path: Path) -> None:
    with emulated(memory=4 * PAGE) as streams:
        device = Accelerator(streams, 8 * PAGE, tmp_path)
        regions = [device.allocate(3 * PAGE) for _ in range(2)]
        device.names[regions[1]] = "the second"
        write(device, regions[0], 1)
        device.use(regions[:1])
        with pytest.raises(BudgetError, match=r"the second.*lower the budget"):
            device.acquire(regions[1:])
        device.used(regions[:1])
        device.acquire(regions[1:])  # the first makes way
        assert device.resident() == regions[1:]
        assert holds(device, regions[0], 1)
        device.close()


# Below


def test_host_memory_is_what_regions_take(streams: Emulated, tmp_path: Path) -> None:
    need = 40 * PAGE
    device = Accelerator(streams, 8 * PAGE, tmp_path, need=need)
    assert streams.host_bytes == need
    regions = filled(device, 10, 4)
    assert streams.host_bytes == need == device.taken_bytes()
    more = filled(device, 3, 4)  # beyond what was foreseen
    assert all(holds(device, region, region) for region in regions + more)
    device.close()
    assert streams.host_bytes == 0


def test_what_host_memory_has_no_room_for_comes_from_the_file_ahead_of_its_turn(
    tiered: Accelerator, streams: Emulated
) -> None:
    """Read by the plan, so that a demand finds it in host memory."""
    regions = filled(tiered, 12, 2)
    assert all(holds(tiered, region, region) for region in regions)
    assert tiered.spill_bytes() >= 64 * PAGE
    assert streams.host_bytes == 8 * PAGE
    uses = [Use((region,)) for region in regions]
    sizes = [tiered.size(region) for region in range(max(regions) + 1)]
    now = tiered.resident()
    tiered.follow(uses, LookAhead().plan(uses, sizes, tiered.capacity, now, now))
    for position, region in enumerate(regions):
        tiered.advance(position)
        assert holds(tiered, region, region)
    counters = tiered.counters()
    assert counters.prefetched_bytes > 0
    assert counters.used_bytes > 0


def _go_through(device: Accelerator, regions: list[int], *, reads: bool) -> None:
    for seed, region in enumerate(regions):
        if reads:
            assert holds(device, region, region)
        else:
            write(device, region, 100 + seed)


@pytest.mark.parametrize("reads", [True, False])
def test_a_file_that_fails_is_told_and_nothing_is_lost(
    tiered: Accelerator, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    regions = filled(tiered, 8, 4)
    fails = True
    transfer = host_tier.transfer

    def failing(*args: object, **kwargs: object) -> None:
        if fails and kwargs["reads"] == reads:
            raise OSError(errno.EIO if reads else errno.ENOSPC, "so it is")
        transfer(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(host_tier, "transfer", failing)
    with pytest.raises(SpillError, match="cannot read" if reads else "cannot write"):
        _go_through(tiered, regions, reads=reads)
    fails = False
    for number, region in enumerate(regions):
        tiered.use([region])
        found = view(tiered, region)
        wanted = (region,) if reads else (region, 100 + number)
        assert any(torch.equal(found, pattern(len(found), seed)) for seed in wanted)
        tiered.used([region])


# What goes wrong half way


@pytest.mark.parametrize("times", [1, 3])
def test_memory_that_is_lacking_takes_no_bytes_with_it(
    streams: Emulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """What makes way needs room in host memory, where what is entering lies."""
    device = Accelerator(streams, 8 * PAGE, tmp_path, host_budget=6 * PAGE, least=6 * PAGE)
    regions = filled(device, 6, 3)
    plain, left = streams.fill, [0]

    def fill(storage: torch.UntypedStorage, nbytes: int) -> None:
        if left[0]:
            left[0] -= 1
            full()
        plain(storage, nbytes)

    monkeypatch.setattr(streams, "fill", fill)
    for region in [*regions, *reversed(regions)]:
        left[0] = 0
        write(device, regions[-1], regions[-1])  # so that somebody can make way
        left[0] = times
        if times == 1:
            assert holds(device, region, region)
        else:
            with contextlib.suppress(BudgetError):
                assert holds(device, region, region)
    left[0] = 0
    assert all(holds(device, region, region) for region in regions)
    device.close()


def test_a_plan_that_finds_no_memory_is_left(
    device: Accelerator, streams: Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    regions = filled(device, 4, 3)
    device.use([regions[-1]])
    now, capacity = device.resident(), device.capacity
    uses = [Use((region,)) for region in regions]
    device.follow(uses, LookAhead().plan(uses, [3 * PAGE] * 4, device.capacity, now, now))

    with monkeypatch.context() as patch:
        patch.setattr(streams, "fill", full)
        for position in range(len(uses)):
            device.advance(position)
    assert device.capacity == capacity, "the pool is as large as it was"
    device.used([regions[-1]])
    assert all(holds(device, region, region) for region in regions)


def test_an_end_that_fails_gives_all_back(
    device: Accelerator, streams: Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = held(device, 4)

    monkeypatch.setattr(streams, "fill", full)
    with pytest.raises(BudgetError, match="lower the budget"):
        device.retire()
    assert len(tensors) == 4
    assert streams.host_bytes == 0


def test_what_is_held_at_the_end_stays(tiered: Accelerator, streams: Emulated) -> None:
    tensors = held(tiered, 6)
    assert tiered.retire() == 0
    assert streams.host_bytes == 0
    for region, tensor in tensors.items():
        assert torch.equal(tensor, pattern(3 * PAGE, region))


# The emulated accelerator itself


def _read_too_early() -> None:
    with emulated() as streams:
        storage = torch.empty(0, dtype=torch.uint8).untyped_storage()
        streams.fill(storage, 64)
        moment = streams.copy_in(storage, torch.zeros(64, dtype=torch.uint8), [streams.now()])
        with Watcher(streams, lambda one: one._cdata == storage._cdata).watching():
            torch.empty(0, dtype=torch.uint8).set_(storage).sum()
        moment.wait()


def test_the_emulated_accelerator_finds_what_was_not_waited_for() -> None:
    with pytest.raises(Race, match="does not come after"):
        _read_too_early()


def test_the_emulated_accelerator_refuses_absent_tensors() -> None:
    with emulated() as streams:
        tensor = torch.ones(4)
        tensor.untyped_storage().resize_(0)
        with Watcher(streams, lambda one: True).watching(), pytest.raises(Race, match="absent"):
            tensor.clone()


# Several threads


def test_regions_are_held_in_several_threads(tiered: Accelerator) -> None:
    """Each holds one of its own two at a time, so that all four never fit."""
    regions = [tiered.allocate(4 * PAGE) for _ in range(4)]
    wrong: list[object] = []

    def work(own: list[int]) -> None:
        for turn in range(30):
            region = own[turn % 2]
            tiered.acquire([region], pin=True)
            target = view(tiered, region)
            if turn > 1 and not torch.equal(target, pattern(len(target), turn - 2)):
                wrong.append((region, turn))
            target.copy_(pattern(len(target), turn))
            tiered.unpin([region])

    threads = [threading.Thread(target=work, args=(regions[half : half + 2],)) for half in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert wrong == []
    for region in regions:
        assert holds(tiered, region, 28 + (region in (regions[1], regions[3])))


# What is heard of


def test_lists_that_do_not_fit_together_are_given_part_by_part(device: Accelerator) -> None:
    """Each of five tensors takes three of the eight pages."""
    regions = [device.allocate(3 * PAGE) for _ in range(5)]
    expected = [torch.arange(3 * PAGE // 4, dtype=torch.float32) + number for number in range(5)]
    residency = Residency(device)
    try:
        tensors = []
        for region, values in zip(regions, expected, strict=True):
            device.acquire([region])
            tensors.append(fit(torch.empty(0).set_(device.storage(region), 0, values.shape, (1,))))
            tensors[-1].copy_(values)
        norms = torch._foreach_norm(tensors)
        torch._foreach_mul_(tensors, 2.0)
        torch._foreach_add_(tensors, norms)
        made = torch._foreach_mul(tensors, [1.0, 2.0, 3.0, 4.0, 5.0])
        found = [one.clone() for one in tensors]
    finally:
        residency.end()
    its = torch._foreach_norm(expected)
    torch._foreach_mul_(expected, 2.0)
    torch._foreach_add_(expected, its)
    assert_same([*norms], [*its], "norms")
    assert_same(found, expected, "tensors")
    assert_same([*made], [one * (n + 1.0) for n, one in enumerate(expected)], "new tensors")


def test_storages_bring_themselves_to_whoever_copies_them(device: Accelerator) -> None:
    first, second = device.allocate(5 * PAGE), device.allocate(5 * PAGE)
    write(device, first, 1)
    tensor = torch.empty(0, dtype=torch.uint8)
    device.acquire([first])
    tensor.set_(device.storage(first))
    expected = pattern(5 * PAGE, 1)
    for copied in (copy.deepcopy, _saved, lambda one: pickle.loads(pickle.dumps(one))):
        write(device, second, 2)
        assert device.resident() == [second]
        found = copied(tensor)
        assert torch.equal(found, expected)
        assert type(found.untyped_storage()) is torch.UntypedStorage


def _saved(tensor: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save({"one": tensor}, file)
    file.seek(0)
    return torch.load(file)["one"]
