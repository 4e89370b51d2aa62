"""All memory, files and threads of one optimizer, which it takes and gives back as one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from dynoffload.errors import BudgetError
from dynoffload.host_optimizer.gradient_offload import GradientOffload
from dynoffload.host_optimizer.link import Link
from dynoffload.host_optimizer.staging import SLOTS, Staging
from dynoffload.host_optimizer.state_buffers import (
    MASTER,
    ParameterState,
    StateBuffer,
    divide,
    flat,
    padded,
)
from dynoffload.host_optimizer.tiles import Tile, tiles_of
from dynoffload.host_optimizer.worker_pool import WorkerPool
from dynoffload.units import format_bytes


class HostStorage:
    """What one optimizer holds.

    Args:
        link: to the accelerator.
        workers: that update; they end with this.
        tile_bytes: of the masters in a tile.
        spill_dir: for masters and moments, or None.
        host_budget: bytes of memory for them where there is a file.
        banks: of memory for gradients: two where one step's are read while the next come.

    Attributes:
        link: as given.
        tiles: of all parameters, in their order.
        gradients: on their way.
        staging: the way of files.
    """

    def __init__(
        self,
        link: Link,
        workers: WorkerPool,
        *,
        tile_bytes: int,
        spill_dir: Path | None,
        host_budget: int,
        banks: int,
    ) -> None:
        self.link, self._workers = link, workers
        self._tile_bytes, self._spill_dir = tile_bytes, spill_dir
        self._budget, self._banks = host_budget, banks
        self._buffers: list[StateBuffer] = []
        self._gradient_memory: list[torch.Tensor] = []
        self.tiles: list[Tile] = []
        self.staging = Staging(link, 0)
        self.gradients = GradientOffload(link, tile_bytes)
        self._closed = False
        self._process = os.getpid()

    def describe(self) -> str:
        """Return in words how large masters, moments and gradients are, and where."""
        held, filed = self._bytes(in_file=False), self._bytes(in_file=True)
        pinned = format_bytes(sum(memory.nbytes for memory in self._gradient_memory))
        return (
            f"{format_bytes(held)} of masters and moments in memory and {format_bytes(filed)} in a "
            f"file, gradients through {pinned}, slots of {format_bytes(self.staging.nbytes)}"
        )

    def _bytes(self, *, in_file: bool) -> int:
        return sum(one.nbytes for one in self._buffers if (one.file is not None) == in_file)

    def add(self, states: Sequence[ParameterState]) -> None:
        """Give parameters their places, and masters their values.

        Raises:
            BudgetError: the host has no such memory; nothing was taken.
            SpillError: the directory cannot be used, or has no such room; nothing was taken.
        """
        inside: list[ParameterState] = list(states)
        outside: list[ParameterState] = []
        if self._spill_dir is not None:
            inside, outside = divide(states, max(0, self._budget - self._bytes(in_file=False)))
        buffers: list[StateBuffer] = []
        memory: list[torch.Tensor] = []
        tiles: list[Tile] = []
        try:
            for some, directory in ((inside, None), (outside, self._spill_dir)):
                if some:
                    buffers.append(StateBuffer(some, directory))
                    tiles += tiles_of([state for state in some if state.numel], self._tile_bytes)
            for _ in range(self._banks):
                memory.append(self._take_gradient_memory(states))
            largest = max((t.nbytes for t in tiles if t.buffer.file is not None), default=0)
            if largest * SLOTS > self.staging.nbytes:
                larger = Staging(self.link, largest)
                self.staging.close()
                self.staging = larger
            with torch.no_grad():
                for state in states:
                    state.flat(MASTER).copy_(flat(state.parameter))
                    state.version = state.parameter._version
            for buffer in buffers:
                buffer.sync()
        except BaseException:
            for one in memory:
                self.link.release(one, held=False)
            for buffer in buffers:
                buffer.close()
            raise
        self._buffers += buffers
        self._gradient_memory += memory
        self.tiles += tiles

    def _take_gradient_memory(self, states: Sequence[ParameterState]) -> torch.Tensor:
        nbytes = sum(padded(state.parameter.nbytes) for state in states)
        try:
            with torch.inference_mode(False):
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
            offset += padded(state.parameter.nbytes)
        return memory

    def sync(self) -> None:
        """Write to their disks what was changed through the maps of files.

        Raises:
            SpillError: it cannot be written.
        """
        for buffer in self._buffers:
            buffer.sync()

    def close(self) -> None:
        """End threads, and give memory and files back; a forked process has none of them."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        self._workers.close()
        self.gradients.close()
        self.staging.close()
        self.tiles.clear()
        while self._gradient_memory:
            self.link.release(self._gradient_memory.pop(), held=False)
        while self._buffers:
            self._buffers.pop().close()
