"""Tensors that appear while a model trains: late buffers, and state of optimizers that run whole.

What a module registers in its constructor is counted before the budget is divided, and stays where
it is. What it registers in a forward, such as a mask or a table made at first use, nobody could
count: so it is paged, like parameters are. So is what an optimizer that is none of `torch.optim`
keeps in containers, or for a parameter that is too small to be paged. A tensor whose memory
something else holds too stays where it is.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn.modules.module import register_module_buffer_registration_hook

from dynoffload.errors import BudgetError
from dynoffload.memory import heap
from dynoffload.memory.device import Device
from dynoffload.memory.region_allocator import users_of
from dynoffload.runtime.adoption.held import is_between_processes, references
from dynoffload.runtime.adoption.store import bytes_of, offset_of, view_of
from dynoffload.runtime.placing import put
from dynoffload.units import MiB, format_bytes

_LEFT_IN_HEAP = 32 * MiB  # of moved state, after which its memory goes back to the system
_OWN = 2  # users of a new buffer's storage: the tensor, and the storage's own object


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


def _swap(tensor: torch.Tensor, made: torch.Tensor) -> bool:
    """Swap the two, and return whether torch does so: a graph may hold one."""
    try:
        torch.utils.swap_tensors(tensor, made)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return True


class Buffers:
    """Pages what modules of ``model`` register from now on, and the state it is given.

    Args:
        model: the root.
        device: takes the regions.
        min_paged_bytes: smaller buffers stay where they are.
        names: where regions get their names for reports.
        enough: returns a budget that has room for a region of so many bytes.
    """

    def __init__(
        self,
        model: nn.Module,
        device: Device,
        min_paged_bytes: int,
        names: dict[int, str],
        enough: Callable[[int], int],
    ) -> None:
        self._device, self._min, self._names = device, min_paged_bytes, names
        self._enough = enough
        self._paths = weakref.WeakKeyDictionary(
            {module: path for path, module in model.named_modules()}
        )
        self._tensors: dict[int, weakref.ref[torch.Tensor]] = {}
        self._handle = register_module_buffer_registration_hook(self._registered)

    @torch.no_grad()
    def _registered(self, module: nn.Module, name: str, buffer: torch.Tensor | None) -> None:
        path = self._paths.get(module)
        if path is not None and buffer is not None and self._pages(buffer):
            self.sweep()
            self._adopt(f"{path}.{name}" if path else name, buffer)

    @torch.no_grad()
    def adopt_state(self, states: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Move tensors of an optimizer's state, given with their names, that lie nowhere yet."""
        self.sweep()
        moved = 0
        for name, tensor in states:
            if self._pages(tensor):
                nbytes = tensor.untyped_storage().nbytes()
                if self._device.padded(nbytes) <= self._device.capacity:
                    self._adopt(name, tensor)
                    moved += nbytes
        if moved >= _LEFT_IN_HEAP:
            heap.give_back()

    def _adopt(self, name: str, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if self._device.padded(nbytes) > self._device.capacity:
            raise BudgetError(
                f"the buffer {name} of {format_bytes(nbytes)} is larger than the pool of "
                f"{format_bytes(self._device.capacity)}: raise the budget to "
                f"{format_bytes(self._enough(nbytes))}, or make it smaller"
            )
        region = self._device.allocate(nbytes, extra=True)
        self._names[region] = name
        self._device.acquire([region])
        ours = self._device.storage(region)
        bytes_of(ours).copy_(bytes_of(storage))
        made = view_of(ours, tensor, offset_of(tensor))
        if tensor._base is None:
            tensor.data = made
        elif not _swap(tensor, made):  # else its base, held by it alone, keeps the old memory
            del made, ours
            self._device.release(region)
            return
        self._tensors[region] = weakref.ref(tensor)

    def _pages(self, buffer: torch.Tensor) -> bool:
        if (
            buffer.layout != torch.strided
            or buffer.device != self._device.device
            or buffer.is_inference()
            or buffer.requires_grad
            or type(buffer) is not torch.Tensor
        ):
            return False
        storage = buffer.untyped_storage()
        return (
            storage.nbytes() >= self._min
            and storage.resizable()  # else it is numpy's memory, or another library's
            and not is_between_processes(storage)
            and self._device.owner(storage) < 0
            and users_of(storage) <= _OWN + _is_sole_view(buffer)
            and (buffer._base is None or not weakref.getweakrefs(buffer))  # else torch swaps none
        )

    def sweep(self) -> None:
        """Release the regions of buffers that are gone."""
        for region, tensor in list(self._tensors.items()):
            if tensor() is None and users_of(self._device.storage(region)) <= 1:
                del self._tensors[region]
                self._device.release(region)

    def are_held(self) -> bool:
        """Return whether somebody holds memory of a buffer's region beside the buffer."""
        self.sweep()
        return any(
            users_of(self._device.storage(region)) > 1 + self._lies_in(region, tensor())
            for region, tensor in self._tensors.items()
        )

    def _lies_in(self, region: int, tensor: torch.Tensor | None) -> bool:
        return tensor is not None and self._device.owner(tensor) == region

    def restore(self, ordinary: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
        """Give every buffer memory of its own again, which ``ordinary`` returns."""
        self._handle.remove()
        tensors = {region: reference() for region, reference in self._tensors.items()}
        self._tensors.clear()  # torch swaps no tensor that has a weak reference
        for region, tensor in tensors.items():
            if tensor is not None and self._lies_in(region, tensor):
                put(tensor, ordinary(region, tensor.data))
