"""Access to a model's tensors while they get their values, in memory or under a budget.

What it is: `Access`, and its two kinds. What it is not: who gives the values
(`dynoffload.runtime.filling`), or which tensors lack them (`dynoffload.runtime.owed`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch

from dynoffload.memory.copies import Copies
from dynoffload.memory.device import Device
from dynoffload.memory.pieces import PIECE, same_bits
from dynoffload.runtime.adopting import Adoption
from dynoffload.runtime.interrupts import uninterrupted


class Access(Protocol):
    """How tensors are reached."""

    def bring(self, tensors: Iterable[torch.Tensor]) -> None:
        """They are about to be written: have those that are paged at hand."""

    def reads_zero(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` has zeros only, as what nobody has written has."""

    def zeros(self, tensor: torch.Tensor) -> float:
        """Return the share of the elements of ``tensor`` that are zero; 0.0 where that would have
        to be read from a file."""

    def kept(self, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """Give ``tensors`` back what they have now when the block ends."""


class InMemory:
    """Access to what is in memory, under no budget."""

    def bring(self, tensors: Iterable[torch.Tensor]) -> None:
        """See `Access.bring`."""

    def reads_zero(self, tensor: torch.Tensor) -> bool:
        """See `Access.reads_zero`."""
        return not bool(tensor.any())

    def zeros(self, tensor: torch.Tensor) -> float:
        """See `Access.zeros`."""
        return 1.0 - int(tensor.count_nonzero()) / max(1, tensor.numel())

    @contextlib.contextmanager
    def kept(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """See `Access.kept`."""
        kept = [(tensor, tensor._version, tensor.detach().clone()) for tensor in tensors]
        try:
            yield
        finally:
            _set_back(kept)


@uninterrupted
def _set_back(kept: Sequence[tuple[torch.Tensor, int, torch.Tensor]]) -> None:
    """Give tensors the values of their copies, with no signal in between."""
    with torch.no_grad():
        for tensor, version, copy in kept:
            if tensor.layout is torch.strided:
                same = same_bits(tensor, copy)
            else:
                same = tensor._version == version
            if not same:
                tensor.copy_(copy)


@uninterrupted
def _read_back(copies: Copies, tensors: Sequence[torch.Tensor], starts: Sequence[int]) -> None:
    """Give tensors the bytes of their copies, with no signal in between."""
    for tensor, start in zip(tensors, starts, strict=True):
        copies.read(start, tensor)


class Paged:
    """Access to what is paged: nothing is in memory twice.

    Args:
        adoption: what is.
        device: where it lies.
        directory: where copies lie meanwhile.
    """

    def __init__(self, adoption: Adoption, device: Device, directory: Path) -> None:
        self._adoption, self._device, self._directory = adoption, device, directory

    def bring(self, tensors: Iterable[torch.Tensor]) -> None:
        """See `Access.bring`."""
        slots = self._adoption.store.slots_of
        self._device.touch([slot.region for tensor in tensors for slot in slots(tensor)])

    def reads_zero(self, tensor: torch.Tensor) -> bool:
        """See `Access.reads_zero`."""
        regions = self._adoption.store.regions_under(tensor)
        if regions and all(self._device.is_clear(regions)):
            return True
        for piece in self._adoption.pieces(tensor):
            with self._adoption.held(piece):
                if bool(piece.any()):
                    return False
        return True

    def zeros(self, tensor: torch.Tensor) -> float:
        """See `Access.zeros`."""
        regions = self._adoption.store.regions_under(tensor)
        if not set(self._device.resident()).issuperset(regions):
            return 0.0
        found = 0
        for piece in self._adoption.pieces(tensor.detach()):
            with self._adoption.held(piece):
                found += int(piece.count_nonzero())
        return 1.0 - found / max(1, tensor.numel())

    @contextlib.contextmanager
    def kept(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """See `Access.kept`.

        Raises:
            SpillError: there is no room for the copies, or they cannot be read back.
        """
        large = [tensor for tensor in tensors if tensor.nbytes > PIECE]
        with InMemory().kept([tensor for tensor in tensors if tensor.nbytes <= PIECE]):
            if not large:
                yield
                return
            copies = Copies(
                self._adoption,
                self._directory,
                sum(tensor.nbytes for tensor in large),
                what="a copy of what has its values",
                purpose="what has its values already, while the rest is given its own,",
                unwritten="the module was not initialised",
            )
            with contextlib.closing(copies):
                starts = [copies.write(tensor) for tensor in large]
                try:
                    yield
                finally:
                    _read_back(copies, large, starts)
