"""Maps parameters, their gradients and their optimizer state to regions.

A tensor is *adopted* when its bytes move into a region. The tensor object stays and its storage
becomes the region's. So the model, the optimizer and later aliases see the same memory until the
session ends. The store only adopts tensors; others decide when regions are fetched and evicted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from dynoffload.memory import heap
from dynoffload.memory.accelerator.guarded import fit, present
from dynoffload.memory.accelerator.storages import size_of
from dynoffload.memory.device import Device
from dynoffload.memory.local import is_spread, is_wrapper, local, local_bytes
from dynoffload.memory.pieces import is_dense
from dynoffload.memory.region_allocator import users_of
from dynoffload.runtime.adoption.held import holders, is_torchs
from dynoffload.runtime.adoption.slots import Fused, Slot
from dynoffload.runtime.consumed import gradient_of
from dynoffload.runtime.placing import put, put_in_place
from dynoffload.runtime.unseen import unseen

logger = logging.getLogger(__name__)

_OWN_USERS = 2  # users of a parameter's storage: its own Python object, and the parameter


def view_of(storage: torch.UntypedStorage, like: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """Return a tensor over ``storage`` with the dtype, shape and strides of ``like``."""
    return fit(over(present(storage), like, offset))


def over(storage: torch.UntypedStorage, like: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """Return what `view_of` returns, without a guard: the bytes are there and stay."""
    empty = torch.empty(0, dtype=like.dtype, device=storage.device)
    return empty.set_(storage, offset, like.size(), like.stride())


def offset_of(tensor: torch.Tensor) -> int:
    """Return the storage offset of ``tensor``, in elements."""
    return int(tensor.storage_offset())


def bytes_of(
    storage: torch.UntypedStorage, offset: int = 0, nbytes: int | None = None
) -> torch.Tensor:
    """Return ``nbytes`` of ``storage`` from byte ``offset``, as uint8; the rest by default."""
    size = storage.nbytes() - offset if nbytes is None else nbytes
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(present(storage), offset, (size,), (1,))


def can_move(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is dense and strided, without a conjugate or negative bit."""
    tensor = local(tensor)
    strided = tensor.layout is torch.strided
    return strided and is_dense(tensor) and not (tensor.is_conj() or tensor.is_neg())


def moved_bytes(parameter: torch.Tensor) -> int:
    """Return the bytes that move with ``parameter``: its whole storage."""
    parameter = local(parameter)
    return parameter.nbytes if parameter.is_meta else size_of(parameter.untyped_storage())


def _holders_of_part(parameter: torch.Tensor, gradient: torch.Tensor) -> int:
    """Return how many tensors reference a gradient's memory if no user code does. FSDP makes a
    group's gradients as views of one tensor, which it holds while its shards' hooks run."""
    return 1 + (is_spread(parameter) and gradient._base is not None)


def _put_gradient(gradient: torch.Tensor, ours: torch.Tensor) -> None:
    """Make ``gradient`` hold ``ours``, and detach it from its base if it is a view."""
    if gradient._base is None:
        put(gradient, ours)
    else:
        torch.utils.swap_tensors(gradient, fit(ours))  # type: ignore[no-untyped-call]


