"""Per-step behaviour of paged mode: plans, fetches and records in response to hooks."""

from __future__ import annotations

import contextlib
import logging
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from dynoffload.around import after_call, before_call, choosing, is_compiled
from dynoffload.distributed.replicas import as_backward_ends
from dynoffload.distributed.sharded import Gathered, groups_of
from dynoffload.memory.accelerator.accelerator import Accelerator
from dynoffload.memory.device import Device
from dynoffload.planning import small_modules
from dynoffload.profiler.experts import split_path
from dynoffload.runtime.adopting import Adoption
from dynoffload.runtime.adoption.slots import Fused, Slot
from dynoffload.runtime.adoption.units import Unit, units_of
from dynoffload.runtime.counting import is_trained, storages_outside
from dynoffload.runtime.experts.gradients import FusedGradients
from dynoffload.runtime.experts.parts import Parts, run_by_slices, takes_all_at_once
from dynoffload.runtime.interrupts import uninterrupted
from dynoffload.runtime.migration.forecast import Forecast
from dynoffload.runtime.migration.migrator import Migrator, Phase
from dynoffload.runtime.modes import Mode
from dynoffload.runtime.opening import Setup
from dynoffload.runtime.overlap import Overlap
from dynoffload.runtime.passes.activations import Activations, tensors_in
from dynoffload.runtime.passes.compiled import CompiledModules
from dynoffload.runtime.passes.hooks import Hook, in_backward, watch_modules
from dynoffload.runtime.passes.saved import Chunk
from dynoffload.runtime.recording import Recording
from dynoffload.runtime.unseen import unseen
from dynoffload.runtime.updates.deferred_optimizer import DeferredOptimizer
from dynoffload.runtime.updates.failure import StepFailure
from dynoffload.runtime.updates.in_backward import InBackward
from dynoffload.telemetry import StepStats

logger = logging.getLogger(__name__)

_MOST_HOOKS = 1 << 14  # that are removed at a step's end


