"""What the system sees: a device takes its pool and no more, and its failures are told."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from devices import (
    HUGE,
    SMALL,
    each_of_the_cpu,
    filled,
    holds,
    needs_pager,
    opened,
    pattern,
    script,
    view,
)

from dynoffload.units import MiB

POOL = 64 * MiB
GROWTH = 32 * MiB  # by which the pager's pool grows
SLACK = 20 * MiB  # what the interpreter and the kernel take for other things meanwhile


@needs_pager
@pytest.mark.parametrize("page", [SMALL, HUGE])
def test_regions_of_many_pages_move_whole(page: int, tmp_path: Path) -> None:
    """Slots that follow one another move as one, also where the pool has grown between them."""
    nbytes = 5 * page if page == HUGE else 300 * page
    with opened("pager", 5 * GROWTH, page, tmp_path) as device:
        regions = [device.allocate(nbytes) for _ in range(7 * GROWTH // nbytes)]
        filled(device, regions)
        choose = random.Random(0)
        for turn in range(200):
            some = choose.sample(regions, 3)
            if turn % 5 == 0:  # leaves holes
                device.discard(some[0])
                device.acquire(some[:1])
                view(device, some[0]).copy_(pattern(nbytes, some[0]))
            device.acquire(some)
            assert all(holds(device, region) for region in some)


@each_of_the_cpu(HUGE)
def test_the_resident_set_grows_by_what_the_device_says_and_the_pool_at_most(
    kind: str, page: int, tmp_path: Path
) -> None:
    """Also when nothing is in use any more: pages that circulate stay, pages of a file go."""
    found = script(
        """
        import gc
        from dynoffload.memory.limits import resident_bytes
        kind, page, directory, pool = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
        device = KINDS[kind](int(pool), page, directory)
        regions = [device.allocate(8 * MiB) for _ in range(40)]
        gc.collect()
        open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
        base = resident_bytes()
        for turn in range(2):
            for region in regions:
                device.acquire([region])
                view(device, region).fill_(region + turn)
        for region in regions:
            device.acquire([region])
            assert int(view(device, region)[-1]) == region + 1
        (peak,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM"))
        print(int(peak.split()[1]) * 1024 - base, resident_bytes() - base, device.taken_bytes())
        for region in regions:
            device.discard(region)
        assert device.resident_bytes() == 0
        print(resident_bytes() - base, device.taken_bytes())
        """,
        kind,
        page,
        tmp_path,
        POOL,
        fresh=True,
    )
    assert found.returncode == 0, found.stderr
    peak, full, said_full, empty, said_empty = map(int, found.stdout.split())
    assert POOL // 2 <= peak <= POOL + SLACK
    assert said_full >= POOL // 2
    assert abs(full - said_full) <= SLACK
    assert abs(empty - said_empty) <= SLACK


@each_of_the_cpu(HUGE)
def test_an_empty_pool_takes_no_memory(kind: str, page: int, tmp_path: Path) -> None:
    """A budget is a limit, not a need."""
    found = script(
        """
        from dynoffload.memory.limits import resident_bytes
        before = resident_bytes()
        device = KINDS[sys.argv[1]](256 * MiB, int(sys.argv[2]), Path(sys.argv[3]))
        device.acquire([device.allocate(1)])
        print(resident_bytes() - before)
        """,
        kind,
        page,
        tmp_path,
        fresh=True,
    )
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) < 80 * MiB


@needs_pager
def test_the_pager_ends_the_process_rather_than_hand_out_what_it_cannot_read(
    tmp_path: Path,
) -> None:
    """The file is cut off under it: the reader must not go on with anything else."""
    found = script(
        """
        import faulthandler, os
        faulthandler.disable()
        device = Pager(8 * SMALL, SMALL, Path(sys.argv[1]), threads=2)
        b, a = device.allocate(6 * SMALL), device.allocate(6 * SMALL)
        filled(device, [a, b])  # evicting b will not make the file long enough for a
        os.ftruncate(device._spill.fd, 0)
        print("read", int(view(device, a)[0]), flush=True)
        """,
        tmp_path,
    )
    assert found.returncode == -6
    assert found.stdout == ""
    assert "cannot read" in found.stderr
    assert "checkpoint" in found.stderr
