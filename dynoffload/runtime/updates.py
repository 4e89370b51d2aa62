"""Optimizer steps without a barrier: each paged parameter's update waits for its next use.

A stock ``optimizer.step()`` would need all parameters, gradients and state at once. Here it splits
into one sub-step per paged parameter, made by the optimizer's own code on a group that holds this
parameter alone, with the hyperparameters as they were at ``step()``. For the optimizers of
`torch.optim` whose state belongs to parameters, the bits are those of the whole step.

[Note: deferral]  On a guarded device the sub-step of a paged parameter is put off until the
parameter is next used: a module's forward, or any other access to it, its gradient or its state,
which the device holds back (the regions are locked) until `Updates.serve` has made the update
behind its back, under other addresses. Elsewhere sub-steps run inside ``step()``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dynoffload.errors import ConfigError
from dynoffload.memory.device import Device
from dynoffload.runtime.store import Slot, Store, offset_of, view_of

logger = logging.getLogger(__name__)

Group = dict[str, Any]

_GROUP_STATE = ("LBFGS", "Muon", "SparseAdam")


@dataclass(eq=False)
class Update:
    """One parameter's share of an optimizer step that is still to be made.

    Attributes:
        group: the hyperparameters at the time of ``step()``, without parameters.
        gradient: what it will consume.
    """

    group: Group
    gradient: torch.Tensor


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse optimizers whose step cannot be split by parameter.

    Raises:
        ConfigError: naming the optimizer.
    """
    name = type(optimizer).__name__
    if name in _GROUP_STATE and type(optimizer).__module__.startswith("torch.optim"):
        raise ConfigError(
            f"{name} updates its parameters together, so its state cannot be paged by parameter: "
            "use an optimizer with state per parameter, such as AdamW, or train without offload()"
        )


def _snapshot(group: Group) -> Group:
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


