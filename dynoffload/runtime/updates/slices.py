"""Updates of fused parameters, slice by slice; updates of experts that were not hit are queued.

With Adam, a step changes every expert: moments and weights decay even where the gradient is zero.
The update of a slice is deferred like any other (see `updates`). If its gradient is zero, it needs
no gradient bytes, so it can wait until the slice is used. The missed steps are kept as a list of
hyperparameters and small state. When the slice is needed, they are made in order: the same
operations on the same numbers.

[Note: small state]  Step counts and similar state belong to the parameter, not the slice, and
depend on the hyperparameters alone. So ``step()`` advances them at once, by running the optimizer's
own code on one element; each slice's update gets their earlier values. The same run shows which
state has the parameter's shape, and whether the optimizer writes into gradients. If it does, no
gradient is treated as zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from dynoffload.memory.pager import Pager
from dynoffload.runtime.adoption.slicing import keeps_bits
from dynoffload.runtime.adoption.slots import Fused, Slot
from dynoffload.runtime.adoption.store import view_of
from dynoffload.runtime.updates.torch_context import TorchContext
from dynoffload.runtime.updates.update import Group, PagedOptimizer, Update, copied

MOST_STEPS = 256
"""Most steps that a slice may lag behind, which bounds the queue and the time to catch up. Some
slices catch up earlier, from half of this on, so that not all do so in one step."""

Run = Callable[..., tuple[dict[str, Any], dict[str, Any]]]
"""`PendingUpdates.run_on`."""


@dataclass(frozen=True, eq=False)
class Step:
    """One step's update of every slice of a parameter.

    Attributes:
        group: the hyperparameters at the time of ``step()``, without parameters.
        small: values before the step of state without the parameter's shape; None at the first.
        zero: whether the gradient is zero.
        context: torch's settings at that time.
    """

    group: Group
    small: dict[str, Any] | None
    zero: bool
    context: TorchContext


@dataclass(eq=False)
class SliceUpdate:
    """The pending updates of one slice, in order.

    Attributes:
        steps: at least one; only the first may have a nonzero gradient.
        regions: regions that the updates read and write, locked until then.
        gradient: the region of the first step's gradient, or None if that is zero.
        begun: whether the optimizer's code has started on it.
    """

    steps: list[Step]
    regions: list[int]
    gradient: int | None
    begun: bool = False

    @property
    def context(self) -> TorchContext:
        """Torch's settings of the first step."""
        return self.steps[0].context


