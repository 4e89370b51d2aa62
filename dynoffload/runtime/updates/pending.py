"""Pending updates of one optimizer: made at once, or deferred until their parameter's next use.

[Note: guards]  The regions of a pending update are locked. The pager blocks an access until the
guard's thread has made the update through other addresses (`PendingUpdates.serve`). On an
accelerator, the accessing thread makes the update first (`PendingUpdates.meet`). A slot leaves
`by_slot` before its update is made, but stays in `_making` until it is done: a thread that needs
the update meanwhile waits for the mutex.

[Note: stand-ins]  A deferred update may be made on the guard's thread while the user's thread
continues. So a shadow of the optimizer makes it, with its own groups and state, on a stand-in for
the parameter. The stand-in uses the same memory or other addresses of it. No object that the user's
thread may read changes meanwhile. If the user replaces a tensor while an update is pending, the
update is made on the old tensor, and the new one stays.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from dynoffload.distributed.sharded import spread_like
from dynoffload.host_optimizer import HostOptimizer
from dynoffload.memory.accelerator.accelerator import Accelerator
from dynoffload.memory.accelerator.guarded import plain_alias
from dynoffload.memory.local import local
from dynoffload.memory.pager import Pager
from dynoffload.runtime.adoption.slots import Slot
from dynoffload.runtime.adoption.store import offset_of, view_of
from dynoffload.runtime.counting import state_tensors
from dynoffload.runtime.interrupts import uninterrupted
from dynoffload.runtime.unseen import unseen
from dynoffload.runtime.updates.failure import note
from dynoffload.runtime.updates.slices import SliceUpdate, SliceUpdates
from dynoffload.runtime.updates.undo_log import UndoLog
from dynoffload.runtime.updates.update import Group, PagedOptimizer, Update, neighbours

OF_SCALER = ("grad_scale", "found_inf")
"""Attributes that a `GradScaler` sets on an optimizer for one step."""

_TOGETHER = 4  # updates made by one call take this part of the pool at most
_EARLY, _MOST = 32, 64  # those made early, this part, and so many

_Updates = Mapping[Slot, Update | SliceUpdate]
_Storages = Mapping[int, torch.UntypedStorage]
"""Storages at other addresses, by region; regions not in it are at their own addresses."""


class PendingUpdates:
    """Makes the updates of one optimizer, and holds the pending ones.

    Args:
        paged: the optimizer and its tensors.
        locks: whether the device blocks accesses; else no update is pending after ``step()``.

    Attributes:
        by_slot: the pending updates, in the order in which they were deferred.
        mutex: held by a thread that makes or defers updates.
        failure: records a partially applied step.
        slices: makes the updates of slices.
        undo_log: keeps what updates overwrite, or None.
        scaled: whether the updates being made are those of a scaled step.
        step: the optimizer's own ``step``, without hooks.
    """

    def __init__(self, paged: PagedOptimizer, *, locks: bool) -> None:
        self._optimizer, self._store, self._device = paged.optimizer, paged.store, paged.device
        self._locks = locks
        self._making: frozenset[Slot] = frozenset()
        self.by_slot: dict[Slot, Update | SliceUpdate] = {}
        self.mutex = threading.RLock()
        self.failure = paged.failure
        self._in_child: BaseException | None = None
        self.slices = SliceUpdates(paged, self.run_on)
        self.undo_log: UndoLog | None = None
        self.scaled = False
        step = type(paged.optimizer).step
        self.step: Callable[..., Any] = (
            step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
        )

    # Pending updates

    def any(self) -> bool:
        """Return whether an update is pending or being made."""
        return bool(self.by_slot or self._making)

    def add(self, updates: _Updates) -> None:
        """Defer ``updates``."""
        if self._locks:
            self._device.lock([region for one in updates.values() for region in one.regions])
        self.by_slot.update(updates)

    @contextlib.contextmanager
    def _taken(self, slots: Sequence[Slot]) -> Iterator[_Updates]:
        """Take the pending updates of ``slots``, after waiting for any update being made."""
        if self._in_child is not None:
            raise self._in_child
        with self.mutex:
            before, self._making = self._making, self._making.union(slots)
            try:
                yield {slot: self.by_slot.pop(slot) for slot in slots if slot in self.by_slot}
            finally:
                self._making = before

    def flush(self, *slots: Slot) -> None:
        """Make the pending updates of ``slots``' parameters now, if there are any."""
        waiting = [slot for slot in slots if slot in self.by_slot or slot in self._making]
        if waiting and not self._making and isinstance(self._device, Accelerator):
            waiting += self._early(self._device, waiting)
        try:
            for some in self._together(waiting) if len(waiting) > 1 else [waiting]:
                if some:
                    self._flush(some)
        except BaseException as error:
            if self.failure.error is error and not self.failure.within:
                self.failure.report_undone()
                note(error, undone=False)
            raise

    def _early(self, device: Accelerator, slots: Sequence[Slot]) -> list[Slot]:
        """Return further slots, all of whose regions are there. For the host, one call of the
        optimizer takes as long for some small parameters as for one."""
        room, early = device.capacity // _EARLY, []
        for slot, update in itertools.islice(list(self.by_slot.items()), _MOST):
            if slot in slots or not isinstance(update, Update) or not self._may_join(update):
                continue
            if device.are_here(update.regions):
                room -= sum(map(device.size, update.regions))
                if room < 0:
                    break
                early.append(slot)
        return early

    def _together(self, slots: Sequence[Slot]) -> Iterator[list[Slot]]:
        """Yield ``slots`` in groups whose updates one call of the optimizer makes.

        A first update makes state, which is in no region before it ends: that is one of its own.
        """
        alike: dict[Any, list[Slot]] = {}
        for slot in slots:
            update = self.by_slot.get(slot)
            key: Any = slot
            if isinstance(update, Update) and self._may_join(update):
                key = id(update.group), update.context
            alike.setdefault(key, []).append(slot)
        for some in alike.values():
            regions = [r for slot in some if (u := self.by_slot.get(slot)) for r in u.regions]
            if sum(map(self._device.size, regions)) <= self._device.capacity // _TOGETHER:
                yield some
            else:
                yield from ([slot] for slot in some)

    def _may_join(self, update: Update) -> bool:
        """Return whether a call of the optimizer may make others too: it makes no state."""
        return bool(update.state) or not state_tensors(self._optimizer)

    @uninterrupted
    def _flush(self, slots: Sequence[Slot]) -> None:
        # Inference mode may be on, but tensors made in it cannot be trained.
        with torch.inference_mode(False), self._taken(slots) as updates:
            if not updates:
                return
            every = list(updates.values())
            if self._locks:
                self._device.unlock([region for update in every for region in update.regions])
            try:
                with every[0].context.again(self._device.device.type):
                    self.make(updates)
            except BaseException as error:
                begun = any(update.begun for update in every)
                for update in every if begun else ():
                    self._lose(update, error, reported=True)
                if not begun:  # nothing was changed: they stay pending
                    self.add(updates)
                raise

    @uninterrupted
    def flush_all(self) -> None:
        """Make every pending update, in the order of the parameters."""
        with self.mutex:
            for slot in list(self.by_slot):
                self.flush(slot)

    def serve(self, region: int) -> None:
        """Make the update that an access to ``region`` waits for, through other addresses; called
        by the guard's thread.

        The parameter's own addresses stay absent until then: a thread is blocked on them. After an
        error that thread continues with the old value. The error is raised when its forward ends,
        or else by the next forward, step or copy of the state.
        """
        assert isinstance(self._device, Pager)
        slot = self._store.slot_of(region)
        if slot is None:
            self._device.unlock([region])
            return
        with self._taken([slot]) as updates:
            update = updates.get(slot)
            if update is None:
                self._device.unlock([region])
                return
            try:
                update.context.check_behind(self._optimizer)
                shown = self._device.show(update.regions)
                try:
                    storages = dict(zip(update.regions, shown, strict=True))
                    with update.context.again(self._device.device.type, guard=True):
                        self._apply(updates, storages)
                finally:
                    storages.clear()
                    shown.clear()
                    self._device.hide(update.regions)
                self._adopt_new(slot, update)
            except BaseException as error:  # the blocked thread must not wait forever
                # Lost even if the update had not begun: the blocked access may be a write.
                self._lose(update, error, reported=False)
            finally:
                self._device.unlock(update.regions)
            self._end_gradient(slot, update)

    def meet(self, region: int) -> None:
        """Make the pending update of a locked ``region``, on the thread that is about to access it.

        Raises:
            BaseException: what the update raised; the update is lost or stays pending.
        """
        slot = self._store.slot_of(region)
        if slot is None or not (slot in self.by_slot or slot in self._making):
            self._device.unlock([region])
            return
        self.flush(slot)

    def vacate(self, slot: Slot, region: int) -> None:
        """Free ``region`` for a slice's next gradient. If a pending update must still read the last
        one, move that one aside; on devices that cannot, make the update."""
        with self.mutex:
            update = self.by_slot.get(slot)
            if not isinstance(update, SliceUpdate) or update.gradient != region:
                return
            if not self._device.serves:
                self.flush(slot)
            else:
                self.slices.put_aside(slot, update, region)

    def _lose(self, update: Update | SliceUpdate, error: BaseException, *, reported: bool) -> None:
        """Record an interrupted update, and release the memory that it and its error hold."""
        self.failure.set(error, reported=reported)
        if isinstance(update, Update):
            update.release()
        traceback.clear_frames(error.__traceback__)

    def settle(self) -> None:
        """Make every pending update, so that all tensors are those of a finished step.

        Raises:
            StepLostError: a step or load was interrupted, and not all was reloaded since.
        """
        self.failure.check()
        self.flush_all()
        self.failure.check()  # an update may have failed on another thread meanwhile

    @uninterrupted
    def forget(self) -> None:
        """Forget every pending update."""
        with self.mutex:
            for slot in list(self.by_slot):
                update = self.by_slot.pop(slot)
                if self._locks:
                    self._device.unlock(update.regions)
                self._end_gradient(slot, update)

    def end_in_child(self, error: BaseException) -> None:
        """In a forked process: raise ``error`` instead of making updates. The mutex is replaced, as
        the thread that may hold it does not exist there."""
        self._in_child, self.mutex = error, threading.RLock()

    # How updates are made

    def run(self, groups: list[Group], state: MutableMapping[torch.Tensor, Any]) -> None:
        """Run the optimizer's own code over ``groups``, with ``state``; see [Note: stand-ins]."""
        if not any(group["params"] for group in groups):
            return
        beside = [neighbours(group, self._device.device) for group in groups]
        groups = [
            {**group, "params": [*group["params"], *others]}
            for group, others in zip(groups, beside, strict=True)
        ]
        shadow = object.__new__(type(self._optimizer))
        shadow.__dict__.update(self._optimizer.__dict__, param_groups=groups, state=state)
        if not self.scaled:
            for name in OF_SCALER:
                shadow.__dict__.pop(name, None)
        with torch.inference_mode(False), torch.no_grad():
            self.step(shadow)
        for parameter in itertools.chain(*beside):
            state.pop(parameter, None)

    def make(self, updates: _Updates) -> None:
        """Make updates whose regions are not locked: one, or whole ones of the same options."""
        regions = [region for update in updates.values() for region in update.regions]
        self._device.acquire(regions, pin=True)
        try:
            self._apply(updates, {})
        finally:
            self._device.unpin(regions)
        for slot, update in updates.items():
            self._adopt_new(slot, update)
            self._end_gradient(slot, update)

    def _apply(self, updates: _Updates, storages: _Storages) -> None:
        """Make updates on stand-ins for their parameters; see [Note: stand-ins]."""
        whole: dict[Slot, Update] = {}
        for slot, update in updates.items():
            if isinstance(update, SliceUpdate):
                self.slices.apply(slot, update, storages)
            else:
                whole[slot] = update
        found = self._run_on(list(whole.items()), storages)
        for (slot, update), (given, made) in zip(whole.items(), found, strict=True):
            parameter = slot.parameter
            old, states = update.state or {}, update.states
            now = dict.get(states, parameter)  # this thread makes the update: nothing is pending
            if now is None and update.state is None and made:
                now = states[parameter] = {}
            for key, value in made.items():
                is_new = value is not given.get(key)
                if is_new and now is not None and now.get(key) is old.get(key):
                    now[key] = spread_like(parameter, value)

    def run_on(
        self, update: Update, storages: _Storages, changed: Slot | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Run the optimizer's code for ``update`` on a stand-in.

        Args:
            update: the update.
            storages: storages at other addresses, by region.
            changed: slot whose tensors the update changes, for the undo log; or None.

        Returns:
            The state that the stand-in was given, and its state afterwards.
        """
        return self._run_on([(changed, update)], storages)[0]

    def _run_on(
        self, updates: Sequence[tuple[Slot | None, Update]], storages: _Storages
    ) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Run the optimizer's code once for ``updates``, which have the same options; see
        `run_on`."""
        if not updates:
            return []
        owner = self._device.owner
        stay = {region for _, update in updates for region in update.regions}

        def shown(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            value = local(value)
            region = owner(value.untyped_storage())
            if (storage := storages.get(region)) is not None:
                return view_of(storage, value, offset_of(value))
            return plain_alias(value) if region in stay else value

        @unseen
        @torch.no_grad()
        def prepared(update: Update) -> tuple[nn.Parameter, dict[str, Any]]:
            stand_in = nn.Parameter(shown(update.data))
            stand_in.grad = shown(update.gradient)
            return stand_in, {key: shown(value) for key, value in (update.state or {}).items()}

        ready = [prepared(update) for _, update in updates]
        own: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for (changed, update), (stand_in, given) in zip(updates, ready, strict=True):
            if update.state is not None:
                own[stand_in] = dict(given)
            if changed is not None and self.undo_log is not None:
                self.undo_log.keep_tensor(changed, None, update.data, stand_in.detach())
                for key, value in (update.state or {}).items():
                    self.undo_log.keep_tensor(changed, key, value, given[key])
        for _, update in updates:
            update.begun = True
        self.run([{**updates[0][1].group, "params": [one for one, _ in ready]}], own)
        return [(given, own.get(stand_in, {})) for stand_in, given in ready]

    def adopt_state(self, parameter: nn.Parameter, states: dict[torch.Tensor, Any]) -> None:
        """Move the state of ``parameter`` in ``states`` into regions."""
        state = dict.get(states, parameter)
        if state is None or isinstance(self._optimizer, HostOptimizer):
            return  # a HostOptimizer's state stays on the host
        fused = self._store.fused.get(parameter)
        if fused is not None:
            self.slices.rows.adopt_state(fused, state)
        else:
            self._store.adopt_state(self._store.slots[parameter], state)

    def _adopt_new(self, slot: Slot, update: Update | SliceUpdate) -> None:
        """After an update: move new state into regions, and release the tensors it held."""
        if isinstance(update, Update):
            self.adopt_state(slot.parameter, update.states)
            update.release()

    def _end_gradient(self, slot: Slot, update: Update | SliceUpdate) -> None:
        """Discard the gradient of an update that was made or forgotten."""
        if isinstance(update, SliceUpdate):
            self.slices.end(slot, update)
        else:
            self._store.end_gradient(slot)
