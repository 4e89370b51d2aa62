"""Deferred optimizer: `step()` notes each parameter's update, which is made at its next use.

A plain ``optimizer.step()`` needs all parameters, gradients and state at once. Here it splits into
one update per paged parameter. The optimizer's own code makes it on a group of this parameter
alone, with the hyperparameters as of ``step()``. For optimizers of `torch.optim` with per-parameter
state, the result equals the whole step bit for bit.

[Note: deferral]  On a guarded device an update is deferred until the parameter is next used: by a
module's forward, or by any access to it, its gradient or its state. Its regions are locked, so the
device blocks such accesses until `PendingUpdates` has made the update. On other devices updates are
made inside ``step()``; so are updates of tensors with which user code replaced adopted ones.
A parameter's version increases at ``step()``, so a backward that still needs the old value raises
as in plain PyTorch.

[Note: interrupts]  Ctrl-C in the middle could leave regions locked for an unrecorded update, a
partial update, or an optimizer without parameters. So signals are delayed until the operation is
complete; see `interrupts`.
"""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dynoffload.host_optimizer import HostOptimizer
from dynoffload.memory.device import Device
from dynoffload.runtime.adoption.fused import FusedStore
from dynoffload.runtime.adoption.store import Store
from dynoffload.runtime.interrupts import admit, hold, uninterrupted
from dynoffload.runtime.updates.failure import StepFailure
from dynoffload.runtime.updates.in_backward import InBackward
from dynoffload.runtime.updates.observed_state import ObservedState, Order
from dynoffload.runtime.updates.pending import PendingUpdates
from dynoffload.runtime.updates.step_commit import StepCommit
from dynoffload.runtime.updates.torch_context import TorchContext
from dynoffload.runtime.updates.undo_log import UndoLog
from dynoffload.runtime.updates.update import Group, PagedOptimizer, can_split, check_optimizer
from dynoffload.runtime.updates.whole_steps import (
    WholeSteps,
    closure_of,
    warn_of_others,
    with_closure,
)

logger = logging.getLogger(__name__)

_REGISTER = "register_step_pre_hook"


