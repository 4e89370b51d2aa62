"""Optimizer steps without a barrier: each paged parameter's update waits for its next use.

A stock ``optimizer.step()`` would need all parameters, gradients and state at once. Here it splits
into one sub-step per paged parameter, made by the optimizer's own code on a group that holds this
parameter alone, with the hyperparameters as they were at ``step()``. For the optimizers of
`torch.optim` whose state belongs to parameters, the bits are those of the whole step.

[Note: deferral]  On a guarded device the sub-step of a paged parameter is put off until the
parameter is next used: a module's forward, or any other access to it, its gradient or its state,
which the device holds back (the regions are locked) until `Waiting.serve` has made the update
behind its back, under other addresses. Elsewhere sub-steps run inside ``step()``.

Deferral is only for what the device guards: where the user has put other tensors in the place of
adopted ones (``p.grad = mine``, ``p.data = mine``), the sub-step runs inside ``step()`` too. What
a put-off update will change counts as changed at once, so that a backward which still needs the
old value raises as it does in plain PyTorch.

[Note: shards]  The update of a shard is made on the part that lies in this process, where every
element is treated by itself. An optimizer that looks at a matrix as a whole, as Muon does, steps
shards together with the other processes: its code runs inside ``step()``, on what the user has.

[Note: interrupts]  Ctrl-C in the middle would leave regions locked for an update that is not noted,
an update half made, or an optimizer without parameters. So signals wait until what was begun is
done; see `interrupts`.
"""

from __future__ import annotations

import inspect
import logging
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from dynoffload.host_optimizer import HostOptimizer
from dynoffload.memory.device import Device
from dynoffload.memory.local import is_spread, local
from dynoffload.runtime.adoption.fused import FusedStore
from dynoffload.runtime.adoption.held import are_shared, references
from dynoffload.runtime.adoption.slicing import may_slice
from dynoffload.runtime.adoption.slots import Fused, Slot
from dynoffload.runtime.adoption.store import Store
from dynoffload.runtime.interrupts import admit, hold, uninterrupted
from dynoffload.runtime.kept_state import wrapped_by
from dynoffload.runtime.unseen import unseen
from dynoffload.runtime.updates.drafts import Drafts
from dynoffload.runtime.updates.images import Images
from dynoffload.runtime.updates.loss import Loss, note_lost, note_undone
from dynoffload.runtime.updates.making import OF_SCALER, Maker
from dynoffload.runtime.updates.marks import is_changed, marks_of
from dynoffload.runtime.updates.modes import Modes, depends_on_dtype, may_wait
from dynoffload.runtime.updates.slices import SliceUpdate, Step
from dynoffload.runtime.updates.update import (
    FIRST_TIMERS,
    Group,
    Update,
    check_optimizer,
    first_timers,
    snapshot,
    takes_hooks,
)
from dynoffload.runtime.updates.waiting import Waiting
from dynoffload.runtime.updates.watched import Order, WatchedState

logger = logging.getLogger(__name__)

_REGISTER = "register_step_pre_hook"
_OF_ENTRY = 2  # references to an entry of the state: of `WatchedState`, and of what it stands for


def can_split(optimizer: Optimizer) -> bool:
    """Return whether the updates of ``optimizer`` are known to be made one by one like together."""
    return type(optimizer).__module__.startswith("torch.optim")


def _any_sparse(groups: Iterable[Group]) -> bool:
    gradients = (parameter.grad for group in groups for parameter in group["params"])
    return any(g is not None and g.layout is not torch.strided for g in gradients)


@unseen
def _data_of(parameter: nn.Parameter) -> torch.Tensor:
    data: torch.Tensor = local(parameter).data
    return data


def _with_gradients(groups: Iterable[Group]) -> list[nn.Parameter]:
    return [p for group in groups for p in group["params"] if p.grad is not None]


