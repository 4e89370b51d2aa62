"""The spill file: private, gone from the directory at once, refused clearly where it cannot be."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from devices import SMALL, each_device, filled, holds, opened

from dynoffload.errors import DynOffloadError, SpillError
from dynoffload.memory import spill
from dynoffload.memory.spill import SpillFile, default_spill_dir, filesystem_of
from dynoffload.units import GiB, MiB


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a directory on an ext4 file system of 160 MiB of its own."""
    image, mount = tmp_path / "image", tmp_path / "disk"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(160 * MiB)
    try:
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m0", image], check=True, capture_output=True)
        subprocess.run(["mount", "-o", "loop", image, mount], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    try:
        (mount / "lost+found").rmdir()
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", mount], check=True, capture_output=True)


@contextlib.contextmanager
def file_in(directory: Path, need: int = 0, *, direct: bool = True) -> Iterator[SpillFile]:
    """Open a spill file, and close it whatever happens."""
    made = SpillFile(directory, need, direct=direct)
    try:
        yield made
    finally:
        made.close()


# What it is


@pytest.mark.parametrize("direct", [True, False])
def test_nobody_else_can_open_it(tmp_path: Path, direct: bool) -> None:
    with file_in(tmp_path, direct=direct) as made:
        found = os.fstat(made.fd)
        assert stat.S_IMODE(found.st_mode) == 0o600
        assert found.st_nlink == 0
        assert list(tmp_path.iterdir()) == []
        assert fcntl.fcntl(made.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        assert bool(fcntl.fcntl(made.fd, fcntl.F_GETFL) & os.O_DIRECT) == made.direct
        if not direct:
            assert not made.direct


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with file_in(tmp_path):
        pass
    with pytest.raises(SpillError):
        SpillFile(tmp_path, 1 << 60)
    assert os.listdir("/proc/self/fd") == before


def test_growth_is_allocated_on_the_disk(tmp_path: Path) -> None:
    with file_in(tmp_path) as made:
        made.grow(1)
        found = os.fstat(made.fd)
        assert found.st_size == made.size >= 1
        assert found.st_blocks * 512 >= made.size
        size = made.size
        made.grow(size)
        assert made.size == size
        made.grow(size + 1)
        assert made.size == os.fstat(made.fd).st_size >= size + 1


def test_where_direct_io_is_refused_it_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened_with, real = [], os.open

    def refuse(name: str, flags: int, mode: int = 0o777) -> int:
        opened_with.append(flags)
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "as on file systems without direct I/O")
        return real(name, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    with file_in(tmp_path) as made:
        assert not made.direct
        made.grow(1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no direct I/O" in caplog.text
    caplog.clear()
    with file_in(tmp_path, direct=False):
        assert caplog.records == []


# Where it cannot be


def test_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(SpillError, match="does not exist: create it, or pass spill_dir="):
        SpillFile(tmp_path / "nowhere", 0)
    (tmp_path / "file").touch()
    with pytest.raises(SpillError, match="is a file, or pass spill_dir="):
        SpillFile(tmp_path / "file", 0)


@pytest.mark.skipif(
    not Path("/dev/shm").is_dir() or filesystem_of(Path("/dev/shm")) != "tmpfs",
    reason="/dev/shm is no tmpfs here",
)
def test_a_directory_in_memory() -> None:
    before = os.listdir("/dev/shm")
    with pytest.raises(SpillError, match="is on tmpfs, which is memory itself: pass spill_dir="):
        SpillFile(Path("/dev/shm"), 0)
    assert os.listdir("/dev/shm") == before


def test_a_directory_that_cannot_be_written() -> None:
    with pytest.raises(SpillError, match="cannot create a file in spill directory"):
        SpillFile(Path("/proc/self"), 0)


def test_too_little_room_for_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(SpillError, match=r"free but training needs 1\.00 EiB|needs") as caught:
        SpillFile(tmp_path, 1 << 60)
    assert caught.value.errno == errno.ENOSPC
    assert isinstance(caught.value, (DynOffloadError, OSError))
    assert "free space there, or pass spill_dir=" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_the_default_is_on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    assert filesystem_of(default_spill_dir()) not in spill._MEMORY_FILESYSTEMS
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/dev/shm")
    assert default_spill_dir() == Path("/var/tmp")


def test_the_innermost_mount_counts(tmp_path: Path) -> None:
    assert filesystem_of(Path("/proc/self")) == "proc"
    link = tmp_path / "link"
    link.symlink_to("/proc")
    assert filesystem_of(link) == "proc"


# A disk that fills up


def test_a_disk_that_fills_up(small_disk: Path) -> None:
    with file_in(small_disk) as made:
        made.grow(64 * MiB)
        with pytest.raises(SpillError, match="cannot grow") as caught:
            made.grow(1 * GiB)
        assert caught.value.errno == errno.ENOSPC
        assert "free space there" in str(caught.value)
        assert made.size == 64 * MiB
        os.pwrite(made.fd, bytes(0), 0)
    with pytest.raises(SpillError, match="needs"):
        SpillFile(small_disk, GiB)
    assert list(small_disk.iterdir()) == []


@each_device(SMALL)
def test_a_device_on_a_disk_that_fills_up(kind: str, page: int, small_disk: Path) -> None:
    """A region is refused when it is made; what has its place on the disk never loses it."""
    with opened(kind, 32 * MiB, page, small_disk) as device:
        regions = [device.allocate(16 * MiB) for _ in range(8)]  # the file has 128 MiB
        with pytest.raises(SpillError, match="cannot grow"):
            device.allocate(16 * MiB)
        filled(device, regions)
        (small_disk / "somebody else's").write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096))
        assert os.statvfs(small_disk).f_bavail == 0
        device.discard(regions[0])
        filled(device, regions)
        filled(device, regions)
        assert all(holds(device, region) for region in regions)
        assert device.counters().peak_bytes <= device.capacity
