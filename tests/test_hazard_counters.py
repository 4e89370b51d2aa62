"""Hazard: modes and profilers that count operators, around any phase of a step.

The graph: linear layers. What packs, moves and updates behind the user's back must not be counted,
and an update that is put off is counted in the step that it belongs to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
from hazards import (
    Mlp,
    Side,
    compared,
    each_backend,
    each_of_the_cpu,
    each_paged,
    loss_of,
    stepwise,
)
from torch.optim import AdamW, Muon, Optimizer
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode


class Counting(TorchDispatchMode):
    """Lists the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.calls.append(str(function))
        return function(*args, **(kwargs or {}))


@each_paged
def test_a_mode_that_watches_the_step_sees_its_updates(backend: str) -> None:
    """All are made inside of it; in which order, and how many at once, is ours."""
    side = Side(backend)
    model = Mlp(depth=3)
    optimizer = AdamW(model.parameters(), lr=1e-2, foreach=False)
    with side.offload(model, optimizer):
        for step in range(3):
            loss_of(model, step).backward()
            with Counting() as counting:
                optimizer.step()
            optimizer.zero_grad()
            assert sum("addcdiv_" in call for call in counting.calls) == len([*model.parameters()])


def muon(model: Mlp) -> Optimizer:
    """An optimizer with products, over the matrices alone."""
    for layer in model.layers:
        layer.bias.requires_grad_(False)
    return Muon([p for p in model.parameters() if p.requires_grad and p.dim() == 2], lr=1e-2)


@compared(each_backend)
@pytest.mark.parametrize("around", ["each phase", "all"])
def test_a_counter_of_flops_counts_what_it_does_in_plain_training(side: Side, around: str) -> None:
    """Those of a step in `step()`, and none of an earlier one where it is made."""
    model = Mlp(depth=3)
    optimizer = muon(model)
    whole = FlopCounterMode(display=False)
    with whole if around == "all" else nullcontext():
        with side.offload(model, optimizer):
            for step in range(4):
                counters = [FlopCounterMode(display=False) for _ in range(3)]
                with counters[0]:
                    loss = loss_of(model, step)
                with counters[1]:
                    loss.backward()
                with counters[2] if step % 2 else nullcontext():
                    optimizer.step()
                optimizer.zero_grad()
                side.see("flops", [one.get_total_flops() for one in counters])
    if around == "all":
        side.see("flops", whole.get_total_flops())


@contextmanager
def counted(by: str) -> Iterator[Counter[str]]:
    """Count operators. Before a hook for what is saved, torch itself detaches it."""
    found: Counter[str] = Counter()
    if by == "a mode":
        with Counting() as counting:
            yield found
        found.update(counting.calls)
    else:
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            yield found
        for event in profiled.key_averages():
            if event.key.startswith("aten::"):
                found[event.key] = event.count
    for name in ("aten.detach.default", "aten::detach", "aten::_has_compatible_shallow_copy_type"):
        found.pop(name, None)


def counting_phases(side: Side, model: Any, optimizer: Any, step: int, by: str) -> None:
    """Note which operators each phase has made."""
    with counted(by) as sample:
        loss_of(model, step).backward()
    with counted(by) if step != 1 else nullcontext() as update:
        optimizer.step()
    optimizer.zero_grad()
    side.see("sample", sorted(sample.items()))
    side.see("update", update and sorted(update.items()))


COUNTED = {"steps": 5, "optimizer": partial(AdamW, lr=1e-2, foreach=False)}


@stepwise(each_backend, lambda: Mlp(depth=3), **COUNTED)
def test_a_mode_counts_no_operator_of_ours(
    side: Side, model: Any, optimizer: Any, step: int
) -> None:
    """Neither those that pack, move and adopt, nor updates that others are made in."""
    counting_phases(side, model, optimizer, step, "a mode")


@stepwise(each_of_the_cpu, lambda: Mlp(depth=3), **COUNTED)
def test_a_profiler_counts_no_operator_of_ours(
    side: Side, model: Any, optimizer: Any, step: int
) -> None:
    """On an accelerator it counts those of the loop once more, as a mode dispatches them anew."""
    counting_phases(side, model, optimizer, step, "a profiler")
