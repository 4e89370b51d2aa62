"""Making updates: the optimizer's own code, on one parameter at a time.

[Note: stand-ins]  A deferred update may be made on the guard's thread while the user's thread runs
on. So it is made by a shadow of the optimizer, with groups and state of its own, on a stand-in for
the parameter, over the same memory or over other addresses of it: nothing that the user's thread
may be reading is changed meanwhile. What the user replaces while an update waits was replaced after
the update: it is made on the old tensors, and the new ones stay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from dynoffload.distributed.sharded import spread_like
from dynoffload.host_optimizer import HostOptimizer
from dynoffload.memory.local import local
from dynoffload.memory.pager import Pager
from dynoffload.runtime.adoption.slots import Slot
from dynoffload.runtime.adoption.store import offset_of, view_of
from dynoffload.runtime.unseen import unseen
from dynoffload.runtime.updates.slices import SliceUpdate, SliceUpdates
from dynoffload.runtime.updates.undo_log import UndoLog
from dynoffload.runtime.updates.update import Group, PagedOptimizer, Update

OF_SCALER = ("grad_scale", "found_inf")
"""What a `GradScaler` gives an optimizer for one step."""


class UpdateRunner:
    """Makes updates of one optimizer, now.

    Args:
        paged: the optimizer and its tensors.

    Attributes:
        slices: makes those of slices.
        undo_log: what updates have overwritten, or None.
        scaled: whether the updates that are made are those of a scaled step.
        step: the optimizer's own ``step``, without hooks.
    """

    def __init__(self, paged: PagedOptimizer) -> None:
        self._optimizer, self._store, self._device = paged.optimizer, paged.store, paged.device
        self.slices = SliceUpdates(paged, self.run_on)
        self.undo_log: UndoLog | None = None
        self.scaled = False
        step = type(paged.optimizer).step
        self.step: Callable[..., Any] = (
            step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
        )

    def run(self, groups: list[Group], state: MutableMapping[torch.Tensor, Any]) -> None:
        """Run the optimizer's own code over ``groups``, with ``state``; see [Note: stand-ins]."""
        if not any(group["params"] for group in groups):
            return
        shadow = object.__new__(type(self._optimizer))
        shadow.__dict__.update(self._optimizer.__dict__, param_groups=groups, state=state)
        if not self.scaled:
            for name in OF_SCALER:
                shadow.__dict__.pop(name, None)
        with torch.inference_mode(False), torch.no_grad():
            self.step(shadow)

    def make(self, slot: Slot, update: Update | SliceUpdate) -> None:
        """Make an update whose regions are not locked."""
        self._device.acquire(update.regions, pin=True)
        try:
            self._apply(slot, update, {})
        finally:
            self._device.unpin(update.regions)
        self._end(slot, update)
        self.end_gradient(slot, update)

    def make_behind(self, slot: Slot, update: Update | SliceUpdate) -> None:
        """Make an update whose regions are locked, under other addresses; their own stay absent.
        The gradient's end is left to the caller."""
        update.context.check_behind(self._optimizer)
        assert isinstance(self._device, Pager)
        shown = self._device.show(update.regions)
        try:
            storages = dict(zip(update.regions, shown, strict=True))
            with update.context.again(self._device.device.type, guard=True):
                self._apply(slot, update, storages)
        finally:
            storages.clear()
            shown.clear()
            self._device.hide(update.regions)
        self._end(slot, update)

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
        self,
        update: Update,
        storages: Mapping[int, torch.UntypedStorage],
        changed: Slot | None = None,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Run the optimizer's code for ``update`` on a stand-in.

        Args:
            update: the update.
            storages: as for `_apply`.
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
        if isinstance(self._optimizer, HostOptimizer):
            return  # it is on the host, and stays there
        state = states.get(parameter)
        if state is None:
            return
        fused = self._store.fused.get(parameter)
        if fused is not None:
            self.slices.rows.adopt_state(fused, state)
        else:
            self._store.adopt_state(self._store.slots[parameter], state)

    def _end(self, slot: Slot, update: Update | SliceUpdate) -> None:
        """An update was made: move state that is new into regions, let go of what it held."""
        if isinstance(update, Update):
            self.adopt_state(slot.parameter, update.states)
            del update.gradient, update.data

    def end_gradient(self, slot: Slot, update: Update | SliceUpdate) -> None:
        """An update was made, or is forgotten: its gradient may go."""
        if isinstance(update, SliceUpdate):
            self.slices.end(slot, update)
        else:
            self._store.end_gradient(slot)
