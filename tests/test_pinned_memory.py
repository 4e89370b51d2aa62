"""Host memory for an accelerator's copies: how much is taken, and what forked processes find."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Callable

import pytest
import torch

from dynoffload.memory.accelerator import pinned
from dynoffload.memory.accelerator.pinned import HostMemory

PAGE = mmap.PAGESIZE
CPU = torch.device("cpu")  # for which nothing is pinned
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps memory from children")


@pytest.fixture(params=["registered", "torch's", "not pinned"])
def host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> HostMemory:
    """Each way to come by memory; a driver, where there is none, says yes."""
    if request.param == "registered":
        monkeypatch.setattr(HostMemory, "_register", lambda self, memory: "")
        monkeypatch.setattr(pinned, "_runtime", _Driver)
    if request.param == "torch's":
        monkeypatch.setattr(torch, "empty", _Torch(0))
    return HostMemory(CPU)


class _Driver:
    def cudaHostUnregister(self, address: int) -> int:
        return 0


class _Torch:
    """torch's pinned memory, which begins some bytes beyond a page.

    Attributes:
        asked: bytes, of each call.
    """

    def __init__(self, beyond: int) -> None:
        self.asked: list[int] = []
        self._beyond = beyond
        self._ordinary = torch.empty

    def __call__(
        self, nbytes: int, *, dtype: torch.dtype, pin_memory: bool = False
    ) -> torch.Tensor:
        if not pin_memory:  # another thread's
            return self._ordinary(nbytes, dtype=dtype)
        assert dtype == torch.uint8
        self.asked.append(nbytes)
        mapping = mmap.mmap(-1, nbytes + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = torch.frombuffer(mapping, dtype=torch.uint8)
        return whole[self._beyond : self._beyond + nbytes]


@pytest.mark.parametrize(("beyond", "asked"), [(0, [2]), (64, [2, 3])])
def test_torch_is_asked_for_what_is_needed(
    beyond: int, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a power of two: a page more takes twice as much. Only what does not begin at a page,
    as its own registered memory may, is asked for again."""
    torchs = _Torch(beyond)
    monkeypatch.setattr(torch, "empty", torchs)
    memory = HostMemory(CPU).take(2 * PAGE)
    assert torchs.asked == [pages * PAGE for pages in asked]
    assert memory.nbytes == 2 * PAGE
    assert memory.data_ptr() % PAGE == 0


def child(program: Callable[[], bool]) -> bool:
    """Return what ``program`` does in a forked process; False if that ends by a signal."""
    process = os.fork()
    if not process:
        code = 1
        with contextlib.suppress(BaseException):
            code = int(not program())
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def is_mapped(address: int) -> bool:
    """Return whether the calling process has memory there."""
    with open("/proc/self/maps") as maps:
        spans = [line.split()[0].split("-") for line in maps]
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in spans)


@linux
@pytest.mark.parametrize("nbytes", [4 * PAGE, 3 * PAGE + 5])
def test_a_forked_process_has_none_of_it(host: HostMemory, nbytes: int) -> None:
    """As of a loader's workers, while copies are made here; what is given back is ordinary."""
    memory = host.take(nbytes)
    assert memory.nbytes == nbytes
    memory.fill_(7)
    pages = range(memory.data_ptr(), memory.data_ptr() + nbytes, PAGE)
    assert all(map(is_mapped, pages))
    assert child(lambda: not any(map(is_mapped, pages)))
    assert bool((memory == 7).all())
    host.give_back(memory)
    assert child(lambda: bool((memory == 7).all()))
    assert bool((memory == 7).all())


@linux
def test_a_forked_process_does_not_unmap_it() -> None:
    """The same addresses may be another's there by the time that tensors go."""
    memory = [HostMemory(CPU).take(4 * PAGE).fill_(7)]
    address = memory[0].data_ptr()

    def program() -> bool:
        fixed, kind = 0x10, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        access = mmap.PROT_READ | mmap.PROT_WRITE
        mine = pinned.libc().mmap(address, 4 * PAGE, access, kind | fixed, -1, 0)
        ctypes.memset(mine, 5, 4 * PAGE)
        memory.clear()
        return is_mapped(address) and ctypes.string_at(mine, 4 * PAGE) == bytes([5]) * 4 * PAGE

    assert child(program)
    memory.clear()
    assert not is_mapped(address)


@linux
@pytest.mark.parametrize("advised", [True, False])
def test_all_pages_are_touched_in_parts(monkeypatch: pytest.MonkeyPatch, advised: bool) -> None:
    """Also where the kernel lacks the advice; the last part is smaller."""
    monkeypatch.setattr(pinned, "_TOUCHED", 4 * PAGE)
    if not advised:
        monkeypatch.setattr(pinned, "_POPULATE_WRITE", -1)
    pages = 4 * 50 + 1
    address = pinned.map_memory(pages * PAGE)
    present = (ctypes.c_ubyte * pages)()
    pinned.libc().mincore(address, pages * PAGE, present)
    assert not any(present)
    pinned._touch(address, pages * PAGE)
    pinned.libc().mincore(address, pages * PAGE, present)
    assert all(present)
    assert ctypes.string_at(address, pages * PAGE) == bytes(pages * PAGE)
    pinned.libc().munmap(address, pages * PAGE)