class Updates:
    """Splits the steps of one optimizer into updates, and puts those off that may wait.

    Args:
        optimizer: the user's.
        store: its parameters' slots.
        rows: the rows of those that are paged by slices.
        device: holds their regions.
        loss: where a step that was cut off is noted.
        defer: put updates off; needs a guarded device.
        hear: called at the start of each ``step()`` of the user, outside of guards of ours.
        check: called before each ``step()`` of the user, which it may refuse.
        on_whole: called before the optimizer's own code runs over all parameters at once.
        on_step: called after each ``step()`` of the user.

    Attributes:
        maker: makes the updates.
        waiting: those that were put off.
        drafts: those made in backward, or None.
        splits: whether steps are split at all.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        store: Store,
        rows: FusedStore,
        device: Device,
        loss: Loss,
        *,
        defer: bool,
        hear: Callable[[], None],
        check: Callable[[], None],
        on_whole: Callable[[], None],
        on_step: Callable[[], None],
    ) -> None:
        check_optimizer(optimizer)
        self.optimizer = optimizer
        self._store = store
        self._device = device
        self._defer = defer and device.guarded
        self._hear, self._check = hear, check
        self._on_whole, self._on_step = on_whole, on_step
        self._groups: list[Group] | None = None
        self.maker = Maker(optimizer, store, rows, device)
        self._slices = self.maker.slices
        self.waiting = Waiting(self.maker, store, device, loss, locks=self._defer)
        self.drafts: Drafts | None = None
        self._order = Order()
        self._begun = False  # whether a step has changed something and is not over
        self._signature = inspect.signature(self.maker.step)
        self.splits = can_split(optimizer)
        self._runs_whole = not self.splits and not isinstance(optimizer, HostOptimizer)
        if self._runs_whole:
            logger.warning(
                "%s is not one of torch.optim: its step runs whole, and its state pages on demand; "
                "what a step makes anew is paged, and under the budget, once the step has ended; "
                "tensors in objects that are no list, tuple, deque, set, mapping, namespace or "
                "dataclass are neither paged nor counted",
                type(optimizer).__name__,
            )
        self._watch()
        self._pre = optimizer.register_step_pre_hook(self._before)
        self._post = optimizer.register_step_post_hook(self._after)
        first = cast(OrderedDict[int, Any], optimizer._optimizer_step_post_hooks)
        first.move_to_end(self._post.id, last=False)
        self._register, optimizer.__dict__[_REGISTER] = (
            getattr(optimizer, _REGISTER),
            self._before_ours,
        )
        self._handles = [
            self._pre,
            self._post,
            optimizer.register_state_dict_pre_hook(lambda _: self.waiting.settle()),
            optimizer.register_load_state_dict_pre_hook(lambda _, __: self.begin_load()),
            optimizer.register_load_state_dict_post_hook(lambda _: self._loaded()),
            register_optimizer_step_pre_hook(self._before_any),
        ]
        self._strangers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._calling: FrameType | None = None  # who calls us in a step that runs whole
        behind = wrapped_by(optimizer, lambda one: not takes_hooks(one))
        for inner in filter(takes_hooks, behind if self._runs_whole else ()):
            self._handles.append(inner.register_step_pre_hook(self._before_inner))
            self._handles.append(inner.register_step_post_hook(self._after_inner))

    def _watch(self) -> None:
        state = self.optimizer.state
        if self._defer and not isinstance(state, WatchedState):
            self.waiting.flush_all()  # into the mapping that was there, which may be under this one
            self.optimizer.state = WatchedState(state, self._look)

    def _look(self, parameter: torch.Tensor | None) -> None:
        if parameter is None:
            with self.waiting.mutex:
                self.waiting.flush_all()
                self._order.restore(self.optimizer.state)
        if not self.waiting.any():
            return
        slot = self._store.slots.get(parameter)  # type: ignore[call-overload]
        if slot is not None:  # of a fused parameter, what is not guarded is up to date
            self.waiting.flush(slot)

    def keep(self, images: Images) -> None:
        """Keep in ``images`` what a step changes, so that one that is cut off is undone.

        All updates of a step are made before the next step's then.
        """
        self.maker.images = images
        self.waiting.loss.undo = self._undo

    @uninterrupted
    def _undo(self) -> bool:
        images = self.maker.images
        if images is None or self.waiting.loss.within or not images.any():
            return False
        with self.waiting.mutex, Modes.now(self._device.device.type).again():
            self.waiting.forget()
            try:
                images.undo()
            except Exception as error:
                logger.warning("a step that was cut off could not be undone: %s", str(error))
                return False
            self.waiting.loss.forgive()
        logger.warning("a step that was cut off is undone")
        return True

    def forget_images(self) -> None:
        """Something else than a step changes the model or the optimizer."""
        if self.maker.images is not None:
            self.maker.images.forget()

    def begin_load(self) -> None:
        """The user is about to load the optimizer, or to make up for a lost step."""
        loss = self.waiting.loss
        if not loss or loss.undo():
            self.waiting.flush_all()
        else:  # what waits is of the lost step, or before it, and could fail again
            self._drop_drafts()
            self.waiting.forget()
        self.forget_images()

    def _loaded(self) -> None:
        self._order = Order()
        self._watch()
        self.adopt_all()
        self.waiting.loss.make_up("optimizer")

    def _drop_drafts(self) -> None:
        if self.drafts is not None:
            self.drafts.drop_all()

    # The user's step()

    def _before_ours(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Register a step pre-hook of the user's, to run before ours.

        Ours is the last before the optimizer's own code, and the first after it: between the two
        the optimizer has nothing left to do, and shows no parameters.
        """
        handle = cast(RemovableHandle, self._register(hook))
        order = cast(OrderedDict[int, Any], self.optimizer._optimizer_step_pre_hooks)
        order.move_to_end(self._pre.id)
        return handle

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._hear()
        if self._runs_whole:
            return self._before_whole(args, kwargs)
        if not self.splits:
            return None
        self.waiting.loss.check()
        self._check()
        self._watch()  # the user may have put another state there
        self._signature.bind(*args, **kwargs)  # refuses what the optimizer's own code would
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        answer = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            rest = {key: value for key, value in kwargs.items() if key != "closure"}
            answer = ((args[0], lambda: loss, *args[2:]), rest)
        self._commit(optimizer)
        return answer

    def _before_any(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Warn of the first step of an optimizer that the block was not given."""
        if optimizer is self.optimizer or optimizer in self._strangers:
            return
        self._strangers.add(optimizer)
        groups = getattr(optimizer, "param_groups", ())
        theirs = any(p in self._store.slots for group in groups for p in group["params"])
        related = wrapped_by(optimizer) + wrapped_by(self.optimizer)
        if theirs and all(one not in (self.optimizer, optimizer) for one in related):
            logger.warning(
                "%s, which offload() was not given, steps over parameters of the model: its state "
                "stays in memory, beyond the budget; give the block the optimizer that steps",
                type(optimizer).__name__,
            )

    def _before_inner(self, inner: Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer that ours wraps steps, perhaps without ours: as in two calls of SAM."""
        if not self._is_within():
            self._on_whole()

    def _after_inner(self, inner: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_within():
            self._after(self.optimizer, args, kwargs)

    def _is_within(self) -> bool:
        """Return whether a step that runs whole has neither returned nor failed."""
        frame = None if self._calling is None else sys._getframe(1)
        while frame is not None and frame is not self._calling:
            frame = frame.f_back
        if frame is None:
            self._calling = None
        return frame is not None

    def _before_whole(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """End the plan as a step begins that runs whole, and after each call of its closure: what
        is planned for the next forward would keep the room that the step's operands need."""
        self._calling = sys._getframe(2)  # until the step has returned, or failed
        self._on_whole()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            return args, kwargs

        def closed(*given: Any, **named: Any) -> Any:
            loss = closure(*given, **named)
            self._on_whole()
            return loss

        if len(args) > 1:
            return (args[0], closed, *args[2:]), kwargs
        return args, {**kwargs, "closure": closed}

    @uninterrupted
    def _commit(self, optimizer: Optimizer) -> None:
        """Make or put off all updates of a step; one under a `GradScaler` makes all at once."""
        scaled = any(getattr(optimizer, name, None) is not None for name in OF_SCALER)
        with self.waiting.mutex:
            if self.drafts is not None and (scaled or _any_sparse(optimizer.param_groups)):
                self.drafts.drop_all()  # or the step may fail, with nothing changed
            images = self.maker.images
            if scaled or images is not None:
                self.waiting.flush_all()  # of earlier steps, which the scaler has no part in
            self._flush_used(optimizer.param_groups)
            self.waiting.loss.check()  # an update may have failed behind somebody's back
            self._order.note(_with_gradients(optimizer.param_groups), optimizer.state)
            if images is not None:
                images.begin(_with_gradients(optimizer.param_groups))
            self.maker.scaled = scaled
            loss = self.waiting.loss
            loss.within = True
            try:
                resident, paged, shared, fused = self._split(optimizer.param_groups)
                self._step_resident(resident)
                for parameter in shared:
                    self.maker.adopt_state(parameter, optimizer.state)
                self._put_off(paged)
                for one, hyper in fused:
                    self._put_off_slices(one, hyper)
                if scaled or not self._defer:
                    self.waiting.flush_all()
                    self._order.restore(optimizer.state)
            except BaseException as error:
                loss.within = False
                if self._begun:
                    loss.set(error, told=True)
                    (note_undone if loss.undo() else note_lost)(error)
                raise
            finally:
                self._begun = self.maker.scaled = loss.within = False
        # The optimizer's own code now finds nothing left to do. Nobody else may find that.
        hold()
        self._groups = optimizer.param_groups
        optimizer.param_groups = [{**group, "params": []} for group in self._groups]

    @uninterrupted
    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._calling = None
        self.restore_groups()
        if not self.splits:
            self.adopt_all()
        if self.drafts is not None:
            self.drafts.end_step()
        self._store.release_orphans()
        for fused in self._store.fused.values():
            homes = {slot.home for slot in fused.slots if slot.home is not None}
            self._slices.rows.release_rows(fused, homes)
        self._on_step()

    def restore_groups(self) -> None:
        """Show the optimizer's groups again, also where something has failed between our hooks: a
        step has ended, or a forward."""
        if self._groups is not None:
            self.optimizer.param_groups = self._groups
            self._groups = None
            admit()

    @unseen
    def _flush_used(self, groups: list[Group]) -> None:
        """Make the pending updates that a step over ``groups`` meets: its own parameters', and
        those whose memory the user has put in the place of something that it reads."""
        owner, slot_of = self._device.owner, self._store.slot_of
        used = [(p, group) for group in groups for p in group["params"] if p.grad is not None]
        for parameter, group in used:
            fused = self._store.fused.get(parameter)
            if fused is not None:
                self._flush_displaced(fused)
                self._slices.rows.take_back(fused)
                if self._slices.splits(fused, group):
                    continue  # each slice's updates are made in order
            for slot in self._store.slots_of(parameter):
                self.waiting.flush(slot)
            if not self.waiting.pending:
                continue
            state = dict.get(self.optimizer.state, parameter, {})
            for tensor in (parameter, parameter.grad, *state.values()):
                if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                    lender = slot_of(owner(tensor))
                    if lender is not None:
                        for slot in self._store.slots_of(lender.parameter):
                            self.waiting.flush(slot)

    def _flush_displaced(self, fused: Fused) -> None:
        """Make the pending updates of a parameter that was given other memory, or other state, from
        what lies in its rows, before that is overwritten."""
        state = dict.get(self.optimizer.state, fused.parameter)
        if not self._slices.rows.holds(fused, state):
            for slot in fused.slots:
                self.waiting.flush(slot)

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
            if found := first_timers(self.optimizer, group):
                hyper[FIRST_TIMERS] = found
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
                elif is_spread(parameter) and not may_slice(self.optimizer):
                    small.append(parameter)  # see [Note: shards]
                    shared.append(parameter)
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

    def _step_resident(self, groups: list[Group]) -> None:
        """Make the updates of what stays in memory."""
        parameters = _with_gradients(groups)
        images = self.maker.images
        if images is not None:
            for parameter in parameters:
                images.keep(parameter)
        before = [marks_of(self.optimizer, parameter) for parameter in parameters]
        try:
            self.maker.run(groups, self.optimizer.state)
        except BaseException:
            after = [marks_of(self.optimizer, parameter) for parameter in parameters]
            undoes = images is not None and before != after
            self._begun = self._begun or any(map(is_changed, before, after)) or undoes
            raise

    def _put_off(self, paged: Iterable[tuple[Slot, Group]]) -> None:
        waiting = []
        may, modes = may_wait(), Modes.now(self._device.device.type)
        self._begun = True
        for slot, group in paged:
            parameter, gradient = slot.parameter, slot.parameter.grad
            assert gradient is not None
            states = self.optimizer.state
            copy = states.get(parameter)
            copy = None if copy is None else dict(copy)  # no local holds the entry: it is counted
            regions = slot.update_regions()
            data, part = _data_of(parameter), local(gradient)
            update = Update(group, data, part, copy, regions, modes, states)
            torch.autograd.graph.increment_version(parameter)
            if (
                may
                and self._may_wait(first=not copy)
                and (not self._defer or self._guards(slot, gradient))
            ):
                waiting.append((slot, update))
                continue
            self.maker.make(slot, update)
        for slot, update in waiting:
            self.waiting.add(slot, update)

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
            waiting = self.waiting.pending.get(slot)
            if isinstance(waiting, SliceUpdate):
                if may_wait() and self._slices.joins(waiting, step):
                    waiting.steps.append(step)
                    continue
                self.waiting.flush(slot)
            self._wait_for_slice(slot, step)

    def _wait_for_slice(self, slot: Slot, step: Step) -> None:
        update = self._slices.begin(slot, step)
        if self._defer and self._may_wait(first=False) and may_wait():
            self.waiting.add(slot, update)
        else:
            self.maker.make(slot, update)

    def _may_wait(self, *, first: bool) -> bool:
        """Return whether an update has the bits of now whenever it is made. The guard's thread
        changes no default dtype; without one, who makes the update has the step's."""
        served = self._defer and self._device.serves
        return not (served and depends_on_dtype(self.optimizer, first=first))

    def _guards(self, slot: Slot, gradient: torch.Tensor) -> bool:
        """Return whether the device sees every access to what the update reads and writes."""
        owner = self._device.owner
        held = references(self.optimizer.state, slot.parameter) > _OF_ENTRY
        state = self.optimizer.state.get(slot.parameter, {})
        return (
            slot.gradient is not None
            and owner(gradient) == slot.gradient
            and not held  # who holds it would see it as it was
            and not are_shared(state, besides=slot.states)
            and all(
                key in state and owner(state[key]) == region for key, region in slot.states.items()
            )
        )

    @uninterrupted
    def draft(self, slot: Slot) -> None:
        """The gradient of ``slot`` is complete: make its update ahead of ``step()``, if it may be.

        See `Drafts`.
        """
        if self.drafts is None or not may_wait():
            return
        with self.waiting.mutex:
            if slot not in self.waiting.pending:
                self.drafts.make(slot)

    @uninterrupted
    def abandon(self) -> None:
        """Forget every pending update and any loss: all tensors are about to be replaced."""
        with self.waiting.mutex:
            self._drop_drafts()
            self.forget_images()
            self.waiting.abandon()

    def adopt_all(self) -> None:
        """Adopt whatever state exists; after a load, or a step that could not be split."""
        for fused in self._store.fused.values():
            self._flush_displaced(fused)
        for parameter in (*self._store.slots, *self._store.fused):
            if parameter in self.optimizer.state:
                self.maker.adopt_state(parameter, self.optimizer.state)

    def close(self) -> None:
        """Make all pending updates, or forget them if a step was lost, and let go of the optimizer.

        Raises:
            StepLostError: a step was lost, and nobody was told; or one is lost and undone.
        """
        loss = self.waiting.loss
        try:
            self.restore_groups()
            self.optimizer.__dict__.pop(_REGISTER, None)
            for handle in self._handles:
                handle.remove()
            self._drop_drafts()
            if not loss or loss.undo():
                self.waiting.flush_all()
            loss.tell()
        except BaseException as error:
            if loss or self.waiting.any():  # else it is undone already
                loss.set(error, told=True)
                loss.tell_undone()
            raise
        finally:
            self.waiting.forget()  # else whoever reads those parameters would wait for ever
            self.forget_images()
            self.maker.images = None
            state = self.optimizer.state
            self._order.restore(state)
            if isinstance(state, WatchedState):
                self.optimizer.state = state.before()