class DeferredOptimizer:
    """Splits the steps of one optimizer into updates, and defers those that may wait.

    Args:
        optimizer: the user's optimizer.
        store: its parameters' slots.
        rows: rows of the parameters that are paged by slices.
        device: holds their regions.
        failure: records a partially applied step.
        defer: whether updates may be deferred; needs a guarded device.
        in_backward: whether updates are made in backward.
        log: keeps what a step overwrites, so that an interrupted step is undone; or None. With a
            log, a step's updates are all made before the next step's.
        check: called before each user ``step()``; may raise to refuse it.
        on_whole: called before the optimizer's own code runs over all parameters at once.
        on_step: called after each user ``step()``.

    Attributes:
        pending: makes updates, and holds the deferred ones.
        splits: whether steps are split into updates.
        in_backward: makes updates in backward, or None.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        store: Store,
        rows: FusedStore,
        device: Device,
        failure: StepFailure,
        *,
        defer: bool,
        in_backward: bool,
        log: UndoLog | None,
        check: Callable[[], None],
        on_whole: Callable[[], None],
        on_step: Callable[[], None],
    ) -> None:
        check_optimizer(optimizer)
        self.optimizer = optimizer
        self._store, self._device = store, device
        self._defer = defer and device.guarded
        self._check, self._on_step = check, on_step
        self._groups: list[Group] | None = None
        paged = PagedOptimizer(optimizer, store, rows, device, failure)
        self.pending = PendingUpdates(paged, locks=self._defer)
        self.splits = can_split(optimizer)
        if log is not None:
            self.pending.undo_log, failure.undo = log, self._undo
        self._commit = StepCommit(paged, self.pending, defer=self._defer)
        self.in_backward: InBackward | None = None
        if in_backward:
            self.in_backward = InBackward(
                optimizer, device.device.type, self._commit, self.pending.failure
            )
        self._signature = inspect.signature(self.pending.step)
        self._observe()
        before = optimizer.register_step_pre_hook(self._before)
        after = optimizer.register_step_post_hook(self._after)
        first = cast(OrderedDict[int, Any], optimizer._optimizer_step_post_hooks)
        first.move_to_end(after.id, last=False)
        self._register = getattr(optimizer, _REGISTER)
        optimizer.__dict__[_REGISTER] = partial(self._register_before, before.id)
        self._handles = [
            before,
            after,
            optimizer.register_state_dict_pre_hook(lambda _: self.settle()),
            optimizer.register_load_state_dict_pre_hook(lambda _, __: self.begin_load()),
            optimizer.register_load_state_dict_post_hook(lambda _: self._loaded()),
            warn_of_others(optimizer, lambda parameter: parameter in store.slots),
        ]
        self._whole: WholeSteps | None = None
        if not self.splits and not isinstance(optimizer, HostOptimizer):
            self._whole = WholeSteps(optimizer, on_whole, self._end_step)
            self._handles += self._whole.handles

    def _observe(self) -> None:
        state = self.optimizer.state
        if self._defer and not isinstance(state, ObservedState):
            self.pending.flush_all()  # into the old mapping, which the new one may wrap
            self.optimizer.state = ObservedState(state, self._look)

    def _look(self, parameter: torch.Tensor | None) -> None:
        if parameter is None:
            with self.pending.mutex:
                self.pending.flush_all()
                self._commit.order.restore(self.optimizer.state)
        if not self.pending.any():
            return
        slot = self._store.slots.get(parameter)  # type: ignore[call-overload]
        if slot is not None:  # a fused parameter's unguarded state is always up to date
            self.pending.flush(slot)

    def settle(self) -> None:
        """Make every pending update, so that all tensors are those of a finished step.

        Raises:
            StepLostError: a step or load was interrupted, and not all was reloaded since.
            ConfigError: backward has made updates of a step that is not finished.
        """
        self.pending.failure.check()
        if self.in_backward is not None:
            self.in_backward.check(reads=True)
        self.pending.settle()

    # Undoing and loading

    @uninterrupted
    def _undo(self) -> bool:
        log, failure = self.pending.undo_log, self.pending.failure
        if log is None or failure.within or not log.any():
            return False
        kind = self._device.device.type
        with self.pending.mutex, TorchContext.now().again(kind):
            self.pending.forget()
            try:
                log.undo()
            except Exception as error:
                logger.warning("a step that was cut off could not be undone: %s", str(error))
                return False
            failure.forgive()
        logger.warning("a step that was cut off is undone")
        return True

    def forget_undo(self) -> None:
        """Clear the undo log: something other than a step changes the model or optimizer."""
        if self.pending.undo_log is not None:
            self.pending.undo_log.forget()

    def begin_load(self) -> None:
        """Prepare for loading the optimizer, or the model after a lost step."""
        failure = self.pending.failure
        if not failure or failure.undo():
            self.pending.flush_all()
        else:  # pending updates are of the lost step or earlier, and could fail again
            self.pending.forget()
        self._forget_step()

    def _forget_step(self) -> None:
        self.forget_undo()
        if self.in_backward is not None:
            self.in_backward.forget()

    def _loaded(self) -> None:
        self._commit.order = Order()
        self._observe()
        self.adopt_all()
        self.pending.failure.make_up("optimizer")

    @uninterrupted
    def abandon(self) -> None:
        """Forget every pending update and any failure: all tensors are about to be replaced."""
        with self.pending.mutex:
            self._forget_step()
            self.pending.forget()
            self.pending.failure.forgive()

    # The user's step()

    def _register_before(self, ours: int, hook: Callable[..., Any]) -> RemovableHandle:
        """Register a user step pre-hook so that it runs before ours.

        Our hooks run last before and first after the optimizer's own code. Between them the
        optimizer has no work left, and its groups have no parameters.
        """
        handle = cast(RemovableHandle, self._register(hook))
        order = cast(OrderedDict[int, Any], self.optimizer._optimizer_step_pre_hooks)
        order.move_to_end(ours)
        return handle

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self._whole is not None:
            return self._whole.begin(args, kwargs)
        if not self.splits:
            return None
        self.pending.failure.check()
        self._check()
        self._observe()  # user code may have replaced the state
        self._signature.bind(*args, **kwargs)  # raises on invalid arguments, as step() would
        closure = closure_of(args, kwargs)
        answer = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            answer = with_closure(args, kwargs, lambda: loss)
        self._make_step()
        return answer

    @uninterrupted
    def _make_step(self) -> None:
        if self.in_backward is None:
            self._commit.make()
        else:
            self.in_backward.begin_step()
            self.in_backward.make_step()
        # Give the optimizer's own code nothing to do, and delay signals until groups are restored.
        hold()
        self._groups = self.optimizer.param_groups
        self.optimizer.param_groups = [{**group, "params": []} for group in self._groups]

    @uninterrupted
    def _after(self, *args: Any) -> None:
        self.restore_groups()
        self._end_step()

    @uninterrupted
    def _end_step(self) -> None:
        if self._whole is not None:
            self._whole.end()
        if not self.splits:
            self.adopt_all()
        self._store.release_orphans()
        for fused in self._store.fused.values():
            homes = {slot.home for slot in fused.slots if slot.home is not None}
            self.pending.slices.rows.release_rows(fused, homes)
        if self.in_backward is not None:
            self.in_backward.end_step()
        self._on_step()

    def restore_groups(self) -> None:
        """Restore the optimizer's groups, after a step, or after a forward if a step failed between
        our hooks."""
        if self._groups is not None:
            self.optimizer.param_groups = self._groups
            self._groups = None
            admit()

    def adopt_all(self) -> None:
        """Adopt all existing state, after a load or a step that could not be split."""
        for fused in self._store.fused.values():
            self._commit.flush_displaced(fused)
        for parameter in (*self._store.slots, *self._store.fused):
            if parameter in self.optimizer.state:
                self.pending.adopt_state(parameter, self.optimizer.state)

    def close(self) -> None:
        """Make all pending updates, or forget them if a step was lost, and release the optimizer.

        Raises:
            StepLostError: a step was lost and this was not reported yet, or it was undone.
        """
        failure = self.pending.failure
        try:
            self.restore_groups()
            self.optimizer.__dict__.pop(_REGISTER, None)
            if self.in_backward is not None:
                self.in_backward.close()
            for handle in self._handles:
                handle.remove()
            if not failure or failure.undo():
                self.pending.flush_all()
            failure.report()
        except BaseException as error:
            if failure or self.pending.any():  # otherwise it is already undone
                failure.set(error)
                failure.report_undone()
            raise
        finally:
            self.pending.forget()  # otherwise reads of those parameters would block forever
            self.forget_undo()
            self.pending.undo_log = None
            state = self.optimizer.state
            self._commit.order.restore(state)
            if isinstance(state, ObservedState):
                self.optimizer.state = state.before()
