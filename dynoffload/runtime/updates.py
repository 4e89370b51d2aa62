"""Optimizer steps without a barrier: each paged parameter's update waits for its next use.

A stock ``optimizer.step()`` would need all parameters, gradients and state at once. Here it splits
into one sub-step per paged parameter, made by the optimizer's own code on a group that holds this
parameter alone, with the hyperparameters as they were at ``step()``. For the optimizers of
`torch.optim` whose state belongs to parameters, the bits are those of the whole step.

[Note: deferral]  On a guarded device the sub-step of a paged parameter is put off until the
parameter is next used: a module's forward, or any other access to it, its gradient or its state,
which the device holds back (the regions are locked) until `Updates.serve` has made the update
behind its back, under other addresses. Elsewhere sub-steps run inside ``step()``.

[Note: stand-ins]  A put-off update may be made on the guard's thread while the user's thread runs
on. So it is made by a shadow of the optimizer, with groups and state of its own, on a stand-in for
the parameter, over the same memory or over what shows it elsewhere; nothing that the user's thread
may be reading is changed for the time being. Whoever needs the update meanwhile waits for the
mutex: a slot leaves `pending` before its update is made, but `_making` holds it until it is.

Deferral is only for what the device guards: where the user has put other tensors in the place of
adopted ones (``p.grad = mine``, ``p.data = mine``), the sub-step runs inside ``step()`` too. What
a put-off update will change counts as changed at once, so that a backward which still needs the
old value raises as it does in plain PyTorch. What the user replaces while an update waits was
replaced after the update: it is made on the old tensors, and the new ones stay.

[Note: interrupts]  Ctrl-C in the middle would leave regions locked for an update that is not noted,
an update half made, or an optimizer without parameters. So signals wait until what was begun is
done; see `interrupts`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import traceback
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from dynoffload.errors import StepLostError
from dynoffload.memory.device import Device
from dynoffload.runtime.drafts import Drafts
from dynoffload.runtime.fused import Fused, FusedStore
from dynoffload.runtime.held import are_shared
from dynoffload.runtime.interrupts import admit, hold, uninterrupted
from dynoffload.runtime.modes import Modes, may_wait
from dynoffload.runtime.slice_updates import MOST_STEPS, SliceUpdate, SliceUpdates, Step
from dynoffload.runtime.store import Slot, Store, offset_of, view_of
from dynoffload.runtime.update import Group, Update, check_optimizer, snapshot
from dynoffload.runtime.watched import WatchedState

logger = logging.getLogger(__name__)


_OF_SCALER = ("grad_scale", "found_inf")  # what a `GradScaler` gives an optimizer for one step


def can_split(optimizer: Optimizer) -> bool:
    """Return whether the updates of ``optimizer`` are known to be made one by one like together."""
    return type(optimizer).__module__.startswith("torch.optim")


def _without_autocast() -> contextlib.AbstractContextManager[Any]:
    """Turn autocast off where it is on.

    Only there: to leave its block takes the lock of its cache, which may be held by the thread that
    casts the very weight whose update is being made.
    """
    if torch.is_autocast_enabled("cpu"):
        return torch.autocast("cpu", enabled=False)
    return contextlib.nullcontext()


def _any_sparse(groups: Iterable[Group]) -> bool:
    gradients = (parameter.grad for group in groups for parameter in group["params"])
    return any(g is not None and g.layout is not torch.strided for g in gradients)


class Updates:
    """Splits, defers and makes the updates of one optimizer.

    Args:
        optimizer: the user's.
        store: its parameters' slots.
        rows: the rows of those that are paged by slices.
        device: holds their regions.
        defer: put updates off; needs a guarded device.
        on_step: called after each ``step()`` of the user.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        store: Store,
        rows: FusedStore,
        device: Device,
        *,
        defer: bool,
        on_step: Callable[[], None],
    ) -> None:
        check_optimizer(optimizer)
        self.optimizer = optimizer
        self._store = store
        self._device = device
        self._defer = defer and device.guarded
        self._on_step = on_step
        self._mutex = threading.RLock()
        self._making: Slot | None = None
        self._groups: list[Group] | None = None
        self.pending: dict[Slot, Update | SliceUpdate] = {}
        self._slices = SliceUpdates(optimizer, store, rows, device, self._run)
        self.drafts: Drafts | None = None  # only of an optimizer that `splits`
        self._scaled = False  # whether the updates that are made are those of a scaled step
        self._holds = False  # whether signals wait until the step is over
        self._begun = False  # whether a step has changed something and is not over
        self.behind = 0  # updates made because of an unannounced access
        self._failure: BaseException | None = None  # of an update made behind somebody's back
        self.lost: BaseException | None = None  # what cut a step off; a load makes up for it
        step = type(optimizer).step
        self._step: Callable[..., Any] = (
            step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
        )
        self.splits = can_split(optimizer)
        if not self.splits:
            logger.warning(
                "%s is not one of torch.optim: its step runs whole, and its state pages on demand",
                type(optimizer).__name__,
            )
        self._watch()
        self._pre = optimizer.register_step_pre_hook(self._before)
        self._post = optimizer.register_step_post_hook(self._after)
        self.keep_order()
        self._handles = [
            self._pre,
            self._post,
            optimizer.register_state_dict_pre_hook(lambda _: self.flush_all()),
            optimizer.register_load_state_dict_pre_hook(lambda _, __: self.flush_all()),
            optimizer.register_load_state_dict_post_hook(lambda _: self._loaded()),
        ]

    def _watch(self) -> None:
        state = self.optimizer.state
        if self._defer and not isinstance(state, WatchedState):
            self.optimizer.state = WatchedState(state, self._look)

    def _look(self, parameter: torch.Tensor | None) -> None:
        if not self.pending and self._making is None:
            return
        if parameter is None:
            self.flush_all()
            return
        slot = self._store.slots.get(parameter)  # type: ignore[call-overload]
        if slot is not None:  # of a fused parameter, what is not guarded is up to date
            self.flush(slot)

    def _loaded(self) -> None:
        self._watch()
        self.adopt_all()

    # The user's step()

    def keep_order(self) -> None:
        """Run after all step pre-hooks and before all step post-hooks of the user's.

        Between the two the optimizer has nothing left to do, and shows no parameters.
        """
        self._restore_groups()  # a hook that ran after ours, registered just before, has failed
        before = cast(OrderedDict[int, Any], self.optimizer._optimizer_step_pre_hooks)
        if next(reversed(before), None) != self._pre.id:
            before.move_to_end(self._pre.id)
        after = cast(OrderedDict[int, Any], self.optimizer._optimizer_step_post_hooks)
        if next(iter(after), None) != self._post.id:
            after.move_to_end(self._post.id, last=False)

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self.splits:
            return None
        self.check()
        self._restore_groups()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        answer = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            rest = {key: value for key, value in kwargs.items() if key != "closure"}
            answer = ((args[0], lambda: loss, *args[2:]), rest)
        self._commit(optimizer)
        return answer

    @uninterrupted
    def _commit(self, optimizer: Optimizer) -> None:
        """Make or put off all updates of a step; one under a `GradScaler` makes all at once."""
        scaled = any(getattr(optimizer, name, None) is not None for name in _OF_SCALER)
        with self._mutex:
            if self.drafts is not None and (scaled or _any_sparse(optimizer.param_groups)):
                self.drafts.drop_all()  # or the step may fail, with nothing changed
            if scaled:
                self.flush_all()  # of earlier steps, which the scaler has no part in
            self._flush_used(optimizer.param_groups)
            self._scaled = scaled
            try:
                resident, paged, shared, fused = self._split(optimizer.param_groups)
                self._step_resident(resident, bool(paged or fused))
                for parameter in shared:
                    self._adopt_state(parameter)
                self._put_off(paged)
                for one, hyper in fused:
                    self._put_off_slices(one, hyper)
                self._begun = False
                if scaled or not self._defer:
                    self.flush_all()
            except BaseException as error:
                if self._begun:
                    self._failure = self.lost = error
                raise
            finally:
                self._begun = self._scaled = False
        # The optimizer's own code now finds nothing left to do. Nobody else may find that.
        self._holds = next(reversed(optimizer._optimizer_step_pre_hooks), None) == self._pre.id
        if self._holds:  # else another hook of the user's runs first, and may raise
            hold()
        self._groups = optimizer.param_groups
        optimizer.param_groups = [{**group, "params": []} for group in self._groups]

    @uninterrupted
    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore_groups()
        if not self.splits:
            self.adopt_all()
        if self.drafts is not None:
            self.drafts.end_step()
        self._store.release_orphans()
        for fused in self._store.fused.values():
            owed = {slot.owed for slot in fused.slots if slot.owed is not None}
            self._slices.rows.release_rows(fused, owed)
        self._on_step()

    def _restore_groups(self) -> None:
        if self._groups is not None:
            self.optimizer.param_groups = self._groups
            self._groups = None
            if self._holds:
                admit()

    def _flush_used(self, groups: list[Group]) -> None:
        """Make the pending updates that a step over ``groups`` meets: its own parameters', and
        those whose memory the user has put in the place of something that it reads."""
        owner, slot_of = self._device.owner, self._store.slot_of
        used = [(p, group) for group in groups for p in group["params"] if p.grad is not None]
        for parameter, group in used:
            fused = self._store.fused.get(parameter)
            if fused is not None:
                self._slices.rows.take_back(fused)
                if self._slices.splits(fused, group):
                    continue  # each slice's updates are made in order
            for slot in self._store.slots_of(parameter):
                self.flush(slot)
            if not self.pending:
                continue
            state = dict.get(self.optimizer.state, parameter, {})
            for tensor in (parameter, parameter.grad, *state.values()):
                if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                    lender = slot_of(owner(tensor.data_ptr()))
                    if lender is not None:
                        for slot in self._store.slots_of(lender.parameter):
                            self.flush(slot)

    def _split(
        self, groups: list[Group]
    ) -> tuple[
        list[Group], list[tuple[Slot, Group]], list[nn.Parameter], list[tuple[Fused, Group]]
    ]:
        """Return what is updated at once, as groups; what can be put off; of the former the paged
        parameters, whose memory is also another's or no longer ours; and those that are updated by
        slices."""
        resident: list[Group] = []
        paged: list[tuple[Slot, Group]] = []
        shared: list[nn.Parameter] = []
        sliced: list[tuple[Fused, Group]] = []
        for group in groups:
            hyper = snapshot(group)
            small = []
            for parameter in group["params"]:
                slot = self._store.slots.get(parameter)
                fused = self._store.fused.get(parameter)
                if fused is not None:
                    if parameter.grad is None:
                        continue
                    if self._slices.splits(fused, hyper):
                        sliced.append((fused, hyper))
                    else:
                        small.append(parameter)
                        shared.append(parameter)
                elif slot is None:
                    small.append(parameter)
                elif parameter.grad is not None:
                    if self.drafts is not None and self.drafts.has(slot):
                        self._begun = True
                        if self.drafts.take(slot, hyper):
                            continue
                    strided = parameter.grad.layout is torch.strided
                    if slot.shared or not strided or not self._store.take_back(slot):
                        small.append(parameter)
                        shared.append(parameter)
                    else:
                        self._store.adopt_gradient(slot)
                        paged.append((slot, hyper))
            resident.append({**hyper, "params": small})
        return resident, paged, shared, sliced

    def _step_resident(self, groups: list[Group], others: bool) -> None:
        """Make the updates of what stays in memory; where one fails, ``others`` are not made."""
        parameters = [parameter for group in groups for parameter in group["params"]]
        versions = [parameter._version for parameter in parameters]
        try:
            self._run(groups, self.optimizer.state)
        except BaseException:
            changed = [parameter._version for parameter in parameters] != versions
            self._begun = self._begun or (others and changed)
            raise

    def _put_off(self, paged: Iterable[tuple[Slot, Group]]) -> None:
        waiting = []
        defer, modes = self._defer and may_wait(), Modes.now()
        self._begun = True
        for slot, group in paged:
            parameter, gradient = slot.parameter, slot.parameter.grad
            assert gradient is not None
            state = self.optimizer.state.get(parameter)
            copy = None if state is None else dict(state)
            regions = slot.update_regions()
            update = Update(group, parameter.data, gradient, copy, regions, modes)
            torch.autograd.graph.increment_version(parameter)
            if not self._defer or (defer and self._guards(slot, gradient)):
                waiting.append((slot, update))
                continue
            self._make(slot, update)
        for slot, update in waiting:
            if self._defer:
                self._device.lock(update.regions)
            self.pending[slot] = update

    def _put_off_slices(self, fused: Fused, group: Group) -> None:
        self._begun = True
        drafts = self.drafts
        taken = {
            slot
            for slot in fused.slots
            if drafts is not None and drafts.has(slot) and drafts.take(slot, group)
        }
        for slot, step in self._slices.steps(fused, group):
            if slot in taken:
                continue
            waiting = self.pending.get(slot)
            if isinstance(waiting, SliceUpdate):
                if step.zero and len(waiting.steps) < MOST_STEPS and may_wait():
                    waiting.steps.append(step)
                    continue
                self.flush(slot)
            self._wait_for_slice(slot, step)

    def _wait_for_slice(self, slot: Slot, step: Step) -> None:
        update = self._slices.begin(slot, step)
        if self._defer and may_wait():
            self._device.lock(update.regions)
            self.pending[slot] = update
        else:
            self._make(slot, update)

    def vacate(self, slot: Slot, region: int) -> None:
        """The gradient of a slice is about to be made in ``region``: an update that still has to
        read the last one there gets it elsewhere."""
        with self._mutex:
            update = self.pending.get(slot)
            if isinstance(update, SliceUpdate) and update.gradient == region:
                self._slices.put_aside(slot, update, region)

    def _guards(self, slot: Slot, gradient: torch.Tensor) -> bool:
        """Return whether the device sees every access to what the update reads and writes."""
        owner = self._device.owner
        state = self.optimizer.state.get(slot.parameter, {})
        return (
            slot.gradient is not None
            and owner(gradient.data_ptr()) == slot.gradient
            and not are_shared(state, besides=slot.states)
            and all(
                key in state and owner(state[key].data_ptr()) == region
                for key, region in slot.states.items()
            )
        )

    @uninterrupted
    def draft(self, slot: Slot) -> None:
        """The gradient of ``slot`` is complete: make its update ahead of ``step()``, if it may be.

        See `Drafts`.
        """
        if self.drafts is None or not may_wait():
            return
        with self._mutex:
            if slot not in self.pending:
                self.drafts.make(slot)

    # Making updates

    def _run(self, groups: list[Group], state: MutableMapping[torch.Tensor, Any]) -> None:
        """Run the optimizer's own code over ``groups``, with ``state``; see [Note: stand-ins]."""
        if not any(group["params"] for group in groups):
            return
        shadow = object.__new__(type(self.optimizer))
        shadow.__dict__.update(self.optimizer.__dict__, param_groups=groups, state=state)
        if not self._scaled:
            for name in _OF_SCALER:
                shadow.__dict__.pop(name, None)
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            _without_autocast(),
        ):
            self._step(shadow)

    @contextlib.contextmanager
    def _taken(self, slot: Slot) -> Iterator[Update | SliceUpdate | None]:
        """Take the pending update of ``slot``, if there is one, to make it; wait for whoever is
        making one."""
        with self._mutex:
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
            if self._defer:
                self._device.unlock(update.regions)
            try:
                with update.modes.again():
                    self._make(slot, update)
            except BaseException as error:
                if update.begun:
                    self._lose(update, error)
                else:  # nothing was touched: the update is still to be made
                    self.pending[slot] = update
                    if self._defer:
                        self._device.lock(update.regions)
                raise

    def _make(self, slot: Slot, update: Update | SliceUpdate) -> None:
        """Make an update whose regions are not locked."""
        self._device.acquire(update.regions, pin=True)
        try:
            self._apply(slot, update, {})
        finally:
            self._device.unpin(update.regions)
        self._end(slot, update)
        self._end_gradient(slot, update)

    @uninterrupted
    def flush_all(self) -> None:
        """Make every pending update now, in the order of the parameters."""
        with self._mutex:
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
                shown = self._device.show(update.regions)
                try:
                    storages = dict(zip(update.regions, shown, strict=True))
                    with update.modes.again(own_thread=True):
                        self._apply(slot, update, storages)
                finally:
                    storages.clear()
                    shown.clear()
                    self._device.hide(update.regions)
                self._end(slot, update)
            except BaseException as error:  # the thread that waits must not wait for ever
                self._lose(update, error)
            finally:
                self._device.unlock(update.regions)
            self._end_gradient(slot, update)

    def _lose(self, update: Update | SliceUpdate, error: BaseException) -> None:
        """An update was cut off: note it, and let go of the memory that it and its error hold."""
        self._failure = self.lost = error
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

    @uninterrupted
    def abandon(self) -> None:
        """Forget every pending update and any loss: all tensors are about to be replaced."""
        with self._mutex:
            for slot in list(self.pending):
                update = self.pending.pop(slot)
                if self._defer:
                    self._device.unlock(update.regions)
                self._end_gradient(slot, update)
            if self.drafts is not None:
                self.drafts.drop_all()
            self._failure = self.lost = None

    def check(self) -> None:
        """Raise what went wrong in an update made behind somebody's back.

        Raises:
            StepLostError: naming the remedy, from the first error.
        """
        error, self._failure = self._failure, None
        if error is not None:
            raise StepLostError(
                "an optimizer update that was put off failed or was cut off, and its parameter "
                "lacks it: the step is lost; go on from the last checkpoint"
            ) from error

    def _apply(
        self,
        slot: Slot,
        update: Update | SliceUpdate,
        storages: Mapping[int, torch.UntypedStorage],
    ) -> None:
        """Make an update on a stand-in for its parameter; see [Note: stand-ins].

        Args:
            slot: whose update it is; the user may have replaced the parameter's tensor, or its
                state, since: then the old ones are updated, and the new ones stay.
            update: the update.
            storages: where regions are shown; the others are at their own addresses.
        """
        if isinstance(update, SliceUpdate):
            self._slices.apply(slot, update, storages)
            return
        parameter = slot.parameter
        given, made = self.run_on(update, storages)
        old, state = update.state or {}, self.optimizer.state
        now = state.get(parameter)
        if now is None and update.state is None and made:
            now = state[parameter] = {}
        for key, value in made.items():
            is_new = value is not given.get(key)
            if is_new and now is not None and now.get(key) is old.get(key):
                now[key] = value

    def run_on(
        self, update: Update, storages: Mapping[int, torch.UntypedStorage]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Run the optimizer's code for ``update`` on a stand-in, with ``storages`` as in `_apply`.

        Returns:
            The state that the stand-in was given, and what the optimizer left there.
        """
        owner = self._device.owner

        def shown(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            storage = storages.get(owner(value.untyped_storage().data_ptr()))
            return value if storage is None else view_of(storage, value, offset_of(value))

        with torch.no_grad():
            stand_in = nn.Parameter(shown(update.data))
            stand_in.grad = shown(update.gradient)
        given = {key: shown(value) for key, value in (update.state or {}).items()}
        own: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        if update.state is not None:
            own[stand_in] = dict(given)
        update.begun = True
        self._run([{**update.group, "params": [stand_in]}], own)
        return given, own.get(stand_in, {})

    def _adopt_state(self, parameter: nn.Parameter) -> None:
        state = self.optimizer.state.get(parameter)
        if state is None:
            return
        fused = self._store.fused.get(parameter)
        if fused is not None:
            self._slices.rows.adopt_state(fused, state)
        else:
            self._store.adopt_state(self._store.slots[parameter], state)

    def _end(self, slot: Slot, update: Update | SliceUpdate) -> None:
        """An update was made: move state that is new into regions, let go of what it held."""
        if isinstance(update, Update):
            self._adopt_state(slot.parameter)
            del update.gradient, update.data

    def _end_gradient(self, slot: Slot, update: Update | SliceUpdate) -> None:
        if isinstance(update, SliceUpdate):
            self._slices.end(slot, update)
        else:
            self._store.end_gradient(slot)

    def adopt_all(self) -> None:
        """Adopt whatever state exists; after a load, or a step that could not be split."""
        for parameter in (*self._store.slots, *self._store.fused):
            if parameter in self.optimizer.state:
                self._adopt_state(parameter)

    def close(self) -> None:
        """Make all pending updates and let go of the optimizer."""
        self._restore_groups()
        for handle in self._handles:
            handle.remove()
        try:
            if self.drafts is not None:
                self.drafts.drop_all()
            self.flush_all()
            self.check()
        except BaseException as error:
            self.abandon()  # else whoever reads those parameters would wait for updates for ever
            self._failure = self.lost = error
            raise
        finally:
            state = self.optimizer.state
            if isinstance(state, WatchedState):
                self.optimizer.state = state.plain()