class Stepping(Mode):
    """The steps of a paged model; `Paging` sets them up and tears them down.

    Attributes:
        device: stores the paged tensors.
        adoption: knows which tensors these are.
        activations: store of what autograd saves.
        overlap: measures what that takes beside gradients.
        updates: the deferred updates of the optimizer, or None.
        gradients: gradients of parameters paged by slices.
        migrator: follows the step, and prefetches and evicts.
        loss: records a failed step; its `check` raises `StepLostError`.
    """

    paging = True
    device: Device
    adoption: Adoption
    activations: Activations
    overlap: Overlap
    gradients: FusedGradients
    migrator: Migrator

    def __init__(
        self,
        setup: Setup,
        forecast: Forecast,
        recording: Recording,
        on_step: Callable[[StepStats], None],
    ) -> None:
        self.model, self.optimizer, self.sizing = setup.model, setup.optimizer, setup.sizing
        self._forecast, self._recording, self._on_step = forecast, recording, on_step
        self.updates: DeferredOptimizer | None = None
        parts = ("model",) if setup.optimizer is None else ("model", "optimizer")
        self.loss = StepFailure(*parts)
        self._watching = contextlib.ExitStack()  # hook registrations, removed on close
        # Gradients of a replicated model change when backward ends: `distributed.replicas`.
        self._replicated = bool(setup.replicas)
        self._awaits_end = False  # of the running backward
        # Backward is followed where it computes activations again: see `_follow_backward`.
        self._hooks: deque[Any] = deque(maxlen=_MOST_HOOKS)
        self._followed: set[Unit] = set()  # by the graph of the forward
        self._input: weakref.ref[torch.Tensor] | None = None  # of the unit followed last
        # Small modules whose submodules run without them; see `_check_members`.
        self._apart: set[str] = set()
        self._visited: set[int] = set()  # units, in the first forward
        self._checked = False
        self._watching_members = contextlib.ExitStack()
        self._ends = False
        self._warned: set[str] = set()

    def _begin_activations(self, enough: Callable[[int], int]) -> None:
        sizing = self.sizing
        self.activations = Activations(
            self.device,
            sizing.chunk_bytes,
            sizing.min_moved_bytes,
            sizing.kept_bytes,
            on_borrow=self._use_again,
            on_borrowed=self._backward_use,
            on_chunk=self._reach_chunk,
            on_open=self._open_chunk,
            site=lambda: self.migrator.site,
            enough=enough,
            region_of=self._region_of,
            names=self.adoption.store.names,
        )
        self.overlap = Overlap(self.model, self.activations)
        if isinstance(self.device, Accelerator):
            self.activations.compiled = CompiledModules(self.device)

    def _watch(self) -> None:
        """Install hooks until `_watching` is closed."""
        model, store, rows = self.model, self.adoption.store, self.adoption.rows
        watching, gradients = self._watching, self.gradients
        groups = groups_of(model)
        small = self.device.capacity // small_modules.SHARE
        units = units_of(model, store.slots, store.fused, groups, small, self._apart)
        self._check_members(units)
        self.activations.gathered = Gathered(groups) if groups else None
        watching.callback(self._forecast.unwatch)
        self._forecast.watch(units, on_ask=self._make_ready, on_revise=self._revise)
        watch_modules(watching, model, units, self._visit, self.settle)
        if (compiled := self.activations.compiled) is not None:
            compiled.watch(watching, model, units, self._visit)
        collectors: dict[nn.Parameter, Callable[[torch.Tensor], None]] = {
            one.parameter: partial(self._collect, one) for one in (*store.slots.values(), *rows)
        }
        for group in groups:  # gradients of shards that are not paged get memory of their own
            for part in group.parameters:
                collectors.setdefault(part, store.part_gradient)
        for other in model.parameters():
            collectors.setdefault(other, self.overlap.collect)
        for parameter, collect in collectors.items():
            if parameter.requires_grad:
                register: Any = parameter.register_post_accumulate_grad_hook
                watching.callback(register(collect).remove)
        for fused in rows:
            if fused.parameter.requires_grad:
                watching.callback(gradients.watch(fused))
        slices: dict[nn.Module, dict[int, Unit]] = {}
        by_index = choosing(model)
        for unit in units:
            if unit.number is not None:
                slices.setdefault(unit.module, {})[unit.number] = unit
        for module, numbered in slices.items():
            if not self.device.serves and (way := takes_all_at_once(module)):
                self._warn_once(
                    f"{type(module).__name__} runs its experts by {way!r}, for which all of a "
                    "layer are fetched: model.set_experts_implementation('eager') has those "
                    "fetched that are hit",
                    once="experts",
                )
            reached: set[int] = set()  # by the running call
            parts = partial(self._parts_of, module, numbered, reached)
            watching.callback(run_by_slices(module, parts))
            end = Hook(partial(self._end_experts, numbered, reached))
            watching.callback(after_call(module, end, by_index).remove)
            watching.callback(end.end)
        self.activations.kept.counted_elsewhere(storages_outside(model, self.device))

    def _check_members(self, units: Sequence[Unit]) -> None:
        """Watch in one forward whether submodules of small modules run without these."""
        modules, unseen = dict(self.model.named_modules()), choosing(self.model)
        # Whose hooks do nothing, but whose code is compiled anew for other hooks.
        compiled = {one for m in modules.values() if is_compiled(m) for one in m.modules()}
        for unit in units if not self._checked else ():
            for path in (
                unit.members if len(unit.members) > 1 and unit.module not in compiled else ()
            ):
                if path != unit.path:
                    hook = Hook(partial(self._ran_within, unit))
                    handle = before_call(modules[path], hook, unseen)
                    self._watching_members.callback(handle.remove)
                    self._watching_members.callback(hook.end)
        self._watching.callback(self._watching_members.close)

    def _ran_within(self, unit: Unit, *_: object) -> None:
        if unit.index not in self._visited:
            self._apart.add(unit.path)

    def _end_check(self) -> None:
        """End the watch of `_check_members`; units that it found are units no more."""
        if not self._checked:
            self._checked = True
            self._watching_members.close()
            self.adoption.changed |= bool(self._apart)

    def settle(self) -> None:
        self.loss.check()
        if self.updates is not None:
            self.updates.settle()

    # A forward

    def begin_sample(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._awaits_end = False
        self._recording.phase("forward")
        order = self._forecast.begin(args, kwargs)  # runs user code, which may be slow
        self._begin_forward(args, kwargs, order)

    @uninterrupted
    @unseen
    def _begin_forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], order: list[Unit] | None
    ) -> None:
        if self.activations.compiled is not None and not in_backward():
            self.activations.compiled.end()
        self._take_back_frozen()
        self.overlap.begin_forward()
        if self.migrator.phase is Phase.BACKWARD:
            self._end_followed()
        self.activations.begin_forward(tensors_in((args, kwargs), depth=4))
        self.migrator.set_prefetch(self._forecast.pays)
        self.migrator.begin_forward(order)

    def _take_back_frozen(self) -> None:
        """Move replaced data of frozen fused parameters back into their rows; no step does."""
        pending = {} if self.updates is None else self.updates.pending.by_slot
        for fused in self.adoption.rows:
            if not is_trained(fused.parameter) and pending.keys().isdisjoint(fused.slots):
                self.adoption.rows.take_back(fused)

    @uninterrupted
    @unseen
    def drop_forward(self) -> None:
        self._forecast.drop()
        self.migrator.drop_forward()

    @uninterrupted
    @unseen
    def end_sample(self, output: Any = None, *, whole: bool = True) -> None:
        self.activations.end_forward()
        self.migrator.end_forward()
        self._forecast.end(whole=whole)
        self._end_check()
        if not whole and isinstance(sys.exception(), torch.OutOfMemoryError):
            self._make_way()
        if self.updates is not None:
            self.updates.restore_groups()

    def _make_way(self) -> None:
        """After an operator on no region found no memory: have room for the next forward."""
        if isinstance(self.device, Accelerator):
            self.device.make_way()

    @property
    def site(self) -> str:
        return self.migrator.site

    # Called by hooks

    @uninterrupted
    @unseen
    def _visit(self, unit: Unit, _: object = None, args: Sequence[Any] = (), *__: object) -> None:
        """Called as the forward of a unit begins."""
        if self.loss:
            self.loss.check()
        if isinstance(self.device, Accelerator):
            self.device.end_loans()
        self._recording.sample()
        if (made := self._in_backward) is not None:
            for slot in unit.slots:
                made.check_use(slot.parameter, slot.name)
        if not self._forecast.asks:
            if self.migrator.visit(unit):
                self._recording.phase("backward")
            self._follow_backward(unit, args)
        if not self._checked:
            self._visited.add(unit.index)
        self._make_ready([unit])
        for slot in unit.slots:
            self.adoption.store.adopt_data(slot)

    @uninterrupted
    def _end_experts(
        self, units: dict[int, Unit], reached: set[int], _: nn.Module, args: Sequence[Any], *__: Any
    ) -> None:
        """Record visits of experts that ran without stand-ins. As operators read all of them, the
        plan keeps them until the call ends."""
        site = split_path(next(iter(units.values())).path)[0]
        listed = self._forecast.listed.get(site, ())
        self.migrator.visit_at_once([units[n] for n in listed if n not in reached])
        if listed and not self._forecast.asks:
            last = listed[0 if reached else -1]  # of backward, which goes back one by one
            self._follow_backward(units[last], args)
        reached.clear()

    def _follow_backward(self, unit: Unit, args: Sequence[Any]) -> None:
        """Hear when backward has gone through a unit called with ``args``: where activations are
        computed again, no saved tensor shows it. See `_left`."""
        forward = self.migrator.phase is Phase.FORWARD
        if not self.migrator.recomputes or (unit in self._followed and not forward):
            return
        for one in args:
            node = None
            if isinstance(one, torch.Tensor):
                with contextlib.suppress(RuntimeError):  # for some views that have none
                    node = one.grad_fn
            if node is None:
                continue
            if self._input is None or self._input() is not one:  # which several units may share
                left = partial(_left, weakref.ref(self), unit.slots[0].region)
                self._hooks.append(node.register_prehook(left))
                self._input = weakref.ref(one)
            if forward:
                self._followed.add(unit)
            return

    @uninterrupted
    def _leave_backward(self, region: int) -> None:
        if not self._ends:
            self.migrator.leave_backward(region)

    def _end_followed(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._followed.clear()
        self._input = None

    def _parts_of(
        self, module: nn.Module, units: dict[int, Unit], reached: set[int]
    ) -> dict[str, Parts]:
        """Return the stand-ins for the fused parameters of ``module`` for one call."""
        reached.clear()

        def use(number: int) -> None:
            if number not in reached:
                reached.add(number)
                self._forecast.visit(units[number])
                self._visit(units[number])

        known = self.adoption.store.fused
        return {
            name: Parts(parameter, known[parameter], self.gradients, use)
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter in known and not known[parameter].is_flat
        }

    @uninterrupted
    @unseen
    def _make_ready(self, units: Sequence[Unit]) -> None:
        """Apply these units' pending updates, and fetch their regions."""
        if self.updates is not None and self.updates.pending.by_slot:
            if self.sizing.flat:
                self._update_flat(units)
            self.updates.pending.flush(*[slot for unit in units for slot in unit.slots])
        self.device.touch([region for unit in units for region in unit.regions])

    def _update_flat(self, units: Sequence[Unit]) -> None:
        """Apply the pending updates of flat parameters, slice by slice as planned."""
        assert self.updates is not None
        pending = self.updates.pending
        for slot in [slot for unit in units for slot in unit.slots if slot.is_flat]:
            if slot in pending.by_slot:
                self.migrator.update(slot.region)
                pending.flush(slot)
                self.migrator.update(slot.region, after=1)

    @uninterrupted
    def _revise(self, rest: Sequence[Unit]) -> None:
        """Replan: the forward has diverged from the prediction."""
        self.migrator.revise(rest)

    def _open_chunk(self, chunk: Chunk) -> None:
        self._recording.look_at_heap()
        self.migrator.open_chunk(chunk)

    @unseen
    def _reach_chunk(self, region: int) -> None:
        self._recording.look_at_heap()
        self.device.touch([region])

    def _region_of(self, parameter: nn.Parameter) -> int:
        slot = self.adoption.store.slots.get(parameter)
        return -1 if slot is None else slot.region

    def _use_again(self, region: int) -> None:
        """Called as a parameter's region is saved or read for backward."""
        if self._in_backward is not None and (slot := self.adoption.store.slot_of(region)):
            self._in_backward.check_use(slot.parameter, slot.name)

    @property
    def _in_backward(self) -> InBackward | None:
        return None if self.updates is None else self.updates.in_backward

    @uninterrupted
    def _backward_use(self, region: int) -> None:
        self._use_again(region)
        slot, regions = self.adoption.store.slot_of(region), [region]
        if slot is not None:
            self.overlap.use(slot.parameter)
            if slot.fused is not None and slot.is_flat:
                regions = slot.fused.row
        if self.migrator.backward_use(regions):
            self._recording.phase("backward")
        self._recording.sample()

    # Gradients

    def _updates_in_backward(self) -> bool:
        """Return whether the next backward makes updates."""
        return self._in_backward is not None and not self._in_backward.tries

    @uninterrupted
    def _collect(self, one: Slot | Fused, parameter: torch.Tensor) -> None:
        """Adopt a complete gradient, or make its update."""
        self.activations.settle()
        if self.activations.compiled is not None:
            self.activations.compiled.release()
        self.overlap.collect(one.parameter)
        made = self._in_backward
        if isinstance(one, Slot) and one.shared:
            made = None  # backward may still read the memory through another parameter
        if isinstance(one, Fused) and one.is_flat:
            self.migrator.leave_backward(one.row[0])
        stays = made is not None and isinstance(one, Slot) and not made.tries
        if not stays:
            self._adopt_gradient(one)
        if (made is None or not made.collect(one.parameter, one.name)) and stays:
            self._adopt_gradient(one)
        self.gradient = one.name
        self._recording.sample()
        if parameter.grad is not None and parameter.grad.requires_grad:
            self._warn_once(
                f"backward(create_graph=True) made the gradient of {one.name!r}: gradients with a "
                "graph, and what that graph saves, stay in memory beside the budget; use "
                "torch.autograd.grad(..., create_graph=True) for the term that needs it, and plain "
                "backward() for gradients",
                once="graphs",
            )
        if self.updates is None:
            self._warn_once(
                "gradients are made, but offload() was given no optimizer: its state is not under "
                "the budget, and no step is recorded; pass offload(model, optimizer, ...)",
                once="no optimizer",
            )
        if self._replicated and not self._awaits_end:
            self._awaits_end = True
            as_backward_ends(self._adopt_reduced)

    def _warn_once(self, text: str, *, once: str) -> None:
        if once not in self._warned:
            self._warned.add(once)
            logger.warning(text)

    def _adopt_gradient(self, one: Slot | Fused) -> None:
        if isinstance(one, Fused):
            self.gradients.adopt(one)
        else:
            self.adoption.store.adopt_gradient(one)

    def _adopt_gradients(self, between: Callable[[], None] = lambda: None) -> None:
        """Adopt all existing gradients; ``between`` is called before each."""
        for one in (*self.adoption.store.slots.values(), *self.adoption.rows):
            between()
            self._adopt_gradient(one)

    @uninterrupted
    def _adopt_reduced(self) -> None:
        """After backward, or without one on this rank: adopt gradients of parameters that only
        other ranks used."""
        self._awaits_end = False
        if self._replicated and not self._ends:
            self._adopt_gradients()

    # Called by the optimizer's step

    @uninterrupted
    def _begin_whole_step(self) -> None:
        """Cancel the plan before the optimizer steps over all parameters at once."""
        self.migrator.end_plan()

    def _end_step(self) -> None:
        """Called after the optimizer has stepped."""
        if isinstance(self.device, Accelerator):
            self.device.end_loans()
        self.activations.sweep()
        self.overlap.end_step()
        self.adoption.buffers.sweep()
        self.adoption.adopt_whole_state()
        self.migrator.end_step()
        self._end_followed()
        self._record_step()

    @unseen
    def _record_step(self) -> None:
        forecast = self._forecast
        stats = self._recording.end_step(
            forecast.names(forecast.predicted),
            forecast.names(forecast.actual) or (),
            forecast.accuracy,
            *forecast.host_time.take(),
        )
        self._on_step(stats)


def _left(stepping: weakref.ref[Stepping], region: int, *_: object) -> None:
    """Called as backward has used a region, by a node of a graph, which keeps no session alive."""
    if (one := stepping()) is not None:
        one._leave_backward(region)
