"""What the doctor reads of a system, from trees of files that look like other machines."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from dynoffload.doctor.system import (
    filesystem_of,
    inspect,
    probe_userfaultfd,
    read_cgroup,
    read_huge_pages,
    read_meminfo,
)
from dynoffload.errors import SpillError

GB = 10**9


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def group_v2(limit: int | str, usage: int, cache: int = 0) -> dict[str, str]:
    return {
        "memory.max": f"{limit}\n",
        "memory.current": f"{usage}\n",
        "memory.stat": f"anon 5\ninactive_file {cache}\nactive_file 0\n",
    }


def under(directory: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{directory}/{name}": text for name, text in files.items()}


V2 = {
    "proc/self/cgroup": "0::/user/job\n",
    "proc/self/mountinfo": "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n",
}
V1_MOUNT = "31 24 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


def test_the_group_with_the_least_room_binds(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        V2
        | under("sys/fs/cgroup/user/job", group_v2(8 * GB, 1 * GB))
        | under("sys/fs/cgroup/user", group_v2(10 * GB, 6 * GB, cache=1 * GB)),
    )
    group = read_cgroup(root)
    assert group is not None
    assert group.version == 2
    assert group.path.endswith("/user")
    assert (group.limit, group.usage, group.reclaimable) == (10 * GB, 6 * GB, 1 * GB)
    assert group.room == 5 * GB


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    root = tree(tmp_path, V2 | under("sys/fs/cgroup/user/job", group_v2("max", 1 * GB)))
    group = read_cgroup(root)
    assert group is not None
    assert group.limit is None
    assert group.room is None


def test_a_group_that_is_over_its_limit_has_no_room(tmp_path: Path) -> None:
    root = tree(tmp_path, V2 | under("sys/fs/cgroup/user/job", group_v2(1 * GB, 2 * GB)))
    group = read_cgroup(root)
    assert group is not None
    assert group.room == 0


@pytest.mark.parametrize("limit", [3 * GB, 0x7FFFFFFFFFFFF000])
def test_version_1(tmp_path: Path, limit: int) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu:/\n4:memory,other:/job\n0::/\n",
            "proc/self/mountinfo": V1_MOUNT,
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{limit}\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{GB}\n",
            "sys/fs/cgroup/memory/job/memory.stat": "total_inactive_file 7\ntotal_active_file 3\n",
        },
    )
    group = read_cgroup(root)
    assert group is not None
    assert group.version == 1
    assert group.limit == (3 * GB if limit == 3 * GB else None)
    assert group.reclaimable == 10


def test_a_container_sees_its_group_at_the_mount(tmp_path: Path) -> None:
    """The path is the host's; the mount's root is that same group, as Docker binds it."""
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n",
            "proc/self/mountinfo": V1_MOUNT.replace(" / /sys", " /docker/abc /sys"),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n",
        },
    )
    group = read_cgroup(root)
    assert group is not None
    assert group.limit == 2 * GB


def test_a_namespace_hides_the_path(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        V2 | {"proc/self/cgroup": "0::/../elsewhere\n"} | under("sys/fs/cgroup", group_v2(GB, 1)),
    )
    group = read_cgroup(root)
    assert group is not None
    assert group.limit == GB


def test_a_system_without_cgroups(tmp_path: Path) -> None:
    assert read_cgroup(tmp_path) is None
    assert read_huge_pages(tmp_path) is None
    assert read_meminfo(tmp_path) == {}


def test_meminfo_is_in_bytes(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/meminfo": "MemTotal:  1024 kB\nHugePages_Total: 3\nOdd line\n"})
    assert read_meminfo(root) == {"MemTotal": 1024 * 1024, "HugePages_Total": 3}


@pytest.mark.parametrize("mode", ["always", "madvise", "never"])
def test_huge_page_mode(tmp_path: Path, mode: str) -> None:
    text = "always madvise never\n".replace(mode, f"[{mode}]")
    root = tree(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": text})
    assert read_huge_pages(root) == mode


def test_the_innermost_and_last_mount_names_the_file_system(tmp_path: Path) -> None:
    place = tmp_path / "with space"
    place.mkdir()
    escaped = str(place).replace(" ", "\\040")
    root = tree(
        tmp_path / "root",
        {
            "proc/self/mountinfo": (
                "1 0 0:1 / / rw - ext4 /dev/a rw\n"
                f"2 1 0:2 / {escaped} rw shared:1 - xfs /dev/b rw\n"
                f"3 2 0:3 / {escaped} rw - tmpfs tmpfs rw\n"
                f"4 2 0:4 / {escaped}x rw - btrfs /dev/c rw\n"
            )
        },
    )
    found = filesystem_of(place, root)
    assert (found.kind, found.mount, found.in_memory) == ("tmpfs", str(place), True)
    assert filesystem_of(tmp_path, root).kind == "ext4"
    assert not filesystem_of(tmp_path, root).in_memory


@pytest.mark.parametrize("name", ["missing", "file"])
def test_what_is_no_directory_is_refused_with_a_remedy(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpillError, match="--spill-dir") as caught:
        filesystem_of(tmp_path / name)
    assert name in str(caught.value)


@pytest.mark.skipif(platform.system() != "Linux", reason="reads /proc")
def test_this_system_agrees_with_itself() -> None:
    system = inspect()
    assert system.memory_total is not None
    assert system.memory_available is not None
    assert 0 < system.memory_available < system.memory_total
    assert system.cores == len(os.sched_getaffinity(0))
    assert system.limits.open_files is None or system.limits.open_files > 0


@pytest.mark.skipif(platform.system() != "Linux", reason="reads /proc")
def test_the_userfaultfd_probe_leaves_no_descriptor_and_agrees_with_the_kernel() -> None:
    before = set(os.listdir("/proc/self/fd"))
    found = probe_userfaultfd()
    assert set(os.listdir("/proc/self/fd")) == before
    assert bool(found.reason) != found.available
    release = tuple(int(part) for part in platform.release().split(".")[:2])
    if found.available:
        assert found.move == (release >= (6, 8))
