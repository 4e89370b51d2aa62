"""The spill file: private, under no name, its room taken; refused clearly where it cannot be."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import errno
import fcntl
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from devices import KINDS, SMALL, each_of_the_cpu, filled, holds, opened
from exactness import assert_same_training, needs_pager
from torch import nn

import dynoffload
from dynoffload.errors import DynOffloadError, SpillError
from dynoffload.memory import filesystems, spill
from dynoffload.memory.spill import SpillFile, default_spill_dir, filesystem_of
from dynoffload.units import GiB, KiB, MiB, format_bytes


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


def test_no_descriptor_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.listdir("/proc/self/fd")
    with file_in(tmp_path):
        pass
    with pytest.raises(SpillError):
        SpillFile(tmp_path, 1 << 60)
    fill_up(monkeypatch)
    with pytest.raises(SpillError, match="cannot grow to"):
        SpillFile(tmp_path, MiB)
    assert os.listdir("/proc/self/fd") == before


def fill_up(patch: pytest.MonkeyPatch) -> None:
    """Let no file grow any more, as if somebody else had taken the rest of the disk."""

    def full(fd: int, start: int, stop: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(spill, "take_room", full)


@pytest.mark.parametrize("direct", [True, False])
def test_what_is_needed_is_allocated_at_once(tmp_path: Path, direct: bool) -> None:
    with file_in(tmp_path, 80 * MiB, direct=direct) as made:
        assert made.size == os.fstat(made.fd).st_size == 80 * MiB
        assert os.fstat(made.fd).st_blocks * 512 >= 80 * MiB
        made.grow(80 * MiB)
        assert made.size == 80 * MiB
        made.grow(80 * MiB + 1)
        assert made.size == os.fstat(made.fd).st_size > 80 * MiB
        assert os.fstat(made.fd).st_blocks * 512 >= made.size


def test_where_nothing_is_allocated_ahead_the_file_is_longer_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> int:
        ctypes.set_errno(errno.EOPNOTSUPP)
        return -1

    monkeypatch.setattr(filesystems, "libc", lambda: SimpleNamespace(fallocate=refuse))
    with file_in(tmp_path, 80 * MiB) as made:
        made.grow(81 * MiB)
        found = os.fstat(made.fd)
        assert found.st_size == made.size >= 81 * MiB
        assert found.st_blocks * 512 < MiB
    with pytest.raises(SpillError, match="needs"):
        SpillFile(tmp_path, 1 << 60)


def test_where_direct_io_is_refused_it_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = fcntl.fcntl

    def refuse(descriptor: int, command: int, argument: int = 0) -> int:
        if argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "as on file systems without direct I/O")
        return real(descriptor, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with file_in(tmp_path) as made:
        assert not made.direct
        made.grow(1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no direct I/O" in caplog.text
    caplog.clear()
    with file_in(tmp_path, direct=False):
        assert caplog.records == []


# Where it cannot be


@pytest.mark.parametrize(
    ("directory", "message"),
    [
        ("nowhere", "does not exist: create it, or pass spill_dir="),
        ("file", "is a file: pass spill_dir="),
        ("/proc/self", "cannot create a file in spill directory"),
        ("/dev/shm", "is on tmpfs, which is memory itself: pass spill_dir="),
    ],
)
def test_a_directory_that_cannot_be_had(tmp_path: Path, directory: str, message: str) -> None:
    if directory == "/dev/shm" and filesystem_of(Path(directory)) != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    (tmp_path / "file").touch()
    with pytest.raises(SpillError, match=message):
        SpillFile(tmp_path / directory, 0)


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
        free = shutil.disk_usage(small_disk).free
        with pytest.raises(SpillError, match=f"; {format_bytes(free)} free") as caught:
            made.grow(1 * GiB)
        assert "cannot grow" in str(caught.value)
        assert shutil.disk_usage(small_disk).free == free, "what it got is given back"
        assert caught.value.errno == errno.ENOSPC
        assert "free space there" in str(caught.value)
        assert made.size == 64 * MiB
        os.pwrite(made.fd, bytes(0), 0)
    with pytest.raises(SpillError, match="needs"):
        SpillFile(small_disk, GiB)
    assert list(small_disk.iterdir()) == []


@each_of_the_cpu(SMALL)
def test_a_device_on_a_disk_that_fills_up(kind: str, page: int, small_disk: Path) -> None:
    """A region is refused when it is made; what has its place on the disk never loses it."""
    with opened(kind, 32 * MiB, page, small_disk) as device:
        regions = [device.allocate(16 * MiB) for _ in range(8)]  # the file has 128 MiB
        with pytest.raises(SpillError, match="cannot grow"):
            device.allocate(16 * MiB)
        filled(device, regions)
        with (small_disk / "somebody else's").open("wb", 0) as file:
            for size in (MiB, KiB):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)):
                        pass
        assert os.statvfs(small_disk).f_bavail == 0
        device.discard(regions[0])
        filled(device, regions)
        filled(device, regions)
        assert all(holds(device, region) for region in regions)
        assert device.counters().peak_bytes <= device.capacity


@each_of_the_cpu(SMALL)
def test_what_was_counted_has_its_room_whatever_comes_on_top(
    kind: str, page: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill, "_GROWTH", page)
    need = 16 * MiB
    device = KINDS[kind](8 * MiB, page, tmp_path, need=need)
    try:
        first = [device.allocate(MiB) for _ in range(4)]
        extra = [device.allocate(2 * MiB, extra=True) for _ in range(3)]
        device.release(extra.pop())
        extra.append(device.allocate(2 * MiB, extra=True))
        assert device._spill.size == need + 6 * MiB, "room is used again"
        fill_up(monkeypatch)
        rest = [device.allocate(MiB) for _ in range(12)]
        with pytest.raises(SpillError, match="cannot grow"):
            device.allocate(page, extra=True)
        filled(device, first + extra + rest)
        assert all(holds(device, region) for region in first + extra + rest)
    finally:
        device.close()


@pytest.mark.parametrize("backend", [pytest.param("pager", marks=needs_pager), "mapped"])
@pytest.mark.parametrize("rows", [1, 512])
def test_a_disk_that_is_full_after_the_start_loses_no_step(
    backend: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients and state come later than the start, and find their room; what a forward
    saves may not, but then no parameter has changed."""
    monkeypatch.setattr(spill, "_GROWTH", SMALL)
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(256, 256) for _ in range(24)))
    paged = copy.deepcopy(plain)
    its, mine = (torch.optim.AdamW(model.parameters()) for model in (plain, paged))
    options = {"backend": backend, "step_aside": False}
    with dynoffload.offload(
        paged, mine, budget="8MB", spill_dir=tmp_path, config=options
    ) as session:
        for step in range(5):
            for model, optimizer in ((plain, its), (paged, mine)):
                torch.manual_seed(step)
                loss = model(torch.randn(rows, 256)).square().mean()
                with monkeypatch.context() as patch:
                    fill_up(patch)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
        assert session.stats["bytes_out"].iloc[-1] > 0
    assert_same_training(paged, mine, plain, its)
