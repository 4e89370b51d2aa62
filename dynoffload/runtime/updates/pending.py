"""Updates that wait: made when their parameter is next used, by whoever comes first.

[Note: guards]  The regions of an update that waits are locked. The pager holds an access back until
the guard's thread has made the update at other addresses (`PendingUpdates.serve`); on an
accelerator, whoever is about to make an access makes the update first (`PendingUpdates.meet`). A
slot leaves `by_slot` before its update is made, but `_making` holds it until it is: whoever needs
the update meanwhile waits for the mutex.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Iterator

import torch

from dynoffload.runtime.adoption.slots import Slot
from dynoffload.runtime.interrupts import uninterrupted
from dynoffload.runtime.updates.failure import note_lost
from dynoffload.runtime.updates.runner import UpdateRunner
from dynoffload.runtime.updates.slices import SliceUpdate
from dynoffload.runtime.updates.update import PagedOptimizer, Update


class PendingUpdates:
    """The updates of one optimizer that wait.

    Args:
        runner: makes them.
        paged: the optimizer and its tensors.
        locks: whether the device holds accesses back; else nothing waits beyond ``step()``.

    Attributes:
        by_slot: the updates, in the order in which they were deferred.
        mutex: held by whoever makes or defers updates.
        failure: where a step that was cut off is noted.
    """

    def __init__(self, runner: UpdateRunner, paged: PagedOptimizer, *, locks: bool) -> None:
        self._runner, self._store, self._device = runner, paged.store, paged.device
        self._locks = locks
        self._making: Slot | None = None
        self.by_slot: dict[Slot, Update | SliceUpdate] = {}
        self.mutex = threading.RLock()
        self.failure = paged.failure
        self._in_child: BaseException | None = None

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
            self._make(slot)
        except BaseException as error:
            if self.failure.error is error and not self.failure.within:
                self.failure.report_undone()
                note_lost(error)
            raise

    @uninterrupted
    def _make(self, slot: Slot) -> None:
        # Perhaps in the midst of an evaluation, whose tensors cannot be trained.
        with torch.inference_mode(False), self._taken(slot) as update:
            if update is None:
                return
            if self._locks:
                self._device.unlock(update.regions)
            try:
                with update.context.again(self._device.device.type):
                    self._runner.make(slot, update)
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
        """Make the update that an access to ``region`` waits for; called by the guard's thread.

        The parameter's own addresses stay absent until it is done: somebody sleeps on one. An
        error lets the sleeper go on with the old value; the forward that he is in raises as it
        ends, or else what comes next: a forward, a step, a copy of the state.
        """
        slot = self._store.slot_of(region)
        if slot is None:
            self._device.unlock([region])
            return
        with self._taken(slot) as update:
            if update is None:
                self._device.unlock([region])
                return
            try:
                self._runner.make_behind(slot, update)
            except BaseException as error:  # the thread that waits must not wait for ever
                # Lost also if it had not begun: the access that goes on may be a write.
                self._lose(update, error, reported=False)
            finally:
                self._device.unlock(update.regions)
            self._runner.end_gradient(slot, update)

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
                self._runner.slices.put_aside(slot, update, region)

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
                self._runner.end_gradient(slot, update)

    def end_in_child(self, error: BaseException) -> None:
        """In a forked process: raise ``error`` instead of making an update. Nobody is left there
        who could let go of the mutex."""
        self._in_child, self.mutex = error, threading.RLock()
