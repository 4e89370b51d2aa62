"""The pager's faults: whoever touches an absent region, however, gets its bytes.

Each test runs in a program of its own with a time limit: what it must not do is hang.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from devices import HUGE, SMALL, needs_pager, script

pytestmark = needs_pager
PAGES = pytest.mark.parametrize("page", [SMALL, HUGE])
ONE = pytest.mark.parametrize("page", [SMALL])  # where the size of pages can make no difference

_SETUP = """
import ctypes, os, signal, threading, time
import numpy as np
from dynoffload.errors import BackendError
page, directory = int(sys.argv[1]), Path(sys.argv[2])
device = Pager(8 * page, page, directory, threads=2)
a, b, c = (device.allocate(4 * page) for _ in range(3))
filled(device, [a, b, c])
assert device.resident() == [b, c]
"""


def run(body: str, page: int, directory: Path) -> None:
    """Run ``body`` after the setup: a pool of 8 pages; a is absent, b and c are present."""
    found = script(_SETUP + body + "\ndevice.close()\nprint('whole')", page, directory)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1] == "whole"


@PAGES
def test_a_read_that_holds_the_interpreters_lock(page: int, tmp_path: Path) -> None:
    """An element of a numpy array is read without letting go of the lock."""
    run(
        """
array = view(device, a).numpy()
expected = pattern(4 * page, a).numpy()
for index in (4 * page - 1, 0, page, 3 * page + 7):
    device.acquire([b, c])
    assert a not in device.resident()
    assert int(array[index]) == int(expected[index])
    assert a in device.resident()
assert bytes(array[:9]) == bytes(expected[:9])
""",
        page,
        tmp_path,
    )


@ONE
def test_a_fault_waits_while_everything_is_pinned(page: int, tmp_path: Path) -> None:
    run(
        """
device.acquire([b, c], pin=True)
seen = []
reader = threading.Thread(target=lambda: seen.append(holds(device, a)))
reader.start()
time.sleep(0.1)
assert seen == []  # there is no page for it
device.unpin([b])
reader.join()
assert seen == [True]
assert device.resident() == [a, c]
device.unpin([c])
""",
        page,
        tmp_path,
    )


@ONE
def test_a_system_call_gets_the_bytes_or_is_refused(page: int, tmp_path: Path) -> None:
    """Where the pager has full rights a system call waits as well; without, it fails loudly."""
    run(
        """
array = view(device, a).numpy()
reading, writing = os.pipe()
answer = None
try:
    answer = os.read(reading, 0) if os.write(writing, memoryview(array)[:512]) == 512 else None
    got = os.read(reading, 512)
    assert got == bytes(pattern(4 * page, a).numpy()[:512])
except OSError as error:
    assert error.errno == 14, error
    assert device._native.pager_probe() == 2
""",
        page,
        tmp_path,
    )


@PAGES
def test_a_forked_child_lives_beside_the_pager(page: int, tmp_path: Path) -> None:
    """The child has none of the regions; neither its life nor its death touches the parent's."""
    run(
        """
import faulthandler
faulthandler.disable()
child = os.fork()
if child == 0:
    ordinary = bytearray(1 << 20)
    ordinary[-1] = 5
    device.close()  # not the child's to close
    os._exit(int(sum(ordinary) != 5))
assert os.waitpid(child, 0)[1] == 0
bold = os.fork()
if bold == 0:
    ctypes.memset(device.storage(b).data_ptr(), 0, 1)
    os._exit(0)
assert os.WTERMSIG(os.waitpid(bold, 0)[1]) == signal.SIGSEGV
patient = os.fork()  # lives while the parent moves pages: MOVE refuses pages that are shared
if patient == 0:
    time.sleep(30)
    os._exit(0)
for _ in range(3):
    assert holds(device, a) and holds(device, b) and holds(device, c)
os.kill(patient, signal.SIGKILL)
os.waitpid(patient, 0)
""",
        page,
        tmp_path,
    )


@ONE
def test_memory_of_a_released_region_ends_the_process(page: int, tmp_path: Path) -> None:
    """Reading on after the end of a region is a bug; zeros in its place would hide it."""
    found = script(
        _SETUP
        + """
import faulthandler
faulthandler.disable()
address = device.storage(a).data_ptr()
device.release(a)
ctypes.string_at(address, 1)
""",
        page,
        tmp_path,
    )
    assert found.returncode == -6
    assert "was released" in found.stderr


@ONE
def test_signals_reach_a_program_that_waits(page: int, tmp_path: Path) -> None:
    """The pager's threads take no signals: the interpreter's own handlers run."""
    run(
        """
got = []
signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
for turn in range(20):
    os.kill(os.getpid(), signal.SIGUSR1)
    assert holds(device, (a, b, c)[turn % 3])
assert len(got) == 20
""",
        page,
        tmp_path,
    )
