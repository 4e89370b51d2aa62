"""The pager's waits end: by bytes, by an error that names the remedy, or with the process."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from devices import SMALL, eventually, filled, holds, needs_pager, opened, script

from dynoffload.errors import BackendError, SpillError
from dynoffload.memory.pager import Pager

pytestmark = needs_pager


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Pager]:
    """Return a pager of 8 small pages that is patient for a second."""
    with opened("pager", 8 * SMALL, SMALL, tmp_path) as made:
        assert isinstance(made, Pager)
        made._native.pager_set_patience(made._handle, 1)
        yield made


def three(device: Pager) -> tuple[int, int, int]:
    """Return three filled regions of half the pool each; the first is absent."""
    a, b, c = (device.allocate(4 * SMALL) for _ in range(3))
    filled(device, [a, b, c])
    assert device.resident() == [b, c]
    return a, b, c


# No room


def test_an_access_ends_the_process_when_all_stays_pinned(tmp_path: Path) -> None:
    found = script(
        """
        import faulthandler
        faulthandler.disable()
        device = Pager(8 * SMALL, SMALL, Path(sys.argv[1]), threads=2)
        device._native.pager_set_patience(device._handle, 1)
        a, b, c = (device.allocate(4 * SMALL) for _ in range(3))
        filled(device, [a, b, c])
        device.acquire([b, c], pin=True)
        print(int(view(device, a)[0]))
        """,
        tmp_path,
    )
    assert found.returncode == -6
    assert found.stdout == ""
    assert "16384 bytes of region 0" in found.stderr
    assert "32768 bytes only 0 are free" in found.stderr
    assert "raise the budget" in found.stderr


# What cannot be read back


def test_showing_shows_all_or_none(device: Pager) -> None:
    a, c, b = (device.allocate(4 * SMALL) for _ in range(3))
    filled(device, [b, a, c])
    high, starts = device._extents.high, list(device._extents._starts)
    os.ftruncate(device._spill.fd, 0)
    device.lock([c, b])
    with pytest.raises(SpillError, match="cannot read region"):
        device.show([c, b])
    assert device._aliases == {}
    assert device._extents._starts == starts
    assert device._extents.high > high  # it had been shown
    device.unlock([c, b])
    assert holds(device, c)
    device.discard(b)
    filled(device, [b, a, c])
    assert all(holds(device, region) for region in (b, a, c))  # no pin was left behind


# Regions that end while somebody waits


def _stalled(device: Pager, region: int) -> float:
    before = device.counters().stall_s
    assert holds(device, region)
    return device.counters().stall_s - before


def test_a_region_released_while_waited_for_leaves_the_counting_right(device: Pager) -> None:
    a, b, c = three(device)
    device._native.pager_set_patience(device._handle, 60)
    device.acquire([b, c], pin=True)
    told: list[BaseException] = []

    def wait() -> None:
        try:
            device.acquire([a])
        except BackendError as error:
            told.append(error)

    stalls = device.counters().stalls
    thread = threading.Thread(target=wait)
    thread.start()
    assert eventually(lambda: device.counters().stalls > stalls)
    device.release(a)
    thread.join(100)
    assert len(told) == 1
    device.unpin([b, c])
    d = device.allocate(4 * SMALL)
    filled(device, [d])
    absent = b if b not in device.resident() else c
    assert _stalled(device, absent) > 0


def test_a_failed_lock_locks_nothing(device: Pager, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page in a driver's hands cannot be withdrawn; see also the pages that are released so."""
    ring = _Ring()
    a, b = device.allocate(SMALL), device.allocate(SMALL)
    filled(device, [a, b])
    ring.hold(device.storage(b).data_ptr(), SMALL)
    with pytest.raises(BackendError, match="the kernel holds pages of region"):
        device.lock([a, b])
    device.acquire([a, b])
    assert holds(device, a)
    assert holds(device, b)
    ring.close()
    device.lock([a, b])
    device.unlock([a, b])
    assert holds(device, b)


@pytest.mark.parametrize("call", ["lock", "exchange", "hide"])
def test_a_call_that_waits_for_a_driver_keeps_nobody_else_waiting(device: Pager, call: str) -> None:
    """Others fault, acquire and ask meanwhile; the call goes on when the driver lets go."""
    ring = _Ring()
    held, other, absent = (device.allocate(SMALL) for _ in range(3))
    filled(device, [held, other, absent])
    twin = device.twin(held)
    filled(device, [device.allocate(4 * SMALL) for _ in range(4)])  # the others leave
    device.acquire([held])
    at = device.storage(held)
    if call == "hide":
        device.lock([held])
        at = device.show([held])[0]
    ring.hold(at.data_ptr(), SMALL)
    del at
    calls: dict[str, Any] = {
        "lock": lambda: device.lock([held]),
        "exchange": lambda: device.exchange([held], [twin]),
        "hide": lambda: device.hide([held]),
    }
    done: list[str] = []
    waits = threading.Thread(target=lambda: done.append(calls[call]() or call), daemon=True)
    waits.start()
    time.sleep(0.3)
    assert waits.is_alive()
    begin = time.monotonic()
    assert holds(device, absent)
    device.acquire([other])
    assert device.resident_bytes() <= device.capacity
    assert time.monotonic() - begin < 4
    assert waits.is_alive()
    ring.close()
    waits.join(5)
    assert not waits.is_alive()
    if call in ("lock", "hide"):
        device.unlock([held])
    if call != "exchange":
        assert holds(device, held)


def test_a_region_can_end_while_a_driver_holds_its_pages(device: Pager) -> None:
    ring = _Ring()
    a = device.allocate(3 * SMALL)
    filled(device, [a])
    ring.hold(device.storage(a).data_ptr(), 3 * SMALL)
    device.discard(a)
    assert device.resident() == []
    regions = [device.allocate(4 * SMALL) for _ in range(4)]
    filled(device, regions)
    assert all(holds(device, region) for region in regions)
    ring.close()
    device.release(a)


class _Ring:
    """An io_uring: memory registered with it is pinned until it is closed."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.syscall(425, 4, ctypes.create_string_buffer(120))
        if self._fd < 0:
            pytest.skip("there is no io_uring here")

    def hold(self, address: int, nbytes: int) -> None:
        """Pin ``nbytes`` at ``address``."""
        vector = (ctypes.c_uint64 * 2)(address, nbytes)
        if self._libc.syscall(427, self._fd, 0, vector, 1):
            pytest.skip("io_uring takes no buffers here")

    def close(self) -> None:
        """Let go."""
        os.close(self._fd)