class SliceUpdates:
    """Makes and queues the updates of one optimizer's fused parameters.

    Args:
        paged: the optimizer and its tensors.
        run: runs the optimizer's own code for one update.
    """

    def __init__(self, paged: PagedOptimizer, run: Run) -> None:
        self._optimizer, self._store, self.rows = paged.optimizer, paged.store, paged.rows
        self._device, self._run = paged.device, run
        self._zeros: dict[int, int] = {}  # bytes -> a region that holds zeros

    def _state_of(self, fused: Fused) -> dict[str, Any] | None:
        return dict.get(self._optimizer.state, fused.parameter)

    def splits(self, fused: Fused, group: Group) -> bool:
        """Return whether a step over ``group`` updates the parameter by slices."""
        return self.rows.is_in_place(fused, self._state_of(fused)) and keeps_bits(
            group, fused.like, {fused.each.numel(), fused.like_of(fused.count - 1).numel()}
        )

    @torch.no_grad()
    def steps(self, fused: Fused, group: Group) -> list[tuple[Slot, Step]]:
        """Return the update that each slice needs in this ``step()``, and advance small state."""
        state = self._state_of(fused)
        small = None
        if state:
            small = {k: copied(v) for k, v in state.items() if k not in fused.states}
        writes = self._count(fused, group, state)
        row = self.rows.row_of(fused, fused.parameter.grad)
        assert row is not None
        self.rows.point(fused, row)  # user code may have assigned a gradient in another row
        clear = self._device.is_clear(row)
        now = TorchContext.now()
        zero, other = Step(group, small, True, now), Step(group, small, False, now)
        torch.autograd.graph.increment_version(fused.parameter)
        return [
            (slot, zero if is_clear and not writes else other)
            for slot, is_clear in zip(fused.slots, clear, strict=True)
        ]

    def _count(self, fused: Fused, group: Group, state: dict[str, Any] | None) -> bool:
        """Advance the small state, and return whether the optimizer writes into gradients; see
        [Note: small state]."""
        like = fused.like
        one = torch.zeros((1,) * like.dim(), dtype=like.dtype, device=self._device.device)
        gradient = torch.zeros_like(one)
        version = gradient._version
        small = {
            key: torch.zeros_like(one) if key in fused.states else value
            for key, value in (state or {}).items()
        }
        update = Update(group, one, gradient, small or None, [], TorchContext.now(), {})
        with _disable_current_modes():  # under a mode, foreach operators do not raise versions
            _, made = self._run(update, {})
        if made and state is None:
            state = self._optimizer.state[fused.parameter] = {}
        for key, value in made.items():
            assert state is not None
            if not isinstance(value, torch.Tensor) or value.shape != one.shape:
                state[key] = value
            elif key not in fused.states:
                state[key] = self.rows.view(fused, self.rows.state_row(fused, key))
        return gradient._version != version

    def joins(self, update: SliceUpdate, step: Step) -> bool:
        """Return whether ``step`` can be queued in ``update``."""
        early = 37 * update.regions[0] % (MOST_STEPS // 2)
        return step.zero and len(update.steps) < MOST_STEPS - early

    def begin(self, slot: Slot, step: Step) -> SliceUpdate:
        """Return a new update of ``slot`` that begins with ``step``."""
        regions = [slot.region, *slot.states.values()]
        gradient = None
        if not step.zero:
            gradient = slot.gradient
            assert gradient is not None
            regions.append(gradient)
        slot.owed = slot.home = gradient
        return SliceUpdate([step], regions, gradient)

    @torch.no_grad()
    def apply(
        self, slot: Slot, update: SliceUpdate, storages: Mapping[int, torch.UntypedStorage]
    ) -> None:
        """Make an update whose regions are resident.

        Args:
            slot: the slice.
            update: its update.
            storages: storages at other addresses, by region; others are at their own addresses.
        """
        assert slot.fused is not None
        like = slot.fused.like_of(slot.number)

        def tensor(region: int) -> torch.Tensor:
            return view_of(self._device.storage(region), like)

        states = {key: tensor(region) for key, region in slot.states.items()}
        zeros = self._zeros_like(slot.fused) if any(step.zero for step in update.steps) else None
        if zeros is not None:
            self._device.acquire([zeros], pin=True)
        try:
            for number, step in enumerate(update.steps):
                region = zeros if step.zero else update.gradient
                assert region is not None
                update.begun = True
                state = None
                if step.small is not None:
                    # The order of keys does not matter: optimizers read state by key.
                    state = {**states, **{key: copied(value) for key, value in step.small.items()}}
                data, gradient = tensor(slot.region), tensor(region)
                one = Update(step.group, data, gradient, state, [], step.context, {})
                kind, guard = self._device.device.type, bool(storages)
                others = step.context != update.context
                with step.context.again(kind, guard=guard) if others else nullcontext():
                    given, made = self._run(one, storages, None if number else slot)
                for key in states.keys() & made.keys():
                    if made[key] is not given.get(key):
                        shown = storages.get(slot.states[key])
                        target = states[key] if shown is None else view_of(shown, like)
                        target.copy_(made[key])
        finally:
            if zeros is not None:
                self._device.unpin([zeros])
                self._device.clear([zeros])

    def _zeros_like(self, fused: Fused) -> int:
        region = self._zeros.get(fused.slice_bytes)
        if region is None:
            region = self._zeros[fused.slice_bytes] = self._device.allocate(
                fused.slice_bytes, extra=True
            )
            self._store.names[region] = "zeros"
            self._device.clear([region])
        return region

    def end(self, slot: Slot, update: SliceUpdate) -> None:
        """Finish an update that was made: discard its gradient."""
        slot.owed = slot.home = None
        if update.gradient is not None:
            self.rows.end_gradient(slot, update.gradient)

    def put_aside(self, slot: Slot, update: SliceUpdate, region: int) -> None:
        """Move an update's gradient to a twin region, because its row is needed for a new gradient.
        The regions trade contents, so no bytes move."""
        assert isinstance(self._device, Pager)
        twin = self._device.twin(region)
        self._store.own(twin, f"{slot.name}.grad (waiting)", slot)
        self._device.lock([twin])
        self._device.exchange([region], [twin])
        self._device.unlock([region])
        update.regions[update.regions.index(region)] = twin
        update.gradient = slot.owed = twin
