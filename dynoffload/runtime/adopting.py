"""Adoption: moves tensors of one model and its optimizer into a device, at the start and as the
model changes, and restores them at the end."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from dynoffload.distributed.sharded import aliases_of
from dynoffload.errors import BudgetError, ConfigError
from dynoffload.host_optimizer import HostOptimizer
from dynoffload.memory.device import Device
from dynoffload.memory.local import local, local_bytes
from dynoffload.memory.pieces import pieces
from dynoffload.memory.region_allocator import users_of
from dynoffload.runtime.adoption.buffers import Buffers
from dynoffload.runtime.adoption.fused import FusedStore
from dynoffload.runtime.adoption.held import held_parameters
from dynoffload.runtime.adoption.relocation import Restoration, Room
from dynoffload.runtime.adoption.slicing import (
    flat_bytes,
    may_slice,
    slices_of,
    sole_owners,
)
from dynoffload.runtime.adoption.slots import Fused, Slot
from dynoffload.runtime.adoption.store import Store, can_move
from dynoffload.runtime.consumed import gradient_of
from dynoffload.runtime.counting import (
    SCALARS,
    States,
    check_stored,
    is_trained,
    parts_of,
    state_tensors,
    tensors_of,
)
from dynoffload.runtime.interrupts import let_come
from dynoffload.runtime.opening import Setup
from dynoffload.runtime.sizing import may_queue
from dynoffload.runtime.updates.kept_state import state_of
from dynoffload.runtime.updates.update import can_split
from dynoffload.units import MiB, format_bytes

# Bytes of new optimizer state that may stay in the heap; the first step makes all of it at once.
# At most 1/4 of the slack: freed temporaries already take part of a small one.
_LEFT_IN_HEAP, _LEFT_OF_SLACK = 32 * MiB, 4


class Adoption:
    """Moves the tensors of a model and its optimizer into a device and out again.

    Args:
        setup: what the block was asked for; its sizing decides which tensors are paged.
        device: where they go.
        enough: returns a budget with room for a region of the given bytes.

    Attributes:
        store: tensors that are paged whole.
        rows: parameters that are paged by slices.
        buffers: buffers adopted later, and the state of an optimizer that runs whole.
        allowance: bytes of saved activations that may stay in memory.
        changed: parameters were converted since the last `adopt_parameters`.
    """

    def __init__(self, setup: Setup, device: Device, enough: Callable[[int], int]) -> None:
        config, sizing = setup.config, setup.sizing
        self._model, self._optimizer, self._sizing = setup.model, setup.optimizer, sizing
        self._device, self._enough = device, enough
        self._slices = config.slices and may_slice(setup.optimizer)
        self._queues = may_queue(config)
        self._accelerator = setup.target.queues is not None
        self._begun = False
        self._seen: tuple[dict[str, int], int] = {}, 0
        self.allowance, self.changed = sizing.kept_bytes, False
        left = min(_LEFT_IN_HEAP, config.heap_slack_bytes // _LEFT_OF_SLACK)
        self.store = Store(device, sizing.min_paged_bytes, left, setup.sourced)
        self.store.home = setup.target.home
        self.rows = FusedStore(device, self.store)
        self.buffers: Buffers

    def begin_buffers(self) -> None:
        """Start paging buffers."""
        # DDP sends buffers to other ranks, and not every system call can read absent memory.
        least = sys.maxsize if self._sizing.bucket_bytes else self._sizing.min_paged_bytes
        names = self.store.names
        self.buffers = Buffers(self._model, self._device, least, names, self._enough)

    def begun(self) -> None:
        """End the initial adoption; what is adopted from now on may find no room."""
        self.store.home = self._device.device
        self._begun = True
        self._seen = self._sizes()

    def adopt_parameters(self, kept: int = 0) -> None:
        """Adopt the parameters that can move and are not adopted yet.

        Args:
            kept: bytes of saved activations that stay in memory now.

        Raises:
            BudgetError: an update, or what stays in memory, does not fit; nothing was adopted.
            ConfigError: see `check_stored`; nothing was adopted.
        """
        check_stored(self._model, accelerator=self._accelerator)
        new: list[tuple[str, nn.Parameter, int]] = []
        held = held_parameters(self._model)
        alone = sole_owners(self._model.parameters()) if self._slices else set()
        states = States(self._optimizer)
        for name, parameter in self._model.named_parameters():
            held_here = parameter in held or name in self._sizing.asked
            known = self.store.slots_of(parameter) or held_here
            stays = (
                is_trained(parameter)
                and states.steps(parameter)
                and local_bytes(parameter) < self._sizing.min_trained_bytes
            )
            empty = self._begun and parameter.is_meta
            if known or stays or empty or not self.store.pages(parameter):
                continue
            count = self._slices_of(name, parameter) if id(parameter) in alone else 1
            late = "added to the model" if self._begun else "added or thawed since the block began"
            self._check_room(f"{name}, which was {late},", parameter, count, states)
            new.append((name, parameter, count))
        if self._begun:
            new += [(name, one, 1) for name, one in self._make_room(new, kept)]
        aliases, regions = aliases_of(self._model), dict[int, int]()
        for name, parameter, count in new:
            if not self._begun:
                let_come()
            if count > 1:
                self.rows.adopt_parameter(name, parameter, flat=name in self._sizing.flat)
            else:
                others = aliases.get(parameter, ())
                self.store.adopt_parameter(name, parameter, regions, others)
        self.changed = False

    def _slices_of(self, name: str, parameter: nn.Parameter) -> int:
        page, nbytes = self._device.page_bytes, local_bytes(parameter)
        if name in self._sizing.flat and not self._begun:
            return -(-nbytes // flat_bytes(nbytes, page))
        return slices_of(parameter, page, self._sizing.min_paged_bytes)

    def _make_room(
        self, new: Sequence[tuple[str, nn.Parameter, int]], kept: int
    ) -> list[tuple[str, nn.Parameter]]:
        """Make room in the budget outside the pool, whose size is fixed.

        First fewer saved activations stay in memory, then small parameters are paged, the largest
        first.

        Returns:
            The small parameters to page.

        Raises:
            BudgetError: there is no room; nothing was changed.
        """
        sizing, states = self._sizing, States(self._optimizer)
        slices = {parameter: count for _, parameter, count in new}
        slices |= dict.fromkeys(self.store.slots, 1)
        slices |= {parameter: fused.count for parameter, fused in self.store.fused.items()}
        held = held_parameters(self._model)  # counted and reported elsewhere
        stays: dict[str, int] = {}  # bytes, with gradient and state even before they exist
        small: list[tuple[str, nn.Parameter]] = []
        for name, parameter in self._model.named_parameters():
            if parameter in held:
                continue
            trained, sizes = is_trained(parameter), states.sizes(parameter)
            stays[name] = sum(sizes) + (SCALARS if trained and sizes else 0)
            if count := slices.get(parameter):
                stays[name] -= sum(states.paged(parameter, sizing.min_paged_bytes, count))
                continue
            stays[name] += local_bytes(parameter) * (1 + trained)
            if parameter.numel() > 1 and not parameter.is_meta and can_move(parameter):
                small.append((name, parameter))
        counted: set[int] = set()  # storages of buffers
        for name, buffer in self._model.named_buffers():
            for part in () if buffer.is_meta else parts_of(buffer):
                storage = part.untyped_storage()
                if self._device.owner(part) < 0 and storage._cdata not in counted:
                    counted.add(storage._cdata)
                    stays[name] = stays.get(name, 0) + storage.nbytes()
        small.sort(key=lambda one: -local_bytes(one[1]))
        most = sizing.budget - sizing.pool_bytes - sizing.bucket_bytes
        total, paged = sum(stays.values()), []
        while small and total + kept > most:
            paged.append(small.pop(0))
            name, parameter = paged[-1]
            self._check_room(f"{name}, which has no room beside the pool,", parameter, 1, states)
            total -= stays.pop(name)
        if total + kept > most:
            raise BudgetError(
                f"{max(stays, key=stays.__getitem__)} and others that cannot be paged "
                f"have no room since the model was changed: what stays in memory takes "
                f"{format_bytes(total)} and saved activations {format_bytes(kept)}, and the budget "
                f"has {format_bytes(most)} beside the pool: raise the budget, or change the model "
                "back"
            )
        self.allowance = min(sizing.kept_bytes, most - total)
        return paged

    def check_thawed(self, parameter: nn.Parameter) -> None:
        """Check the room for an adopted parameter that was frozen and is about to be trained.

        Raises:
            BudgetError: its update does not fit.
        """
        slots = self.store.slots_of(parameter)
        if slots:
            name = slots[0].name if slots[0].fused is None else slots[0].fused.name
            what, states = f"{name}, which was frozen before,", States(self._optimizer)
            self._check_room(what, parameter, len(slots), states)

    def _sizes(self) -> tuple[dict[str, int], int]:
        """Return what update sizes depend on: bytes per parameter, state tensors per parameter."""
        known = (*self.store.slots.values(), *self.rows)
        return {one.name: local_bytes(one.parameter) for one in known}, state_tensors(
            self._optimizer
        )

    def check_updates(self) -> None:
        """Check that updates still fit if parameters were converted or optimizer options changed.

        It reads no content and takes about 0.2 microseconds a parameter if nothing changed.

        Raises:
            BudgetError: an update no longer fits; nothing was changed.
            ConfigError: a parameter that is paged by slices has another dtype or shape.
        """
        for fused in self.rows:
            if self.rows.is_converted(fused):
                own, like = fused.parameter, fused.like
                raise ConfigError(
                    f"{fused.name} was converted from {like.dtype} {tuple(like.shape)} to "
                    f"{own.dtype} {tuple(own.shape)} inside the offload() block, which pages it "
                    "slice by slice: convert it back, or leave the block, convert the model, and "
                    "enter another"
                )
        now, before = self._sizes(), self._seen
        if now == before:
            return
        states = States(self._optimizer)
        whole = (s for s in self.store.slots.values() if self.store.pages(s.parameter, s))
        known: list[tuple[Slot | Fused, int]] = [(slot, 1) for slot in whole]
        known += [(fused, fused.count) for fused in self.rows]
        chunks = int(self._device.guarded)  # unguarded: no update while a chunk is filled
        for one, slices in known:
            nbytes = local_bytes(one.parameter)
            was = before[0].get(one.name, nbytes)
            changed = f"which has {format_bytes(nbytes)} now and had {format_bytes(was)},"
            more = "of which the optimizer keeps more now,"
            what = f"{one.name}, {more if was == nbytes else changed}"
            self._check_room(
                what, one.parameter, slices, states, chunks=chunks, remedy="change it back"
            )
        self.changed = True
        self._seen = now

    def _check_room(
        self,
        what: str,
        parameter: nn.Parameter,
        slices: int,
        states: States,
        *,
        chunks: int = 2,
        remedy: str = "make it smaller",
    ) -> None:
        page, least = self._device.page_bytes, self._sizing.min_paged_bytes
        update = states.update_bytes(parameter, page, least, slices=slices, queues=self._queues)
        need = update + chunks * self._sizing.chunk_bytes
        if need > self._sizing.pool_bytes:
            raise BudgetError(
                f"{what} needs {format_bytes(need)} at once "
                f"(parameter, gradient and optimizer state), and the pool has "
                f"{format_bytes(self._sizing.pool_bytes)}: raise the budget, or {remedy}"
            )

    def pieces(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield views of ``tensor`` of at most a piece each. One that spans a row goes slice by
        slice, as its regions together may exceed the pool."""
        if tensor.dim() == 3 and len(self._device.owners(tensor)) > 1:
            for part in tensor:
                yield from pieces(part)
        else:
            yield from pieces(tensor)

    @contextlib.contextmanager
    def held(self, tensor: torch.Tensor) -> Iterator[None]:
        """Pin the regions under a small tensor, or under a piece of one."""
        regions = self._device.owners(tensor)
        self._device.acquire(regions, pin=True)
        try:
            yield
        finally:
            self._device.unpin(regions)

    def adopt(self, parameter: nn.Parameter) -> None:
        """Move new optimizer state of ``parameter`` into regions."""
        slot, fused = self.store.slots.get(parameter), self.store.fused.get(parameter)
        if self._optimizer is None or isinstance(self._optimizer, HostOptimizer):
            return
        if slot is not None:
            self.store.adopt_state(slot, self._optimizer.state[parameter])
        if fused is not None:
            self.rows.adopt_state(fused, self._optimizer.state[parameter])

    def adopt_whole_state(self) -> None:
        """Move the state of an optimizer that runs whole into regions."""
        optimizer = self._optimizer
        if optimizer is None or can_split(optimizer) or isinstance(optimizer, HostOptimizer):
            return
        names: dict[torch.Tensor, str] = {p: name for name, p in self._model.named_parameters()}
        self.buffers.adopt_state(state_of(optimizer, names))

    def tensors(self) -> dict[int, list[torch.Tensor]]:
        """Return the tensors of model and optimizer that are stored in the device, by first
        region."""
        tensors = {id(tensor): tensor for tensor in tensors_of(self._model, self._optimizer)}
        # Adopted parameters may have been removed from the model.
        states = {} if self._optimizer is None else self._optimizer.state
        for parameter in (*self.store.slots, *self.store.fused):
            state = dict.get(states, parameter) or {}
            for tensor in (parameter, gradient_of(parameter), *state.values()):
                if isinstance(tensor, torch.Tensor):
                    tensors[id(local(tensor))] = local(tensor)
        found: dict[int, list[torch.Tensor]] = {}
        for tensor in tensors.values():
            if tensor.layout is torch.strided:
                region = self._device.owner(tensor)
                if region >= 0:
                    found.setdefault(region, []).append(tensor)
        return found

    def is_held(self) -> bool:
        """Return whether memory of the device has references beyond what `restore` restores."""
        return self.buffers.are_held() or bool(self.held_by_others(self.tensors()))

    def held_by_others(self, adopted: Mapping[int, Sequence[torch.Tensor]]) -> set[int]:
        """Return the first regions of storages with references from outside ``adopted``."""
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

    def restore(self, place: torch.device, room: Room) -> str:
        """Make all tensors ordinary again, on ``place``, as far as there is ``room``.

        Returns:
            Where the tensors that do not fit are stored, or "".

        Raises:
            SpillError: some could not be read; all others were restored.
        """
        adopted = self.tensors()
        # A block that fails to begin gave out no references: only its error holds what it made.
        held = self.held_by_others(adopted) if self._begun else set()
        stays = place == self._device.device
        parts = (self._device, self.store, self.rows, held, room)
        restoration = Restoration(*parts, stays=stays)
        for region, buffer in self.buffers.end().items():  # also one that left the model
            adopted.setdefault(region, []).append(buffer)
        where = restoration.run(adopted)
        if restoration.lost:
            raise restoration.lost[0]
        return where
