"""Fused parameters: tensors of three dimensions that are paged slice by slice.

A *row* is a run of regions whose addresses follow one another, one for each slice. The parameter
lies over one row, its gradient over another, and so does each tensor of its optimizer state, so the
model, the optimizer and all aliases see ordinary tensors, while each slice is a `Slot` that moves
by itself. This file owns rows and adoption into them; when slices are updated is the business of
`updates`, how their gradients arrive that of `experts`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from dynoffload.memory.accelerator.storages import RowStorage
from dynoffload.memory.device import Device
from dynoffload.memory.region_allocator import users_of
from dynoffload.runtime.adoption.held import holders, is_torchs
from dynoffload.runtime.adoption.slots import Fused, Slot
from dynoffload.runtime.adoption.store import Store, bytes_of, view_of
from dynoffload.runtime.placing import put, put_in_place
from dynoffload.runtime.unseen import unseen

_IN_USE = 3  # users of a storage: its own object, the parameter, and its `data`
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_zero(tensor: torch.Tensor) -> bool:
    """Return whether all bits of a contiguous tensor are zero: no number but +0."""
    bits = tensor.detach().reshape(-1).view(_BITS[tensor.element_size()])
    return not bits[:1024].any() and not bits.any()


def zero_slices(tensor: torch.Tensor, *, at_once: bool) -> list[bool]:
    """Return of each slice of a contiguous tensor whether it `is_zero`.

    Args:
        tensor: of at least one dimension.
        at_once: ask for all of them in one, as an accelerator's answers are waited for.
    """
    if not at_once:
        return [is_zero(part) for part in tensor]
    bits = tensor.detach().reshape(len(tensor), -1).view(_BITS[tensor.element_size()])
    return [not some for some in bits.any(1).tolist()]


class FusedStore:
    """Adopts fused parameters, and their gradients and state, into rows.

    Args:
        device: where rows live.
        store: knows the names and owners of regions.
    """

    def __init__(self, device: Device, store: Store) -> None:
        self._device, self._store = device, store

    def __iter__(self) -> Iterator[Fused]:
        return iter(self._store.fused.values())

    def _row(self, fused: Fused, kind: str, *, extra: bool = False) -> list[int]:
        row = self._device.allocate_row(fused.count, fused.slice_bytes, extra=extra)
        for number, region in enumerate(row):
            self._store.own(region, f"{fused.name}[{number}]{kind}", fused.slots[number])
        return row

    def view(self, fused: Fused, row: Sequence[int]) -> torch.Tensor:
        """Return a tensor like the parameter over ``row``."""
        return view_of(self._device.row_storage(row), fused.like)

    @torch.no_grad()
    def adopt_parameter(self, name: str, parameter: nn.Parameter) -> None:
        """Move ``parameter`` into a row; one on the meta device gets one of zeros."""
        count = int(parameter.shape[0])
        nbytes = parameter.numel() // count * parameter.element_size()
        row = self._device.allocate_row(count, nbytes)
        like = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        fused = Fused(name, parameter, like, row)
        slots = []
        for number, region in enumerate(row):
            slot = Slot(f"{name}[{number}]", parameter, region, fused=fused, number=number)
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
        """Return a tensor over ``row`` with the values of ``source``; slices of zeros become
        clear."""
        ours = self.view(fused, row)
        zeros = zero_slices(source, at_once=not self._device.serves)
        for number, region in enumerate(row):
            if zeros[number]:
                self._device.clear([region])
            else:
                self._device.acquire([region])
                ours[number].copy_(source[number])
        return ours

    def may_move(self, fused: Fused, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` could lie over a row, and lies in memory of its own."""
        outside = self.is_like(fused, tensor) and self._device.owner(tensor) < 0
        return outside and holders(tensor) <= 1

    # Gradients

    def point(self, fused: Fused, row: Sequence[int]) -> None:
        """The gradient lies, or will lie, in ``row``."""
        for slot, region in zip(fused.slots, row, strict=True):
            slot.gradient = region

    def row_of(self, fused: Fused, tensor: torch.Tensor | None) -> list[int] | None:
        """Return the gradient row that ``tensor`` lies over as a whole, if any."""
        if tensor is None or not self.is_like(fused, tensor):
            return None
        region = self._device.owner(tensor)
        for row in fused.gradients:
            if row[0] == region:
                return row if self._device.begins(tensor, region) else None
        return None

    def is_held(self, row: Sequence[int]) -> bool:
        """Return whether there is a tensor over ``row``."""
        return users_of(self._device.row_storage(row)) > 1

    def free_row(self, fused: Fused) -> list[int]:
        """Return a gradient row of which nobody holds a tensor, a new one if there is none.

        Updates that still have to read slices of it are the caller's business.
        """
        for row in fused.gradients:
            if not self.is_held(row):
                return row
        row = self._row(fused, ".grad", extra=True)
        fused.gradients.append(row)
        return row

    def end_gradient(self, slot: Slot, region: int) -> None:
        """The gradient of a slice was consumed: it is gone, unless somebody holds its row, or
        another gradient lies there by now and an update that waits will read it."""
        assert slot.fused is not None
        if region == slot.owed:
            return
        for row in slot.fused.gradients:
            if region == row[slot.number]:
                if not self.is_held(row):  # by the parameter's gradient, or by the user
                    self._device.clear([region])
                return
        self._device.discard(region)  # it had been put aside

    def release_rows(self, fused: Fused, needed: set[int]) -> None:
        """Release gradient rows beyond the first that nobody holds and no update needs."""
        for row in list(fused.gradients[1:]):
            if self.is_held(row) or needed.intersection(row) or fused.slots[0].gradient == row[0]:
                continue
            fused.gradients.remove(row)
            for region in row:
                self._store.release(region)

    def is_converted(self, fused: Fused) -> bool:
        """Return whether the user has given the parameter a tensor of another dtype or shape."""
        now, like = fused.parameter, fused.like
        return now.dtype != like.dtype or now.shape != like.shape

    # State

    def state_row(self, fused: Fused, key: str) -> list[int]:
        """Return the row for the state ``key``; a new one has no content."""
        row = fused.states.get(key)
        if row is None:
            row = fused.states[key] = self._row(fused, f".{key}")
            for slot, region in zip(fused.slots, row, strict=True):
                slot.states[key] = region
        return row

    @unseen
    @torch.no_grad()
    def adopt_state(self, fused: Fused, state: dict[str, Any]) -> None:
        """Move state tensors of the parameter's form into rows."""
        for key, value in state.items():
            if not isinstance(value, torch.Tensor) or not self.may_move(fused, value):
                continue
            row = fused.states.get(key)
            if row is not None and self.is_held(row):
                continue  # somebody keeps the tensor that was there: the new one stays outside
            put(value, self.filled(fused, self.state_row(fused, key), value))

    # Whether all is where it was put

    def is_like(self, fused: Fused, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` could lie over a row."""
        return (
            tensor.layout == torch.strided
            and tensor.device.type in (self._device.device.type, self._store.home.type)
            and tensor.dtype == fused.like.dtype
            and tensor.shape == fused.like.shape
            and tensor.is_contiguous()
        )

    def _lies_over(self, fused: Fused, tensor: Any, row: Sequence[int]) -> bool:
        return (
            isinstance(tensor, torch.Tensor)
            and self.is_like(fused, tensor)
            and self._device.begins(tensor, row[0])
        )

    def is_in_place(self, fused: Fused, state: dict[str, Any] | None) -> bool:
        """Return whether parameter, gradient and ``state`` lie in their rows."""
        return self.row_of(fused, fused.parameter.grad) is not None and self.holds(fused, state)

    def holds(self, fused: Fused, state: dict[str, Any] | None) -> bool:
        """Return whether parameter and ``state`` lie in their rows."""
        return (
            self._lies_over(fused, fused.parameter, fused.row)
            and (not state or fused.states.keys() <= state.keys())
            and (bool(state) or not fused.states)
            and all(
                self._lies_over(fused, value, fused.states[key])
                if key in fused.states
                else not isinstance(value, torch.Tensor) or value.numel() == 1
                for key, value in (state or {}).items()
            )
        )

    @unseen
    @torch.no_grad()
    def take_back(self, fused: Fused) -> None:
        """Move the parameter's tensor back into its row, if the user has given it another that
        nobody else holds."""
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
        fused.parameter.data = self.filled(fused, fused.row, data)

    # The end

    def copy_out(self, row: Sequence[int], target: torch.UntypedStorage) -> None:
        """Copy a row's bytes into an ordinary storage, slice by slice."""
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
