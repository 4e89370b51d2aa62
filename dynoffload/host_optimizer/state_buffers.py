"""What the optimizer keeps of each parameter, and the host memory or file that it lies in.

[Note: layout]  A buffer holds the master and then the moments of each parameter, one parameter
behind the other. Each tensor is unbroken and in the order of the parameter's own memory, so
``optimizer.state`` shows it without a copy, with the parameter's shape and strides. Small
parameters that are neighbours are one unbroken stretch of bytes. A slice of a large one is as many
stretches as it has tensors.

[Note: the file's map]  A file is mapped for whoever reads the state. Steps go past the map, with
direct I/O. Linux writes back what the map has changed before it reads directly, and drops what the
map shows before it writes directly. So both agree as long as nobody reads the map during a step.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dynoffload.errors import BudgetError, SpillError
from dynoffload.memory.spill import UNREAD, SpillFile, failure, reason, transfer
from dynoffload.units import KiB, format_bytes

MASTER = "master"
ELEMENT_BYTES = 4  # of float32
LINE_BYTES = 64  # that tensors begin at multiples of, in memory
_SECTOR_BYTES = 4 * KiB  # likewise in a file


@dataclass(eq=False)
class ParameterState:
    """What the optimizer keeps of one parameter.

    Attributes:
        name: what errors call it.
        parameter: the user's.
        moments: keys of the tensors of its size beside the master.
        step: how many updates it has had; float32 of no dimension, as torch's.
        lags: whether the parameter is still to take its master over (a delayed update); bool.
        version: of the parameter's tensor when it last agreed with the master.
        buffer: where it lies.
        offsets: where the master and each moment begin in the buffer, in bytes.
        gradient_memory: pinned, flat, in the parameter's dtype; two if updates are delayed.
    """

    name: str
    parameter: nn.Parameter
    moments: tuple[str, ...]
    step: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    lags: torch.Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.bool))
    version: int = 0
    buffer: StateBuffer = field(init=False)
    offsets: dict[str, int] = field(init=False, default_factory=dict)
    gradient_memory: list[torch.Tensor] = field(init=False, default_factory=list)

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
        return self.buffer.memory[begin : begin + self.numel * ELEMENT_BYTES].view(torch.float32)

    def shown(self) -> dict[str, torch.Tensor]:
        """Return what ``optimizer.state`` shows: views, of the parameter's shape and strides."""
        tensors = {key: shaped(self.flat(key), self.parameter) for key in self.keys}
        return {"step": self.step, **tensors, "lags": self.lags}

    def mark_updated(self) -> None:
        """The parameter agrees with its master."""
        self.version = self.parameter._version
        self.lags.fill_(False)


def named_parameters(number: int, group: Mapping[str, Any]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of group ``number``, and what errors call them."""
    names = group.get("param_names")
    for at, parameter in enumerate(group["params"]):
        yield repr(names[at]) if names else f"parameter {at} of group {number}", parameter


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor in the order of its memory, as a view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def shaped(elements: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a view of flat ``elements`` with the shape and strides of a dense tensor."""
    return elements.as_strided(like.size(), like.stride(), elements.storage_offset())


class StateBuffer:
    """Memory, or a file, for the masters and moments of some parameters; see [Note: layout].

    Args:
        states: that are to lie here.
        directory: of the file; None for memory.

    Attributes:
        memory: all of it, uint8; of a file, its map.
        file: None where it is memory.
        nbytes: all that masters and moments take here.

    Raises:
        BudgetError: the host has no such memory.
        SpillError: the directory cannot be used.
    """

    def __init__(self, states: Sequence[ParameterState], directory: Path | None) -> None:
        self.file: SpillFile | None = None
        self._align = LINE_BYTES if directory is None else _SECTOR_BYTES
        self.nbytes = 0
        for state in states:
            for key in state.keys:
                state.offsets[key] = self.nbytes
                self.nbytes += self.padded(state.numel * ELEMENT_BYTES)
        with torch.inference_mode(False):
            if directory is not None:
                self._open(directory)
            else:
                self._allocate(len(states))
        for state in states:
            state.buffer = self

    def _allocate(self, count: int) -> None:
        try:
            self.memory = torch.zeros(self.nbytes, dtype=torch.uint8)
        except (MemoryError, RuntimeError) as error:
            raise BudgetError(
                f"the host has no {format_bytes(self.nbytes)} for the masters and moments of "
                f"{count} parameters: pass spill_dir= a directory on a disk, and they go to a file"
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
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)

    def padded(self, nbytes: int) -> int:
        """Return the bytes that a tensor of ``nbytes`` takes here."""
        return padded(nbytes, self._align)

    def sync(self) -> None:
        """Write to the disk what was changed through the map of a file.

        Raises:
            SpillError: it cannot be written.
        """
        if self.file is None:
            return
        try:
            self._map.flush()
        except OSError as error:
            raise self._failure(error, self.nbytes, reads=False) from error

    def transfer(self, content: torch.Tensor, offset: int, *, reads: bool) -> None:
        """Read or write bytes of the file, whole sectors.

        Args:
            content: uint8, aligned to 4 KiB.
            offset: where in the file, in bytes.
            reads: from the file into ``content``; else the other way.

        Raises:
            SpillError: the system refuses it.
        """
        assert self.file is not None
        try:
            transfer(self.file.fd, content, offset, reads=reads)
        except OSError as error:
            raise self._failure(error, content.nbytes, reads=reads) from error

    def _failure(self, error: OSError, nbytes: int, *, reads: bool) -> SpillError:
        assert self.file is not None
        number = error.errno or 5
        what, why = f"{format_bytes(nbytes)} of masters and moments", reason(number)
        if reads:
            return failure(number, f"{self.file.unreadable(what, why)}; {UNREAD}")
        return failure(number, self.file.unwritable(what, why))

    def close(self) -> None:
        """Give the memory or the file back; tensors that somebody still holds keep their map."""
        del self.memory
        if self.file is not None:
            self.file.close()


def padded(nbytes: int, align: int = LINE_BYTES) -> int:
    """Return the least multiple of ``align`` that holds ``nbytes``."""
    return math.ceil(nbytes / align) * align


def divide(
    states: Iterable[ParameterState], room: int
) -> tuple[list[ParameterState], list[ParameterState]]:
    """Return those that lie in ``room`` bytes of memory, as they fit whole, and the rest."""
    inside: list[ParameterState] = []
    outside: list[ParameterState] = []
    for state in states:
        need = len(state.keys) * padded(state.numel * ELEMENT_BYTES)
        fits = need <= room
        room -= need if fits else 0
        (inside if fits else outside).append(state)
    return inside, outside