class Updates:
    """Splits, defers and makes the updates of one optimizer.

    Args:
        optimizer: the user's.
        store: its parameters' slots.
        device: holds their regions.
        defer: put updates off; needs a guarded device.
        on_step: called after each ``step()`` of the user.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        store: Store,
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
        self._inside = False
        self._groups: list[Group] | None = None
        self.pending: dict[Slot, Update] = {}
        self.behind = 0  # updates made because of an unannounced access
        step = type(optimizer).step
        self._step: Callable[..., Any] = (
            step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
        )
        self._splits = type(optimizer).__module__.startswith("torch.optim")
        if not self._splits:
            logger.warning(
                "%s is not one of torch.optim: its step runs whole, and its state pages on demand",
                type(optimizer).__name__,
            )
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
            optimizer.register_state_dict_pre_hook(lambda _: self.flush_all()),
            optimizer.register_load_state_dict_pre_hook(lambda _, __: self.flush_all()),
            optimizer.register_load_state_dict_post_hook(lambda _: self.adopt_all()),
        ]

    # The user's step()

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._inside or not self._splits:
            return None
        self._restore_groups()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        answer = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            rest = {key: value for key, value in kwargs.items() if key != "closure"}
            answer = ((args[0], lambda: loss, *args[2:]), rest)
        scaled = any(
            getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf")
        )
        with self._mutex:
            resident, paged = self._split(optimizer.param_groups)
            self._run(resident)
            self._put_off(paged)
            if scaled or not self._defer:
                self.flush_all()
        # The optimizer's own code now finds nothing left to do.
        self._groups = optimizer.param_groups
        optimizer.param_groups = [{**group, "params": []} for group in self._groups]
        return answer

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._inside:
            return
        self._restore_groups()
        if not self._splits:
            self.adopt_all()
        self._store.release_orphans()
        self._on_step()

    def _restore_groups(self) -> None:
        if self._groups is not None:
            self.optimizer.param_groups = self._groups
            self._groups = None

    def _split(self, groups: list[Group]) -> tuple[list[Group], list[tuple[Slot, Group]]]:
        resident: list[Group] = []
        paged: list[tuple[Slot, Group]] = []
        for group in groups:
            hyper = _snapshot(group)
            small = []
            for parameter in group["params"]:
                slot = self._store.slots.get(parameter)
                if slot is None:
                    small.append(parameter)
                elif parameter.grad is not None:
                    paged.append((slot, hyper))
            resident.append({**hyper, "params": small})
        return resident, paged

    def _put_off(self, paged: Iterable[tuple[Slot, Group]]) -> None:
        for slot, group in paged:
            if slot in self.pending:
                self.flush(slot)
            gradient = slot.parameter.grad
            assert gradient is not None
            self.pending[slot] = Update(group, gradient)
            if self._defer:
                self._device.lock(slot.update_regions())

    # Making updates

    def _run(self, groups: list[Group]) -> None:
        """Run the optimizer's own code over ``groups``."""
        if not any(group["params"] for group in groups):
            return
        held, self._inside = self.optimizer.param_groups, True
        self.optimizer.param_groups = groups
        try:
            with (
                torch.inference_mode(False),
                torch.no_grad(),
                torch.autocast("cpu", enabled=False),
            ):
                self._step(self.optimizer)
        finally:
            self.optimizer.param_groups, self._inside = held, False

    def flush(self, slot: Slot) -> None:
        """Make the update of ``slot``'s parameter now, if one is pending."""
        with self._mutex:
            update = self.pending.pop(slot, None)
            if update is None:
                return
            regions = slot.update_regions()
            if self._defer:
                self._device.unlock(regions)
            self._device.acquire(regions, pin=True)
            parameter = slot.parameter
            held = parameter.grad
            parameter.grad = update.gradient
            try:
                self._run([{**update.group, "params": [parameter]}])
            finally:
                parameter.grad = held
                self._device.unpin(regions)
            self._store.adopt_state(slot, self.optimizer.state[parameter])
            del update, held
            self._store.end_gradient(slot)

    def flush_all(self) -> None:
        """Make every pending update now, in the order of the parameters."""
        for slot in list(self.pending):
            self.flush(slot)

    def serve(self, region: int) -> None:
        """Make the update that an access to ``region`` waits for; called by the guard's thread.

        The parameter's own addresses stay absent until it is done: somebody sleeps on one.
        """
        slot = self._store.slot_of(region)
        if slot is None:
            self._device.unlock([region])
            return
        with self._mutex:
            regions = slot.update_regions()
            update = self.pending.pop(slot, None)
            if update is not None:
                self.behind += 1
                self._update_elsewhere(slot, update, regions)
            self._device.unlock(regions)

    def _update_elsewhere(self, slot: Slot, update: Update, regions: list[int]) -> None:
        storages = dict(zip(regions, self._device.show(regions), strict=True))
        with torch.no_grad():
            real = slot.parameter
            offset = offset_of(real)
            stand_in = nn.Parameter(view_of(storages[slot.region], real.data, offset))
            gradient = update.gradient
            if slot.gradient in storages:
                gradient = view_of(storages[slot.gradient], gradient, offset_of(gradient))
            stand_in.grad = gradient
        state = self.optimizer.state
        paged = {
            key: state[real][key] for key in slot.states if real in state and key in state[real]
        }
        if real in state:
            state[stand_in] = dict(state[real])
            for key, value in paged.items():
                state[stand_in][key] = view_of(storages[slot.states[key]], value)
        try:
            self._run([{**update.group, "params": [stand_in]}])
        finally:
            made = state.pop(stand_in, {})
            stand_in.grad = None
            state[real] = {**made, **paged}
            del made, gradient
            storages.clear()
            self._device.hide(regions)
        self._store.adopt_state(slot, state[real])

    def adopt_all(self) -> None:
        """Adopt whatever state exists; after a load, or a step that could not be split."""
        for parameter, slot in self._store.slots.items():
            if parameter in self.optimizer.state:
                self._store.adopt_state(slot, self.optimizer.state[parameter])

    def close(self) -> None:
        """Make all pending updates and let go of the optimizer."""
        self._restore_groups()
        self.flush_all()
        for handle in self._handles:
            handle.remove()
