"""What the system sees: a device takes its pool and no more, and its failures are told."""

from __future__ import annotations

from pathlib import Path

from devices import HUGE, each_of_the_cpu, needs_pager, script

from dynoffload.units import MiB

POOL = 64 * MiB
SLACK = 20 * MiB  # what the interpreter and the kernel take for other things meanwhile


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
