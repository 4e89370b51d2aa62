"""Parameters that are paged slice by slice: fused experts, and those whose update is too large.

A *row* is a sequence of regions with consecutive addresses, one per slice. The parameter, its
gradient and each tensor of its optimizer state are stored in one row each. So the model, the
optimizer and all aliases see ordinary tensors, while each slice is a `Slot` that moves separately.
This file owns rows and adoption into them. `updates` decides when slices are updated, `experts` how
their gradients are collected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from dynoffload.memory.accelerator.storages import RowStorage
from dynoffload.memory.device import Device
from dynoffload.memory.region_allocator import users_of
from dynoffload.profiler.experts import unit_path
from dynoffload.runtime.adoption.held import holders, is_torchs
from dynoffload.runtime.adoption.slicing import flat_bytes
from dynoffload.runtime.adoption.slots import Fused, Slot
from dynoffload.runtime.adoption.store import Store, bytes_of, view_of
from dynoffload.runtime.placing import put, put_in_place
from dynoffload.runtime.unseen import unseen

_IN_USE = 3  # users of a storage: its own object, the parameter, and its `data`
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_zero(tensor: torch.Tensor) -> bool:
    """Return whether all bits of a contiguous tensor are zero, so every element is +0."""
    bits = tensor.detach().reshape(-1).view(_BITS[tensor.element_size()])
    return not bits[:1024].any() and not bits.any()


def zero_slices(fused: Fused, tensor: torch.Tensor, *, at_once: bool) -> list[bool]:
    """Return for each slice of a tensor whether it `is_zero`.

    Args:
        fused: the parameter.
        tensor: contiguous, and like it.
        at_once: check all slices in one operator, for accelerators, where each result needs a sync.
    """
    if not at_once:
        return [is_zero(part) for part in fused.parts(tensor)]
    bits = tensor.detach().reshape(len(tensor), -1).view(_BITS[tensor.element_size()])
    return [not some for some in bits.any(1).tolist()]


class FusedStore:
    """Adopts fused parameters, and their gradients and state, into rows.

    Args:
        device: allocates the rows.
        store: maps regions to names and owners.
    """

    def __init__(self, device: Device, store: Store) -> None:
        self._device, self._store = device, store

    def __iter__(self) -> Iterator[Fused]:
        return iter(self._store.fused.values())

    def _row(self, fused: Fused, kind: str, *, extra: bool = False) -> list[int]:
        row = self._device.allocate_row(fused.like.nbytes, fused.slice_bytes, extra=extra)
        for number, region in enumerate(row):
            self._store.own(region, unit_path(fused.name, number) + kind, fused.slots[number])
        return row

    def view(self, fused: Fused, row: Sequence[int]) -> torch.Tensor:
        """Return a tensor like the parameter over ``row``."""
        return view_of(self._device.row_storage(row), fused.like)

    @torch.no_grad()
    def adopt_parameter(self, name: str, parameter: nn.Parameter, *, flat: bool) -> None:
        """Move ``parameter`` into a row; a meta parameter gets a row of zeros.

        Args:
            name: of the parameter.
            parameter: contiguous, and alone in its storage.
            flat: whether its slices are ranges of elements, not those of its first dimension.
        """
        backed = parameter not in self._store.sourced
        like = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        nbytes = flat_bytes(like.nbytes, self._device.page_bytes)
        each = like.view(-1)[: nbytes // like.element_size()] if flat else like[0]
        row = self._device.allocate_row(like.nbytes, each.nbytes, backed=backed)
        fused = Fused(name, parameter, like, each, row)
        slots = []
        for number, region in enumerate(row):
            own = unit_path(name, number)
            slot = Slot(own, parameter, region, fused=fused, number=number)
            self._store.own(region, slot.name, slot)
            slots.append(slot)
        fused.slots = tuple(slots)
        if parameter.is_meta:
            self._device.clear(row)
            put_in_place(parameter, self.view(fused, row))
        else:
            put(parameter, self.filled(fused, row, parameter.data))
        self._store.fused[parameter] = fused
        if parameter.requires_grad:
            fused.gradients.append(self._row(fused, ".grad"))
            self.point(fused, fused.gradients[0])

    def filled(self, fused: Fused, row: Sequence[int], source: torch.Tensor) -> torch.Tensor:
        """Return a tensor over ``row`` with the values of ``source``; zero slices become clear."""
        ours = self.view(fused, row)
        zeros = zero_slices(fused, source, at_once=not self._device.serves)
        parts = zip(row, zeros, fused.parts(ours), fused.parts(source), strict=True)
        for region, zero, own, other in parts:
            if zero:
                self._device.clear([region])
            else:
                self._device.acquire([region])
                own.copy_(other)
        return ours

    def may_move(self, fused: Fused, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` fits a row and solely owns memory outside regions."""
        outside = self.is_like(fused, tensor) and self._device.owner(tensor) < 0
        return outside and holders(tensor) <= 1

    # Gradients

    def point(self, fused: Fused, row: Sequence[int]) -> None:
        """Set ``row`` as the row that stores, or will store, the gradient."""
        for slot, region in zip(fused.slots, row, strict=True):
            slot.gradient = region

    def row_of(self, fused: Fused, tensor: torch.Tensor | None) -> list[int] | None:
        """Return the gradient row that stores the whole ``tensor``, or None."""
        if tensor is None or not self.is_like(fused, tensor):
            return None
        region = self._device.owner(tensor)
        for row in fused.gradients:
            if row[0] == region:
                return row if self._device.begins(tensor, region) else None
        return None

    def is_held(self, row: Sequence[int]) -> bool:
        """Return whether any tensor references ``row``."""
        return users_of(self._device.row_storage(row)) > 1

    def free_row(self, fused: Fused) -> list[int]:
        """Return a gradient row that no tensor references; allocate one if there is none.

        The caller handles pending updates that still read slices of it.
        """
        for row in fused.gradients:
            if not self.is_held(row):
                return row
        row = self._row(fused, ".grad", extra=True)
        fused.gradients.append(row)
        return row

    def end_gradient(self, slot: Slot, region: int) -> None:
        """Discard a slice's consumed gradient, unless its row is referenced or ``region`` stores a
        newer gradient that a pending update will read."""
        assert slot.fused is not None
        if region == slot.owed:
            return
        for row in slot.fused.gradients:
            if region == row[slot.number]:
                if not self.is_held(row):  # by the parameter's gradient or user references
                    self._device.clear([region])
                return
        self._device.discard(region)  # a twin: the gradient was moved aside

    def release_rows(self, fused: Fused, needed: set[int]) -> None:
        """Release gradient rows after the first that are unreferenced and not in ``needed``."""
        for row in list(fused.gradients[1:]):
            if self.is_held(row) or needed.intersection(row) or fused.slots[0].gradient == row[0]:
                continue
            fused.gradients.remove(row)
            for region in row:
                self._store.release(region)

    def is_converted(self, fused: Fused) -> bool:
        """Return whether the parameter's dtype or shape has changed since adoption."""
        now, like = fused.parameter, fused.like
        return now.dtype != like.dtype or now.shape != like.shape

    # State

    def state_row(self, fused: Fused, key: str) -> list[int]:
        """Return the row for the state ``key``; allocate it, without content, if it is new."""
        row = fused.states.get(key)
        if row is None:
            row = fused.states[key] = self._row(fused, f".{key}")
            for slot, region in zip(fused.slots, row, strict=True):
                slot.states[key] = region
        return row

    @unseen
    @torch.no_grad()
    def adopt_state(self, fused: Fused, state: dict[str, Any]) -> None:
        """Move state tensors with the parameter's shape and dtype into rows."""
        for key, value in state.items():
            if not isinstance(value, torch.Tensor) or not self.may_move(fused, value):
                continue
            row = fused.states.get(key)
            if row is not None and self.is_held(row):
                continue  # the old tensor is still referenced: the new one stays outside
            put(value, self.filled(fused, self.state_row(fused, key), value))

    # Placement checks

    def is_like(self, fused: Fused, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` matches the parameter's layout and could be stored in a row."""
        return (
            tensor.layout == torch.strided
            and tensor.device.type in (self._device.device.type, self._store.home.type)
            and tensor.dtype == fused.like.dtype
            and tensor.shape == fused.like.shape
            and tensor.is_contiguous()
        )

    def _is_stored_in(self, fused: Fused, tensor: Any, row: Sequence[int]) -> bool:
        return (
            isinstance(tensor, torch.Tensor)
            and self.is_like(fused, tensor)
            and self._device.begins(tensor, row[0])
        )

    def is_in_place(self, fused: Fused, state: dict[str, Any] | None) -> bool:
        """Return whether parameter, gradient and ``state`` are stored in their rows."""
        return self.row_of(fused, fused.parameter.grad) is not None and self.holds(fused, state)

    def holds(self, fused: Fused, state: dict[str, Any] | None) -> bool:
        """Return whether parameter and ``state`` are stored in their rows."""
        return (
            self._is_stored_in(fused, fused.parameter, fused.row)
            and (not state or fused.states.keys() <= state.keys())
            and (bool(state) or not fused.states)
            and all(
                self._is_stored_in(fused, value, fused.states[key])
                if key in fused.states
                else not isinstance(value, torch.Tensor) or value.numel() == 1
                for key, value in (state or {}).items()
            )
        )

    @unseen
    @torch.no_grad()
    def take_back(self, fused: Fused) -> None:
        """Move the parameter's data back into its row, if user code replaced it with a tensor that
        has no other reference."""
        data = fused.parameter.data
        storage = data.untyped_storage()
        if (
            self._device.owner(data) >= 0
            or not self.is_like(fused, data)
            or users_of(storage) > _IN_USE
            or not is_torchs(data)
            or self.is_held(fused.row)
        ):
            return
        put(fused.parameter, self.filled(fused, fused.row, data))

    # Copying out

    def copy_out(self, row: Sequence[int], target: torch.UntypedStorage) -> None:
        """Copy a row's bytes slice by slice into the ordinary storage ``target``."""
        ours = self._device.row_storage(row)
        if isinstance(ours, RowStorage):
            ours.read(target)
            return
        start = 0
        for region, clear in zip(row, self._device.is_clear(row), strict=True):
            nbytes = self._device.nbytes(region)
            theirs = bytes_of(target, start, nbytes)
            start += nbytes
            if clear:
                theirs.zero_()
            else:
                self._device.acquire([region])
                theirs.copy_(bytes_of(self._device.storage(region)))
