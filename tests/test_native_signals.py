"""Making a thread let go of the interpreter's lock: in time, late, and when all is over."""

from __future__ import annotations

from pathlib import Path

from devices import needs_pager, script

pytestmark = needs_pager

_SETUP = """
import ctypes, faulthandler, signal, threading
faulthandler.disable()
device = Pager(8 * SMALL, SMALL, Path(sys.argv[1]), threads=2)
region = device.allocate(3 * SMALL)
filled(device, [region])
libc = ctypes.CDLL(None)
libc.pthread_self.restype = ctypes.c_ulong
libc.pthread_sigqueue.argtypes = (ctypes.c_ulong, ctypes.c_int, ctypes.c_void_p)
pydll = ctypes.PyDLL(None)
pydll.pthread_self.restype = ctypes.c_ulong
pydll.pthread_sigqueue.argtypes = (ctypes.c_ulong, ctypes.c_int, ctypes.c_void_p)
handled = lambda n: int(
    [l for l in open("/proc/self/status") if l.startswith("SigCgt")][0].split()[1], 16
) >> (n - 1) & 1
(number,) = [n for n in range(signal.SIGRTMIN, signal.SIGRTMAX) if handled(n)]
def told(address):
    # once while the interpreter's lock is held, once while it is not
    assert pydll.pthread_sigqueue(pydll.pthread_self(), number, address) == 0
    assert libc.pthread_sigqueue(libc.pthread_self(), number, address) == 0
address = device.storage(region).data_ptr()
"""


def run(body: str, directory: Path) -> None:
    """Run ``body`` beside a pager with one filled region."""
    found = script(_SETUP + body + "\nprint('whole')", directory)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1] == "whole"


def test_a_reader_that_holds_the_lock_lets_its_owner_work(tmp_path: Path) -> None:
    run(
        """
array = view(device, region).numpy()
expected = int(array[5])
def serve():
    for _ in range(20):
        assert device.handed(10.0) == region
        (storage,) = device.show([region])
        torch.empty(0, dtype=torch.uint8).set_(storage)[5] += 1
        del storage
        device.hide([region])
        device.unlock([region])
owner = threading.Thread(target=serve)
owner.start()
for turn in range(20):
    device.lock([region])
    assert int(array[5]) == (expected + turn + 1) % 256
owner.join()
device.close()
""",
        tmp_path,
    )


def test_a_region_that_ends_while_its_reader_has_let_go(tmp_path: Path) -> None:
    run(
        """
array = view(device, region).numpy()
def end():
    assert device.handed(10.0) == region
    time.sleep(0.1)
    device.discard(region)
owner = threading.Thread(target=end)
device.lock([region])
owner.start()
int(array[5])
owner.join()
device.close()
""",
        tmp_path,
    )


def test_a_signal_that_comes_late_does_nothing(tmp_path: Path) -> None:
    """The region is there, is absent, is gone; the pager is closed; another one is open."""
    run(
        """
told(address)
filled(device, [device.allocate(8 * SMALL)])
assert region not in device.resident()
faults = device.counters().faults
told(address)
assert device.counters().faults == faults
device.release(region)
told(address)
told(0)
device.close()
told(address)
assert handled(number)
other = Pager(8 * SMALL, SMALL, Path(sys.argv[1]), threads=2)
third = Pager(8 * SMALL, SMALL, Path(sys.argv[1]), threads=2)
assert sum(handled(n) for n in range(signal.SIGRTMIN, signal.SIGRTMAX)) == 1
told(address)
third.close()
told(address)
other.close()
""",
        tmp_path,
    )


def test_signals_of_others_are_not_answered(tmp_path: Path) -> None:
    run(
        """
device.lock([region])
import os
os.kill(os.getpid(), number)  # says nothing of an address
signal.raise_signal(number)
device.unlock([region])
assert holds(device, region)
device.close()
""",
        tmp_path,
    )


def test_pagers_that_close_while_others_are_told(tmp_path: Path) -> None:
    run(
        """
addresses = [address]
stop = time.monotonic() + 2
def tell():
    while time.monotonic() < stop:
        told(addresses[-1])
threads = [threading.Thread(target=tell) for _ in range(3)]
for t in threads: t.start()
while time.monotonic() < stop:
    made = Pager(8 * SMALL, SMALL, Path(sys.argv[1]), threads=1)
    first = made.allocate(SMALL)
    addresses.append(made.storage(first).data_ptr())
    made.close()
for t in threads: t.join()
device.close()
""",
        tmp_path,
    )


def test_threads_that_cannot_be_had_leave_nothing_behind(tmp_path: Path) -> None:
    """The system runs out of room for the stacks of threads when some have been started."""
    run(
        """
import os, resource
from dynoffload.errors import BackendError
device.close()
def state():
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
Pager(8 * HUGE, HUGE, Path(sys.argv[1]), threads=2).close()
before = state()
size = int([l for l in open("/proc/self/status") if l.startswith("VmSize")][0].split()[1]) * 1024
limit = size + (1 << 40) + (256 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
for _ in range(3):
    try:
        Pager(8 * HUGE, HUGE, Path(sys.argv[1]), threads=200)
    except BackendError as error:
        assert "lower the budget, or use backend='mapped'" in str(error)
    else:
        raise AssertionError("so many threads could be started")
assert eventually(lambda: state() == before), (state(), before)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
device = Pager(8 * HUGE, HUGE, Path(sys.argv[1]), threads=2)
filled(device, [device.allocate(HUGE) for _ in range(12)])
device.close()
""",
        tmp_path,
    )
