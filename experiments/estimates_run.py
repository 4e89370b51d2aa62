"""One process of `dynoffload.experiments.estimates`: estimates of a network, or its training.

What it is: ``python -m dynoffload.experiments.estimates_run TASK``, which prints what it found as
one JSON object. What it is not: the comparison.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

ESTIMATED, TRAINED = "estimated", "trained"
_CONFIG = {"policy": "repeat"}
_SAMPLES = 6  # as many as an estimate looks at


@dataclass(frozen=True)
class Task:
    """What one process does.

    Attributes:
        network: a key of `dynoffload.experiments.simulated_networks.NETWORKS`.
        mode: `ESTIMATED` or `TRAINED`.
        budgets: bytes; of one of them it is trained under.
        steps: of a training.
        warmup: of those, how many do not count.
        calibration: path of one, "" for none.
        spill_dir: "" for the default.
    """

    network: str
    mode: str
    budgets: tuple[int, ...]
    steps: int = 10
    warmup: int = 4
    calibration: str = ""
    spill_dir: str = ""


def estimated(task: Task) -> dict[str, Any]:
    """Return the estimates."""
    from dynoffload.estimation import estimates
    from dynoffload.experiments.simulated_networks import NETWORKS
    from dynoffload.experiments.simulated_run import adamw

    kind = NETWORKS[task.network]()
    model = kind.build()
    begin = time.perf_counter()
    found = estimates(
        model,
        kind.samples(0),
        budgets=task.budgets,
        optimizer=adamw(model),
        config=_CONFIG,
        spill_dir=task.spill_dir or None,
        calibration=task.calibration or None,
    )
    return {
        "estimates": [asdict(one) for one in found],
        "seconds": time.perf_counter() - begin,
    }


def trained(task: Task) -> dict[str, Any]:
    """Train under a budget; return a step's seconds, and the peaks."""
    import dynoffload
    from dynoffload.errors import BudgetError
    from dynoffload.experiments.simulated_networks import NETWORKS
    from dynoffload.experiments.simulated_run import adamw

    kind = NETWORKS[task.network]()
    model = kind.build()
    optimizer, seconds = adamw(model), list[float]()
    block = dynoffload.offload(
        model,
        optimizer,
        budget=task.budgets[0],
        config=_CONFIG,
        spill_dir=task.spill_dir or None,
    )
    try:
        session = block.__enter__()
    except BudgetError as error:
        return {"refused": str(error)}
    file = 0
    seen = list(itertools.islice(kind.samples(0), _SAMPLES))
    for sample in itertools.islice(itertools.cycle(seen), task.steps):
        begin = time.perf_counter()
        loss = sample.call(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
        file = max(file, session.spill_bytes)
    steps = session.log.steps
    answer = {
        "refused": "",
        "step_s": sum(seconds[task.warmup :]) / len(seconds[task.warmup :]),
        "steps_s": seconds,
        "fast_peak": max(step.peak_fast_bytes for step in steps),
        "file_peak": file,
        "bytes_in": sum(s.bytes_in for s in steps[task.warmup :]) / len(steps[task.warmup :]),
        "bytes_out": sum(s.bytes_out for s in steps[task.warmup :]) / len(steps[task.warmup :]),
    }
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)  # nobody looks at the restored tensors


def footprint(task: Task) -> dict[str, Any]:
    """Return the bytes of a network's parameters, gradients and optimizer state."""
    from dynoffload.experiments.simulated_networks import NETWORKS
    from dynoffload.experiments.simulated_run import adamw
    from dynoffload.runtime.counting import whole_bytes

    model = NETWORKS[task.network]().build()
    return {"bytes": whole_bytes(model, adamw(model))}


def main() -> None:
    """Carry out the task of the command line."""
    import torch

    torch.set_num_threads(1)
    task = Task(**json.loads(sys.argv[1]))
    work = {ESTIMATED: estimated, TRAINED: trained, "footprint": footprint}[task.mode]
    sys.stdout.write(json.dumps(work(task)) + "\n")


if __name__ == "__main__":
    main()
