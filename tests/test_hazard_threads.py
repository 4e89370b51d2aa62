"""Hazard: threads of the user's around the model.

The graph: linear layers with a gate between them, at which one thread's forward waits until another
thread has tried to call the model. Which thread trains does not matter, as long as it is one at a
time; what comes at once is refused, and leaves nothing changed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hazards import (
    Mlp,
    Side,
    batch,
    compared,
    each_backend_in_time,
    each_paged,
    loss_of,
    trains,
)
from torch import nn
from torch.optim import AdamW

from dynoffload.errors import ThreadError


def in_a_thread(do: Callable[[], None]) -> BaseException | None:
    """Run ``do`` in another thread to its end; return its error."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            do()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return errors[0] if errors else None


class Gated(nn.Module):
    """Calls ``at_gate`` in the midst of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Mlp(classes=64), Mlp()
        self.at_gate: Callable[[], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self._pass()
        return self.second(x)

    @torch._disable_dynamo
    def _pass(self) -> None:
        at_gate, self.at_gate = self.at_gate, None
        if at_gate is not None:
            at_gate()


@compared(each_paged)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("grad", "compiled"), [(True, ""), (False, ""), (True, "in place"), (True, "outside")]
)
def test_a_second_thread_in_forward_is_refused(side: Side, grad: bool, compiled: str) -> None:
    """And the first goes on, bit for bit as if nobody had tried; also in a sample that begins
    with a change of the network."""
    torch._dynamo.reset()
    model = Gated()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    if compiled == "in place":
        model.compile(backend="eager")
    run = torch.compile(model, backend="eager") if compiled == "outside" else model

    def call() -> None:
        with torch.set_grad_enabled(grad):
            run(batch(50)[0])

    def at_gate() -> None:
        for _ in range(2):
            error = in_a_thread(call)
            assert isinstance(error, ThreadError)
            assert "two threads call the model at once" in str(error)
            assert "hold a threading.Lock around each forward" in str(error)

    with side.offload(model, optimizer):
        for step in range(4):
            if side.backend is not None and step in (1, 2):
                model.at_gate = at_gate
            if step == 2:
                model.unused = nn.Linear(64, 64)
            side.step(loss_of(run, step), optimizer)


@each_backend_in_time
def test_a_thread_for_each_step(backend: str) -> None:
    def each(side: Side, model: Any, optimizer: Any, step: int) -> None:
        assert in_a_thread(lambda s=step: side.step(loss_of(model, s), optimizer)) is None
        side.step(loss_of(model, step + 10), optimizer)

    trains(backend, each)


@compared(each_backend_in_time)
def test_a_thread_whose_forward_was_torn_down(side: Side) -> None:
    """An interrupt runs no hooks: another thread finds the model free, and so does the first."""
    model = Gated()
    optimizer = AdamW(model.parameters(), lr=1e-2)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with side.offload(model, optimizer):
        for step in range(5):
            if step in (1, 3):
                model.at_gate = interrupt
                with pytest.raises(KeyboardInterrupt):
                    loss_of(model, step)
                if step == 1:
                    assert in_a_thread(lambda: loss_of(model, 50).backward()) is None
                    optimizer.zero_grad()
            side.step(loss_of(model, step), optimizer)
            x = torch.ones(64, 64, requires_grad=True)
            saved = x.square().sum().grad_fn
            side.see("hooks", torch._C._autograd._top_saved_tensors_default_hooks(True) is None)
            assert saved is not None
