"""Measuring the tiers: plausible numbers, no trace on the disk, clear refusals."""

from __future__ import annotations

import errno
import os
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynoffload.doctor import advise, measure_moves, measure_tiers, tiers
from dynoffload.doctor.system import FileSystem, System
from dynoffload.doctor.tiers import Direction
from dynoffload.errors import ConfigError, SpillError
from dynoffload.memory.filesystems import MEMORY_FILESYSTEMS, mount_of
from dynoffload.memory.pager import probe
from dynoffload.memory.spill import SpillFile
from dynoffload.units import GiB, KiB, MiB

SMALL = 64 * MiB


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    if mount_of(tmp_path)[0] in MEMORY_FILESYSTEMS:
        pytest.skip("the directory for temporary files is in memory")
    return tmp_path


def test_all_is_measured_and_nothing_is_left(disk: Path) -> None:
    told: list[tuple[str, float]] = []
    open_before = len(os.listdir("/proc/self/fd"))
    found = measure_tiers(
        disk, 0.05, file_bytes=SMALL, progress=lambda name, share: told.append((name, share))
    )
    assert list(disk.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == open_before
    for direction in Direction:
        assert [row for row in found.rows if row.direction is direction]
    for value in (found.read_bps, found.write_bps, found.mixed_bps, found.memory_bps):
        assert 1e6 < value < 1e13
    assert found.read_bps == max(r.bps for r in found.rows if r.direction is Direction.READ)
    assert [share for _, share in told] == sorted(share for _, share in told)
    assert told[0][0] == "write, 1 thread"


def test_without_o_direct_it_measures_buffered(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "SpillFile", partial(SpillFile, direct=False))
    found = measure_tiers(disk, 0.02, file_bytes=SMALL)
    assert not found.direct
    assert found.read_bps > 0


def test_a_failing_disk_is_an_error_not_a_number(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(SpillError, match="Input/output error"):
        measure_tiers(disk, 0.02, file_bytes=SMALL)
    assert list(disk.iterdir()) == []


def test_a_full_disk_is_refused_before_a_file_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100 * MiB))
    with pytest.raises(SpillError, match=r"100\.00 MiB free.*128\.00 MiB"):
        measure_tiers(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_no_time_is_no_measurement(tmp_path: Path, seconds: float) -> None:
    with pytest.raises(ConfigError, match="positive"):
        measure_tiers(tmp_path, seconds)


def system(available: int, room: int | None = None, **pager: Any) -> System:
    return System(
        kernel="Linux 6.8",
        cores=2,
        memory_total=2 * available,
        memory_available=available,
        swap_total=0,
        room=available if room is None else room,
        huge_pages="madvise",
        **pager,
    )


def test_advice_leaves_room_and_names_what_binds_and_why() -> None:
    disk = FileSystem("ext4", "/", 100 * GiB)
    small, large = advise(system(4 * GiB), disk), advise(system(64 * GiB), disk)
    assert (small.budget, small.bound_by, small.backend) == (3 * GiB, "memory", "pager")
    assert 50 * GiB < large.budget < 0.86 * 64 * GiB
    grouped = advise(system(64 * GiB, 4 * GiB), disk)
    assert (grouped.bound_by, grouped.room, grouped.budget) == ("cgroup", 4 * GiB, 3 * GiB)
    none = advise(system(GiB // 2), disk)
    assert (none.budget, none.line[:14]) == (0, "No budget fits")
    assert "user mode only" in advise(system(8 * GiB, user_mode=True), disk).line
    refused = advise(system(8 * GiB, pager_refusal="userfaultfd is refused here"), disk)
    assert refused.backend == "mapped"
    assert "userfaultfd is refused here" in refused.line
    lost = advise(system(8 * GiB), None, "spill directory /x does not exist")
    assert lost.line == "Nothing can be spilled: spill directory /x does not exist"


@pytest.mark.skipif(bool(probe()), reason=f"no pager here: {probe()}")
@pytest.mark.alone
def test_moves_of_larger_pages_take_less_for_each_byte(tmp_path: Path) -> None:
    """And nothing remains in the directory."""
    found = measure_moves(tmp_path)
    assert list(found) == [1 << power for power in range(12, 22)]
    assert 0 < found[4 * KiB] < 1e-3
    assert found[4 * KiB] < found[256 * KiB] < 64 * found[4 * KiB]
    assert 0 < found[2 * MiB] < 512 * found[4 * KiB]
    assert not list(tmp_path.iterdir())
