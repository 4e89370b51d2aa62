"""Commits one optimizer step: makes each parameter's update now, or defers it.

[Note: shards]  With an elementwise optimizer, the update of a shard is made on this process's part.
An optimizer that needs whole matrices, such as Muon, steps shards together with other processes:
its code runs inside ``step()``, on the user's tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from dynoffload.memory.accelerator.guarded import plain_alias
from dynoffload.memory.local import is_spread, local
from dynoffload.runtime.adoption.held import are_shared, references
from dynoffload.runtime.adoption.slicing import may_slice
from dynoffload.runtime.adoption.slots import Fused, Slot
from dynoffload.runtime.interrupts import uninterrupted
from dynoffload.runtime.unseen import unseen
from dynoffload.runtime.updates.failure import note
from dynoffload.runtime.updates.observed_state import Order
from dynoffload.runtime.updates.pending import OF_SCALER, PendingUpdates
from dynoffload.runtime.updates.slices import SliceUpdate
from dynoffload.runtime.updates.torch_context import TorchContext, depends_on_dtype, may_wait
from dynoffload.runtime.updates.update import (
    FIRST_TIMERS,
    Group,
    PagedOptimizer,
    Update,
    first_timers,
    snapshot,
)

_OF_ENTRY = 2  # references to a state entry: `ObservedState`'s and the original mapping's


@unseen
def _data_of(parameter: nn.Parameter) -> torch.Tensor:
    return plain_alias(local(parameter)).data


def _with_gradients(groups: Iterable[Group]) -> list[nn.Parameter]:
    return [p for group in groups for p in group["params"] if p.grad is not None]


@dataclass
class _Split:
    """How the parameters of one step are updated.

    Attributes:
        whole: groups of parameters updated at once.
        shared: paged parameters among them, as those with shared or replaced memory.
        paged: parameters updated one by one, possibly deferred.
        sliced: parameters updated slice by slice, possibly deferred.
    """

    whole: list[Group] = field(default_factory=list)
    shared: list[nn.Parameter] = field(default_factory=list)
    paged: list[tuple[Slot, Group]] = field(default_factory=list)
    sliced: list[tuple[Fused, Group]] = field(default_factory=list)


class StepCommit:
    """Commits the steps of one optimizer, parameter by parameter.

    Args:
        paged: the optimizer and its tensors.
        pending: makes updates, and holds the deferred ones.
        defer: whether updates may be deferred beyond the step.

    Attributes:
        order: the order of the state's entries in plain PyTorch.
    """

    def __init__(self, paged: PagedOptimizer, pending: PendingUpdates, *, defer: bool) -> None:
        self._optimizer, self._store, self._device = paged.optimizer, paged.store, paged.device
        self._pending, self._defer = pending, defer
        self._slices = pending.slices
        self.order = Order()
        self._begun = False  # whether a running step has changed something

    def make(self, made: Collection[nn.Parameter] = ()) -> None:
        """Make or defer all updates of a step; a step under a `GradScaler` defers none.

        Args:
            made: parameters whose first update this step has made already.

        Raises:
            StepLostError: an earlier step was lost.
            Exception: from the optimizer's own code, with a note if the step was interrupted by it.
        """
        self._make(self._optimizer.param_groups, made)
        if made:
            self.order.restore(self._optimizer.state)

    def make_now(self, groups: list[Group]) -> None:
        """Make the updates of ``groups`` at once, with gradients where they are; see `make`."""
        self._make(groups, now=True)

    @uninterrupted
    def _make(
        self, groups: list[Group], made: Collection[nn.Parameter] = (), *, now: bool = False
    ) -> None:
        """See `make`.

        Raises:
            StepLostError: an earlier step was lost.
            Exception: from the optimizer's own code, with a note if the step was interrupted by it.
        """
        optimizer, pending, log = self._optimizer, self._pending, self._pending.undo_log
        failure = pending.failure
        scaled = any(getattr(optimizer, name, None) is not None for name in OF_SCALER)
        with pending.mutex:
            if scaled or log is not None:
                pending.flush_all()  # updates of earlier steps must not be scaled
            self._flush_used(groups)
            failure.check()  # an update may have failed on another thread
            if not now:
                self.order.created(
                    one
                    for group in groups
                    for one in group["params"]
                    if one in made
                    or (one.grad is not None and not dict.__contains__(optimizer.state, one))
                )
            if log is not None:
                log.begin(_with_gradients(groups))
            self._pending.scaled = scaled
            failure.within = True
            try:
                split = self._split(groups, adopts=not now)
                self._update_whole(split.whole)
                for parameter in split.shared:
                    self._pending.adopt_state(parameter, optimizer.state)
                self._update_paged(split.paged, now=now)
                for fused, hyper in split.sliced:
                    self._update_slices(fused, hyper, now=now)
                if not now and (scaled or not self._defer):
                    pending.flush_all()
                    self.order.restore(optimizer.state)
            except BaseException as error:
                failure.within = False
                if self._begun:
                    failure.set(error)
                    note(error, undone=failure.undo())
                raise
            finally:
                self._begun = self._pending.scaled = failure.within = False

    # How a step is split

    @unseen
    def _flush_used(self, groups: list[Group]) -> None:
        """Make the pending updates that a step over ``groups`` depends on: those of its parameters,
        and those of parameters whose memory user code made it read."""
        owner, slot_of = self._device.owner, self._store.slot_of
        used = [(p, group) for group in groups for p in group["params"] if p.grad is not None]
        for parameter, group in used:
            fused = self._store.fused.get(parameter)
            if fused is not None:
                self.flush_displaced(fused)
                self._slices.rows.take_back(fused)
                if self._slices.splits(fused, group):
                    continue  # each slice queues its updates in order
            for slot in self._store.slots_of(parameter):
                self._pending.flush(slot)
            if not self._pending.by_slot:
                continue
            state = dict.get(self._optimizer.state, parameter, {})
            for tensor in (parameter, parameter.grad, *state.values()):
                if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                    lender = slot_of(owner(tensor))
                    if lender is not None:
                        for slot in self._store.slots_of(lender.parameter):
                            self._pending.flush(slot)

    def flush_displaced(self, fused: Fused) -> None:
        """If a parameter's data or state was replaced, make its pending updates from its rows,
        before those are overwritten."""
        state = dict.get(self._optimizer.state, fused.parameter)
        if not self._slices.rows.holds(fused, state):
            for slot in fused.slots:
                self._pending.flush(slot)

    def _split(self, groups: list[Group], *, adopts: bool) -> _Split:
        split = _Split()
        for group in groups:
            hyper = snapshot(group)
            if found := first_timers(self._optimizer, group):
                hyper[FIRST_TIMERS] = found
            whole = []
            for parameter in group["params"]:
                slot = self._store.slots.get(parameter)
                fused = self._store.fused.get(parameter)
                if parameter.grad is None:
                    continue
                if slot is None and fused is None:
                    whole.append(parameter)
                elif fused is not None and self._slices.splits(fused, hyper):
                    split.sliced.append((fused, hyper))
                elif slot is not None and self._is_paged(slot):
                    if adopts:
                        self._store.adopt_gradient(slot)
                    split.paged.append((slot, hyper))
                else:
                    whole.append(parameter)
                    split.shared.append(parameter)
            split.whole.append({**hyper, "params": whole})
        return split

    def _is_paged(self, slot: Slot) -> bool:
        """Return whether a parameter is updated alone, in its region; see [Note: shards]."""
        parameter = slot.parameter
        if is_spread(parameter) and not may_slice(self._optimizer):
            return False
        assert parameter.grad is not None
        strided = parameter.grad.layout is torch.strided
        return strided and not slot.shared and self._store.take_back(slot)

    # How updates are made or deferred

    def _update_whole(self, groups: list[Group]) -> None:
        parameters = _with_gradients(groups)
        log = self._pending.undo_log
        if log is not None:
            for parameter in parameters:
                log.keep(parameter)
        before = self._versions(parameters)
        try:
            self._pending.run(groups, self._optimizer.state)
        except BaseException:
            after = self._versions(parameters)
            changed = (
                before.get(key, (at, 0)) != (at, version) for key, (at, version) in after.items()
            )
            undoes = log is not None and before != after  # includes state that is only created
            self._begun = self._begun or any(changed) or undoes
            raise

    def _versions(
        self, parameters: Iterable[nn.Parameter]
    ) -> dict[tuple[int, str], tuple[int, int]]:
        """Return ids and versions of parameters and their state tensors. A new state tensor at
        version 0, created but not yet written, counts as unchanged."""
        states = self._optimizer.state
        return {
            (id(parameter), key): (id(value), value._version)
            for parameter in parameters
            for key, value in (("", parameter), *dict.get(states, parameter, {}).items())
            if isinstance(value, torch.Tensor)
        }

    def _update_paged(self, paged: Iterable[tuple[Slot, Group]], *, now: bool) -> None:
        waiting: dict[Slot, Update | SliceUpdate] = {}
        context, states = TorchContext.now(), self._optimizer.state
        self._begun = True
        for slot, group in paged:
            parameter, gradient = slot.parameter, slot.parameter.grad
            assert gradient is not None
            copy = states.get(parameter)
            copy = None if copy is None else dict(copy)  # drops the entry: references are counted
            data, part, regions = _data_of(parameter), local(gradient), slot.update_regions()
            if now:
                regions = [slot.region, *slot.states.values()]
            update = Update(group, data, part, copy, regions, context, states)
            torch.autograd.graph.increment_version(parameter)
            waits = not now and self._may_wait(first=not copy)
            if waits and (not self._defer or self._guards(slot, gradient)):
                waiting[slot] = update
            else:
                self._pending.make({slot: update})
        self._pending.add(waiting)

    def _update_slices(self, fused: Fused, group: Group, *, now: bool) -> None:
        self._begun = True
        waits = self._may_wait(first=False)
        for slot, step in self._slices.steps(fused, group):
            waiting = self._pending.by_slot.get(slot)
            if isinstance(waiting, SliceUpdate):
                if waits and self._slices.joins(waiting, step):
                    waiting.steps.append(step)
                    continue
                self._pending.flush(slot)
            update = self._slices.begin(slot, step)
            if self._defer and waits and not (now and update.gradient is not None):
                self._pending.add({slot: update})
            else:
                self._pending.make({slot: update})

    def _may_wait(self, *, first: bool) -> bool:
        """Return whether an update gives the same bits if made later. The guard's thread cannot
        change the default dtype; other threads can set the step's."""
        served = self._defer and self._device.serves
        if served and depends_on_dtype(self._optimizer, first=first):
            return False
        return may_wait(self._optimizer, self._device.device.type)

    def _guards(self, slot: Slot, gradient: torch.Tensor) -> bool:
        """Return whether the device sees every access to what the update reads and writes."""
        owner = self._device.owner
        held = references(self._optimizer.state, slot.parameter) > _OF_ENTRY
        state = self._optimizer.state.get(slot.parameter, {})
        return (
            slot.gradient is not None
            and owner(gradient) == slot.gradient
            and not held  # such references would see stale values
            and not are_shared(state, besides=slot.states)
            and all(
                key in state and owner(state[key]) == region for key, region in slot.states.items()
            )
        )
