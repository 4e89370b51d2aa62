"""Moves tensors to the compute device when a block begins, and into ordinary memory at its end.

`Homes` moves tensors outside regions, and moves home all that a block leaves on an accelerator.
`Restoration` copies tensors out of regions at the end of paging. Both allocate from `Room`: at
home, on the CPU, or in a mapped file when memory is short.

[Note: where steps are]  Torch's optimizers keep a parameter's step count on the CPU, unless they
are fused or capturable. We do the same, as torch's own `load_state_dict` does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dynoffload.errors import SpillError
from dynoffload.memory import heap
from dynoffload.memory.device import Device
from dynoffload.memory.limits import available_bytes
from dynoffload.memory.outside import mapped_copy
from dynoffload.memory.region_allocator import users_of
from dynoffload.planning.schedule import Schedule
from dynoffload.runtime.adoption.fused import FusedStore
from dynoffload.runtime.adoption.store import Store, offset_of, view_of
from dynoffload.runtime.counting import tensors_of
from dynoffload.runtime.opening import Setup
from dynoffload.runtime.placing import put
from dynoffload.runtime.target import Target
from dynoffload.units import MiB, format_bytes

_AT_ONCE = 32 * MiB  # of the pool, which it gives back
_KEEP_FREE = 0.1  # share of available memory that stays unused
_LEAST_FREE = 64 * MiB  # and for the file cache through which the rest leaves
# A storage and its copy. The first is kept alive so that its address is not reused.
_Pair = tuple[torch.UntypedStorage, torch.UntypedStorage]


class Room:
    """Allocates memory for tensors that leave a block.

    Args:
        target: where operators run.
        home: preferred device: the target's device, or the CPU.
        directory: for mapped files, used when the CPU has no room.

    Attributes:
        outside: bytes in mapped files of ``directory``.
        away: bytes on the CPU because there was no room at home.
    """

    def __init__(self, target: Target, home: torch.device, directory: Path) -> None:
        self._home, self._directory = home, directory
        heap.give_back()
        have = available_bytes()
        host = max(0, have - max(int(have * _KEEP_FREE), _LEAST_FREE))
        self._free = {torch.device("cpu"): host}
        if home.type != "cpu" and target.queues is not None:
            self._free = {home: int(target.queues.free_bytes() * (1 - _KEEP_FREE)), **self._free}
        self.outside = self.away = 0

    @property
    def where(self) -> str:
        """Where tensors that did not fit at home are stored, or ""."""
        places = [f"{format_bytes(self.away)} on the CPU"] if self.away else []
        if self.outside:
            places.append(f"{format_bytes(self.outside)} mapped from {self._directory}")
        return ", ".join(places)

    def empty(self, nbytes: int) -> torch.UntypedStorage | None:
        """Return a new storage of ``nbytes``, at home or on the CPU; None if neither has room."""
        for device, free in self._free.items():
            if nbytes <= free:
                self._free[device] -= nbytes
                self.away += nbytes if device.type != self._home.type else 0
                return torch.UntypedStorage(nbytes, device=device)  # type: ignore[no-untyped-call]
        return None

    def mapped(self, source: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return a copy of ``source`` in a mapped file.

        Raises:
            SpillError: it cannot be made.
        """
        copy = mapped_copy(source, self._directory)
        self.outside += source.nbytes()
        return copy

    def copy_of(self, source: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return a copy of ``source``.

        Raises:
            SpillError: there is no room for it anywhere.
        """
        copy = self.empty(source.nbytes())
        if copy is None:
            return self.mapped(source)
        copy.copy_(source)
        return copy


class Homes:
    """Moves tensors of a block's model and optimizer to the compute device, and back home."""

    def __init__(self, setup: Setup) -> None:
        self._model, self._optimizer = setup.model, setup.optimizer
        self._target, self._directory = setup.target, setup.spill_dir
        self._moves = setup.target.home != setup.target.device

    @torch.no_grad()
    def bring(self) -> None:
        """Move tensors from home to the compute device."""
        if not self._moves:
            return
        home, device = self._target.home, self._target.device
        storages: dict[int, _Pair] = {}
        for tensor in self._staying():
            if tensor.device == home:
                _move(tensor, device, storages, lambda source: _copied(source, device))

    @torch.no_grad()
    def leave(self) -> str:
        """Move all tensors from the compute device home.

        Returns:
            Where tensors that do not fit at home are stored now, or "".

        Raises:
            SpillError: no room for a tensor anywhere; it and those after it stay in place.
        """
        if not self._moves:
            return ""
        room = Room(self._target, self._target.home, self._directory)
        storages: dict[int, _Pair] = {}
        for tensor in tensors_of(self._model, self._optimizer):
            if tensor.device == self._target.device:
                _move(tensor, self._target.home, storages, room.copy_of)
        return room.where

    def _staying(self) -> Iterator[torch.Tensor]:
        """Yield all tensors but step counts that stay home; see [Note: where steps are]."""
        stays = set()
        for group in [] if self._optimizer is None else self._optimizer.param_groups:
            if not (group.get("fused") or group.get("capturable")):
                stays |= {id(_step(self._optimizer, one)) for one in group["params"]}
        for tensor in tensors_of(self._model, self._optimizer):
            if id(tensor) not in stays:
                yield tensor


def _step(optimizer: Any, parameter: torch.Tensor) -> object:
    return (dict.get(optimizer.state, parameter) or {}).get("step")


def _copied(source: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
    copy = torch.UntypedStorage(source.nbytes(), device=device)  # type: ignore[no-untyped-call]
    copy.copy_(source)
    return copy


def _move(
    tensor: torch.Tensor,
    device: torch.device,
    storages: dict[int, _Pair],
    copy: Callable[[torch.UntypedStorage], torch.UntypedStorage],
) -> None:
    """Move ``tensor`` to a copy of its storage; tensors that share a storage share the copy."""
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        put(tensor, tensor.detach().to(device))
        return
    source = tensor.untyped_storage()
    if source._cdata not in storages:
        storages[source._cdata] = source, copy(source)
    ours = storages[source._cdata][1]
    put(tensor, view_of(ours, tensor.detach(), offset_of(tensor)))


class Restoration:
    """Moves tensors out of regions into ordinary memory, at the end of paging.

    Tensors that do not fit in memory move to mapped files; if that fails too, they stay in place.
    Either way they remain usable as ordinary tensors.

    Args:
        device: holds their regions.
        store: maps parameters to their slots.
        rows: holds the parameters paged by slices.
        held: first regions of tensors with external references, which stay in place.
        stays: whether tensors are to remain on the compute device.
        room: allocates the ordinary memory.

    Attributes:
        lost: errors of tensors that could not be read; the others are unaffected.
    """

    def __init__(
        self,
        device: Device,
        store: Store,
        rows: FusedStore,
        held: Collection[int],
        room: Room,
        *,
        stays: bool,
    ) -> None:
        self._device, self._store, self._rows = device, store, rows
        self._held, self._room, self._stays = held, room, stays
        self._storages: dict[int, torch.UntypedStorage] = {}  # by the first region
        self._inside = 0
        self._refused = ""
        self.lost: list[SpillError] = []

    @torch.no_grad()
    def run(self, adopted: Mapping[int, Sequence[torch.Tensor]]) -> str:
        """Restore the ``adopted`` tensors, which are keyed by first region.

        Returns:
            Where tensors that do not fit in memory are stored now, or "".
        """
        self._device.follow([], Schedule(()))  # else a plan and the reserve would go on evicting
        self._device.reserve(0)
        for slot in self._store.slots.values():
            for region in slot.update_regions():
                self._discard_unused(region)
        for fused in self._rows:
            for row in fused.rows():
                self._discard_unused(row[0])
        present = set(self._device.resident())

        def missing(first: int) -> int:
            regions = self._row_of(first) or [first]
            return sum(self._device.size(one) for one in regions if one not in present)

        together = [self._row_of(first) or [first] for first in adopted]
        # To fetch what is missing: a row is whole before its slices go.
        room = max((sum(map(self._device.size, regions)) for regions in together), default=0)
        # What is present comes first: it leaves room for the rest, also when the disk is full.
        for first in sorted(adopted, key=missing):
            for tensor in adopted[first]:
                if self._device.owner(tensor) >= 0:
                    put(tensor, self._ordinary(tensor.data))
            self._discard_unused(first)
            left = self._device.resident_bytes() + room
            if left + _AT_ONCE <= self._device.capacity:  # else it is in memory twice
                self._device.limit(left)
        places = [self._room.where] if self._room.where else []
        if self._inside:
            inside = f"{format_bytes(self._inside)} under the budget still ({self._refused})"
            places.append(inside)
        return ", ".join(places)

    def _discard_unused(self, region: int) -> None:
        """Discard a region, and the others of its row, unless a tensor is stored there."""
        row = self._row_of(region)
        storage = self._device.storage(region) if row is None else self._device.row_storage(row)
        if users_of(storage) <= 1:
            for one in row or [region]:
                self._device.discard(one)

    def _row_of(self, region: int) -> list[int] | None:
        slot = self._store.slot_of(region)
        return None if slot is None or slot.fused is None else slot.fused.row_with(region)

    def _ordinary(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor like the paged ``tensor``, over a copy of its region or row."""
        region = self._device.owner(tensor)
        row = self._row_of(region)
        first = region if row is None else row[0]
        storage = self._storages.get(first)
        if storage is None:
            storage = self._storages[first] = self._copy(first, row)
        return view_of(storage, tensor, offset_of(tensor))

    def _copy(self, region: int, row: list[int] | None) -> torch.UntypedStorage:
        device = self._device
        ours = device.storage(region) if row is None else device.row_storage(row)
        try:
            if row is None and self._stays and device.keep(region):
                return ours
            if region in self._held:  # external references must keep sharing its memory
                if row is None:
                    device.acquire([region])
                return ours
            if row is None and (below := device.below(region)) is not None:
                return below
            if row is None:
                device.acquire([region])
            storage = self._room.empty(ours.nbytes())
            if storage is not None and row is None:
                storage.copy_(ours)
            elif storage is not None and row is not None:
                self._rows.copy_out(row, storage)
        except SpillError as error:
            self.lost.append(error)
            return self._left(ours, error)
        if storage is not None:
            return storage
        self._device.limit(0)  # what is mapped takes page cache and page tables
        try:
            return self._room.mapped(ours)
        except SpillError as error:  # no room there either
            return self._left(ours, error)

    def _left(self, ours: torch.UntypedStorage, error: SpillError) -> torch.UntypedStorage:
        self._refused = error.strerror or str(error)
        self._inside += ours.nbytes()
        return ours
