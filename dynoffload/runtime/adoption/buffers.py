"""Buffers that modules register while they train: they move into regions as they appear.

What a module registers in its constructor is counted before the budget is divided, and stays where
it is. What it registers in a forward, such as a mask or a table made at first use, nobody could
count: so it is paged, like parameters are. A tensor whose memory somebody else holds too stays
where it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.module import register_module_buffer_registration_hook

from dynoffload.errors import BudgetError
from dynoffload.memory.device import Device
from dynoffload.memory.places import users_of
from dynoffload.runtime.adoption.held import is_between_processes
from dynoffload.runtime.adoption.store import bytes_of, offset_of, view_of
from dynoffload.runtime.placing import put
from dynoffload.units import format_bytes

_OWN = 2  # users of a new buffer's storage: the tensor, and the storage's own object


class Buffers:
    """Pages what modules of ``model`` register from now on.

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
        if path is None or buffer is None or not self._pages(buffer):
            return
        self.sweep()
        storage = buffer.untyped_storage()
        name = f"{path}.{name}" if path else name
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
        buffer.data = view_of(ours, buffer, offset_of(buffer))
        self._tensors[region] = weakref.ref(buffer)

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
            and users_of(storage) <= _OWN
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
