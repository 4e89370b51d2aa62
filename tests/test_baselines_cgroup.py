"""Memory limits are real: what passes one dies, what may swap lives, and nothing remains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynoffload.experiments.baselines import cgroup
from dynoffload.experiments.baselines.cgroup import (
    LimitError,
    MemoryGroup,
    Usage,
    memory_group,
    swap_file,
    why_unavailable,
)
from dynoffload.units import MiB

LIMIT = 64 * MiB
limited = pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable())


def fills(nbytes: int) -> list[str]:
    """Return a command that writes to ``nbytes`` of memory, page by page, twice."""
    code = f"x = bytearray({nbytes})\nfor _ in 0, 1:\n for i in range(0, {nbytes}, 4096): x[i] = 1"
    return [sys.executable, "-S", "-c", code]


def groups() -> list[str]:
    found = cgroup.version()
    assert found is not None
    return [p.name for p in cgroup._ROOTS[found].glob(f"dynoffload-{os.getpid()}-*")]


@pytest.fixture
def disk() -> Iterator[Path]:
    """Return a directory on a disk where swap can be switched on; skip where it cannot."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        try:
            with swap_file(Path(name), 2 * MiB):
                pass
        except LimitError as error:
            pytest.skip(str(error))
        yield Path(name)


def run(command: list[str], limit: int | None, swap: bool = False) -> tuple[int, Usage]:
    """Run a command in a group of its own; return its code and what was counted."""
    with memory_group(limit, swap=swap) as group:
        code = subprocess.run(group.command(command), check=False, timeout=120).returncode
        usage = group.usage()
    assert groups() == []
    return code, usage


@limited
def test_what_fits_lives_and_what_passes_the_limit_is_killed() -> None:
    code, usage = run(fills(20 * MiB), LIMIT)
    assert (code, usage.oom_kills) == (0, 0)
    assert 20 * MiB < usage.peak_bytes <= LIMIT
    code, usage = run(fills(3 * LIMIT), LIMIT)
    assert (code, usage.oom_kills) == (-signal.SIGKILL, 1)
    assert usage.peak_bytes <= LIMIT
    code, usage = run(fills(2 * LIMIT), None)
    assert (code, usage.oom_kills) == (0, 0)
    assert usage.peak_bytes > 2 * LIMIT


@limited
def test_with_swap_it_lives_and_without_leave_to_use_it_not(disk: Path) -> None:
    with swap_file(disk, 4 * LIMIT):
        code, usage = run(fills(3 * LIMIT), LIMIT, swap=True)
        assert code == 0
        assert usage.peak_bytes <= LIMIT
        assert usage.limit_hits > 0
        assert run(fills(3 * LIMIT), LIMIT)[0] == -signal.SIGKILL
    assert list(disk.iterdir()) == []
    assert str(disk) not in Path("/proc/swaps").read_text()


@limited
def test_what_still_runs_at_the_end_is_killed() -> None:
    with memory_group(LIMIT) as group:
        child = subprocess.Popen(group.command(["sleep", "60"]))
        while child.pid not in group.processes():
            assert child.poll() is None
    assert child.wait(timeout=100) == -signal.SIGKILL
    assert groups() == []


def swapping_child(directory: Path) -> subprocess.Popen[str]:
    """Return a process that has a swap file of its own switched on, and waits."""
    code = (
        "import sys, time; from pathlib import Path\n"
        "from dynoffload.experiments.baselines.cgroup import swap_file\n"
        f"with swap_file(Path({str(directory)!r}), {4 * MiB}):\n"
        "    print('on', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "on\n"
    assert str(directory) in Path("/proc/swaps").read_text()
    return child


def test_terminated_it_switches_swap_off(disk: Path) -> None:
    child = swapping_child(disk)
    child.terminate()
    assert child.wait(timeout=100) == 128 + signal.SIGTERM
    assert list(disk.iterdir()) == []
    assert str(disk) not in Path("/proc/swaps").read_text()


def test_what_a_killed_one_left_is_cleared_by_the_next(disk: Path) -> None:
    child = swapping_child(disk)
    child.kill()
    child.wait(timeout=100)
    assert len(list(disk.iterdir())) == 1
    with swap_file(disk, 4 * MiB) as own:
        assert list(disk.iterdir()) == [own]
    assert str(disk) not in Path("/proc/swaps").read_text()


def test_who_cannot_limit_memory_is_told_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LimitError, match="root"), memory_group(LIMIT):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(cgroup, "_ROOTS", {1: tmp_path / "one", 2: tmp_path / "two"})
    with pytest.raises(LimitError, match="no memory cgroup"), memory_group(LIMIT):
        pass


def test_version_two_speaks_its_own_files(tmp_path: Path) -> None:
    for name in ("memory.max", "memory.swap.max"):
        (tmp_path / name).write_text("max\n")
    group = MemoryGroup(tmp_path, 2, LIMIT, swap=False)
    assert (tmp_path / "memory.max").read_text() == str(LIMIT)
    assert (tmp_path / "memory.swap.max").read_text() == "0"
    (tmp_path / "memory.peak").write_text("1234\n")
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 2\noom_kill 1\n")
    usage = group.usage()
    assert (usage.peak_bytes, usage.limit_hits, usage.oom_kills) == (1234, 7, 1)


def test_no_room_for_swap_is_said(disk: Path) -> None:
    with pytest.raises(LimitError, match="free"), swap_file(disk, 2**60):
        pass
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize("left_by", ["this process", "a killed one"])
def test_a_swap_file_that_cannot_be_switched_off_stays(
    left_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its name nobody could switch it off any more. Tools like root's, with their own list
    of what is on; the directory is a link, and its name has a space."""
    swaps, tools, directory = tmp_path / "swaps", tmp_path / "tools", tmp_path / "link"
    (tmp_path / "two words").mkdir()
    directory.symlink_to(tmp_path / "two words")
    tools.mkdir()
    swaps.write_text("Filename Type Size Used Priority\n")
    scripts = {
        "mkswap": "",
        "swapon": rf"""readlink -f "$1" | sed 's/ /\\040/; s/$/ file 1 0 -2/' >> {swaps}""",
        "swapoff": f"test -e {tmp_path}/room || {{ echo no memory >&2; exit 255; }}\n"
        f"sed -i 1q {swaps}",
    }
    for tool, script in scripts.items():
        (tools / tool).write_text(f"#!/bin/sh\n{script}\n")
        (tools / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=os.pathsep)
    monkeypatch.setattr(cgroup, "_SWAPS", swaps)
    monkeypatch.setattr(cgroup, "why_unavailable", lambda swap=False: "")
    left = directory / f"{cgroup._SWAP}999999999-x"
    if left_by == "a killed one":
        left.touch()
        subprocess.run([tools / "swapon", left], check=True)
    with pytest.raises(LimitError, match="no memory"), swap_file(directory, MiB):
        pass
    (there,) = directory.iterdir()
    there.rename(left)
    swaps.write_text(swaps.read_text().replace(there.name, left.name))
    (tmp_path / "room").touch()
    cgroup._remove_stale_swap(directory)
    assert list(directory.iterdir()) == []
    assert len(swaps.read_text().splitlines()) == 1
