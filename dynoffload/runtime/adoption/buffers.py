"""Pages tensors created during training: late buffers, and state of optimizers that run whole.

Buffers registered in a constructor are counted before the budget is divided, and stay in place.
Buffers registered in a forward, such as a mask made at first use, cannot be counted in advance, so
they are paged. So is state that an optimizer outside `torch.optim` keeps in containers, or for a
parameter too small to be paged. A tensor whose memory has other references stays in place.
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
from dynoffload.memory.accelerator.guarded import kind_of
from dynoffload.memory.device import Device
from dynoffload.memory.region_allocator import users_of
from dynoffload.runtime.adoption.held import is_between_processes, references
from dynoffload.runtime.adoption.store import bytes_of, offset_of, view_of
from dynoffload.runtime.placing import put
from dynoffload.units import MiB, format_bytes

_LEFT_IN_HEAP = 32 * MiB  # of moved state, above which freed heap memory returns to the system
_OWN = 2  # users of a new buffer's storage: the tensor, and the storage's own object


def _is_sole_view(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a view and holds the only reference to its base."""
    base = tensor._base
    return base is not None and references({0: base}, 0) == _sole_base_references()


@functools.cache
def _sole_base_references() -> int:
    """Return the reference count of a base that only its view holds; it depends on torch."""
    with torch.no_grad():
        view = torch.empty(1).view(1)
    base = view._base
    return references({0: base}, 0)


def _swap(tensor: torch.Tensor, made: torch.Tensor) -> bool:
    """Swap the tensors; return False if torch refuses, as when a graph holds one of them."""
    try:
        torch.utils.swap_tensors(tensor, made)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return True


class Buffers:
    """Pages buffers that modules of ``model`` register later, and the state passed to it.

    Args:
        model: the root.
        device: allocates the regions.
        min_paged_bytes: smaller buffers stay in place.
        names: maps regions to their names in reports; it is extended here.
        enough: returns a budget with room for a region of the given bytes.
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
        """Move named tensors of an optimizer's state that are not in a region yet."""
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
            put(tensor, made)
        elif not _swap(tensor, made):  # setting `data` would leave the old memory to its base
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
            or kind_of(buffer) is not torch.Tensor
        ):
            return False
        storage = buffer.untyped_storage()
        return (
            storage.nbytes() >= self._min
            and storage.resizable()  # else the memory is numpy's or another library's
            and not is_between_processes(storage)
            and self._device.owner(storage) < 0
            and users_of(storage) <= _OWN + _is_sole_view(buffer)
            and (buffer._base is None or not weakref.getweakrefs(buffer))  # else no swap
        )

    def sweep(self) -> None:
        """Release the regions of buffers that no longer exist."""
        for region, tensor in list(self._tensors.items()):
            if tensor() is None and users_of(self._device.storage(region)) <= 1:
                del self._tensors[region]
                self._device.release(region)

    def are_held(self) -> bool:
        """Return whether a buffer's region has references other than the buffer."""
        self.sweep()
        return any(
            users_of(self._device.storage(region)) > 1 + self._is_in_region(region, tensor())
            for region, tensor in self._tensors.items()
        )

    def _is_in_region(self, region: int, tensor: torch.Tensor | None) -> bool:
        return tensor is not None and self._device.owner(tensor) == region

    def end(self) -> dict[int, torch.Tensor]:
        """Stop paging what is registered, and return what is paged, by region."""
        self._handle.remove()
        tensors = {region: reference() for region, reference in self._tensors.items()}
        self._tensors.clear()  # torch cannot swap a tensor that has weak references
        return {
            region: tensor
            for region, tensor in tensors.items()
            if tensor is not None and self._is_in_region(region, tensor)
        }