class Store:
    """Adopts tensors into regions of ``device``.

    Args:
        device: allocates the regions.
        min_paged_bytes: smaller tensors stay in place.
        left_bytes: bytes of state moved out of the heap before its free pages are returned.
        sourced: see `Setup`.

    Attributes:
        home: device of tensors before the block; then the device's own.
    """

    def __init__(
        self,
        device: Device,
        min_paged_bytes: int,
        left_bytes: int,
        sourced: Collection[nn.Parameter] = (),
    ) -> None:
        self._device, self.sourced = device, sourced
        self.home = device.device
        self._min = min_paged_bytes
        self._most_left = left_bytes
        self.slots: dict[nn.Parameter, Slot] = {}  # of those that are paged whole
        self.fused: dict[nn.Parameter, Fused] = {}  # of those that are paged by slices
        self.names = device.names
        self._by_region: dict[int, Slot] = {}
        self._left_in_heap = 0
        self._orphans: list[int] = []  # replaced regions that still have external references
        # Another thread's update may discard a gradient while the next one is adopted.
        self._gradients = threading.RLock()

    def pages(self, tensor: torch.Tensor, slot: Slot | None = None) -> bool:
        """Return whether ``tensor`` is paged. A gradient or state of ``slot`` is also paged below
        the minimum size, if it is at least as large as the slot's parameter."""
        least = self._min if slot is None else max(1, min(self._min, local_bytes(slot.parameter)))
        return (
            can_move(tensor)
            and tensor.device.type in (self._device.device.type, self.home.type, "meta")
            and local_bytes(tensor) >= least
        )

    def slot_of(self, region: int) -> Slot | None:
        """Return the slot that owns ``region``."""
        return self._by_region.get(region)

    def name_of(self, region: int) -> str:
        """Return what reports call ``region``."""
        return self.names.get(region, f"region {region}")

    def _region(self, nbytes: int, name: str, slot: Slot | None, *, backed: bool = True) -> int:
        region = self._device.allocate(nbytes, backed=backed)
        if slot is None:
            self.names[region] = name
        else:
            self.own(region, name, slot)
        return region

    def own(self, region: int, name: str, slot: Slot) -> None:
        """Make ``slot`` the owner of ``region``."""
        self.names[region] = name
        self._by_region[region] = slot

    def release(self, region: int) -> None:
        """Release ``region`` and its owner entry."""
        self._by_region.pop(region, None)
        self._device.release(region)

    def slots_of(self, parameter: torch.Tensor) -> Sequence[Slot]:
        """Return the slots of ``parameter``: none, one, or one per slice."""
        slot = self.slots.get(parameter)  # type: ignore[call-overload]
        if slot is not None:
            return (slot,)
        fused = self.fused.get(parameter)  # type: ignore[call-overload]
        return () if fused is None else fused.slots

    @torch.no_grad()
    def adopt_parameter(
        self,
        name: str,
        parameter: nn.Parameter,
        regions: dict[int, int],
        aliases: Sequence[torch.Tensor],
    ) -> None:
        """Move ``parameter`` into a region; a meta parameter gets a region of zeros.

        Args:
            name: of the parameter.
            parameter: is moved with its whole storage.
            regions: of the storages moved so far, by address; it is extended.
            aliases: other tensors that share its memory and move with it.
        """
        part = local(parameter)
        nbytes, meta = local_bytes(part), part.is_meta
        whole = moved_bytes(part)  # includes its other views, which move with it
        source = 0 if meta else part.untyped_storage().data_ptr()
        region = None if meta else regions.get(source)
        if region is None:
            region = self._region(whole, name, None, backed=parameter not in self.sourced)
            if not meta:
                self._device.acquire([region])
                ours = bytes_of(self._device.storage(region))
                ours.copy_(bytes_of(part.untyped_storage()))
                regions[source] = region
        slot = Slot(name, parameter, region)
        if meta:
            self._device.clear([region])
            put_in_place(parameter, view_of(self._device.storage(region), part))
        else:
            put(part, view_of(self._device.storage(region), part, offset_of(part)))
            for alias in aliases:
                put(alias, view_of(self._device.storage(region), alias, offset_of(alias)))
        self.slots[parameter] = slot
        other = self._by_region.get(region)
        if other is not None:
            slot.shared = other.shared = True
        self._by_region[region] = slot
        if parameter.requires_grad:
            slot.gradient = self._region(nbytes, f"{name}.grad", slot)

    @unseen
    @torch.no_grad()
    def take_back(self, slot: Slot) -> bool:
        """Return whether ``slot``'s region holds its parameter, after moving it there if possible.

        If user code replaced the parameter's data, the new data moves into the region, or into a
        larger new one. Data with other references stays in place.
        """
        if is_wrapper(slot.parameter):  # what replaces its memory stays in place
            return self._device.owner(slot.parameter) == slot.region
        if self._device.owner(slot.parameter) == slot.region:
            return True
        data = slot.parameter.data
        if not self.pages(data, slot):
            return False
        storage = data.untyped_storage()
        ours = self._device.storage(slot.region)
        # Its users are the storage's own object, the parameter and `data`.
        if users_of(storage) > _OWN_USERS + 1 or users_of(ours) > 1 or not is_torchs(data):
            return False
        if storage.nbytes() > self._device.nbytes(slot.region):
            region = self._region(storage.nbytes(), slot.name, slot)
            self._device.discard(slot.region)
            self.release(slot.region)
            slot.region = region
            ours = self._device.storage(region)
        self._device.acquire([slot.region])
        bytes_of(ours, 0, storage.nbytes()).copy_(bytes_of(storage))
        put(slot.parameter, view_of(ours, data, offset_of(data)))
        return True

    def adopt_data(self, slot: Slot) -> None:
        """Move data assigned in forward (``p.data = new``) into the region, unless it has other
        references. Data larger than the region is handled when the step ends."""
        parameter = slot.parameter
        if slot.shared or slot.is_slice or parameter.is_meta:
            return
        if self._device.owner(parameter) == slot.region or is_wrapper(parameter):
            return
        if size_of(parameter.untyped_storage()) <= self._device.nbytes(slot.region):
            self.take_back(slot)

    @unseen
    @torch.no_grad()
    def adopt_gradient(self, slot: Slot) -> None:
        """Move the gradient that autograd or user code made into its region.

        References to the gradient tensor stay valid. A gradient whose memory has other references,
        such as a view of a user buffer, stays in place.
        """
        gradient = local(gradient_of(slot.parameter))
        if gradient is None or gradient.layout != torch.strided or gradient.requires_grad:
            return
        if self._device.owner(gradient.untyped_storage()) >= 0:
            return  # accumulated in place
        if not self.pages(gradient, slot) or not is_torchs(gradient):
            return
        if holders(gradient) > _holders_of_part(slot.parameter, gradient):
            return
        with self._gradients:
            nbytes = gradient.numel() * gradient.element_size()
            region = self._region_for(slot.gradient, nbytes, f"{slot.name}.grad", slot)
            slot.gradient = region
        self._device.acquire([region], pin=True)
        try:
            ours = over(self._device.storage(region), gradient)
            ours.copy_(gradient)
            _put_gradient(gradient, ours)
        finally:
            self._device.unpin([region])

    @torch.no_grad()
    def part_gradient(self, parameter: torch.Tensor) -> None:
        """Copy an unpaged shard's gradient into its own memory. It is a view of its group's
        gradient, all of which would otherwise stay alive."""
        gradient = local(parameter.grad)
        if gradient is None or size_of(gradient.untyped_storage()) == local_bytes(gradient):
            return
        if holders(gradient) <= _holders_of_part(parameter, gradient):
            _put_gradient(gradient, gradient.clone())

    def _region_for(self, known: int | None, nbytes: int, name: str, slot: Slot) -> int:
        """Return ``known``, or a new region if ``known`` is too small or its old content still has
        external references."""
        if known is not None:
            if users_of(self._device.storage(known)) <= 1 and self._device.nbytes(known) >= nbytes:
                return known
            self._orphans.append(known)
        return self._region(nbytes, name, slot)

    def end_gradient(self, slot: Slot) -> None:
        """Discard the consumed gradient unless it has external references."""
        with self._gradients:
            if slot.gradient is not None and users_of(self._device.storage(slot.gradient)) <= 1:
                self._device.discard(slot.gradient)

    def release_orphans(self) -> None:
        """Release orphaned regions that no longer have external references."""
        for region in list(self._orphans):
            if users_of(self._device.storage(region)) <= 1:
                self._orphans.remove(region)
                self.release(region)

    @unseen
    @torch.no_grad()
    def adopt_state(self, slot: Slot, state: dict[str, Any]) -> None:
        """Move one parameter's optimizer state tensors into regions."""
        for key, value in state.items():
            value = local(value)
            if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
                continue
            if value.is_meta or self._device.owner(value) >= 0:
                continue
            if not self.pages(value, slot) or holders(value) > 1:
                continue
            nbytes = value.numel() * value.element_size()
            known = slot.states.get(key)
            region = self._region_for(known, nbytes, f"{slot.name}.{key}", slot)
            slot.states[key] = region
            self._left_in_heap += nbytes * (region != known)
            self._device.acquire([region])
            ours = view_of(self._device.storage(region), value)
            ours.copy_(value)
            put(value, ours)
        if self._left_in_heap > self._most_left:
            self._left_in_heap = 0
            heap.give_back()
