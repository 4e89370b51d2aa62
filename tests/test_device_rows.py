"""Rows: regions whose addresses follow one another, each of which moves by itself.

A tensor may lie over a whole row while its slices come and go; a slice that is known to hold zeros
takes no fast memory and moves no byte. Both devices of the CPU, and the accelerator's, on which
what lies over a row has no memory, and operators are heard of.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import filled, holds, needs_pager, opened, schedule, uses_of, view

from dynoffload.errors import BudgetError
from dynoffload.memory.accelerator.guarded import fit
from dynoffload.memory.device import Device
from dynoffload.memory.pager import Pager
from dynoffload.planning.schedule import Action, Kind

PAGE = 4096
SLICE = 4 * PAGE
POOL = 10 * SLICE

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(params=[pytest.param("pager", marks=needs_pager), "mapped", "accelerator"])
def device(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Device]:
    """Each device with room for ten slices."""
    with opened(request.param, POOL, PAGE, tmp_path) as made:
        yield made


def whole(device: Device, row: list[int]) -> torch.Tensor:
    """Return a row's bytes as one tensor ``[slices, bytes]``."""
    tensor = torch.empty(0, dtype=torch.uint8)
    return fit(tensor.set_(device.row_storage(row), 0, (len(row), SLICE), (SLICE, 1)))


def pushed_out(device: Device) -> None:
    """Fill the pool with other things, so that all else has left it."""
    others = [device.allocate(SLICE) for _ in range(POOL // SLICE)]
    device.acquire(others, pin=True)
    device.unpin(others)
    for region in others:
        device.release(region)


def test_a_row_is_one_tensor_whose_slices_move_alone(device: Device) -> None:
    """A row larger than the pool; each slice has an owner, and only what is touched comes."""
    row = device.allocate_row(16 * SLICE, SLICE)
    assert len(set(row)) == 16
    tensor = whole(device, row)
    for number, region in enumerate(row):
        assert device.owner(tensor[number]) == region
        assert device.owner(tensor[number, -1:]) == region
        if device.serves:
            assert device.storage(region).data_ptr() == tensor[number].data_ptr()
        assert device.size(region) == SLICE
        assert device.begins(tensor[number], region)
        assert not device.begins(tensor[number, 1:], region)
    assert device.owners(tensor) == sorted(row)
    assert device.owners(tensor[3:5, 1:]) == sorted(row[3:5])
    assert device.owners(tensor[2:9:3]) == sorted(row[2:9])  # and what lies between
    filled(device, row)
    pushed_out(device)
    before = device.counters()
    assert torch.equal(tensor[5], view(device, row[5]))
    device.acquire([row[5]])
    moved = device.counters().bytes_in - before.bytes_in
    assert moved <= SLICE
    for number, region in enumerate(row):
        device.acquire([region])
        assert holds(device, region)
        assert torch.equal(tensor[number], view(device, region))


def test_regions_of_a_row_are_whole_pages(device: Device) -> None:
    """Padding would tear the tensor apart."""
    with pytest.raises(ValueError, match="multiple of 4096"):
        device.allocate_row(4 * SLICE, SLICE + 64)


def test_a_slice_must_fit_the_pool_the_row_need_not(device: Device) -> None:
    """What moves as one is the slice."""
    device.allocate_row(3 * POOL, POOL)
    with pytest.raises(BudgetError, match="does not fit the pool"):
        device.allocate_row(2 * POOL, POOL + PAGE)


def test_a_row_that_cannot_be_had_leaves_nothing_behind(device: Device) -> None:
    """Addresses and numbers are given back; the next allocation gets them."""
    first = device.allocate(SLICE)
    device.release(first)
    with pytest.raises(BudgetError, match="regions are alive"):
        device.allocate_row(70_000 * SLICE, SLICE)
    assert device.allocate(SLICE) == first


def test_clear_slices_read_as_zeros_and_move_nothing(device: Device) -> None:
    """Cleared after they held something else, in memory and in the file, and read by nobody."""
    row = device.allocate_row(16 * SLICE, SLICE)
    filled(device, row)
    before = device.counters()
    device.clear(row)
    assert device.resident_bytes() == 0
    assert all(device.is_clear(row))
    pushed_out(device)
    after = device.counters()
    assert (after.bytes_in, after.bytes_out) == (before.bytes_in, before.bytes_out)
    assert not any(one.any() for one in whole(device, row))


def test_what_somebody_may_have_written_is_not_clear(device: Device) -> None:
    """Announced or not, in memory still or gone to the file."""
    row = device.allocate_row(4 * SLICE, SLICE)
    device.clear(row)
    tensor = whole(device, row)
    tensor[1, 7] = 3
    device.acquire([row[2]])
    view(device, row[2])[9] = 4
    assert device.is_clear(row) == [True, False, False, True]
    device.counters()
    pushed_out(device)
    assert device.is_clear(row) == [True, False, False, True]
    assert tensor[1].sum() == 3
    assert tensor[2].sum() == 4
    assert tensor[0].sum() == 0


@needs_pager
def test_zeros_written_over_zeros_are_clear_again(tmp_path: Path) -> None:
    """As clipping does it: in memory still, or on the way out, where nothing is written. Any other
    byte ends that, be it the sign of a zero at the very end."""
    device: Any = Pager(POOL, PAGE, tmp_path, threads=2)
    row = device.allocate_row(16 * SLICE, SLICE)
    device.clear(row)
    numbers = whole(device, row).view(torch.float32)
    before = device.counters()
    numbers.mul_(0.5)
    assert device.is_clear(row) == [True] * 16
    numbers.mul_(0.5)
    pushed_out(device)
    after = device.counters()
    assert (after.bytes_in, after.bytes_out) == (before.bytes_in, before.bytes_out)
    assert device.is_clear(row) == [True] * 16
    numbers[3, -1] = -0.0
    numbers[5, -1] = 1.0
    expected = [number not in (3, 5) for number in range(16)]
    assert device.is_clear(row) == expected
    pushed_out(device)
    assert device.is_clear(row) == expected
    assert device.counters().bytes_out == before.bytes_out + 2 * SLICE
    assert torch.signbit(numbers[3, -1])
    del numbers
    device.close()


def test_discarded_is_not_clear(device: Device) -> None:
    """Without content is not zeros."""
    row = device.allocate_row(2 * SLICE, SLICE)
    device.clear(row)
    device.discard(row[0])
    assert device.is_clear(row) == [False, True]


def test_a_clear_slice_comes_by_plan_without_a_read(device: Device) -> None:
    """A plan may name it; it is zeros in memory then, and goes as it came."""
    row = device.allocate_row(2 * SLICE, SLICE)
    filled(device, row)
    device.clear(row)
    before = device.counters()
    device.follow(uses_of(*row), schedule(Action(0, Kind.FETCH, row[0])))
    device.advance(0)
    device.acquire([row[0]])
    assert not view(device, row[0]).any()
    assert device.counters().bytes_in == before.bytes_in
