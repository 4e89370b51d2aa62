"""Tensors on their way: to where operators run, as a block begins, and to memory of their own.

`Homes` moves what lies beside the device's regions, and brings all home that a block leaves on an
accelerator. `Restoration` gives what lies in regions memory of its own, at the end of paging. Both
take memory from `Room`: at home, on the CPU, or in a mapped file where there is none.

[Note: where steps are]  Optimizers of torch keep a parameter's count of steps on the CPU, unless
they are fused or capturable. So do we, as torch's own `load_state_dict` does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dynoffload.errors import SpillError
from dynoffload.memory.device import Device
from dynoffload.memory.limits import available_bytes
from dynoffload.memory.outside import mapped_copy
from dynoffload.memory.region_allocator import users_of
from dynoffload.runtime.adoption.buffers import Buffers
from dynoffload.runtime.adoption.fused import FusedStore
from dynoffload.runtime.adoption.store import Store, offset_of, view_of
from dynoffload.runtime.counting import tensors_of
from dynoffload.runtime.placing import put
from dynoffload.runtime.target import Target
from dynoffload.units import format_bytes

_KEEP_FREE = 0.1  # share of available memory that is left alone
# A storage and its copy: the first is held, as another may come to lie where it did.
_Pair = tuple[torch.UntypedStorage, torch.UntypedStorage]


class Room:
    """Memory for what leaves a block.

    Args:
        target: where operators run.
        home: where it is wanted: the target's device, or the CPU.
        directory: for what has no room on the CPU.

    Attributes:
        outside: bytes that lie in mapped files of ``directory``.
        away: bytes that lie on the CPU, as there was no room at home.
    """

    def __init__(self, target: Target, home: torch.device, directory: Path) -> None:
        self._home, self._directory = home, directory
        host = int(available_bytes() * (1 - _KEEP_FREE))
        self._free = {torch.device("cpu"): host}
        if home.type != "cpu" and target.queues is not None:
            self._free = {home: int(target.queues.free_bytes() * (1 - _KEEP_FREE)), **self._free}
        self.outside = self.away = 0

    @property
    def where(self) -> str:
        """Where what did not fit lies, or ""."""
        told = [f"{format_bytes(self.away)} on the CPU"] if self.away else []
        if self.outside:
            told.append(f"{format_bytes(self.outside)} mapped from {self._directory}")
        return ", ".join(told)

    def empty(self, nbytes: int) -> torch.UntypedStorage | None:
        """Return a new storage of ``nbytes``, at home or on the CPU; None: there is no memory."""
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
            SpillError: there is room for it nowhere.
        """
        copy = self.empty(source.nbytes())
        if copy is None:
            return self.mapped(source)
        copy.copy_(source)
        return copy


class Homes:
    """Where tensors beside the regions are, during a block and after it.

    Args:
        model: the root.
        optimizer: its optimizer, or None.
        target: where operators run, and where tensors were.
        directory: for what has no room at home.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, target: Target, directory: Path
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._target, self._directory = target, directory
        self._moves = target.home != target.device

    @torch.no_grad()
    def bring(self) -> None:
        """Move what is at home to where operators run."""
        if not self._moves:
            return
        home, device = self._target.home, self._target.device
        storages: dict[int, _Pair] = {}
        for tensor in self._staying():
            if tensor.device == home:
                _move(tensor, device, storages, lambda source: _copied(source, device))

    @torch.no_grad()
    def leave(self) -> str:
        """Move everything that is where operators run home.

        Returns:
            Where what has no room there lies now, or "".

        Raises:
            SpillError: a tensor has room nowhere; it stays where it is, as do those after it.
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
        """Yield what operators of the accelerator take: all but steps that stay on the CPU."""
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
    """Give ``tensor`` the copy of its storage; those that share one share the copy."""
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        put(tensor, tensor.detach().to(device))
        return
    source = tensor.untyped_storage()
    if source._cdata not in storages:
        storages[source._cdata] = source, copy(source)
    ours = storages[source._cdata][1]
    put(tensor, view_of(ours, tensor.detach(), offset_of(tensor)))


class Restoration:
    """Gives tensors that lie in the device memory of their own, at the end of paging.

    What does not fit in memory becomes a mapped file, and what fits nowhere stays where it is; the
    tensors are ordinary in any case.

    Args:
        device: holds them.
        store: knows which.
        rows: holds those that are paged by slices.
        held: first regions of what others hold too: it stays where it is.
        stays: they are wanted where the device is.
        room: has memory where they are wanted.

    Attributes:
        lost: why some tensors could not be read; the others are not lost by it.
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
    def run(self, buffers: Buffers, adopted: Mapping[int, Sequence[torch.Tensor]]) -> str:
        """Restore everything: ``buffers``, and what was ``adopted``, by its first region.

        Returns:
            Where what does not fit in memory lies now, or "".
        """
        buffers.restore(lambda region, tensor: self._ordinary(tensor))
        for tensors in adopted.values():
            for tensor in tensors:
                if self._device.owner(tensor) >= 0:
                    put(tensor, self._ordinary(tensor.data))
        for slot in self._store.slots.values():
            for region in slot.update_regions():
                if users_of(self._device.storage(region)) <= 1:
                    self._device.discard(region)
        for fused in self._rows:
            for row in fused.rows():
                if not self._rows.is_held(row):
                    for region in row:
                        self._device.discard(region)
        places = [self._room.where] if self._room.where else []
        if self._inside:
            inside = f"{format_bytes(self._inside)} under the budget still ({self._refused})"
            places.append(inside)
        return ", ".join(places)

    def _ordinary(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor like one that lies in the device, over a copy of what it lies over."""
        region = self._device.owner(tensor)
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
        try:
            return self._room.mapped(ours)
        except SpillError as error:  # no room there either
            return self._left(ours, error)

    def _left(self, ours: torch.UntypedStorage, error: SpillError) -> torch.UntypedStorage:
        self._refused = error.strerror or str(error)
        self._inside += ours.nbytes()
        return ours
