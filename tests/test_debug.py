"""Debug mode: what comes back from the spill file is what left, or nobody gets it.

A byte is changed in the file behind the device's back. Whoever called a function is told; a thread
that merely touches memory cannot be told, so then the process ends. Training itself is the same.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from devices import HUGE, KINDS, SMALL, each_of_the_cpu, filled, holds, script, view
from exactness import (
    Loop,
    Twin,
    compare_runs,
    footprint_of,
    least_budget,
    needs_pager,
    small,
    small_loss,
    small_samples,
)

from dynoffload.config import OffloadConfig
from dynoffload.errors import ConfigError, CorruptionError, SpillError
from dynoffload.memory.device import Device

BACKENDS = [pytest.param("pager", marks=needs_pager), "mapped"]


@contextmanager
def debugged(kind: str, page: int, directory: Path, *, debug: bool = True) -> Iterator[Device]:
    """Open a device of eight pages in debug mode."""
    device = KINDS[kind](8 * page, page, directory, debug=debug)
    try:
        yield device
    finally:
        device.close()


def flip(device: Device, region: int) -> None:
    """Change one byte of an absent region, in the middle of its place in the file."""
    overwrite(device, region, lambda old: bytes([old[0] ^ 1]), 1)


def overwrite(device: Device, region: int, change: Callable[[bytes], bytes], nbytes: int) -> None:
    """Change bytes of an absent region from the middle of its place in the file on."""
    assert region not in device.resident()
    place = device._places[region]  # type: ignore[attr-defined]
    spill = device._spill.fd  # type: ignore[attr-defined]
    at = place.page * device.page_bytes + place.nbytes // 2
    begin = at // SMALL * SMALL
    # Past the page cache, as a disk does it: else the device finds the region touched.
    fd = os.open(f"/proc/self/fd/{spill}", os.O_RDWR | os.O_DIRECT)
    with mmap.mmap(-1, 2 * SMALL) as block:
        try:
            assert os.preadv(fd, [block], begin) == len(block)
            own = slice(at - begin, at - begin + nbytes)
            block[own] = change(block[own])
            assert os.pwritev(fd, [block], begin) == len(block)
        finally:
            os.close(fd)


def four(device: Device) -> list[int]:
    """Fill four regions of three pages, so that at most two are present."""
    regions = [device.allocate(3 * device.page_bytes - 5) for _ in range(4)]
    filled(device, regions)
    assert len(device.resident()) <= 2
    return regions


@each_of_the_cpu(SMALL, HUGE)
def test_a_changed_byte_is_told_to_whoever_called(kind: str, page: int, tmp_path: Path) -> None:
    """By name, with the remedy; and the other regions are not touched."""
    with debugged(kind, page, tmp_path) as device:
        regions = four(device)
        bad, *_ = absent = [r for r in regions if r not in device.resident()]
        flip(device, bad)
        device.names[bad] = "layers.3.weight"
        for _ in range(2):
            with pytest.raises(CorruptionError, match="not those that were written") as caught:
                device.acquire([bad])
            assert "layers.3.weight (" in str(caught.value)
            assert str(tmp_path) in str(caught.value)
            assert "check that disk" in str(caught.value)
            assert caught.value.errno == errno.EBADMSG
            assert isinstance(caught.value, SpillError)
        for region in set(regions) - {bad}:
            device.acquire([region])
            assert holds(device, region)
        assert len(absent) >= 2


@needs_pager
@pytest.mark.parametrize("page", [SMALL, HUGE])
@pytest.mark.parametrize("nbytes", [512, 4096])
def test_the_pager_always_finds_lost_sectors(page: int, nbytes: int, tmp_path: Path) -> None:
    """Zeros, as of a block that the file system takes for one that was never written."""
    with debugged("pager", page, tmp_path, debug=False) as device:
        regions = four(device)
        bad = next(r for r in regions if r not in device.resident())
        device.names[bad] = "layers.3.weight"
        overwrite(device, bad, lambda old: bytes(len(old)), nbytes)
        with pytest.raises(
            CorruptionError, match=r"layers\.3\.weight .*not those that were written"
        ):
            device.acquire([bad])
        for region in set(regions) - {bad}:
            device.acquire([region])
            assert holds(device, region)


@needs_pager
def test_an_access_that_nobody_announced_ends_the_process(tmp_path: Path) -> None:
    """A good region is served, a bad one is not."""
    found = script(
        """
        import faulthandler
        from test_debug import *
        faulthandler.disable()
        with debugged("pager", SMALL, Path(sys.argv[1])) as device:
            regions = four(device)
            good, bad = [r for r in regions if r not in device.resident()][:2]
            flip(device, bad)
            assert holds(device, good)
            print("good", flush=True)
            print("read", int(view(device, bad)[7]), flush=True)
        """,
        tmp_path,
        seconds=120,
    )
    assert found.returncode == -6, (found.stdout, found.stderr)
    assert found.stdout == "good\n"
    assert "not those that were written" in found.stderr
    assert "checkpoint" in found.stderr


@pytest.mark.parametrize("written", [False, True])
def test_a_write_that_nobody_announced_is_no_corruption(written: bool, tmp_path: Path) -> None:
    """The kernel serves it from the mapped file, and may have written it by the time we look."""
    with debugged("mapped", SMALL, tmp_path) as device:
        regions = four(device)
        region = next(r for r in regions if r not in device.resident())
        view(device, region)[7] += 1
        if written:
            os.fsync(device._spill.fd)  # type: ignore[attr-defined]
        expected = view(device, region).clone()
        device.acquire([region])
        assert torch.equal(view(device, region), expected)
        for other in set(regions) - {region}:
            device.acquire([other])
            assert holds(device, other)
        device.acquire([region])
        assert torch.equal(view(device, region), expected)


@needs_pager
def test_free_buffers_are_poisoned(tmp_path: Path) -> None:
    """A region without content holds no number that could pass for one."""
    with debugged("pager", SMALL, tmp_path) as device:
        region = device.allocate(2 * SMALL)
        device.acquire([region])
        assert bool(view(device, region).view(torch.float32).isnan().all())
        view(device, region).fill_(3)
        device.discard(region)
        device.acquire([region])
        assert bool(view(device, region).view(torch.bfloat16).isnan().all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_training_is_the_same(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, with every region checked; asked for by the environment."""
    monkeypatch.setenv("DYNOFFLOAD_DEBUG", "1")
    assert OffloadConfig().debug
    twin = Twin(small(), lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    config = {"backend": backend}
    budget, _ = least_budget(twin.model, twin.optimizer, footprint_of(twin.model) // 3, config)
    session = compare_runs(
        twin, Loop(steps=6, clip=1.0), small_samples(6), small_loss, budget, config=config
    )
    assert session.stats["bytes_in"].sum() > 0


def test_a_word_that_is_no_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is refused, as it would be taken for either."""
    monkeypatch.setenv("DYNOFFLOAD_DEBUG", "yes")
    with pytest.raises(ConfigError, match="DYNOFFLOAD_DEBUG='yes'"):
        OffloadConfig()
