"""What the host takes for an operator and for a visit, on the backend: no tests here.

    python tests/backend/host_cost.py --json docs/results/host-cost.json

Nothing moves: all is on the accelerator. Medians of rounds in which the kinds take turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from accelerator import DEVICE
from torch import nn

import dynoffload
from dynoffload.experiments import write_json
from dynoffload.experiments.provenance import provenance

LAYERS, WIDTH, CALLS, ROUNDS = 32, 64, 500, 15


def _seconds(do: Callable[[], object], count: int) -> float:
    """Return the seconds that the host takes for one of ``count`` calls."""
    begin = time.perf_counter()
    for _ in range(count):
        do()
    taken = time.perf_counter() - begin
    torch.accelerator.synchronize()
    return taken / count


def measure() -> dict[str, dict[str, float]]:
    """Return microseconds by what was called and where."""
    x = torch.randn(8, WIDTH, device=DEVICE)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(DEVICE)
    copied = weight = model[0].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def forward() -> None:
        with torch.no_grad():
            model(x)

    def train() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    kinds: dict[str, tuple[Callable[[], object], int, int]] = {
        "an operator without a region": (lambda: copied + copied, CALLS, 1),
        "an operator on a region": (lambda: weight + weight, CALLS, 1),
        "a visit in forward": (forward, CALLS // LAYERS, LAYERS),
        "a layer's forward, backward and update": (train, CALLS // LAYERS, LAYERS),
    }

    def run() -> dict[str, float]:
        found: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(ROUNDS):
            for name, (do, count, parts) in kinds.items():
                found[name].append(_seconds(do, count) / parts * 1e6)
        return {name: statistics.median(each) for name, each in found.items()}

    for do, *_ in kinds.values():
        do()
    rows = {"plain": run()}
    config = {"page_bytes": 4096, "min_paged_bytes": 1024, "step_aside": False}
    budget = torch.accelerator.memory_allocated() + (64 << 20)
    with dynoffload.offload(
        model, optimizer, budget=budget, pilot=None, device=DEVICE, config=config
    ):
        for _ in range(3):
            train()
        weight = model[0].weight.detach()
        rows["in a block"] = run()
    return rows


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    rows = measure()
    for name in rows["plain"]:
        plain, ours = (rows[where][name] for where in ("plain", "in a block"))
        sys.stdout.write(f"{name:40} plain {plain:7.1f} us, in a block {ours:7.1f} us\n")
    command = f"python tests/backend/host_cost.py --json {options.json}"
    write_json(
        options.json, {"made_by": {**provenance(), "command": command}, "microseconds": rows}
    )


if __name__ == "__main__":
    main()
