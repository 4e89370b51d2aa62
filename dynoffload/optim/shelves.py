"""Where masters and moments lie: host memory, or a file, in the order in which steps pass them.

What it is: `Entry`, what the optimizer keeps of one parameter, and `Shelf`, the bytes of many. What
it is not: how they move; `staging` has the way to a file and back, `tiles` the pieces.

[Note: a shelf]  Entries lie one behind the other, each as its master and then its moments, every
one unbroken and in the order of the parameter's own memory. So each is a tensor of the parameter's
shape and strides, which ``optimizer.state`` shows without a copy; what a few small parameters have
is one unbroken stretch of bytes, and a slice of a large one as many stretches as it has tensors.

[Note: the file's map]  A file's shelf is mapped, for whoever looks at the state. Steps go past the
map, with direct I/O. Linux writes back what the map has changed before it reads directly, and drops
what the map shows before it writes directly; so the two agree as long as nobody looks during a
step.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from dynoffload.errors import BudgetError, SpillError
from dynoffload.memory.accelerator.queues import Queues
from dynoffload.memory.spill import UNREAD, SpillFile, failure, reason
from dynoffload.units import KiB, format_bytes

MASTER = "master"
_ELEMENT = 4  # bytes of float32
_LINE, _SECTOR = 64, 4 * KiB  # that tensors begin at multiples of, in memory and in a file


@dataclass(eq=False)
class Entry:
    """What the optimizer keeps of one parameter.

    Attributes:
        name: what errors call it.
        parameter: the user's.
        moments: keys of the tensors of its size beside the master.
        step: how many updates it has had; float32 of no dimension, as torch's.
        lags: whether the parameter is still to take its master over (a delayed update); bool.
        version: of the parameter's tensor when it last agreed with the master.
        shelf: where it lies.
        offsets: where the master and each moment begin on the shelf, in bytes.
        banks: host memory of its gradients, flat, in the parameter's dtype; none on the device.
    """

    name: str
    parameter: nn.Parameter
    moments: tuple[str, ...]
    step: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    lags: torch.Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.bool))
    version: int = 0
    shelf: Shelf = field(init=False)
    offsets: dict[str, int] = field(init=False, default_factory=dict)
    banks: list[torch.Tensor] = field(init=False, default_factory=list)

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return self.parameter.numel()

    @property
    def keys(self) -> tuple[str, ...]:
        """The master and the moments."""
        return MASTER, *self.moments

    def flat(self, key: str) -> torch.Tensor:
        """Return the master, or a moment, in the order of the parameter's memory."""
        begin = self.offsets[key]
        return self.shelf.memory[begin : begin + self.numel * _ELEMENT].view(torch.float32)

    def state(self) -> dict[str, torch.Tensor]:
        """Return what ``optimizer.state`` shows: views, of the parameter's shape and strides."""
        shown = {key: shaped(self.flat(key), self.parameter) for key in self.keys}
        return {"step": self.step, **shown, "lags": self.lags}


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor in the order of its memory, as a view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def shaped(elements: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a view of flat ``elements`` with the shape and strides of a dense tensor."""
    return elements.as_strided(like.size(), like.stride(), elements.storage_offset())


class Shelf:
    """The bytes of some entries; see [Note: a shelf].

    Args:
        entries: that are to lie here.
        queues: whose pinned memory it is to be, where copies cross the link from here; None:
            ordinary memory, or a file.
        directory: of the file; None for memory.

    Attributes:
        memory: all of it, uint8; of a file, its map.
        file: None where it is memory.

    Raises:
        BudgetError: the host has no such memory.
        SpillError: the directory cannot be used.
    """

    def __init__(
        self, entries: Sequence[Entry], queues: Queues | None, directory: Path | None
    ) -> None:
        self.nbytes = place(entries, in_file=directory is not None)
        self.file: SpillFile | None = None
        self._queues = queues if directory is None else None
        self._map: mmap.mmap | None = None
        if directory is not None:
            self._open(directory)
        else:
            self._take(entries)
        for entry in entries:
            entry.shelf = self

    def _take(self, entries: Sequence[Entry]) -> None:
        nbytes = max(1, self.nbytes)
        try:
            with torch.inference_mode(False):
                if self._queues is not None:
                    self.memory = self._queues.host(nbytes)
                else:
                    self.memory = torch.empty(nbytes, dtype=torch.uint8)
                self.memory.zero_()
        except (MemoryError, RuntimeError) as error:
            raise BudgetError(
                f"the host has no {format_bytes(nbytes)} for the masters and moments of "
                f"{len(entries)} parameters: pass spill_dir= a directory on a disk, and they go "
                "to a file"
            ) from error

    def _open(self, directory: Path) -> None:
        self.file = SpillFile(directory, self.nbytes, purpose="masters and moments")
        try:
            self._map = mmap.mmap(self.file.fd, max(1, self.nbytes))
        except OSError as error:
            self.file.close()
            raise SpillError(
                error.errno, f"the file in {directory} cannot be mapped ({error.strerror})"
            ) from error
        with torch.inference_mode(False):
            self.memory = torch.frombuffer(self._map, dtype=torch.uint8)

    def taken(self, nbytes: int) -> int:
        """Return the bytes that a tensor of ``nbytes`` takes here."""
        return padded(nbytes, _LINE if self.file is None else _SECTOR)

    def sync(self) -> None:
        """What was written through the map is on the disk.

        Raises:
            SpillError: it cannot be written.
        """
        if self._map is None or self.file is None:
            return
        try:
            self._map.flush()
        except OSError as error:
            number = error.errno or 5
            what = f"{format_bytes(self.nbytes)} of masters and moments"
            raise failure(number, self.file.unwritable(what, reason(number))) from error

    def transfer(self, content: torch.Tensor, offset: int, *, reads: bool) -> None:
        """Read or write bytes of the file, whole sectors.

        Args:
            content: uint8, aligned to 4 KiB.
            offset: where in the file, in bytes.
            reads: from the file into ``content``; else the other way.

        Raises:
            SpillError: they cannot be.
        """
        assert self.file is not None
        view = memoryview(content.numpy().data)
        done = 0
        try:
            while done < len(view):
                move = os.preadv if reads else os.pwritev
                moved = move(self.file.fd, [view[done:]], offset + done)
                if moved <= 0:
                    raise OSError(5, "the file ends before what it holds")
                done += moved
        except OSError as error:
            number = error.errno or 5
            what = f"{format_bytes(len(view))} of masters and moments"
            told = (
                f"{self.file.unreadable(what, reason(number))}; {UNREAD}"
                if reads
                else self.file.unwritable(what, reason(number))
            )
            raise failure(number, told) from error

    def close(self) -> None:
        """Give the memory or the file back; tensors that somebody still holds keep their map."""
        memory = self.memory
        del self.memory
        if self._queues is not None:
            self._queues.release(memory, held=True)
        if self.file is not None:
            self.file.close()


def place(entries: Iterable[Entry], *, in_file: bool) -> int:
    """Give entries their offsets on a shelf, one behind the other; return the bytes they take."""
    align = _SECTOR if in_file else _LINE
    offset = 0
    for entry in entries:
        for key in entry.keys:
            entry.offsets[key] = offset
            offset += padded(entry.numel * _ELEMENT, align)
    return offset


def padded(nbytes: int, align: int = _SECTOR) -> int:
    """Return the least multiple of ``align`` that holds ``nbytes``."""
    return math.ceil(nbytes / align) * align


def divide(
    entries: Sequence[Entry], host_budget: int | None, *, has_file: bool
) -> tuple[list[Entry], list[Entry]]:
    """Return which entries lie in memory, as many as fit whole, and which in the file.

    Args:
        entries: in the order of steps.
        host_budget: bytes of memory for them; with a file, None is none.
        has_file: whether there is one; else all lie in memory.
    """
    if not has_file:
        return list(entries), []
    room = host_budget or 0
    inside: list[Entry] = []
    outside: list[Entry] = []
    for entry in entries:
        need = len(entry.keys) * padded(entry.numel * _ELEMENT, _LINE)
        if need <= room:
            room -= need
            inside.append(entry)
        else:
            outside.append(entry)
    return inside, outside
