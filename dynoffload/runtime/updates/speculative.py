"""Speculative updates: made in backward before ``step()``, which applies or discards them.

[Note: speculation]  A deferred update reads a parameter, its gradient and its state in the next
forward, and writes three of them back. That is most of a step's traffic, in its shortest phase.
Once backward has completed a gradient, the update is mostly known. So for a share of the parameters
it is made then, on *twins* (shadow regions). The parameter is copied, its state's pages are lent,
and the old state stays in the file. At ``step()`` regions and twins trade contents, which moves no
bytes.

Such an update is a *draft*. It is valid only if it equals the update to be made: the same tensors
over the same memory, none of their regions accessed since, and equal hyperparameters, torch
settings and values of unpaged state. Otherwise it is discarded, and the update is made from the old
contents. If a loop always changes gradients after backward, as clipping does, drafts pause for ever
longer periods.

The gradient of a slice counts as complete once its expert has been through backward; a later
addition is an access to its region. `slices` advances state that belongs to the whole parameter.

Optimizers that write into gradients get no drafts, as the change would show before ``step()``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dynoffload.errors import BudgetError, SpillError, StepLostError
from dynoffload.memory.local import is_spread, local
from dynoffload.memory.pager import Pager
from dynoffload.planning.reference import choose_drafts, drafted_regions
from dynoffload.runtime.adoption.slicing import keeps_bits, may_slice
from dynoffload.runtime.adoption.slots import Slot
from dynoffload.runtime.adoption.store import bytes_of, offset_of, view_of
from dynoffload.runtime.updates.torch_context import TorchContext, may_wait
from dynoffload.runtime.updates.update import (
    Group,
    PagedOptimizer,
    Update,
    copied,
    same,
    snapshot,
    writes_gradients,
)

logger = logging.getLogger(__name__)

_LONGEST_PAUSE = 1024  # steps

Run = Callable[[Update, Mapping[int, torch.UntypedStorage]], tuple[dict[str, Any], dict[str, Any]]]


@dataclass(eq=False)
class _Draft:
    """An update made on twins, and the inputs that it was made from."""

    group: Group
    context: TorchContext
    gradient: torch.Tensor | None  # the parameter's ``.grad``; None for a slice
    places: list[tuple[Any, ...]]  # addresses, layouts and versions of the tensors
    state: dict[str, Any]
    before: dict[str, Any]  # old values of the unpaged state
    small: dict[str, Any]  # new values of the unpaged state
    regions: list[int]  # of parameter and state, which have twins
    watched: list[int]  # `regions`, then the gradient's region
    visits: list[int]  # access counts of `watched`


class SpeculativeUpdates:
    """Makes, applies and discards the drafts of one optimizer's updates.

    Args:
        paged: the optimizer and its tensors, on a pager.
        capacity: bytes of the pool that plans may use.
        share: drafted share of the parameters' bytes, 0 to 1, spread evenly over the network.
        run: makes an update on other memory; returns the state before and after it.
    """

    def __init__(self, paged: PagedOptimizer, *, capacity: int, share: float, run: Run) -> None:
        assert isinstance(paged.device, Pager)
        self._optimizer, self._store, self._rows = paged.optimizer, paged.store, paged.rows
        self._device = paged.device
        self._capacity, self._share, self._run = capacity, share, run
        self._groups: dict[torch.Tensor, Group] = {}
        self._chosen: dict[Slot, dict[int, int]] = {}
        self._drafts: dict[Slot, _Draft] = {}
        self._spent: list[Slot] = []  # whose draft was applied; their gradients may be discarded
        self._dropped = 0
        self._pause = self._pause_left = 0

    # Choosing slots

    def choose(self, order: Iterable[Sequence[Slot]]) -> Mapping[Slot, Mapping[int, int]]:
        """Choose the slots to draft in a backward that completes gradients in ``order``.

        Args:
            order: groups of slots whose gradients are complete at the same time, one per unit.

        Returns:
            For each chosen slot, the twins of its parameter's and state's regions.
        """
        self._chosen = {}
        if self._pause_left or not self._share:
            return self._chosen
        self._groups = {p: g for g in self._optimizer.param_groups for p in g["params"]}
        chosen = choose_drafts(
            order,
            share=self._share,
            capacity=self._capacity,
            size=self._device.size,
            eligible=self._is_eligible,
        )
        for slot in chosen:
            try:
                self._chosen[slot] = {r: self._twin(r) for r in drafted_regions(slot)}
            except (SpillError, BudgetError) as error:
                self._stop(error)
                break
        return self._chosen

    def _stop(self, error: Exception) -> None:
        logger.warning("no more updates are made in backward: %s", str(error))
        self._share = 0.0

    def _is_eligible(self, slot: Slot) -> bool:
        parameter = slot.parameter
        state = dict.get(self._optimizer.state, parameter)
        group = self._groups.get(parameter)
        if slot.shared or group is None or not state or writes_gradients(self._optimizer, group):
            return False
        if is_spread(parameter) and not may_slice(self._optimizer):
            return False
        if slot.fused is not None:
            return self._rows.holds(slot.fused, state) and keeps_bits(
                group, slot.fused.like, slot.fused.count
            )
        owner = self._device.owner
        return owner(parameter) == slot.region and all(
            key in state and owner(state[key]) == region for key, region in slot.states.items()
        )

    def _twin(self, region: int) -> int:
        twin = self._device.twin(region)
        self._store.names[twin] = f"{self._store.name_of(region)} (draft)"
        return twin

    # Making, applying and discarding drafts

    def make(self, slot: Slot) -> None:
        """Draft the update of ``slot``, whose gradient is complete, if it was chosen."""
        twins = self._chosen.get(slot)
        if twins is None or slot.gradient is None or slot in self._drafts:
            return
        try:
            self._make(slot, twins)
        except BaseException:
            for twin in twins.values():  # the file still has the lent contents
                self._device.discard(twin)
            raise

    def _make(self, slot: Slot, twins: Mapping[int, int]) -> None:
        assert slot.gradient is not None
        device, whole = self._device, slot.fused is None
        theirs = slot.parameter.grad if whole else self._part(slot, slot.gradient)
        if theirs is None or theirs.layout is not torch.strided:
            return
        gradient = local(theirs)
        if device.owner(gradient) != slot.gradient or not self._is_eligible(slot):
            return
        parameter, states = slot.parameter, list(slot.states.values())
        state = dict.get(self._optimizer.state, parameter, {})
        paged = slot.states.keys()
        before = {key: copied(local(value)) for key, value in state.items() if key not in paged}
        own = {k: local(v) if k in paged else copied(local(v)) for k, v in state.items()}
        data = local(parameter).data
        if not whole:
            data = self._part(slot, slot.region)
            own |= {key: self._part(slot, region) for key, region in slot.states.items()}
        group, context = snapshot(self._groups[parameter]), TorchContext.now()
        duplicated = [slot.region]  # still in use, so copied; the state's pages are lent
        if not device.lend(states, [twins[region] for region in states]):
            if not set(states) <= set(device.resident()):
                return  # the state is not resident yet: the update is made later, not drafted
            duplicated += states  # dirty, by an update made in step(): copied as well
        given_gradient = view_of(device.storage(slot.gradient), gradient, offset_of(gradient))
        version = given_gradient._version
        update = Update(group, data, given_gradient, own, [], context, self._optimizer.state)
        pinned = list({*duplicated, slot.gradient, *twins.values()})
        device.acquire(pinned, pin=True)
        try:
            for region in duplicated:
                ours, twin = device.storage(region), device.storage(twins[region])
                bytes_of(twin).copy_(bytes_of(ours))
            given, made = self._run(update, {r: device.storage(t) for r, t in twins.items()})
        finally:
            device.unpin(pinned)
        if given_gradient._version != version:
            raise StepLostError(
                f"{type(self._optimizer).__name__} has changed the gradient of {slot.name} in an "
                "update made ahead of step(): the step is lost; go on from the last checkpoint "
                "with config={'draft_share': 0}"
            )
        regions = [slot.region, *states]
        watched = [*regions, slot.gradient]
        draft = _Draft(
            group=group,
            context=context,
            gradient=theirs if whole else None,
            places=_places(slot, theirs if whole else None, state),
            state=dict(state),
            before=before,
            small={key: value for key, value in made.items() if key not in paged},
            regions=regions,
            watched=watched,
            visits=device.withdraw(watched),
        )
        if made.keys() == state.keys() and all(made[key] is given[key] for key in paged):
            self._drafts[slot] = draft
        else:  # the optimizer replaces its state tensors: make no more drafts
            self._forget(draft)
            self._share = 0.0

    def _part(self, slot: Slot, region: int) -> torch.Tensor:
        """Return the slice, its gradient or state tensor that is stored in ``region``."""
        assert slot.fused is not None
        return view_of(self._device.storage(region), slot.fused.like[0])

    def has(self, slot: Slot) -> bool:
        """Return whether there is a draft for ``slot``."""
        return slot in self._drafts

    def take(self, slot: Slot, group: Group) -> bool:
        """Apply the draft of ``slot`` at ``step()`` if it is valid; return whether it was."""
        draft = self._drafts.pop(slot, None)
        if draft is None:
            return False
        if not self._is_valid(slot, draft, group):
            self._drop(draft)
            return False
        twins = [self._device.twin(region) for region in draft.regions]
        self._device.exchange(draft.regions, twins)
        if slot.fused is None:
            self._write_small(slot, draft)
        for twin in twins:
            self._device.discard(twin)
        self._spent.append(slot)
        return True

    def _write_small(self, slot: Slot, draft: _Draft) -> None:
        """Write the new values of the unpaged state, and raise the parameter's version."""
        for key, value in draft.small.items():
            old = draft.state[key]
            if isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor):
                with torch.no_grad():
                    local(old).copy_(value)
            else:
                dict.__getitem__(self._optimizer.state, slot.parameter)[key] = value
        torch.autograd.graph.increment_version(slot.parameter)

    def _is_valid(self, slot: Slot, draft: _Draft, group: Group) -> bool:
        parameter = slot.parameter
        state = dict.get(self._optimizer.state, parameter, {})
        return (
            self._is_gradient(slot, draft)
            and len(state) == len(draft.state)
            and all(state.get(key) is value for key, value in draft.state.items())
            and _places(slot, draft.gradient, state) == draft.places
            and same(group, draft.group)
            and draft.context == TorchContext.now()
            and may_wait(self._optimizer, self._device.device.type)
            and same({key: local(state[key]) for key in draft.before}, draft.before)
            and self._device.visits(draft.watched) == draft.visits
        )

    def _is_gradient(self, slot: Slot, draft: _Draft) -> bool:
        """Return whether the parameter's gradient is the one that ``draft`` was made with."""
        if slot.fused is None:
            return slot.parameter.grad is draft.gradient
        row = self._rows.row_of(slot.fused, slot.parameter.grad)
        return row is not None and row[slot.number] == draft.watched[-1]

    def _drop(self, draft: _Draft) -> None:
        self._forget(draft)
        self._dropped += 1

    def _forget(self, draft: _Draft) -> None:
        for region in draft.regions:
            self._device.discard(self._device.twin(region))

    def drop_all(self) -> None:
        """Discard all drafts that were not applied; their updates are made normally."""
        while self._drafts:
            self._drop(self._drafts.popitem()[1])

    def begin_forward(self) -> None:
        """Begin a sample: discard drafts that were not applied, and gradients of those applied."""
        self._chosen = {}
        self.drop_all()
        while self._spent:
            slot = self._spent.pop()
            if slot.fused is None:
                self._store.end_gradient(slot)
            elif slot.gradient is not None:
                self._rows.end_gradient(slot, slot.gradient)

    def end_step(self) -> None:
        """End a step: if drafts were discarded, make none for a while."""
        if self._pause_left:
            self._pause_left -= 1
        elif self._dropped:
            self._pause = self._pause_left = min(_LONGEST_PAUSE, 2 * self._pause + 1)
        elif self._spent:
            self._pause = 0
        self._dropped = 0


def _places(
    slot: Slot, gradient: torch.Tensor | None, state: Mapping[str, Any]
) -> list[tuple[Any, ...]]:
    return [
        (local(t).data_ptr(), t.size(), t.stride(), t.dtype, t._version, local(t)._version)
        for t in (slot.parameter, gradient, *state.values())
        if isinstance(t, torch.Tensor)
    ]
