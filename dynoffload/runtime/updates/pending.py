"""Updates of one optimizer: made at once, or put off until their parameter is next used.

[Note: guards]  The regions of an update that waits are locked. The pager holds an access back until
the guard's thread has made the update at other addresses (`PendingUpdates.serve`); on an
accelerator, whoever is about to make an access makes the update first (`PendingUpdates.meet`). A
slot leaves `by_slot` before its update is made, but `_making` holds it until it is: whoever needs
the update meanwhile waits for the mutex.

[Note: stand-ins]  A deferred update may be made on the guard's thread while the user's thread runs
on. So it is made by a shadow of the optimizer, with groups and state of its own, on a stand-in for
the parameter, over the same memory or over other addresses of it: nothing that the user's thread
may be reading is changed meanwhile. What the user replaces while an update waits was replaced after
the update: it is made on the old tensors, and the new ones stay.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from dynoffload.distributed.sharded import spread_like
from dynoffload.host_optimizer import HostOptimizer
from dynoffload.memory.local import local
from dynoffload.memory.pager import Pager
from dynoffload.runtime.adoption.slots import Slot
from dynoffload.runtime.adoption.store import offset_of, view_of
from dynoffload.runtime.interrupts import uninterrupted
from dynoffload.runtime.unseen import unseen
from dynoffload.runtime.updates.failure import note
from dynoffload.runtime.updates.slices import SliceUpdate, SliceUpdates
from dynoffload.runtime.updates.undo_log import UndoLog
from dynoffload.runtime.updates.update import Group, PagedOptimizer, Update, neighbours

OF_SCALER = ("grad_scale", "found_inf")
"""What a `GradScaler` gives an optimizer for one step."""

_Storages = Mapping[int, torch.UntypedStorage]
"""Where regions are shown; the others are at their own addresses."""


class PendingUpdates:
    """Makes the updates of one optimizer, and holds those that wait.

    Args:
        paged: the optimizer and its tensors.
        locks: whether the device holds accesses back; else nothing waits beyond ``step()``.

    Attributes:
        by_slot: the updates that wait, in the order in which they were deferred.
        mutex: held by whoever makes or defers updates.
        failure: where a step that was cut off is noted.
        slices: makes the updates of slices.
        undo_log: what updates have overwritten, or None.
        scaled: whether the updates that are made are those of a scaled step.
        step: the optimizer's own ``step``, without hooks.
    """

    def __init__(self, paged: PagedOptimizer, *, locks: bool) -> None:
        self._optimizer, self._store, self._device = paged.optimizer, paged.store, paged.device
        self._locks = locks
        self._making: Slot | None = None
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

    # What waits

    def any(self) -> bool:
        """Return whether an update waits or is being made."""
        return bool(self.by_slot) or self._making is not None

    def add(self, slot: Slot, update: Update | SliceUpdate) -> None:
        """Defer ``update``."""
        if self._locks:
            self._device.lock(update.regions)
        self.by_slot[slot] = update

    @contextlib.contextmanager
    def _taken(self, slot: Slot) -> Iterator[Update | SliceUpdate | None]:
        """Take the update of ``slot``, if one waits, to make it; wait for whoever is making one."""
        if self._in_child is not None:
            raise self._in_child
        with self.mutex:
            before, self._making = self._making, slot
            try:
                yield self.by_slot.pop(slot, None)
            finally:
                self._making = before

    def flush(self, slot: Slot) -> None:
        """Make the update of ``slot``'s parameter now, if one waits."""
        if not (slot in self.by_slot or self._making is slot):
            return
        try:
            self._flush(slot)
        except BaseException as error:
            if self.failure.error is error and not self.failure.within:
                self.failure.report_undone()
                note(error, undone=False)
            raise

    @uninterrupted
    def _flush(self, slot: Slot) -> None:
        # Perhaps in the midst of an evaluation, whose tensors cannot be trained.
        with torch.inference_mode(False), self._taken(slot) as update:
            if update is None:
                return
            if self._locks:
                self._device.unlock(update.regions)
            try:
                with update.context.again(self._device.device.type):
                    self.make(slot, update)
            except BaseException as error:
                if update.begun:
                    self._lose(update, error, reported=True)
                else:  # nothing was touched: the update is still to be made
                    self.add(slot, update)
                raise

    @uninterrupted
    def flush_all(self) -> None:
        """Make every update that waits, in the order of the parameters."""
        with self.mutex:
            for slot in list(self.by_slot):
                self.flush(slot)

    def serve(self, region: int) -> None:
        """Make the update that an access to ``region`` waits for, at other addresses; called by the
        guard's thread.

        The parameter's own addresses stay absent until it is done: somebody sleeps on one. An
        error lets the sleeper go on with the old value; the forward that he is in raises as it
        ends, or else what comes next: a forward, a step, a copy of the state.
        """
        assert isinstance(self._device, Pager)
        slot = self._store.slot_of(region)
        if slot is None:
            self._device.unlock([region])
            return
        with self._taken(slot) as update:
            if update is None:
                self._device.unlock([region])
                return
            try:
                update.context.check_behind(self._optimizer)
                shown = self._device.show(update.regions)
                try:
                    storages = dict(zip(update.regions, shown, strict=True))
                    with update.context.again(self._device.device.type, guard=True):
                        self._apply(slot, update, storages)
                finally:
                    storages.clear()
                    shown.clear()
                    self._device.hide(update.regions)
                self._adopt_new(slot, update)
            except BaseException as error:  # the thread that waits must not wait for ever
                # Lost also if it had not begun: the access that goes on may be a write.
                self._lose(update, error, reported=False)
            finally:
                self._device.unlock(update.regions)
            self._end_gradient(slot, update)

    def meet(self, region: int) -> None:
        """Somebody is about to use a locked ``region``: make the update that it waits for, in his
        thread.

        Raises:
            BaseException: what the update has raised; it is lost, or still to be made.
        """
        slot = self._store.slot_of(region)
        if slot is None or not (slot in self.by_slot or self._making is slot):
            self._device.unlock([region])
            return
        self.flush(slot)

    def vacate(self, slot: Slot, region: int) -> None:
        """The gradient of a slice is about to be made in ``region``: an update that still has to
        read the last one there gets it elsewhere, or is made where nothing can be put aside."""
        with self.mutex:
            update = self.by_slot.get(slot)
            if not isinstance(update, SliceUpdate) or update.gradient != region:
                return
            if not self._device.serves:
                self.flush(slot)
            else:
                self.slices.put_aside(slot, update, region)

    def _lose(self, update: Update | SliceUpdate, error: BaseException, *, reported: bool) -> None:
        """An update was cut off: note it, and let go of the memory that it and its error hold."""
        self.failure.set(error, reported=reported)
        if isinstance(update, Update):
            del update.gradient, update.data
            update.state = None
        traceback.clear_frames(error.__traceback__)

    def settle(self) -> None:
        """Make every update that waits, so that all tensors are those of a finished step.

        Raises:
            StepLostError: a step, or a load, was cut off, and nothing was loaded since.
        """
        self.failure.check()
        self.flush_all()
        self.failure.check()  # which may have happened behind somebody's back meanwhile

    @uninterrupted
    def forget(self) -> None:
        """Forget every update that waits."""
        with self.mutex:
            for slot in list(self.by_slot):
                update = self.by_slot.pop(slot)
                if self._locks:
                    self._device.unlock(update.regions)
                self._end_gradient(slot, update)

    def end_in_child(self, error: BaseException) -> None:
        """In a forked process: raise ``error`` instead of making an update. Nobody is left there
        who could let go of the mutex."""
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

    def make(self, slot: Slot, update: Update | SliceUpdate) -> None:
        """Make an update whose regions are not locked."""
        self._device.acquire(update.regions, pin=True)
        try:
            self._apply(slot, update, {})
        finally:
            self._device.unpin(update.regions)
        self._adopt_new(slot, update)
        self._end_gradient(slot, update)

    def _apply(self, slot: Slot, update: Update | SliceUpdate, storages: _Storages) -> None:
        """Make an update on a stand-in for its parameter; see [Note: stand-ins]."""
        if isinstance(update, SliceUpdate):
            self.slices.apply(slot, update, storages)
            return
        parameter = slot.parameter
        given, made = self.run_on(update, storages, slot)
        old, states = update.state or {}, update.states
        now = states.get(parameter)
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
            storages: where regions are shown.
            changed: the user's tensors that it changes, for the undo log.

        Returns:
            The state that the stand-in was given, and what the optimizer left there.
        """
        owner = self._device.owner

        def shown(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            value = local(value)
            storage = storages.get(owner(value.untyped_storage()))
            return value if storage is None else view_of(storage, value, offset_of(value))

        @unseen
        @torch.no_grad()
        def prepared() -> tuple[nn.Parameter, dict[str, Any]]:
            stand_in = nn.Parameter(shown(update.data))
            stand_in.grad = shown(update.gradient)
            return stand_in, {key: shown(value) for key, value in (update.state or {}).items()}

        stand_in, given = prepared()
        own: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        if update.state is not None:
            own[stand_in] = dict(given)
        if changed is not None and self.undo_log is not None:
            self.undo_log.keep_tensor(changed, None, update.data, stand_in.detach())
            for key, value in (update.state or {}).items():
                self.undo_log.keep_tensor(changed, key, value, given[key])
        update.begun = True
        self.run([{**update.group, "params": [stand_in]}], own)
        return given, own.get(stand_in, {})

    def adopt_state(self, parameter: nn.Parameter, states: Mapping[torch.Tensor, Any]) -> None:
        """Move into regions what ``states`` has for ``parameter``."""
        state = states.get(parameter)
        if state is None or isinstance(self._optimizer, HostOptimizer):
            return  # the latter's is on the host, and stays there
        fused = self._store.fused.get(parameter)
        if fused is not None:
            self.slices.rows.adopt_state(fused, state)
        else:
            self._store.adopt_state(self._store.slots[parameter], state)

    def _adopt_new(self, slot: Slot, update: Update | SliceUpdate) -> None:
        """An update was made: move state that is new into regions, let go of what it held."""
        if isinstance(update, Update):
            self.adopt_state(slot.parameter, update.states)
            del update.gradient, update.data

    def _end_gradient(self, slot: Slot, update: Update | SliceUpdate) -> None:
        """An update was made, or is forgotten: its gradient may go."""
        if isinstance(update, SliceUpdate):
            self.slices.end(slot, update)
        else:
            self._store.end_gradient(slot)
