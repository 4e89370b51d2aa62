"""State that the optimizer keeps for each parameter, in memory or in a file.

[Note: the file's map]  A file is mapped for readers of the state, but steps use direct I/O. Before
a direct read, Linux writes back pages changed through the map; before a direct write, it drops the
mapped pages. So both agree, as long as no thread reads the map during a step.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dynoffload.errors import BudgetError, SpillError
from dynoffload.memory.spill import SpillFile, transfer
from dynoffload.units import KiB, format_bytes

MASTER = "master"
ELEMENT_BYTES = 4  # of float32
_SECTOR_BYTES = 4 * KiB  # alignment of tensors in a file


@dataclass(eq=False)
class ParameterState:
    """State of one parameter.

    Attributes:
        name: used in errors.
        parameter: the user's.
        moments: keys of the tensors of its size other than the master.
        step: number of updates; a float32 scalar, as torch's.
        lags: whether the parameter has yet to take over its master (a delayed update); bool.
        version: of the parameter's tensor when it last agreed with the master.
        tensors: the master and the moments, flat, float32, in the order of the parameter's memory.
        file: that they are mapped from; None if they are in memory.
        offsets: of each tensor in the file, in bytes.
        gradient_memory: pinned, flat, in the parameter's dtype; two if updates are delayed.
    """

    name: str
    parameter: nn.Parameter
    moments: tuple[str, ...]
    step: torch.Tensor = field(
        default_factory=lambda: torch.zeros((), dtype=torch.float32, device="cpu")
    )
    lags: torch.Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.bool))
    version: int = 0
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    file: StateFile | None = None
    offsets: dict[str, int] = field(default_factory=dict)
    gradient_memory: list[torch.Tensor] = field(default_factory=list)

    @property
    def numel(self) -> int:
        """Number of elements of the parameter."""
        return self.parameter.numel()

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the master and the moments."""
        return MASTER, *self.moments

    @property
    def nbytes(self) -> int:
        """Bytes of the master and the moments."""
        return len(self.keys) * self.numel * ELEMENT_BYTES

    def shown(self) -> dict[str, torch.Tensor]:
        """Return the entry for ``optimizer.state``: views with the parameter's size and strides."""
        tensors = {key: shaped(self.tensors[key], self.parameter) for key in self.keys}
        return {"step": self.step, **tensors, "lags": self.lags}

    def mark_updated(self) -> None:
        """Record that the parameter agrees with its master."""
        self.version = self.parameter._version
        self.lags.fill_(False)

    def catch_up(self) -> None:
        """Copy the master to the parameter if the parameter lags."""
        if self.lags:
            flat(self.parameter).copy_(self.tensors[MASTER])
            self.mark_updated()

    def release(self) -> None:
        """Release all memory."""
        self.tensors.clear()
        self.gradient_memory.clear()


def named_parameters(number: int, group: Mapping[str, Any]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of group ``number``, each after its name in errors."""
    names = group.get("param_names")
    for at, parameter in enumerate(group["params"]):
        yield repr(names[at]) if names else f"parameter {at} of group {number}", parameter


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor in the order of its memory, as a view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def shaped(elements: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a view of flat ``elements`` with the shape and strides of a dense tensor."""
    return elements.as_strided(like.size(), like.stride(), elements.storage_offset())


def padded(nbytes: int, align: int = _SECTOR_BYTES) -> int:
    """Return the least multiple of ``align`` that is at least ``nbytes``."""
    return -(-nbytes // align) * align


def allocate(states: Sequence[ParameterState]) -> None:
    """Allocate masters and moments in host memory.

    Raises:
        BudgetError: there is too little memory.
    """
    try:
        for state in states:
            state.tensors = {
                key: torch.zeros(state.numel, dtype=torch.float32, device="cpu")
                for key in state.keys
            }
    except (MemoryError, RuntimeError) as error:
        raise BudgetError(
            f"the host has no {format_bytes(sum(state.nbytes for state in states))} for the "
            f"masters and moments of {len(states)} parameters: pass spill_dir= a directory on a "
            "disk, and they go to a file"
        ) from error


class StateFile:
    """A file with the masters and moments of some parameters, stored consecutively.

    Args:
        states: of these parameters.
        directory: of the file.

    Raises:
        SpillError: the directory cannot be used.
    """

    def __init__(self, states: Sequence[ParameterState], directory: Path) -> None:
        begin = 0
        for state in states:
            for key in state.keys:
                state.offsets[key] = begin
                begin += padded(state.numel * ELEMENT_BYTES)
        self._file = SpillFile(directory, begin, purpose="masters and moments")
        try:
            self._map = mmap.mmap(self._file.fd, max(1, begin))
        except OSError as error:
            self._file.close()
            raise SpillError(
                error.errno, f"the file in {directory} cannot be mapped ({error.strerror})"
            ) from error
        memory = torch.frombuffer(self._map, dtype=torch.float32) if begin else torch.empty(0)
        for state in states:
            state.file = self
            for key, offset in state.offsets.items():
                state.tensors[key] = memory[offset // ELEMENT_BYTES :][: state.numel]

    def sync(self) -> None:
        """Write to the disk the changes made through the map.

        Raises:
            SpillError: it cannot be written.
        """
        try:
            self._map.flush()
        except OSError as error:
            raise self._failure(error, len(self._map), reads=False) from error

    def transfer(self, content: torch.Tensor, offset: int, *, reads: bool) -> None:
        """Read or write bytes of the file, whole sectors.

        Args:
            content: uint8, aligned to 4 KiB.
            offset: where in the file, in bytes.
            reads: from the file into ``content``; else from ``content`` to the file.

        Raises:
            SpillError: the transfer failed.
        """
        try:
            transfer(self._file.fd, content, offset, reads=reads)
        except OSError as error:
            raise self._failure(error, content.nbytes, reads=reads) from error

    def _failure(self, error: OSError, nbytes: int, *, reads: bool) -> SpillError:
        what = f"{format_bytes(nbytes)} of masters and moments"
        return self._file.failed(error.errno, what, reads=reads, after=None if reads else "")

    def close(self) -> None:
        """Close the file; tensors that are still referenced keep their map."""
        self._file.close()
