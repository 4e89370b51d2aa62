"""State of optimizers that run whole: tensors in their containers, found once a step has ended.

An optimizer that is none of `torch.optim` keeps state where it likes. What it has made in a step is
paged afterwards. A tensor whose memory something else holds too stays where it is.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable

import torch

from dynoffload.memory import heap
from dynoffload.memory.device import Device
from dynoffload.memory.region_allocator import users_of
from dynoffload.runtime.adoption.held import is_between_processes, references
from dynoffload.runtime.adoption.store import bytes_of, offset_of, view_of
from dynoffload.runtime.placing import put
from dynoffload.units import MiB

_LEFT_IN_HEAP = 32 * MiB  # of moved state, after which its memory goes back to the system
_OWN = 2  # users of a tensor's storage: the tensor, and the storage's own object


def _is_sole_view(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a view, of which alone its base is still there."""
    base = tensor._base
    return base is not None and references({0: base}, 0) == _of_sole_base()


@functools.cache
def _of_sole_base() -> int:
    """Return how many references there are to what only a view holds: versions of torch differ."""
    with torch.no_grad():
        view = torch.empty(1).view(1)
    base = view._base
    return references({0: base}, 0)


class WholeState:
    """Pages the tensors that it is given.

    Args:
        device: takes the regions.
        min_paged_bytes: smaller tensors stay where they are.
        names: where regions get their names for reports.
    """

    def __init__(self, device: Device, min_paged_bytes: int, names: dict[int, str]) -> None:
        self._device, self._min, self._names = device, min_paged_bytes, names
        self._tensors: dict[int, weakref.ref[torch.Tensor]] = {}

    @torch.no_grad()
    def adopt(self, states: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Move tensors, given with their names, that lie nowhere yet."""
        self.sweep()
        moved = 0
        for name, tensor in states:
            if not self._pages(tensor):
                continue
            storage = tensor.untyped_storage()
            region = self._device.allocate(storage.nbytes(), extra=True)
            self._names[region] = name
            self._device.acquire([region])
            ours = self._device.storage(region)
            bytes_of(ours).copy_(bytes_of(storage))
            made = view_of(ours, tensor, offset_of(tensor))
            if tensor._base is None:
                tensor.data = made
            else:
                try:
                    torch.utils.swap_tensors(tensor, made)  # type: ignore[no-untyped-call]
                except RuntimeError:  # a graph holds it, and its base keeps the old memory
                    del made, ours
                    self._device.release(region)
                    continue
            self._tensors[region] = weakref.ref(tensor)
            moved += storage.nbytes()
        if moved >= _LEFT_IN_HEAP:
            heap.give_back()

    def _pages(self, tensor: torch.Tensor) -> bool:
        if (
            tensor.layout != torch.strided
            or tensor.device != self._device.device
            or tensor.is_inference()
            or tensor.requires_grad
            or type(tensor) is not torch.Tensor
        ):
            return False
        storage = tensor.untyped_storage()
        return (
            storage.nbytes() >= self._min
            and self._device.padded(storage.nbytes()) <= self._device.capacity
            and storage.resizable()  # else it is numpy's memory, or another library's
            and not is_between_processes(storage)
            and self._device.owner(storage) < 0
            and users_of(storage) <= _OWN + _is_sole_view(tensor)
            and (tensor._base is None or not weakref.getweakrefs(tensor))  # else torch swaps none
        )

    def sweep(self) -> None:
        """Release the regions of tensors that are gone."""
        for region, tensor in list(self._tensors.items()):
            if tensor() is None and users_of(self._device.storage(region)) <= 1:
                del self._tensors[region]
                self._device.release(region)

    def is_held(self) -> bool:
        """Return whether somebody holds memory of a region beside the tensor in it."""
        self.sweep()
        return any(
            users_of(self._device.storage(region)) > 1 + self._lies_in(region, tensor())
            for region, tensor in self._tensors.items()
        )

    def _lies_in(self, region: int, tensor: torch.Tensor | None) -> bool:
        return tensor is not None and self._device.owner(tensor) == region

    def restore(self, ordinary: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Give every tensor memory of its own again, which ``ordinary`` returns."""
        tensors = {region: reference() for region, reference in self._tensors.items()}
        self._tensors.clear()  # torch swaps no tensor that has a weak reference
        for region, tensor in tensors.items():
            if tensor is not None and self._lies_in(region, tensor):
                put(tensor, ordinary(tensor.data))
