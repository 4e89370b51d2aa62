"""How long planning takes as steps grow.

What it is: `scaling`, the processor time from a recorded step of so many operators to its plan:
uses, visits, execution blocks, plan. The step is that of a decoder with as many layers as it takes.
What it is not: the quality of plans.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import torch

from dynoffload.experiments.architectures import ARCHITECTURES
from dynoffload.experiments.idioms import trained
from dynoffload.planning.timed import plan_blocks, step_of
from dynoffload.profiler import Trace, resolve

NETWORK = "gpt2"
SHARE = 0.35
"""Where the budget lies between the largest use and all that is ever alive."""
REPEATS = 5


def scaling(operators: tuple[int, ...], repeats: int = REPEATS) -> list[dict[str, Any]]:
    """Return a row for each number of operators, in the median of ``repeats`` plans."""
    return [_row(deep(count), repeats) for count in operators]


def deep(operators: int) -> Trace:
    """Return a step of a decoder with about as many operators."""
    torch.manual_seed(0)
    shallow = len(_trace(2).operators)
    layer = len(_trace(3).operators) - shallow
    return _trace(max(1, round((operators - shallow) / layer) + 2))


def _trace(layers: int) -> Trace:
    architecture = ARCHITECTURES[NETWORK]
    options = {**architecture.options, "n_layer": layers}
    return trained(dataclasses.replace(architecture, options=options), 2)[-1]


def _row(trace: Trace, repeats: int) -> dict[str, Any]:
    program = resolve(trace)
    taken = []
    for _ in range(repeats):
        began = time.process_time()
        step = step_of(trace, program).at_visits()
        least, most = step.extent()
        compute = sum(use.seconds for use in step.uses)
        capacity = least + int(SHARE * (most - least))
        bandwidth = most / compute
        blocks, plan = plan_blocks(step, capacity, bandwidth, bandwidth)
        taken.append(time.process_time() - began)
    return {
        "operators": len(trace.operators),
        "visits": len(step.uses),
        "blocks": len(blocks.uses),
        "regions": len(blocks.sizes),
        "cpu_s": statistics.median(taken),
        "cpu_worst_s": max(taken),
        "planned_s": plan.seconds,
        "compute_s": compute,
    }
