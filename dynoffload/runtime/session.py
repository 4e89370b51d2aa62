"""The session: what the user holds while a model trains under a budget."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dynoffload.around import Handle, after_call, before_call, choosing
from dynoffload.config import OffloadConfig
from dynoffload.launch import launched_rank
from dynoffload.memory.device import Device
from dynoffload.memory.limits import resident_bytes
from dynoffload.runtime.adoption.held import has_its_own
from dynoffload.runtime.adoption.homes import Homes
from dynoffload.runtime.aside import ASIDE, Whole
from dynoffload.runtime.checkpoints.loading import load
from dynoffload.runtime.checkpoints.peers import peers_of
from dynoffload.runtime.checkpoints.saving import save
from dynoffload.runtime.checkpoints.tensors import Ordinary
from dynoffload.runtime.counting import ordinary_bytes
from dynoffload.runtime.forked import refusal
from dynoffload.runtime.frames import clear_frames
from dynoffload.runtime.growth import Growth
from dynoffload.runtime.interrupts import interruptible, uninterrupted
from dynoffload.runtime.meta_init import MetaInit
from dynoffload.runtime.migration.forecast import Forecast, Predictor
from dynoffload.runtime.overrun import largest_outside
from dynoffload.runtime.paging import Paging
from dynoffload.runtime.passes.calls import Calls
from dynoffload.runtime.passes.hooks import Hook
from dynoffload.runtime.ranks.replicas import beside, is_known, unknown
from dynoffload.runtime.ranks.sharded import groups_of, said_of
from dynoffload.runtime.ranks.status import RankStatus
from dynoffload.runtime.ranks.watchdog import RankWatchdog, watch_ranks
from dynoffload.runtime.recording import Recording
from dynoffload.runtime.sizing import Sizing
from dynoffload.runtime.target import Target
from dynoffload.runtime.unseen import unseen
from dynoffload.runtime.updates.failure import Aftermath
from dynoffload.telemetry import RunLog, StepStats, table_of
from dynoffload.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd

    from dynoffload.reporting import ReportFiles

logger = logging.getLogger(__name__)

_MEASURED_STEPS = 2  # steps watched before stepping aside
_GROWTH = 1.1  # a sample so much larger than those measured is paged again

_ITEMS = 64  # of a list, by which the size of the rest is judged


class Session:
    """A model and its optimizer under a budget; made by `dynoffload.offload`.

    Attributes:
        model: the root module.
        optimizer: its optimizer, or None.
        sizing: how the budget is divided.
        spill_dir: where the spill file lies.
        log: all that was recorded so far.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        sizing: Sizing,
        config: OffloadConfig,
        spill_dir: Path,
        target: Target,
        pilot: Predictor | str | None,
        spill_reason: str = "",
        replicas: tuple[DistributedDataParallel, ...] = (),
    ) -> None:
        self._replicas = replicas
        self._leave_block: Callable[[], None] | None = None  # while it is open
        self._moved = 0  # by all that happens
        self._called = False  # the root, to train; or it was warned that it is not
        self.model, self.optimizer, self.sizing = model, optimizer, sizing
        self._config, self.spill_dir = config, spill_dir
        self._target = target
        self._homes = Homes(model, optimizer, target, spill_dir)
        # It asks a predictor of the user's.
        self._forecast = interruptible(Forecast)(model, config.policy, pilot, config.features)
        self._paging: Paging | None = None
        self._handles: list[Handle] = []
        self._aside_handle: RemovableHandle | None = None
        self._meta_init = MetaInit(model, target.device)
        try:
            self._begin(spill_reason)
        except BaseException as error:
            self._undo(error)
            raise

    @uninterrupted
    def _undo(self, error: BaseException | None) -> None:
        """End a session that has not begun, because of ``error``: all is as before it."""
        for handle in self._handles:
            handle.remove()
        paging, self._paging = self._paging, None
        with contextlib.ExitStack() as undo:  # the last first, though one of them raises
            undo.callback(self._meta_init.undo)
            undo.callback(self._homes.leave)
            if paging is not None:
                undo.callback(paging.close)
            clear_frames(error)
            if paging is not None:
                if paging.meta_is_held():  # by code of the user's that was cut off
                    clear_frames(error, ours=False)
                paging.revert()

    def _begin(self, spill_reason: str) -> None:
        model, optimizer, sizing = self.model, self.optimizer, self.sizing
        config, target = self._config, self._target
        before = resident_bytes()
        self._paging = paging = self._page()
        self.log = RunLog(
            model=type(model).__name__,
            backend=paging.device.name,
            policy=config.policy,
            budget=sizing.budget,
            headroom=0,
        )
        # What the process takes without the managed tensors: it takes less once they are paged.
        baseline = min(before, resident_bytes() - paging.device.taken_bytes())
        self._recording = Recording(
            self.log,
            baseline,
            config.heap_slack_bytes,
            outside=self._outside_bytes,
            allocated=None if target.queues is None else target.queues.peak_bytes,
        )
        self._largest = 0
        self._measured_peak = self._need = 0
        self._whole = Whole(model, optimizer)
        self._stepped = False  # since the last sample
        self._said_overrun = False
        self._leaves = self._outgrown = False
        self._pid = os.getpid()
        self._calls = Calls()
        self._in_sample = False
        self._around: BaseException | None = None  # being handled as the forward began
        enter = Hook(self._before_forward, self._settle, compiled=True)
        leave = Hook(self._after_forward, compiled=True)
        self._hooks, unseen = (enter, leave), choosing(model)
        self._handles += [
            before_call(model, enter, unseen, first=True),
            after_call(model, leave, unseen),
        ]
        queues = target.queues
        self._growth = Growth(model, None if queues is None else queues.given_bytes)
        self._say_plan(spill_reason)
        paging.begun()
        interruptible(self._meta_init.give)(paging.bring)
        paging.count_anew()

    def _outside_bytes(self, device: Device | None) -> int:
        buckets = beside(self._replicas, device, self.sizing.bucket_bytes)
        return ordinary_bytes(self.model, self.optimizer, device) + buckets

    def _page(self) -> Paging:
        return Paging(
            self.model,
            self.optimizer,
            self.sizing,
            self._config,
            self.spill_dir,
            self._target,
            self._homes,
            self._forecast,
            on_progress=self._progress,
            on_chunk=self._look_at_heap,
            on_phase=lambda name: self._recording.phase(name),
            on_step=self._end_step,
            replicated=bool(self._replicas),
        )

    def _say_plan(self, spill_reason: str) -> None:
        paging, sizing = self._paging, self.sizing
        assert paging is not None
        if launched_rank():
            return
        logger.info(
            "%s: %s of parameters, gradients%s%s under %s on the %s (pool %s in "
            "pages of %s, reserve %s), %s, policy %s",
            type(self.model).__name__,
            format_bytes(sizing.states_bytes),
            "" if self.optimizer is None else " and optimizer state",
            said_of(groups_of(self.model)),
            format_bytes(sizing.budget),
            paging.device.name,
            format_bytes(paging.device.capacity),
            format_bytes(sizing.page_bytes),
            format_bytes(sizing.reserve_bytes),
            self._beside(spill_reason),
            self._config.policy,
        )

    def _beside(self, spill_reason: str) -> str:
        """Return what the plan line says of what lies beside and below the pool."""
        spills = f"spilling to {self.spill_dir}{f' ({spill_reason})' if spill_reason else ''}"
        target, paging = self._target, self._paging
        if target.queues is None:
            slack = format_bytes(self._config.heap_slack_bytes)
            buckets = self.sizing.bucket_bytes
            reduced = f"{format_bytes(buckets)} of buckets of gradients and " if buckets else ""
            return f"beside it {reduced}up to {slack} of freed memory, {spills}"
        assert paging is not None
        pinned = "pinned" if target.queues.pinned else "not pinned"
        host = f"{format_bytes(paging.device.taken_bytes())} of host memory below it ({pinned})"
        return host if target.host_budget is None else f"{host}, {spills}"

    def __repr__(self) -> str:
        return (
            f"<Session of {type(self.model).__name__} under {format_bytes(self.sizing.budget)} on "
            f"the {self.backend}, {'paging' if self.paging else 'not paging'}>"
        )

    def _watch_ranks(self) -> RankWatchdog | None:
        groups = [one.process_group for one in self._replicas]
        return watch_ranks(self._rank_status, self._config.rank_timeout, groups)

    def _rank_status(self) -> RankStatus:
        """Return what this rank does. It reads no tensor, and any thread may ask."""
        paging = self._paging
        return RankStatus(
            step=len(self.log.steps),
            phase=self._recording.phase_name,
            site="" if paging is None else paging.migrator.site,
            gradient="" if paging is None else paging.gradient,
            progress=self._moved,
        )

    # What happens in a step

    def _before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._paging is not None and os.getpid() != self._pid:
            raise refusal(f"this {type(self.model).__name__}")
        if not self._calls.enter():
            return
        self._moved += 1
        if not is_known(module, self._replicas):
            raise unknown(module)
        self._in_sample = False
        if self._paging is not None:
            self._paging.hear()
            self._paging.loss.check()
        if self._leaves and not _is_transformed():
            self._step_aside()
        if torch.is_grad_enabled():
            self._begin_sample(args, kwargs)
        elif self._paging is not None:
            self._paging.drop_forward()

    def _begin_sample(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._paging is not None:
            self._paging.follow_model()
        if self._config.step_aside:
            size = _size_of((args, kwargs))
            if self._paging is None and has_its_own(self.model) and not _is_transformed():
                reason = self._reason_to_come_back(size)
                if reason:
                    logger.info("%s: paging again", reason)
                    self._come_back()
            if self._paging is not None:
                self._largest = max(self._largest, size)
        self._in_sample, self._around = True, sys.exception()
        self._called = True
        if self._paging is None:
            self._growth.begin()
            return
        self._paging.begin_forward(args, kwargs)
        if self._config.page_activations:
            self._calls.save_to(self._paging.activations)

    def _reason_to_come_back(self, size: int) -> str:
        if self._outgrown or size > self._largest * _GROWTH:
            return "a larger sample than any measured"
        stepped, self._stepped = self._stepped, False
        if self._whole.grew(stepped=stepped):
            return "more is trained than when paging stepped aside"
        return ""

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._calls.leave():
            return
        if self._in_sample:
            self._in_sample = False
            self._end_sample(output)
        if self._paging is not None and output is not None:  # else by an error, mostly
            self._paging.loss.check()  # what was computed may be of a value that lacks its update

    def _end_sample(self, output: Any) -> None:
        around, self._around = self._around, None
        if self._paging is not None:
            self._paging.end_forward(whole=sys.exception() is around)
        else:
            peak = self._recording.grew(self._growth.finish(output))
            self._outgrown = peak > self.sizing.budget

    def _progress(self) -> None:
        self._moved += 1
        if self._paging is not None:
            paging = self._paging
            self._recording.sample(paging.device, paging.activations.kept_bytes)

    def _look_at_heap(self) -> None:
        if self._paging is not None:
            paging = self._paging
            self._recording.look_at_heap(paging.device, paging.activations.kept_bytes)

    @unseen
    def _end_step(self) -> None:
        self._moved += 1
        paging = self._paging
        if paging is None:
            self._stepped = True
            self._growth.end()
            self._recording.end_step(None, None, 0, None, (), math.nan)
            return
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
        forecast = self._forecast
        stats = self._recording.end_step(
            paging.device,
            paging.store,
            paging.activations.kept.take_peak(),
            forecast.names(forecast.predicted),
            forecast.names(forecast.actual) or (),
            forecast.accuracy,
        )
        if stats.peak_fast_bytes > self.sizing.budget:
            self._say_overrun(paging, stats)
        if self._config.step_aside and not self._config.rollback:
            self._consider_aside(stats)
        forecast.judge(stats)

    def _say_overrun(self, paging: Paging, stats: StepStats) -> None:
        """Say, once, what passes the budget: tensors that cannot be paged, and have grown."""
        if self._said_overrun:
            return
        self._said_overrun = True
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

    def _consider_aside(self, stats: StepStats) -> None:
        peak = max(stats.peak_fast_bytes, stats.peak_allocated_bytes)
        self._measured_peak = max(self._measured_peak, peak)
        if (
            self._leaves
            or stats.bytes_in
            or stats.bytes_out
            or len(self.log.steps) < _MEASURED_STEPS
        ):
            return
        paging = self._paging
        assert paging is not None
        need = self._measured_peak + paging.absent_bytes(self._whole.look())
        need = self._need = max(self._need, need)  # also of steps that trained more than this one
        if need > ASIDE * self.sizing.budget or stats.step < _MEASURED_STEPS:
            return
        if paging.is_held_outside() or paging.loss:
            return  # somebody looks at our memory, which would end; or a loss would be forgotten
        logger.info(
            "all that a step takes, %s of the budget of %s, fits: paging steps aside",
            format_bytes(need),
            format_bytes(self.sizing.budget),
        )
        self._leaves = True  # with the next sample: now torch walks the optimizer's hooks

    @uninterrupted
    def _step_aside(self) -> None:
        self._leaves = False
        paging = self._paging
        assert paging is not None
        if paging.is_held_outside():
            return  # since the step
        self._paging = None
        self._end(paging, stays=True)
        self._whole.watch()
        if self.optimizer is not None:
            self._aside_handle = self.optimizer.register_step_post_hook(
                lambda optimizer, args, kwargs: self._end_step()
            )

    def _end(self, paging: Paging, *, stays: bool = False) -> str:
        try:
            return paging.close(stays=stays)
        finally:
            if paging.loss:
                Aftermath(self.model, self.optimizer, paging.loss)

    @uninterrupted
    def _come_back(self) -> None:
        paging = self._page()  # where it fails, the session stays aside, and says so again
        if self._aside_handle is not None:
            self._aside_handle.remove()
            self._aside_handle = None
        self._whole.reset()
        self._measured_peak = self._need = 0
        self._outgrown = False
        self._growth.end()
        self._recording.restart()
        paging.begun()
        paging.count_anew()
        self._paging = paging

    # What the user calls

    @property
    def backend(self) -> str:
        """The device's name: ``"pager"`` or ``"mapped"``."""
        return self.log.backend

    @property
    def paging(self) -> bool:
        """Whether the model is paged now; False while everything fits."""
        return self._paging is not None

    @property
    def spill_bytes(self) -> int:
        """Bytes that the spill file takes now; 0 while everything fits."""
        return 0 if self._paging is None else self._paging.device.spill_bytes()

    @property
    def stats(self) -> pd.DataFrame:
        """One row per step so far; columns are the fields of `StepStats`."""
        return table_of(self.log.steps)

    def flush(self) -> None:
        """Make every optimizer update that was put off."""
        if self._paging is not None:
            self._paging.flush()

    def _settle(self) -> None:
        if self._paging is not None:
            self._paging.settle()

    def save(
        self,
        directory: str | Path,
        *,
        extra: Mapping[str, Any] | None = None,
        max_shard_size: int | str = "5GB",
    ) -> None:
        """Save the run to ``directory``, which is replaced at once; see `save_checkpoint`.

        Updates that were put off are made first. Tensors are written piece by piece, from where
        they are, so no more memory is taken than the budget and some megabytes. Call it between
        steps: gradients are not saved, and those that there are stay as they are.

            with dynoffload.offload(model, optimizer, budget="8GiB") as session:
                if Path("run/last").exists():
                    session.load("run/last", extra={"scheduler": scheduler})
                for batch in loader:
                    ...  # forward, backward, step, zero_grad
                session.save("run/last", extra={"scheduler": scheduler})

        Raises:
            CheckpointError: a value cannot be kept, the disk is full or read-only, or the directory
                is something else. Training can go on.
            StepLostError: a step was lost, and nothing was loaded since.
        """
        self._save(self.optimizer, directory, extra, max_shard_size)

    def load(self, directory: str | Path, *, extra: Mapping[str, Any] | None = None) -> None:
        """Load a checkpoint, saved under whatever budget or none; see `load_checkpoint`.

        Gradients, updates that were put off and a lost step are gone afterwards.

        Raises:
            CheckpointError: there is none, it is damaged, foreign or of a newer version, or it is
                not of this model; names what differs, and has touched nothing.
        """
        self._load(self.optimizer, directory, extra)

    def _save(
        self,
        optimizer: Optimizer | None,
        directory: str | os.PathLike[str],
        extra: Mapping[str, Any] | None,
        max_shard_size: int | str,
    ) -> None:
        def settle() -> None:
            self._settle()
            Aftermath.check(self.model, optimizer)

        peers = peers_of(self.model, self._replicas)
        peers.share(settle)
        save(
            self.model,
            optimizer,
            directory,
            extra=extra,
            max_shard_size=max_shard_size,
            memory=self._paging.adoption if self._paging else Ordinary(),
            peers=peers,
        )

    def _load(
        self,
        optimizer: Optimizer | None,
        directory: str | os.PathLike[str],
        extra: Mapping[str, Any] | None,
    ) -> None:
        touched = False

        def prepare() -> None:
            nonlocal touched
            touched = True
            if self._paging is None:
                return
            if optimizer is None:
                self._paging.begin_load()
            else:
                self._paging.abandon()

        try:
            load(
                self.model,
                optimizer,
                directory,
                extra=extra,
                memory=self._paging.adoption if self._paging else Ordinary(),
                prepare=prepare,
                peers=peers_of(self.model, self._replicas),
            )
        except BaseException as error:
            if touched and self._paging is not None:
                self._paging.lose(error)
            raise
        if self._paging is not None:
            self._paging.loss.make_up("model")
            if optimizer is not None:
                self._paging.loss.make_up("optimizer")
        Aftermath.make_up(self.model, optimizer)

    def report(self, path: str | Path) -> ReportFiles:
        """Write the HTML page to ``path``, with a Perfetto trace and the run log beside it.

        Returns:
            The paths of the three.
        """
        from dynoffload.reporting import write_run

        return write_run(self.log, Path(path))

    def close(self) -> None:
        """End the block, as leaving its ``with`` does; where it has ended, do nothing.

        All tensors are ordinary again, and memory and disk are given back.
        """
        if self._leave_block is not None:
            self._leave_block()

    @uninterrupted
    def _close(self) -> None:
        paging, self._paging = self._paging, None
        places: list[str] = []
        with contextlib.ExitStack() as ends:  # the last first, though one of them raises
            if os.getpid() == self._pid:
                ends.callback(self._say_where, places)
                ends.callback(lambda: places.append(self._homes.leave()))
                if paging is not None:
                    ends.callback(lambda: places.append(self._end(paging)))
            for hook in self._hooks:
                hook.end()
            for handle in self._handles:
                handle.remove()
            self._calls.abandon()
            self._whole.reset()
            if self._aside_handle is not None:
                self._aside_handle.remove()
            if os.getpid() == self._pid:  # what may take long, or is the user's
                interruptible(self._forecast.close)()

    def _say_where(self, places: list[str]) -> None:
        where = ", ".join(place for place in places if place)
        if where:
            logger.warning("what does not fit in memory stays usable: %s", where)


def _is_transformed() -> bool:
    """Return whether this runs inside of a `torch.func` transformation, in which tensors that are
    made, such as copies of parameters, are the transformation's and end with it."""
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
