"""What of one model and its optimizer lies in a device: taken in at the start and as the model
changes, given back at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from dynoffload.errors import BudgetError
from dynoffload.memory.device import Device
from dynoffload.memory.places import users_of
from dynoffload.runtime.adoption.buffers import Buffers
from dynoffload.runtime.adoption.fused import FusedStore
from dynoffload.runtime.adoption.held import held_parameters
from dynoffload.runtime.adoption.restoring import Restoration
from dynoffload.runtime.adoption.slicing import may_slice, slices_of, sole_owners
from dynoffload.runtime.adoption.store import Store, moved_bytes
from dynoffload.runtime.sizing import Sizing, state_tensors, tensors_of
from dynoffload.units import MiB, format_bytes

_LEFT_IN_HEAP = 32 * MiB  # by new optimizer state, which the first step makes all at once


class Adoption:
    """Moves the tensors of a model and its optimizer into a device and out again.

    Args:
        model: the root.
        optimizer: its optimizer, or None.
        sizing: which tensors are worth it.
        device: where they go.
        heap_slack: bytes that moved tensors may leave in the heap.
        slices: page fused parameters by slices.

    Attributes:
        store: what is paged whole.
        rows: what is paged by slices.
        buffers: the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        sizing: Sizing,
        device: Device,
        *,
        heap_slack: int,
        slices: bool,
    ) -> None:
        self._model, self._optimizer, self._sizing = model, optimizer, sizing
        self._device = device
        self._slices = slices and may_slice(optimizer)
        self._begun = False
        self.store = Store(device, sizing.min_paged_bytes, min(_LEFT_IN_HEAP, heap_slack))
        self.rows = FusedStore(device, self.store)
        self.buffers: Buffers

    def begin_buffers(self) -> None:
        """Take over the model's buffers, those of now and those to come."""
        least, names = self._sizing.min_paged_bytes, self.store.names
        self.buffers = Buffers(self._model, self._device, least, names)

    def begun(self) -> None:
        """All that was there is adopted; what comes now comes late, and may find no room."""
        self._begun = True

    def adopt_parameters(self) -> list[nn.Parameter]:
        """Adopt what can move of the model and was not adopted before; return what was.

        Raises:
            BudgetError: the update of one does not fit; none was adopted.
        """
        new: list[tuple[str, nn.Parameter, int]] = []
        held = held_parameters(self._model)
        alone = sole_owners(self._model.parameters()) if self._slices else set()
        for name, parameter in self._model.named_parameters():
            known = self.store.slots_of(parameter) or parameter in held
            if known or not self.store.pages(parameter) or (self._begun and parameter.is_meta):
                continue
            page, least = self._device.page_bytes, self._sizing.min_paged_bytes
            count = slices_of(parameter, page, least) if id(parameter) in alone else 1
            late = "added to the model" if self._begun else "added or thawed since the block began"
            self._check_room(f"{name}, which was {late}", parameter, count)
            new.append((name, parameter, count))
        for name, parameter, count in new:
            if count > 1:
                self.rows.adopt_parameter(name, parameter)
            else:
                self.store.adopt_parameter(name, parameter)
        self.store.forget_sources()
        return [parameter for _, parameter, _ in new]

    def check_thawed(self, parameter: nn.Parameter) -> None:
        """A parameter that was adopted while it was frozen is about to be trained.

        Raises:
            BudgetError: its update does not fit.
        """
        slots = self.store.slots_of(parameter)
        if slots:
            name = slots[0].name if slots[0].fused is None else slots[0].fused.name
            self._check_room(f"{name}, which was frozen before", parameter, len(slots))

    def _check_room(self, what: str, parameter: nn.Parameter, slices: int) -> None:
        copies = 2 + state_tensors(self._optimizer) if parameter.requires_grad else 1
        region = self._device.padded(parameter.nbytes // slices)
        beside = self._device.padded(moved_bytes(parameter)) - self._device.padded(parameter.nbytes)
        need = region * copies + beside + 2 * self._sizing.chunk_bytes
        if need > self._sizing.pool_bytes:
            raise BudgetError(
                f"{what}, needs {format_bytes(need)} at once "
                f"(parameter, gradient and optimizer state), and the pool has "
                f"{format_bytes(self._sizing.pool_bytes)}: raise the budget, or make it smaller"
            )

    def bring(self, tensors: Iterable[torch.Tensor]) -> None:
        """Tensors are about to be written outside a step: have those that are paged at hand."""
        known = [slot for tensor in tensors for slot in self.store.slots_of(tensor)]
        self._device.touch([slot.region for slot in known])

    @contextlib.contextmanager
    def held(self, tensor: torch.Tensor) -> Iterator[None]:
        """Keep the regions under a small tensor, or under a piece of one, at hand."""
        regions = self.store.regions_under(tensor)
        self._device.acquire(regions, pin=True)
        try:
            yield
        finally:
            self._device.unpin(regions)

    def adopt(self, parameter: nn.Parameter) -> None:
        """The parameter has got optimizer state: move it into regions."""
        slot, fused = self.store.slots.get(parameter), self.store.fused.get(parameter)
        if self._optimizer is None:
            return
        if slot is not None:
            self.store.adopt_state(slot, self._optimizer.state[parameter])
        if fused is not None:
            self.rows.adopt_state(fused, self._optimizer.state[parameter])

    def tensors(self) -> dict[int, list[torch.Tensor]]:
        """Return the tensors of model and optimizer that lie in the device, by their first
        regions."""
        tensors = {id(tensor): tensor for tensor in tensors_of(self._model, self._optimizer)}
        # The user may have taken some out of the model.
        for parameter in (*self.store.slots, *self.store.fused):
            for tensor in (parameter, parameter.grad):
                if tensor is not None:
                    tensors[id(tensor)] = tensor
        found: dict[int, list[torch.Tensor]] = {}
        for tensor in tensors.values():
            if tensor.layout is torch.strided:
                region = self._device.owner(tensor.data_ptr())
                if region >= 0:
                    found.setdefault(region, []).append(tensor)
        return found

    def is_held(self) -> bool:
        """Return whether somebody holds memory of the device beyond what is restored at the end."""
        return self.buffers.are_held() or bool(self.held_by_others(self.tensors()))

    def held_by_others(self, adopted: Mapping[int, Sequence[torch.Tensor]]) -> set[int]:
        """Return the first regions of what somebody holds who is none of what was ``adopted``."""
        storages = {
            region: self._device.storage(region)
            for slot in self.store.slots.values()
            for region in slot.update_regions()
        }
        for fused in self.rows:
            storages.update((row[0], self._device.row_storage(row)) for row in fused.rows())
        return {
            region
            for region, storage in storages.items()
            if users_of(storage) > 1 + len(adopted.get(region, ()))
        }

    def restore(self, directory: Path) -> str:
        """Make all tensors ordinary again; what does not fit in memory lies in ``directory`` then.

        Returns:
            Where what does not fit in memory lies now, or "".

        Raises:
            SpillError: some could not be read; all others were restored.
        """
        adopted = self.tensors()
        # A block that fails to begin has shown nobody anything: only its error holds what it made.
        held = self.held_by_others(adopted) if self._begun else set()
        restoration = Restoration(self._device, self.store, self.rows, held, directory)
        restoration.run(self.buffers, adopted)
        if restoration.lost:
            raise restoration.lost[0]
        return restoration.where
