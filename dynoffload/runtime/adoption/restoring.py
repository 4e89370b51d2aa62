"""The end of paging: every tensor that lies in the device gets memory of its own.

What does not fit in memory becomes a mapped file, and what fits nowhere stays where it is; the
tensors are ordinary in any case.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from dynoffload.errors import SpillError
from dynoffload.memory.device import Device
from dynoffload.memory.region_allocator import users_of
from dynoffload.runtime.adoption.buffers import Buffers
from dynoffload.runtime.adoption.fused import FusedStore
from dynoffload.runtime.adoption.homes import Room
from dynoffload.runtime.adoption.store import Store, offset_of, view_of
from dynoffload.runtime.placing import put
from dynoffload.units import format_bytes


class Restoration:
    """Gives tensors memory of their own.

    Args:
        device: holds them.
        store: knows which.
        rows: holds those that are paged by slices.
        held: first regions of what others hold too: it stays where it is.
        place: where they are wanted.
        room: has memory there.

    Attributes:
        where: where what does not fit in memory lies now, or "".
        lost: why some tensors could not be read; the others are not lost by it.
    """

    def __init__(
        self,
        device: Device,
        store: Store,
        rows: FusedStore,
        held: Collection[int],
        place: torch.device,
        room: Room,
    ) -> None:
        self._device, self._store, self._rows = device, store, rows
        self._held, self._room = held, room
        self._stays = place == device.device
        self._storages: dict[int, torch.UntypedStorage] = {}  # by the first region
        self._inside = 0
        self._refused = ""
        self.where = ""
        self.lost: list[SpillError] = []

    @torch.no_grad()
    def run(self, buffers: Buffers, adopted: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Restore everything: ``buffers``, and what was ``adopted``, by its first region."""
        buffers.restore(lambda region, tensor: self._ordinary(tensor))
        for tensors in adopted.values():
            for tensor in tensors:
                if self._region_of(tensor) >= 0:
                    put(tensor, self._ordinary(tensor.data))
        for slot in self._store.slots.values():
            for region in slot.update_regions():
                if users_of(self._device.storage(region)) <= 1:
                    self._device.discard(region)
        for fused in self._rows.with_left():
            for row in fused.rows():
                if not self._rows.is_held(row):
                    for region in row:
                        self._device.discard(region)
        where = self._room.where
        if self._inside:
            where += f"{', ' if where else ''}{format_bytes(self._inside)} under the budget still"
            where += f" ({self._refused})"
        self.where = where

    def _region_of(self, tensor: torch.Tensor) -> int:
        return self._device.owner(tensor)

    def _ordinary(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor like one that lies in the device, over a copy of what it lies over."""
        region = self._region_of(tensor)
        slot = self._store.slot_of(region)
        row = None if slot is None or slot.fused is None else slot.fused.row_with(region)
        first = region if row is None else row[0]
        storage = self._storages.get(first)
        if storage is None:
            storage = self._storages[first] = self._copy(first, row)
        return view_of(storage, tensor, offset_of(tensor))

    def _copy(self, region: int, row: list[int] | None) -> torch.UntypedStorage:
        device = self._device
        ours = device.storage(region) if row is None else device.row_storage(row)
        try:
            return self._copied(ours, region, row)
        except SpillError as error:
            self.lost.append(error)
            self._refused = error.strerror or str(error)
            self._inside += ours.nbytes()
            return ours

    def _copied(
        self, ours: torch.UntypedStorage, region: int, row: list[int] | None
    ) -> torch.UntypedStorage:
        device = self._device
        if row is None and self._stays and device.keep(region):
            return ours
        if region in self._held:  # whoever holds it must go on seeing the tensor
            if row is None:
                device.acquire([region])
            return ours
        if row is None and (below := device.below(region)) is not None:
            return below
        if row is None:
            device.acquire([region])
        nbytes = ours.nbytes()
        storage = self._room.empty(nbytes)
        if storage is not None:
            if row is None:
                storage.copy_(ours)
            else:
                self._rows.copy_out(row, storage)
            return storage
        try:
            return self._room.mapped(ours)
        except SpillError as error:  # no room there either: it stays where it is
            self._refused = error.strerror or str(error)
            self._inside += nbytes
            return ours
