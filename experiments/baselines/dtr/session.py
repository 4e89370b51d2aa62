"""A block that keeps its budget by dropping activations and making them again.

Parameters, gradients and optimizer state stay in memory, as published, so a budget that does not
hold them is refused; nothing moves, and there is no spill file.

[Note: what counts]  The model's tensors, and every tensor that an operator makes in the thread of
the block. Temporaries inside of an operator are headroom, and so are those of the optimizer's step.
Its state is counted, and room for it is made before it begins.

[Note: what is dropped]  What autograd saves in the model's forward and nobody else holds. On an
accelerator the cost of an operator is the time in which it was launched.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dynoffload.errors import BudgetError
from dynoffload.experiments.baselines.dtr.making import Making
from dynoffload.experiments.baselines.dtr.mode import Recompute
from dynoffload.experiments.baselines.dtr.records import Ledger
from dynoffload.runtime.counting import ordinary_bytes, tensors_of, whole_bytes
from dynoffload.telemetry import RunLog, StepStats
from dynoffload.units import format_bytes


class Recomputation:
    """A model whose activations are dropped where the budget is too small for them.

    Attributes:
        log: seconds and peak of each step.
        backend: ``"recompute"``.
        paging: False.
        sizing: None, as nothing is divided.
        ledger, making: what is live, and what was made again.
    """

    backend = "recompute"
    paging = False
    sizing = None

    def __init__(self, model: nn.Module, optimizer: Optimizer, budget: int) -> None:
        self.model, self.optimizer = model, optimizer
        self.log = RunLog(type(model).__name__, self.backend, "dtr", budget=budget, headroom=0)
        kind = next(model.parameters()).device.type
        self.ledger = Ledger()
        self.making = Making(self.ledger, budget, kind)
        self._mode = Recompute(self.ledger, self.making, kind)
        self._saving = torch.autograd.graph.saved_tensors_hooks(self._mode.pack, self._mode.unpack)
        self._began = time.perf_counter()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch operators, forwards of the model and steps of the optimizer."""
        self._count_states()
        model, optimizer = self.model, self.optimizer
        handles = [
            model.register_forward_pre_hook(self._before_forward),
            model.register_forward_hook(self._after_forward, always_call=True),
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        try:
            with self._mode:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        self._mode.records = torch.is_grad_enabled()
        self._saving.__enter__()

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._saving.__exit__(None, None, None)
        self._mode.end_forward()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Make room for the state that the optimizer makes."""
        need = whole_bytes(self.model, optimizer) - ordinary_bytes(self.model, optimizer)
        absent = sum(
            p.nbytes for p in self.model.parameters() if p.requires_grad and p.grad is None
        )
        self.making.room(max(0, need - absent))
        self._mode.counts = False

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._mode.counts = True
        self._count_states()
        now = time.perf_counter()
        none = dict.fromkeys(("stalls", "bytes_in", "bytes_out", "prefetched_bytes"), 0)
        self.log.steps.append(
            StepStats(
                step=len(self.log.steps),
                seconds=now - self._began,
                stall_s=0.0,
                used_bytes=0,
                wasted_bytes=0,
                accuracy=math.nan,
                peak_fast_bytes=self.ledger.take_peak(),
                **none,
            )
        )
        self._began = now

    def _count_states(self) -> None:
        for tensor in tensors_of(self.model, self.optimizer):
            self.ledger.count(tensor.untyped_storage())


@contextlib.contextmanager
def recomputing(model: nn.Module, optimizer: Optimizer, budget: int) -> Iterator[Recomputation]:
    """Train ``model`` under ``budget`` by recomputation.

    Raises:
        BudgetError: parameters, gradients, optimizer state and buffers alone do not fit.
    """
    need = whole_bytes(model, optimizer)
    if need > budget:
        raise BudgetError(
            "dtr moves nothing: parameters, gradients, optimizer state and buffers of this "
            f"{type(model).__name__} take {format_bytes(need)}, and the budget is "
            f"{format_bytes(budget)}"
        )
    session = Recomputation(model, optimizer, budget)
    with session.watching():
        yield session
