"""Updates that wait: made when their parameter is next used, by whoever comes first.

[Note: guards]  The regions of an update that waits are locked: an access by anybody is held back
until `Waiting.serve` has made the update behind its back. Whoever needs the update meanwhile waits
for the mutex: a slot leaves `pending` before its update is made, but `_making` holds it until it
is.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Iterator
from typing import Literal

import torch

from dynoffload.errors import StepLostError
from dynoffload.memory.device import Device
from dynoffload.runtime.adoption.store import Slot, Store
from dynoffload.runtime.interrupts import uninterrupted
from dynoffload.runtime.updates.making import Maker
from dynoffload.runtime.updates.slices import SliceUpdate
from dynoffload.runtime.updates.update import Update


class Waiting:
    """The updates of one optimizer that were put off.

    Args:
        maker: makes them.
        store: its parameters' slots.
        device: holds their regions.
        locks: whether the device holds accesses back; else nothing waits beyond ``step()``.

    Attributes:
        pending: the updates, by their slots, in the order in which they were put off.
        mutex: held by whoever makes or puts off updates.
        behind: updates made because of an unannounced access.
        lost: what cut a step or a load off, or None; a load makes up for it (see `Recovery`).
    """

    def __init__(self, maker: Maker, store: Store, device: Device, *, locks: bool) -> None:
        self._maker, self._store, self._device, self._locks = maker, store, device, locks
        self._making: Slot | None = None
        self._failure: BaseException | None = None  # of an update made behind somebody's back
        self.pending: dict[Slot, Update | SliceUpdate] = {}
        self.mutex = threading.RLock()
        self.behind = 0
        self.lost: BaseException | None = None
        self._made_up: set[str] = set()  # of model and optimizer, what was loaded since
        self._in_child: BaseException | None = None

    def any(self) -> bool:
        """Return whether an update waits or is being made."""
        return bool(self.pending) or self._making is not None

    def add(self, slot: Slot, update: Update | SliceUpdate) -> None:
        """Put ``update`` off."""
        if self._locks:
            self._device.lock(update.regions)
        self.pending[slot] = update

    @contextlib.contextmanager
    def _taken(self, slot: Slot) -> Iterator[Update | SliceUpdate | None]:
        """Take the pending update of ``slot``, if there is one, to make it; wait for whoever is
        making one."""
        if self._in_child is not None:
            raise self._in_child
        with self.mutex:
            before, self._making = self._making, slot
            try:
                yield self.pending.pop(slot, None)
            finally:
                self._making = before

    def flush(self, slot: Slot) -> None:
        """Make the update of ``slot``'s parameter now, if one is pending."""
        if slot in self.pending or self._making is slot:
            self._flush(slot)

    @uninterrupted
    def _flush(self, slot: Slot) -> None:
        # Perhaps in the midst of an evaluation, whose tensors cannot be trained.
        with torch.inference_mode(False), self._taken(slot) as update:
            if update is None:
                return
            if self._locks:
                self._device.unlock(update.regions)
            try:
                with update.modes.again():
                    self._maker.make(slot, update)
            except BaseException as error:
                if update.begun:
                    self._lose(update, error)
                else:  # nothing was touched: the update is still to be made
                    self.pending[slot] = update
                    if self._locks:
                        self._device.lock(update.regions)
                raise

    @uninterrupted
    def flush_all(self) -> None:
        """Make every pending update now, in the order of the parameters."""
        with self.mutex:
            for slot in list(self.pending):
                self.flush(slot)

    def serve(self, region: int) -> None:
        """Make the update that an access to ``region`` waits for; called by the guard's thread.

        The parameter's own addresses stay absent until it is done: somebody sleeps on one. An
        error lets the sleeper go on with the old value; `check` raises it before the next step.
        """
        slot = self._store.slot_of(region)
        if slot is None:
            self._device.unlock([region])
            return
        with self._taken(slot) as update:
            if update is None:
                self._device.unlock([region])
                return
            self.behind += 1
            try:
                self._maker.make_behind(slot, update)
            except BaseException as error:  # the thread that waits must not wait for ever
                self._lose(update, error)
            finally:
                self._device.unlock(update.regions)
            self._maker.end_gradient(slot, update)

    def vacate(self, slot: Slot, region: int) -> None:
        """The gradient of a slice is about to be made in ``region``: an update that still has to
        read the last one there gets it elsewhere."""
        with self.mutex:
            update = self.pending.get(slot)
            if isinstance(update, SliceUpdate) and update.gradient == region:
                self._maker.slices.put_aside(slot, update, region)

    def fail(self, error: BaseException) -> None:
        """A step was cut off by ``error``: what it was to change is half changed."""
        self._failure = error
        self.lose(error)

    def lose(self, error: BaseException) -> None:
        """A step or a load was cut off by ``error``, which was raised: no step until a load."""
        self.lost = error
        self._made_up.clear()

    def make_up(self, part: Literal["model", "optimizer"]) -> None:
        """``part`` was loaded as a whole: a lost step is made up for once both were."""
        self._made_up.add(part)
        if len(self._made_up) == 2:
            self._forgive()

    def _forgive(self) -> None:
        self._failure = self.lost = None
        self._made_up.clear()

    def _lose(self, update: Update | SliceUpdate, error: BaseException) -> None:
        """An update was cut off: note it, and let go of the memory that it and its error hold."""
        self.fail(error)
        if isinstance(update, Update):
            del update.gradient, update.data
            update.state = None
        traceback.clear_frames(error.__traceback__)

    def settle(self) -> None:
        """Make every pending update, so that all tensors are those of a finished step.

        Raises:
            StepLostError: a step, or a load, was cut off, and nothing was loaded since.
        """
        self.flush_all()
        if self.lost is not None:
            raise StepLostError(
                "a step or a load was cut off, so this is no state to save: load the last "
                "checkpoint first"
            ) from self.lost

    def abandon(self) -> None:
        """Forget every pending update and any loss: all tensors are about to be replaced."""
        self.forget()
        self._forgive()

    @uninterrupted
    def forget(self) -> None:
        """Forget every pending update."""
        with self.mutex:
            for slot in list(self.pending):
                update = self.pending.pop(slot)
                if self._locks:
                    self._device.unlock(update.regions)
                self._maker.end_gradient(slot, update)

    def check_step(self) -> None:
        """Admit another step, unless one was lost and nothing was loaded since.

        Raises:
            StepLostError: naming the remedy, from what cut that step off.
        """
        self._refuse(self.lost)

    def end_in_child(self, error: BaseException) -> None:
        """In a forked process: raise ``error`` instead of making an update. Nobody is left there
        who could let go of the mutex."""
        self._in_child, self.mutex = error, threading.RLock()

    def check(self) -> None:
        """Raise what went wrong in an update made behind somebody's back, unless it was told.

        Raises:
            StepLostError: naming the remedy, from the first error.
        """
        self._refuse(self._failure)

    def _refuse(self, error: BaseException | None) -> None:
        self._failure = None
        if error is not None:
            raise StepLostError(
                "an optimizer update that was put off failed or was cut off, and its parameter "
                "lacks it: the step is lost; go on from the last checkpoint, by session.load(), or "
                "by load_state_dict() of the whole model and of the optimizer"
            ) from error
