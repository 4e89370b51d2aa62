"""What the doctor says of this system, and of a directory."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from dynoffload.doctor.system import filesystem_of, inspect
from dynoffload.errors import SpillError
from dynoffload.memory.filesystems import mount_of


def test_the_innermost_and_last_mount_names_the_file_system(tmp_path: Path) -> None:
    place, root = tmp_path / "with space", tmp_path / "root"
    place.mkdir()
    (root / "proc/self").mkdir(parents=True)
    escaped = str(place).replace(" ", "\\040")
    (root / "proc/self/mountinfo").write_text(
        "1 0 0:1 / / rw - ext4 /dev/a rw\n"
        f"2 1 0:2 / {escaped} rw shared:1 - xfs /dev/b rw\n"
        f"3 2 0:3 / {escaped} rw - tmpfs tmpfs rw\n"
        f"4 2 0:4 / {escaped}x rw - btrfs /dev/c rw\n"
    )
    assert mount_of(place, root) == ("tmpfs", str(place))
    assert mount_of(tmp_path, root)[0] == "ext4"


@pytest.mark.parametrize("name", ["missing", "file"])
def test_what_is_no_directory_is_refused_with_a_remedy(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpillError, match="spill_dir=") as caught:
        filesystem_of(tmp_path / name)
    assert name in str(caught.value)


@pytest.mark.skipif(platform.system() != "Linux", reason="reads /proc")
def test_this_system_agrees_with_itself() -> None:
    system = inspect()
    assert 0 < system.memory_available < system.memory_total
    assert 0 < system.room <= system.memory_available
    assert system.huge_pages in (None, "always", "madvise", "never")
    assert system.cores == len(os.sched_getaffinity(0))
