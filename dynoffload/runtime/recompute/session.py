"""`policy="dtr"`: a session that keeps its budget by dropping activations and making them again.

What it is: dynamic tensor rematerialization (Kirisame et al., ICLR 2021), online and for real, as a
measured side to compare with. Parameters, gradients and optimizer state stay in memory, as
published, so a budget that does not hold them is refused. What it is not: offloading; nothing
moves, there is no spill file.

On an accelerator, where the model is there before the block, the ledger counts storages of the
accelerator, not what its allocator takes, and an operator's cost is the time in which it was
launched. It has not run on a GPU.

[Note: what counts]  From the start of the block on: the model's tensors, and every tensor that an
operator makes in the thread of the block, until it ends. What was made before it, and by others,
such as a loader's processes, is the user's. Temporaries inside of an operator are headroom, as for
all policies, and so are those of the optimizer's step, which could not be given less memory:
``foreach`` makes some as large as all parameters. Its state is counted, and room for it is made
before it begins.

[Note: what is dropped]  What autograd saves in the model's forward and nobody else holds. What the
user's code or a module refers to stays, and so does what is saved outside of that forward (by a
loss function), inside of `torch.utils.checkpoint` (which recomputes by itself), and results of
operators that are not PyTorch's own.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode,
    _get_current_dispatch_mode_stack,
)

from dynoffload.around import Handle, after_call, before_call, choosing
from dynoffload.config import OffloadConfig
from dynoffload.errors import BudgetError, ConfigError, ThreadError
from dynoffload.runtime.counting import ordinary_bytes, parts_of, tensors_of, whole_bytes
from dynoffload.runtime.passes.calls import Calls
from dynoffload.runtime.passes.hooks import Hook
from dynoffload.runtime.recompute.ledger import Ledger
from dynoffload.runtime.recompute.making import Making
from dynoffload.runtime.recompute.mode import Recompute
from dynoffload.runtime.telemetry import StepStats
from dynoffload.runtime.unpaged import Unpaged
from dynoffload.units import format_bytes

logger = logging.getLogger(__name__)


class RecomputingSession(Unpaged):
    """A model whose activations are dropped where the budget is too small for them."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, budget: int, config: OffloadConfig
    ) -> None:
        super().__init__(model, optimizer, "recompute", config.policy, budget)
        self._ledger = Ledger()
        places = (p.device.type for p in model.parameters() if not p.is_meta)
        kind = next(places, "cpu")
        self._making = Making(self._ledger, budget, debug=config.debug, kind=kind)
        self._mode = Recompute(self._ledger, self._making, kind)
        self._calls = Calls()
        self._hooks: list[Hook] = []
        self._handles: list[Handle] = []
        self._began = time.perf_counter()
        self._before = self._totals()

    def _begin(self) -> None:
        """Count what is there, and watch from now on."""
        self._count_states()
        logger.info(
            "%s: %s of parameters, gradients%s and buffers stay under %s; activations are dropped "
            "and made again, policy dtr",
            type(self.model).__name__,
            format_bytes(whole_bytes(self.model, self.optimizer)),
            "" if self.optimizer is None else ", optimizer state",
            format_bytes(self.sizing.budget),
        )
        model, optimizer = self.model, self.optimizer
        self._unseen = choosing(model)
        for path, module in model.named_modules():
            self._register(before_call, module, Hook(self._pass(path)))
        enter, leave = Hook(self._before_forward), Hook(self._after_forward)
        self._register(before_call, model, enter, first=True)
        self._register(after_call, model, leave)
        if optimizer is not None:
            self._handles += [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            ]
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def _register(
        self, register: Callable[..., Handle], module: nn.Module, hook: Hook, **how: Any
    ) -> None:
        self._hooks.append(hook)
        self._handles.append(register(module, hook, self._unseen, **how))

    def _pass(self, path: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._mode.site = path

        return enter

    # A step

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._mode not in _get_current_dispatch_mode_stack():
            raise ThreadError(
                "policy='dtr' watches the thread that entered the offload() block, and the model "
                "is called in another, or inside of what torch.compile runs: call it in that "
                "thread, as it is, or use policy='pilot'"
            )
        if self._calls.enter():
            self._mode.end_forward()  # of one that was torn down
            if not self._mode.counts:  # a step that failed
                self._end_update()
            if torch.is_grad_enabled():
                self._mode.records = True
                self._calls.save_to(self._mode)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._calls.leave():
            self._mode.end_forward()

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Make room for the update; a closure, which makes forward and backward, comes first."""

        def closed(closure: Callable[[], Any]) -> Callable[[], Any]:
            def call() -> Any:
                result = closure()
                self._begin_update()
                return result

            return call

        if len(args) > 1 and callable(args[1]):
            return (args[0], closed(args[1]), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": closed(kwargs["closure"])}
        self._begin_update()
        return None

    def _begin_update(self) -> None:
        for tensor in tensors_of(self.model, self.optimizer):
            if tensor.layout is torch.strided:
                known = self._ledger.find(tensor.untyped_storage())
                if known is not None and known.record is not None:
                    self._making.secure(known.record)  # of a graph whose backward is still to come
        need = whole_bytes(self.model, self.optimizer) - ordinary_bytes(self.model, self.optimizer)
        absent = sum(
            p.nbytes for p in self.model.parameters() if p.requires_grad and p.grad is None
        )
        self._making.room(max(0, need - absent), "the state that the optimizer makes", "")
        self._mode.counts = False

    def _end_update(self) -> None:
        self._mode.counts = True
        self._count_states()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._end_update()
        now, before, totals = time.perf_counter(), self._before, self._totals()
        self.log.steps.append(
            StepStats(
                step=len(self.log.steps),
                seconds=now - self._began,
                stalls=0,
                stall_s=0.0,
                bytes_in=0,
                bytes_out=0,
                prefetched_bytes=0,
                used_bytes=0,
                wasted_bytes=0,
                accuracy=math.nan,
                peak_fast_bytes=self._ledger.take_peak(),
                dropped_bytes=int(totals[0] - before[0]),
                recomputed=int(totals[1] - before[1]),
                recompute_s=totals[2] - before[2],
            )
        )
        self._began, self._before = now, totals

    def save(
        self,
        directory: str | Path,
        *,
        extra: Mapping[str, Any] | None = None,
        max_shard_size: int | str = "5GB",
    ) -> None:
        """Save the run; see `Session.save`. Its buffer of a megabyte is not counted."""
        with self._uncounted():
            super().save(directory, extra=extra, max_shard_size=max_shard_size)

    def load(self, directory: str | Path, *, extra: Mapping[str, Any] | None = None) -> None:
        """Load a checkpoint; see `Session.load`. Its buffer of a megabyte is not counted."""
        with self._uncounted():
            super().load(directory, extra=extra)

    @contextlib.contextmanager
    def _uncounted(self) -> Iterator[None]:
        self._mode.counts = False
        try:
            yield
        finally:
            self._end_update()

    def _totals(self) -> tuple[int, int, float]:
        making = self._making
        return making.dropped_bytes, making.operators, making.seconds

    def _count_states(self) -> None:
        for whole in tensors_of(self.model, self.optimizer):
            for tensor in parts_of(whole):
                if not tensor.is_meta:
                    self._ledger.count(tensor.untyped_storage())

    def _close(self) -> None:
        """Watch no more. A graph whose backward is still to come makes again what it lacks."""
        try:
            for hook in self._hooks:
                hook.end()
            for handle in self._handles:
                handle.remove()
            self._calls.abandon()
            self._mode.end_forward()
        finally:
            self._leave_mode()

    def _leave_mode(self) -> None:
        self._making.capped = False
        if _get_current_dispatch_mode() is self._mode:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        else:
            self._mode.retire()
            logger.warning(
                "a dispatch mode was entered inside the offload() block and is still on: policy "
                "dtr stays below it and does nothing; leave it before the block ends"
            )


@contextlib.contextmanager
def recomputing(
    model: nn.Module, optimizer: Optimizer | None, budget: int, config: OffloadConfig
) -> Iterator[RecomputingSession]:
    """Train ``model`` under ``budget`` by recomputation; a block in place of a session's.

    Raises:
        BudgetError: parameters, gradients, optimizer state and buffers alone do not fit.
        ConfigError: the model is compiled, or an option asks for what this policy lacks.
    """
    _check(model, config)
    need = whole_bytes(model, optimizer)
    if need > budget:
        error = BudgetError(
            "policy='dtr' moves nothing: parameters, gradients, optimizer state and buffers of "
            f"this {type(model).__name__} take {format_bytes(need)}, all of which must be in "
            f"memory, and the budget is {format_bytes(budget)}: raise it to more than that, or use "
            "policy='pilot', which pages them"
        )
        error.lacking = need - budget
        raise error
    session = RecomputingSession(model, optimizer, budget, config)
    session._give_noted_weights()
    try:
        session._begin()
        yield session
    finally:
        session._close()


def _check(model: nn.Module, config: OffloadConfig) -> None:
    for path, module in model.named_modules():
        compiled = isinstance(module, torch._dynamo.OptimizedModule) if _dynamo() else False
        if compiled or getattr(module, "_compiled_call_impl", None) is not None:
            raise ConfigError(
                f"module {path!r} is compiled, and policy='dtr' makes tensors again by single "
                "operators, of which a compiled module has none: train the module as it was "
                "before torch.compile, or use policy='pilot'"
            )
    if not config.page_activations:
        raise ConfigError(
            "policy='dtr' drops what autograd saves, and page_activations=False leaves it nothing "
            "to drop: leave that out, or use policy='pilot'"
        )
    if config.rollback:
        raise ConfigError(
            "policy='dtr' keeps no images of a step, so rollback=True cannot be had with it: leave "
            "it out, or use policy='pilot'"
        )


def _dynamo() -> bool:
    """Return whether torch.compile was ever asked for; to import it takes seconds."""
    import sys

    return "torch._dynamo" in sys.modules
