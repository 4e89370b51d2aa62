"""Regions that are read from files of others until they are written."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from devices import SMALL, needs_pager, opened, pattern, view

from dynoffload.errors import SpillError
from dynoffload.memory.pager import Pager
from dynoffload.memory.sources import Extent, SourceFile
from dynoffload.units import MiB

pytestmark = needs_pager
LENGTH = 5 * SMALL + 999
CONTENT = pattern(40 * SMALL, 5)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(bytes(CONTENT))
    return path


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Pager]:
    """A pager of eight pages."""
    with opened("pager", 8 * SMALL, SMALL, tmp_path) as made:
        assert isinstance(made, Pager)
        yield made


def parted(path: Path, at: int, *cuts: int) -> tuple[list[Extent], torch.Tensor]:
    """Return extents of a region's length from ``at`` on, ``cuts`` bytes long but for the last,
    with gaps between them; and their bytes."""
    opened, left, extents = SourceFile(path), LENGTH, []
    for cut in (*cuts, LENGTH):
        nbytes = min(cut, left)
        extents.append(Extent(opened, at, nbytes))
        at, left = at + nbytes + 37, left - nbytes
    return extents, torch.cat([CONTENT[e.offset : e.offset + e.nbytes] for e in extents])


def crowd(device: Pager) -> None:
    """Push everything else out."""
    other = device.allocate(8 * SMALL)
    device.acquire([other])
    device.release(other)


@pytest.mark.parametrize("cuts", [(), (1,), (SMALL,), (SMALL - 1, 2 * SMALL, 5), (7,) * 300])
@pytest.mark.parametrize("at", [0, 1, 4090])
def test_bytes_at_any_place(device: Pager, file: Path, at: int, cuts: tuple[int, ...]) -> None:
    """Read as often as they left, and never written."""
    region = device.allocate(LENGTH)
    extents, expected = parted(file, at, *cuts)
    device.source(region, extents)
    assert device.resident() == []
    for _ in range(3):
        assert torch.equal(view(device, region), expected)
        crowd(device)
        assert region not in device.resident()
    assert device.counters().bytes_out == 0
    assert device.counters().bytes_in == 3 * LENGTH


def read_from_disk() -> int:
    """Return the bytes that this process has read from disks so far."""
    (line,) = re.findall(r"^read_bytes: (\d+)$", Path("/proc/self/io").read_text(), re.M)
    return int(line)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("at", [0, 1, 4095])
@pytest.mark.parametrize("length", [3 * MiB - 1, 5 * MiB + 4097])
def test_long_extents_leave_the_page_cache_alone(
    tmp_path: Path, length: int, at: int, cached: bool
) -> None:
    """What is there is used, and what is not is read past it. The last one ends with the file."""
    content = pattern(at + 2 * length + 7, length)
    path = tmp_path / "long"
    path.write_bytes(content.numpy().tobytes())
    source = SourceFile(path)
    if source.direct < 0:
        pytest.skip("the file system has no direct reads")
    os.fsync(source.fd)
    os.posix_fadvise(source.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if cached:
        path.read_bytes()
    extents = [Extent(source, at, length), Extent(source, at + length + 7, length)]
    with opened("pager", 3 * length, SMALL, tmp_path) as device:
        region = device.allocate(2 * length)
        device.source(region, extents)
        before = read_from_disk()
        for _ in range(2):
            expected = torch.cat([content[e.offset : e.offset + length] for e in extents])
            assert torch.equal(view(device, region), expected)
            other = device.allocate(3 * length - SMALL)
            device.acquire([other])
            device.release(other)
        read = read_from_disk() - before
        assert read == 0 if cached else 4 * length <= read < 4 * length + MiB


def test_what_is_written_moves_to_the_spill_file(device: Pager, file: Path) -> None:
    region = device.allocate(LENGTH)
    extents, expected = parted(file, 3, SMALL)
    device.source(region, extents)
    view(device, region)[LENGTH - 1] ^= 1
    expected[LENGTH - 1] ^= 1
    crowd(device)
    assert device.counters().bytes_out == LENGTH
    file.write_bytes(b"")  # nobody looks there any more
    for _ in range(2):
        assert torch.equal(view(device, region), expected)
        crowd(device)
    assert bytes(file.read_bytes()) == b""


def test_what_is_not_backed_takes_room_once_it_is_written(device: Pager, file: Path) -> None:
    regions = [device.allocate(LENGTH, backed=False) for _ in range(3)]
    for region in regions:
        device.source(region, parted(file, region)[0])
    assert device.spill_bytes() == 0
    view(device, regions[1])[7] ^= 1
    expected = view(device, regions[1]).clone()
    crowd(device)
    assert os.fstat(device._spill.fd).st_blocks * 512 <= device.spill_bytes() + SMALL
    assert torch.equal(view(device, regions[1]), expected)
    assert torch.equal(view(device, regions[2]), parted(file, regions[2])[1])


def test_content_is_dropped_and_exchanged(device: Pager, file: Path) -> None:
    region = device.allocate(LENGTH)
    extents, expected = parted(file, 0)
    device.source(region, extents)
    twin = device.twin(region)
    device.exchange([region], [twin])
    assert torch.equal(view(device, twin), expected)
    device.exchange([region], [twin])
    crowd(device)
    assert torch.equal(view(device, region), expected)
    device.clear([region])
    assert not view(device, region).any()
    device.source(region, extents)
    device.discard(region)
    device.source(region, extents)
    assert torch.equal(view(device, region), expected)


@pytest.mark.parametrize("how", ["written", "cut off", "touched by another write of the same"])
def test_a_file_that_changes_is_not_read(device: Pager, file: Path, how: str) -> None:
    region = device.allocate(LENGTH)
    device.names[region] = "experts.up[3]"
    extents, _ = parted(file, 0)
    device.source(region, extents)
    device.acquire([region])
    crowd(device)
    with file.open("r+b") as written:
        if how == "cut off":
            os.ftruncate(written.fileno(), 100)
        else:
            written.write(b"x" if how == "written" else bytes(CONTENT[:1]))
    words = r"cannot read experts.up\[3\] .* from .*weights.*changed"
    with pytest.raises(SpillError, match=words):
        device.acquire([region])
    with pytest.raises(SpillError, match=words):
        device.touch([region])
    device.discard(region)
    device.touch([region])
    device.check_files()


_ACCESS = """
import os, pathlib, sys
sys.path.insert(0, sys.argv[1])
from devices import SMALL, opened, view
from test_sources import parted
first, second = map(pathlib.Path, sys.argv[2:4])
with opened("pager", 8 * SMALL, SMALL, first.parent) as device:
    region = device.allocate(2 * SMALL)
    extents = [parted(one, 0)[0][0]._replace(nbytes=SMALL) for one in (first, second)]
    device.names[region] = "experts.up[3]"
    device.source(region, extents)
    if sys.argv[4] == "cut off":
        os.truncate(second, 100)
    else:
        second.write_bytes(first.read_bytes())
    view(device, region).sum()
"""


@pytest.mark.parametrize("how", ["cut off", "written"])
def test_an_access_that_no_error_reaches_names_the_file_that_changed(file: Path, how: str) -> None:
    """The process ends with the words that a call would raise."""
    other = file.parent / "more weights"
    other.write_bytes(bytes(CONTENT))
    where = Path(__file__).parent
    command = [sys.executable, "-c", _ACCESS, str(where), str(file), str(other), how]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == -signal.SIGABRT
    assert "bytes of experts.up[3], for which a thread sleeps" in done.stderr
    assert f"from {other}: it has changed since the block began. Leave the files" in done.stderr


def test_a_file_that_vanishes_is_read_on(device: Pager, file: Path) -> None:
    """It exists as long as it is open."""
    region = device.allocate(LENGTH)
    extents, expected = parted(file, 0)
    device.source(region, extents)
    file.rename(file.parent / "elsewhere")
    assert torch.equal(view(device, region), expected)
