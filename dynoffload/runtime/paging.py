"""Paged mode: the device, the tensors adopted into it, and the hooks, from start to restoration.

A model is paged in many steps; if one fails, those before it are undone. The caller of `Paging`
defers signals. They are admitted between two tensors, as copying their bytes takes time. Closing
makes every tensor ordinary again; another `Paging` can be made afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.optim import Optimizer

from dynoffload.checkpoint.tensors import Memory
from dynoffload.config import OffloadConfig
from dynoffload.distributed.sharded import groups_of, reshard
from dynoffload.memory.accelerator import guarded
from dynoffload.memory.accelerator.accelerator import Accelerator
from dynoffload.memory.pager import Pager
from dynoffload.runtime.adopting import Adoption
from dynoffload.runtime.adoption.changes import Changes
from dynoffload.runtime.adoption.held import has_its_own
from dynoffload.runtime.adoption.relocation import Homes, Room
from dynoffload.runtime.counting import images_bytes, tensors_of
from dynoffload.runtime.experts.gradients import FusedGradients
from dynoffload.runtime.file_parts import FileValue
from dynoffload.runtime.forked import refusal, tell_children
from dynoffload.runtime.interrupts import let_come, uninterrupted
from dynoffload.runtime.migration.forecast import Forecast
from dynoffload.runtime.migration.migrator import Migrator
from dynoffload.runtime.opening import Setup, open_device
from dynoffload.runtime.placing import is_held, leave_for_meta
from dynoffload.runtime.recording import Recording
from dynoffload.runtime.residency import Residency
from dynoffload.runtime.sizing import enough_for, lowest_for
from dynoffload.runtime.stepping import Stepping
from dynoffload.runtime.unseen import unseen
from dynoffload.runtime.updates.deferred_optimizer import DeferredOptimizer
from dynoffload.runtime.updates.failure import Recovery
from dynoffload.runtime.updates.in_backward import check_in_backward
from dynoffload.runtime.updates.pending import PendingUpdates
from dynoffload.runtime.updates.undo_log import UndoLog
from dynoffload.runtime.updates.update import can_split, check_host
from dynoffload.runtime.weight_files import ExtentsOf
from dynoffload.telemetry import StepStats
from dynoffload.units import format_bytes

logger = logging.getLogger(__name__)


class Paging(Stepping):
    """A model under a budget; see `Mode`. ``on_step`` is called with each step's statistics."""

    def __init__(
        self,
        setup: Setup,
        homes: Homes,
        forecast: Forecast,
        recording: Recording,
        on_step: Callable[[StepStats], None],
    ) -> None:
        super().__init__(setup, forecast, recording, on_step)
        self._target, self._homes = setup.target, homes
        self._place = setup.target.home  # where tensors are restored
        self.spill_dir = setup.spill_dir
        self._where = ""
        self._meta = [parameter for parameter in self.model.parameters() if parameter.is_meta]
        self._undoes = True  # closing moves parameters back to the meta device
        self._guarding = contextlib.ExitStack()  # ends the guard thread
        self._undo = contextlib.ExitStack()  # callbacks for the end, last first
        try:
            self._open(setup)
            self._start(setup.config)
        except BaseException:
            self._undo_all()
            raise

    def begun(self) -> None:
        """Called once the caller has begun, too: a failure no longer undoes the beginning."""
        self._undoes = False
        self._recording.page(self.device, self.activations.kept)
        self.adoption.begun()
        tell_children(self)

    def count_anew(self) -> None:
        """Size an accelerator's pool by what setup left allocated, before the first step."""
        if isinstance(self.device, Accelerator):
            self.device.count_anew()

    def _open(self, setup: Setup) -> None:
        sizing, config = self.sizing, setup.config
        self.device = open_device(setup)
        if isinstance(self.device, Accelerator):
            self._undo.callback(guarded.let_go)
        self._undo.callback(self._end_device)
        if isinstance(self.device, Accelerator):
            self._undo.callback(Residency(self.device).end)
        check_host(self.optimizer, self.device)
        if config.optimizer_in_backward:
            ranks = bool(setup.replicas or groups_of(self.model))
            check_in_backward(self.optimizer, ranks=ranks)
        self.device.reserve(sizing.reserve_bytes)
        enough = functools.partial(self._enough_for, config)
        self.adoption = Adoption(setup, self.device, enough)
        self.store, self.rows = self.adoption.store, self.adoption.rows
        self._begin_activations(enough)
        self.saving = self.activations if config.page_activations else None

    def _enough_for(self, config: OffloadConfig, nbytes: int) -> int:
        """Return a budget that also has room for a region of ``nbytes``."""
        return enough_for(self.model, self.optimizer, self.sizing, config, self._staying(), nbytes)

    def lowest(self, config: OffloadConfig) -> tuple[int, int]:
        """Return the lowest budget that would do, and its least pool."""
        return lowest_for(self.model, self.optimizer, self.sizing, config, self._staying())

    def _staying(self) -> set[torch.nn.Parameter]:
        paged = self.store.slots_of
        return {one for one in self.model.parameters() if not paged(one)}

    @unseen
    def _start(self, config: OffloadConfig) -> None:
        optimizer = self.optimizer
        self._undo.callback(self.activations.close)
        self.adoption.begin_buffers()
        self._undo.callback(self._restore)
        self.adoption.adopt_parameters()
        if optimizer is not None:
            self._split_steps(optimizer, config)
        begin = None if self.updates is None else self.updates.begin_load
        recovery = Recovery(self.model, optimizer, self.loss, begin or (lambda: None))
        self._undo.callback(recovery.close)
        self.gradients = FusedGradients(self.rows, self.device, self.updates)
        self._adopt_gradients(let_come)
        self._homes.bring()
        pending = {} if self.updates is None else self.updates.pending.by_slot
        self.migrator = Migrator(
            self.device,
            self.activations,
            pending,
            self._forecast.doubts,
            self._updates_in_backward,
            reserve_bytes=self.sizing.reserve_bytes,
        )
        self._changes = Changes()
        self._undo.callback(self._watching.close)
        self._watch()
        self._changes.begin(self.model)
        if self.updates is not None and isinstance(self.device, Accelerator):
            self.device.on_locked = self.updates.pending.meet
        elif self.updates is not None and self.device.guarded:
            self._begin_guard(self.updates.pending)

    def _begin_guard(self, pending: PendingUpdates) -> None:
        """Start the thread that makes a deferred update when another thread touches its tensors."""
        device, closing = self.device, threading.Event()
        assert isinstance(device, Pager)

        def serve() -> None:
            while not closing.is_set():
                region = device.handed(0.05)
                if region >= 0:
                    pending.serve(region)
                elif region == -2:
                    return

        thread = threading.Thread(target=serve, name="dynoffload-guard", daemon=True)
        thread.start()
        self._guarding.callback(thread.join)
        self._guarding.callback(closing.set)

    def _split_steps(self, optimizer: Optimizer, config: OffloadConfig) -> None:
        log = self._undo_log(optimizer) if config.rollback else None
        updates = self.updates = DeferredOptimizer(
            optimizer,
            self.store,
            self.rows,
            self.device,
            self.loss,
            defer=config.defer_updates == "auto",
            in_backward=config.optimizer_in_backward,
            log=log,
            check=self._check_step,
            on_whole=self._begin_whole_step,
            on_step=self._end_step,
        )
        self._undo.callback(self._guarding.close)
        self._undo.callback(updates.close)
        for parameter in (*self.store.slots, *self.store.fused):
            let_come()
            updates.pending.adopt_state(parameter, optimizer.state)
        self.adoption.adopt_whole_state()

    def _undo_log(self, optimizer: Optimizer) -> UndoLog | None:
        if not can_split(optimizer):
            logger.warning(
                "rollback: a step of %s that is cut off is not undone, as it is not one of "
                "torch.optim",
                type(optimizer).__name__,
            )
            return None
        need = images_bytes(self.model, optimizer)
        log = UndoLog(optimizer, self.adoption, self.spill_dir, need)
        self._undo.callback(log.close)
        return log

    @uninterrupted
    @torch.inference_mode(False)
    @unseen
    def follow_model(self) -> None:
        """See `Mode.follow_model`.

        Raises:
            BudgetError: a new, thawed or converted parameter and its update do not fit, or larger
                optimizer state does not; nothing was changed.
            ConfigError: a parameter that is paged by slices has another dtype or shape.
        """
        self._check_step()
        if not (self.adoption.changed or self._changes.any()) or not has_its_own(self.model):
            return
        reshard(self.model)
        self.activations.sweep()
        for parameter in self._changes.thawed():
            self.adoption.check_thawed(parameter)
        self.adoption.adopt_parameters(self.activations.kept_bytes)
        self.activations.allowance = self.adoption.allowance
        self._adopt_gradients()
        if self.updates is not None:
            self.updates.adopt_all()
        self._watching.close()
        self.migrator.forget()
        self._watch()
        self._changes.begin(self.model)

    @torch.inference_mode(False)
    def _check_step(self) -> None:
        """Refuse an update that no longer fits, before anything changes."""
        self._adopt_reduced()
        self.adoption.check_updates()

    def flush(self) -> None:
        if self._in_backward is not None:
            self._in_backward.check(reads=True)
        if self.updates is not None:
            self.updates.pending.flush_all()

    @property
    def spill_bytes(self) -> int:
        return self.device.spill_bytes()

    @property
    def memory(self) -> Memory:
        return self.adoption

    @contextlib.contextmanager
    def loading(self, *, optimizer: bool) -> Iterator[Callable[[], None]]:
        """See `Mode.loading`; deferred updates are discarded with their state."""
        changed = False

        def begin() -> None:
            nonlocal changed
            changed = True
            if self.updates is not None:
                (self.updates.abandon if optimizer else self.updates.begin_load)()

        try:
            yield begin
        except BaseException as error:
            if changed:
                if self.updates is not None:
                    self.updates.forget_undo()
                self.loss.set(error)
            raise
        self.loss.make_up("model")
        if optimizer:
            self.loss.make_up("optimizer")

    # A forward

    def enter(self) -> None:
        self.loss.check()
        if self._in_backward is not None:
            self._in_backward.check()
        if isinstance(self.device, Pager):
            self.device.check_files()

    def leave(self) -> None:
        self.loss.check()

    # The end

    def end_in_child(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `dynoffload.runtime.forked`."""
        if self._ends:
            return
        if self.updates is not None:
            self.updates.pending.end_in_child(refusal("the optimizer's state"))
        for tensor in tensors_of(self.model, self.optimizer):
            if tensor.layout is torch.strided and not tensor.is_meta:
                region = self.device.owner(tensor)
                if region >= 0:
                    yield self.store.name_of(region), tensor

    def is_held_outside(self) -> bool:
        """Return whether device memory has references beyond what is restored at the end: a view of
        a parameter, an old gradient, a graph whose backward is still to come."""
        self.flush()  # pending updates hold references, too
        return self.activations.are_held() or self.adoption.is_held()

    def bring(self, tensors: Iterable[torch.Tensor]) -> None:
        """Fetch the paged ones of ``tensors``, or views of them, which are written next."""
        regions: list[int] = []
        for tensor in tensors:
            if tensor._is_view():
                regions += self.device.owners(tensor)
            else:
                regions += [slot.region for slot in self.store.slots_of(tensor)]
        self.device.touch(regions)

    def link(self, tensor: torch.Tensor, value: FileValue, extents_of: ExtentsOf) -> bool:
        """Let a paged parameter be read from where its value lies, until it is written; return
        whether it is. See `WeightFiles.copy_to`."""
        slots = self.store.slots_of(tensor)
        if not isinstance(self.device, Pager) or not slots or not tensor.is_contiguous():
            return False
        if slots[0].is_flat:
            return False
        sliced = len(slots) > 1 or slots[0].is_slice
        values = value.rows() if sliced else [value]
        found = [extents_of(one, tensor.dtype) for one in values]
        if None in found or sum(self.device.nbytes(slot.region) for slot in slots) != tensor.nbytes:
            return False
        for slot, extents in zip(slots, found, strict=True):
            self.device.source(slot.region, extents or ())
        return True

    def revert(self) -> None:
        """Restore the meta tensors on close, as the beginning failed before any use."""
        self._undoes = True

    def meta_is_held(self) -> bool:
        """Return whether views keep parameters that were on the meta device."""
        return any(is_held(one) for one in self._meta if not one.is_meta)

    @uninterrupted
    def close(self, *, stays: bool = False) -> str:
        """See `Mode.close`; frees the pool and the spill file.

        Raises:
            StepLostError: a deferred update failed; everything else was done.
        """
        if stays:
            self._place = self._target.device
        self._undo_all()
        return self._where

    def _undo_all(self) -> None:
        self._ends = True
        try:
            with torch.inference_mode(False):
                self._undo.close()
        finally:
            self._recording.stay()  # it would keep the device

    def _end_device(self) -> None:
        """Close the device, or keep it while external references to its memory remain."""
        held = self.device.retire()
        if held:
            logger.warning(
                "%d %s still in use that the offload() block made, such as views of parameters: "
                "the pool of %s and its spill file stay until no variable holds them",
                held,
                "tensors are" if held > 1 else "tensor is",
                format_bytes(self.device.capacity),
            )

    @unseen
    def _restore(self) -> None:
        with contextlib.ExitStack() as parts:  # in reverse order, even if one raises
            parts.callback(self._restore_all)
            parts.callback(self._leave_for_meta)
            parts.callback(self.activations.close)
            reshard(self.model)

    def _leave_for_meta(self) -> None:
        if self._undoes:
            leave_for_meta(self._meta)

    def _restore_all(self) -> None:
        try:
            room = Room(self._target, self._place, self.spill_dir)
            self._where = self.adoption.restore(self._place, room)
        except BaseException as error:
            self.loss.set(error)
            raise
