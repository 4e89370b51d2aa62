"""A session under a budget: it hooks into the training loop and pages unless everything fits."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from dynoffload.around import Handle, after_call, before_call, choosing
from dynoffload.distributed.replicas import beside, is_known, unknown
from dynoffload.distributed.sharded import groups_of, said_of
from dynoffload.distributed.status import RankStatus
from dynoffload.distributed.watchdog import RankWatchdog, watch_ranks
from dynoffload.launch import launched_rank
from dynoffload.memory.device import Device
from dynoffload.memory.limits import resident_bytes
from dynoffload.runtime.adoption.held import has_its_own
from dynoffload.runtime.adoption.relocation import Homes
from dynoffload.runtime.counting import largest_outside, ordinary_bytes
from dynoffload.runtime.forked import refusal
from dynoffload.runtime.frames import clear_frames
from dynoffload.runtime.host import Headroom
from dynoffload.runtime.interrupts import interruptible, uninterrupted
from dynoffload.runtime.meta_init import MetaInit
from dynoffload.runtime.migration.forecast import Forecast
from dynoffload.runtime.modes import Mode
from dynoffload.runtime.opening import Setup
from dynoffload.runtime.paging import Paging
from dynoffload.runtime.passes.calls import Calls
from dynoffload.runtime.passes.hooks import Hook
from dynoffload.runtime.recording import Recording
from dynoffload.runtime.resident import Fit, Resident
from dynoffload.runtime.session import Session
from dynoffload.runtime.updates.failure import Aftermath
from dynoffload.telemetry import RunLog, StepStats
from dynoffload.units import format_bytes

logger = logging.getLogger(__name__)

_ITEMS = 64  # items of a list that are measured; the rest is extrapolated


class BudgetedSession(Session):
    """See `Session`; its mode is `Paging`, or `Resident` while everything fits."""

    def __init__(self, setup: Setup) -> None:
        model, optimizer, sizing = setup.model, setup.optimizer, setup.sizing
        config, target, replicas = setup.config, setup.target, setup.replicas
        log = RunLog(type(model).__name__, "", config.policy, budget=sizing.budget, headroom=0)
        super().__init__(model, optimizer, sizing, setup.spill_dir, log, replicas)
        self._config, self._target, self._wrappers = config, target, replicas
        self._homes = Homes(setup)
        # Interruptible, as it calls a user predictor.
        self._forecast = interruptible(Forecast)(
            model, config.policy, setup.pilot, config.features, config.routing_probes
        )
        self._recording = Recording(
            log,
            config.heap_slack_bytes,
            Headroom(setup.possible, sizing, self._lowest),
            outside=self._outside_bytes,
            allocated=None if target.queues is None else target.queues.peak_bytes,
        )
        parts = (setup, self._homes, self._forecast, self._recording, self._end_step)
        self._page = partial(Paging, *parts)
        self._fit = Fit(model, optimizer, sizing.budget)
        self._fits = False  # everything fits: paging ends with the next sample
        self._called = False  # the root was called to train, or a warning was logged that it is not
        self._warned_overrun = False
        self._pid = os.getpid()
        self._calls = Calls()
        self._in_sample = False
        self._around: BaseException | None = None  # the exception being handled as forward began
        self._hooks: tuple[Hook, ...] = ()
        self._handles: list[Handle] = []
        self._meta_init = MetaInit(model, target.device)
        try:
            self._begin(setup.spill_reason)
        except BaseException as error:
            self._undo(error)
            raise

    @uninterrupted
    def _undo(self, error: BaseException | None) -> None:
        """Roll back a session that failed to begin with ``error``; everything is as before it."""
        for handle in self._handles:
            handle.remove()
        paging, self._mode = self._paging, Mode()
        with contextlib.ExitStack() as undo:  # in reverse order, even if one raises
            undo.callback(self._meta_init.undo)
            undo.callback(self._homes.leave)
            if paging is not None:
                undo.callback(paging.close)
            clear_frames(error)
            if paging is not None:
                if paging.meta_is_held():  # by frames of interrupted user code
                    clear_frames(error, ours=False)
                paging.revert()

    def _begin(self, spill_reason: str) -> None:
        model, before = self.model, resident_bytes()
        self._mode = paging = self._page()
        self.log.backend = paging.device.name
        # Resident bytes without the managed tensors, which take less once they are paged.
        self._recording.baseline = min(before, resident_bytes() - paging.device.taken_bytes())
        enter = Hook(self._before_forward, lambda: self._mode.settle(), compiled=True)
        leave = Hook(self._after_forward, compiled=True)
        self._hooks, unseen = (enter, leave), choosing(model)
        self._handles += [
            before_call(model, enter, unseen, first=True),
            after_call(model, leave, unseen),
        ]
        self._log_plan(paging, spill_reason)
        paging.begun()
        interruptible(self._meta_init.give)(paging.bring, paging.link)
        paging.count_anew()

    def _lowest(self) -> tuple[int, int]:
        assert self._paging is not None
        return self._paging.lowest(self._config)

    def _outside_bytes(self, device: Device | None) -> int:
        buckets = beside(self._wrappers, device, self.sizing.bucket_bytes)
        if isinstance(self._mode, Resident):
            return self._mode.outside_bytes() + buckets
        return ordinary_bytes(self.model, self.optimizer, device) + buckets

    def _log_plan(self, paging: Paging, spill_reason: str) -> None:
        if launched_rank():
            return
        sizing, target, config = self.sizing, self._target, self._config
        where = f"spilling to {self.spill_dir}{f' ({spill_reason})' if spill_reason else ''}"
        if target.queues is None:
            slack, buckets = format_bytes(config.heap_slack_bytes), sizing.bucket_bytes
            reduced = f"{format_bytes(buckets)} of buckets of gradients and " if buckets else ""
            where = f"beside it {reduced}up to {slack} of freed heap, {where}"
        else:
            pinned = "pinned" if target.queues.pinned else "not pinned"
            taken = format_bytes(paging.device.taken_bytes())
            host = f"{taken} of host memory below it ({pinned})"
            where = host if target.host_budget is None else f"{host}, {where}"
        logger.info(
            "%s: %s of parameters, gradients%s%s under %s on the %s (pool %s in "
            "pages of %s, reserve %s), %s, policy %s%s",
            type(self.model).__name__,
            format_bytes(sizing.states_bytes),
            "" if self.optimizer is None else " and optimizer state",
            said_of(groups_of(self.model)),
            format_bytes(sizing.budget),
            paging.device.name,
            format_bytes(paging.device.capacity),
            format_bytes(sizing.page_bytes),
            format_bytes(sizing.reserve_bytes),
            where,
            config.policy,
            self._forecast.probing,
        )

    def _watch_ranks(self) -> RankWatchdog | None:
        groups = [one.process_group for one in self._wrappers]
        return watch_ranks(self._rank_status, self._config.rank_timeout, groups)

    def _rank_status(self) -> RankStatus:
        """Return this rank's status. It reads no tensor; any thread may call it."""
        return RankStatus(
            step=len(self.log.steps),
            phase=self._recording.phase_name,
            site=self._mode.site,
            gradient=self._mode.gradient,
            progress=self._recording.progress,
        )

    # Hooks of a step

    def _before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self.paging and os.getpid() != self._pid:
            raise refusal(f"this {type(self.model).__name__}")
        if not self._calls.enter():
            return
        self._recording.progress += 1
        if not is_known(module, self._wrappers):
            raise unknown(module)
        self._in_sample = False
        self._mode.enter()
        if self._fits and not _is_transformed():
            self._step_aside()
        if torch.is_grad_enabled():
            self._begin_sample(args, kwargs)
        else:
            self._mode.drop_forward()

    def _begin_sample(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._mode.follow_model()
        if self._config.step_aside:
            size = _size_of((args, kwargs))
            resident = self._mode if isinstance(self._mode, Resident) else None
            if resident and self._may_move() and (reason := resident.outgrown(size)):
                logger.info("%s: paging again", reason)
                self._page_again(resident)
            if self.paging:
                self._fit.largest = max(self._fit.largest, size)
        self._in_sample, self._around = True, sys.exception()
        self._called = True
        self._mode.begin_sample(args, kwargs)
        if self._mode.saving is not None:
            self._calls.save_to(self._mode.saving)

    def _may_move(self) -> bool:
        return has_its_own(self.model) and not _is_transformed()

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._calls.leave():
            return
        if self._in_sample:
            self._in_sample = False
            around, self._around = self._around, None
            self._mode.end_sample(output, whole=sys.exception() is around)
        if output is not None:  # it is None mostly after an error
            self._mode.leave()  # the output may come from a parameter whose update failed

    def _end_step(self, stats: StepStats) -> None:
        """End a step made while paging."""
        paging = self._paging
        assert paging is not None
        if not self._called and paging.gradient:
            self._called = True
            logger.warning(
                "this %s itself is not called, only parts of it, such as that of %r: what autograd "
                "saves there is neither paged nor counted, and nothing is prefetched; call the %s, "
                "or give offload() the module that is called",
                type(self.model).__name__,
                paging.gradient,
                type(self.model).__name__,
            )
        if stats.peak_fast_bytes > self.sizing.budget:
            self._warn_overrun(paging, stats)
        if self._config.step_aside and not self._config.rollback:
            self._consider_aside(paging, stats)
        self._forecast.judge(stats)

    def _warn_overrun(self, paging: Paging, stats: StepStats) -> None:
        """Warn once that unpageable tensors have grown beyond the budget, and name the largest."""
        if self._warned_overrun:
            return
        self._warned_overrun = True
        name, nbytes, cause = largest_outside(self.model, paging.optimizer, paging.device)
        kept_bytes, kept = paging.activations.kept.largest
        if kept_bytes > nbytes:
            name, nbytes, cause = kept, kept_bytes, ""
        logger.warning(
            "step %d took %s, more than the budget of %s: something holds memory that cannot be "
            "paged%s; let go of it, clone it, or raise the budget",
            stats.step,
            format_bytes(stats.peak_fast_bytes),
            format_bytes(self.sizing.budget),
            f"; the largest is {name} with {format_bytes(nbytes)}{cause}" if name else "",
        )

    def _consider_aside(self, paging: Paging, stats: StepStats) -> None:
        if self._fits or not self._fit.holds(stats, paging):
            return
        if paging.is_held_outside() or paging.loss:
            return  # external references would lose their memory, or a step failure be forgotten
        logger.info(
            "all that a step takes, %s of the budget of %s, fits: paging steps aside",
            format_bytes(self._fit.need),
            format_bytes(self.sizing.budget),
        )
        self._fits = True  # applied at the next sample: torch is running the optimizer's hooks now

    @uninterrupted
    def _step_aside(self) -> None:
        self._fits = False
        paging = self._paging
        assert paging is not None
        if paging.is_held_outside():
            return  # referenced since the step
        self._mode = Mode()
        try:
            self._end(paging, stays=True)
        finally:  # resident also where closing lost a step
            queues = self._target.queues
            given = None if queues is None else queues.given_bytes
            self._mode = Resident(self._fit, self._recording, given)

    def _end(self, paging: Paging, *, stays: bool = False) -> str:
        try:
            return paging.close(stays=stays)
        finally:
            if paging.loss:
                Aftermath(self.model, self.optimizer, paging.loss)

    @uninterrupted
    def _page_again(self, resident: Resident) -> None:
        paging = self._page()  # if this fails the session stays resident, and logs so again
        resident.close()
        self._fit.reset()
        paging.begun()
        paging.count_anew()
        self._mode = paging

    @uninterrupted
    def _close(self) -> None:
        mode, self._mode = self._mode, Mode()
        places: list[str] = []
        with contextlib.ExitStack() as ends:  # in reverse order, even if one raises
            if os.getpid() == self._pid:
                ends.callback(self._log_where, places)
                ends.callback(lambda: places.append(self._homes.leave()))
                if isinstance(mode, Paging):
                    ends.callback(lambda: places.append(self._end(mode)))
            if not isinstance(mode, Paging):
                mode.close()
            for hook in self._hooks:
                hook.end()
            for handle in self._handles:
                handle.remove()
            self._calls.abandon()

    def _log_where(self, places: list[str]) -> None:
        where = ", ".join(place for place in places if place)
        if where:
            logger.warning("what does not fit in memory stays usable: %s", where)


def _is_transformed() -> bool:
    """Return whether this runs inside a `torch.func` transform. Tensors made there, such as copies
    of parameters, belong to the transform and end with it."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _size_of(value: Any, depth: int = 3) -> int:
    """Return a cheap measure of a sample's size, in elements."""
    if isinstance(value, torch.Tensor):
        return value.numel()
    if depth and isinstance(value, dict):
        return sum(_size_of(item, depth - 1) for item in value.values())
    if depth and isinstance(value, tuple | list):
        seen = value[:_ITEMS]
        some = sum(_size_of(item, depth - 1) for item in seen)
        return max(len(value), some * len(value) // max(1, len(seen)))
    if depth and is_dataclass(value) and not isinstance(value, type):
        return sum(_size_of(getattr(value, f.name, None), depth - 1) for f in fields(value))
    try:
        return len(value)
    except TypeError:
        return 0
