"""All memory, files and threads of one optimizer, acquired and released together."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from pathlib import Path

import torch

from dynoffload.errors import BudgetError
from dynoffload.host_optimizer.gradient_offload import GradientOffload
from dynoffload.host_optimizer.link import Link
from dynoffload.host_optimizer.states import (
    MASTER,
    ParameterState,
    StateFile,
    allocate,
    flat,
    padded,
)
from dynoffload.host_optimizer.tiles import Staging, Tile, tiles_of
from dynoffload.units import format_bytes

_LINE_BYTES = 64  # alignment of gradients in pinned memory


class HostStorage:
    """Memory, files and threads of one optimizer.

    Args:
        link: to the accelerator.
        workers: run the updates; shut down with this.
        tile_bytes: of the masters in a tile.
        spill_dir: for masters and moments, or None.
        host_budget: bytes of memory for them if there is a file.
        banks: of memory for gradients: two if one step's are read while the next arrive.

    Attributes:
        link: as given.
        states: of all parameters.
        tiles: of all parameters, in order.
        gradients: copies gradients to the host.
        staging: slots through which tiles of files pass.
    """

    def __init__(
        self,
        link: Link,
        workers: Executor,
        *,
        tile_bytes: int,
        spill_dir: Path | None,
        host_budget: int,
        banks: int,
    ) -> None:
        self.link, self._workers = link, workers
        self._tile_bytes, self._spill_dir = tile_bytes, spill_dir
        self._budget, self._banks = host_budget, banks
        self._files: list[StateFile] = []
        self._taken = ExitStack()
        self.states: list[ParameterState] = []
        self.tiles: list[Tile] = []
        self.staging = Staging(link)
        self.gradients = GradientOffload(link, tile_bytes)
        self._process = os.getpid()

    def describe(self) -> str:
        """Return in words the size and location of masters, moments and gradients."""
        held, all_bytes = _in_memory(self.states), sum(state.nbytes for state in self.states)
        pinned = self._banks * sum(state.parameter.nbytes for state in self.states)
        return (
            f"{format_bytes(held)} of masters and moments in memory and "
            f"{format_bytes(all_bytes - held)} in a file, gradients through {format_bytes(pinned)},"
            f" slots of {format_bytes(self.staging.nbytes)}"
        )

    def add(self, states: Sequence[ParameterState]) -> None:
        """Allocate storage for parameters, and initialize their masters.

        Raises:
            BudgetError: the host has too little memory; nothing was kept.
            SpillError: the directory cannot be used, or lacks room; nothing was kept.
        """
        room = self._budget - _in_memory(self.states)
        inside: list[ParameterState] = []
        outside: list[ParameterState] = []
        for state in states:
            fits = self._spill_dir is None or state.nbytes <= room
            room -= state.nbytes if fits else 0
            (inside if fits else outside).append(state)
        with ExitStack() as taken, torch.inference_mode(False), torch.no_grad():
            for state in states:
                taken.callback(state.release)
            allocate(inside)
            files = []
            if outside:
                assert self._spill_dir is not None
                files = [StateFile(outside, self._spill_dir)]
                taken.callback(files[0].close)
            for _ in range(self._banks):
                memory = self._take_gradient_memory(states)
                taken.callback(self.link.release, memory, held=False)
            tiles = tiles_of(inside, self._tile_bytes) + tiles_of(outside, self._tile_bytes)
            self.staging.grow(max((t.nbytes for t in tiles if t.file is not None), default=0))
            for state in states:
                state.tensors[MASTER].copy_(flat(state.parameter))
                state.version = state.parameter._version
            for file in files:
                file.sync()
            self._taken.enter_context(taken.pop_all())
        self._files += files
        self.states += states
        self.tiles += tiles

    def _take_gradient_memory(self, states: Sequence[ParameterState]) -> torch.Tensor:
        nbytes = sum(padded(state.parameter.nbytes, _LINE_BYTES) for state in states)
        try:
            memory = self.link.host(max(1, nbytes))
        except MemoryError as error:
            raise BudgetError(
                f"the host has no {format_bytes(nbytes)} for the gradients of {len(states)} "
                "parameters: free memory, or train fewer of them by this optimizer"
            ) from error
        offset = 0
        for state in states:
            taken = memory[offset : offset + state.parameter.nbytes]
            state.gradient_memory.append(taken.view(state.parameter.dtype))
            offset += padded(state.parameter.nbytes, _LINE_BYTES)
        return memory

    def sync(self) -> None:
        """Write to the disk the changes made through the maps of files.

        Raises:
            SpillError: it cannot be written.
        """
        for file in self._files:
            file.sync()

    def close(self) -> None:
        """End threads, and release memory and files; does nothing in a forked process."""
        if os.getpid() == self._process:
            self._workers.shutdown()
            self.gradients.close()
            self.staging.close()
            self.tiles.clear()
            self.states.clear()
            self._taken.close()


def _in_memory(states: Iterable[ParameterState]) -> int:
    """Return the bytes of masters and moments that are in memory."""
    return sum(state.nbytes for state in states if state.file is None)
