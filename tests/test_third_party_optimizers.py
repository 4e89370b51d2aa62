"""Optimizers of other packages at a quarter of the footprint: exact, and not much slower.

Each runs where its package is installed; dynoffload needs none of them.
"""

from __future__ import annotations

import importlib
import time
from statistics import median
from typing import Any

import pytest
import torch
from exactness import assert_same
from torch import nn
from torch.optim import Optimizer

import dynoffload
from dynoffload.runtime.counting import ordinary_bytes
from dynoffload.runtime.updates.kept_state import state_of

WIDTH, DEPTH, STEPS = 256, 10, 4
SLOWEST, LEAST_S = 20, 0.1  # times plain, of steps that take so long

OPTIMIZERS: dict[str, list[str]] = {
    "pytorch_optimizer": [
        *("AdaBelief", "AdaBound", "AdaFactor", "Adai", "AdamMini", "AdamP", "Adan", "AdEMAMix"),
        *("ADOPT", "AggMo", "CAME", "DAdaptAdam", "FAdam", "GaLore", "Lamb", "LaProp"),
        *("Lion", "MARS", "Muon", "PNM", "Prodigy", "Ranger21", "ScheduleFreeAdamW", "Shampoo"),
        *("SM3", "SOAP", "SophiaH", "StableAdamW", "Tiger", "Yogi"),
    ],
    "lion_pytorch": ["Lion"],
    "prodigyopt": ["Prodigy"],
    "schedulefree": ["AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"],
    "heavyball": ["AdamW", "SOAP", "Muon", "LaProp"],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "AdamMini": {"model": None, "lr": 1e-3},
    "Ranger21": {"num_iterations": 100, "lr": 1e-3},
    "Prodigy": {},
    "DAdaptAdam": {},
    "Shampoo": {"preconditioning_compute_steps": 2, "lr": 1e-3},
    "SOAP": {"precondition_frequency": 2, "lr": 1e-3},
}


class Layers(nn.Sequential):
    """Matrices, biases and the scales of norms."""

    def __init__(self) -> None:
        layers = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())
            for _ in range(DEPTH)
        )
        super().__init__(*layers)


def _make(package: str, name: str, model: nn.Module) -> Optimizer:
    kind = getattr(importlib.import_module(package), name)
    if package == "heavyball":
        importlib.import_module("heavyball.utils").compile_mode = None  # a compiler takes minutes
    options = dict(OPTIONS.get(name, {"lr": 1e-3})) if package != "heavyball" else {"lr": 1e-3}
    if "model" in options:
        options.pop("model")
        return kind(model, **options)
    if package == "pytorch_optimizer" and name == "Muon":
        groups = [
            {"params": [p for p in model.parameters() if p.ndim == 2], "use_muon": True},
            {"params": [p for p in model.parameters() if p.ndim != 2], "use_muon": False},
        ]
        return kind(groups, **options)
    return kind(model.parameters(), **options)


def _batch(step: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step))


def _train(
    package: str, name: str, budget: int, rows: int
) -> tuple[nn.Module, Optimizer, list[float], int, Any]:
    torch.manual_seed(0)
    model = Layers()
    optimizer = _make(package, name, model)
    if hasattr(optimizer, "train"):
        optimizer.train()
    seconds, session = [], None

    def steps() -> None:
        for step in range(STEPS):
            began = time.perf_counter()
            x = _batch(step, rows)
            loss = (model(x) - x.roll(1, 1)).square().mean()
            loss.backward(create_graph=name == "SophiaH")
            optimizer.step()
            seconds.append(time.perf_counter() - began)
            footprint.append(ordinary_bytes(model, optimizer))
            optimizer.zero_grad()

    footprint: list[int] = []
    if budget:
        options = {"step_aside": False, "min_paged_bytes": 4096, "page_bytes": 4096}
        with dynoffload.offload(
            model, optimizer, budget=budget, pilot=None, config=options
        ) as session:
            steps()
    else:
        steps()
    return model, optimizer, seconds, max(footprint), session


def measured(package: str, name: str, rows: int) -> tuple[float, float, int, int]:
    """Train plainly and paged, assert that all bits are equal; return the medians of both, the
    footprint and the largest peak."""
    plain, its, fast, footprint, _ = _train(package, name, 0, rows)
    model, optimizer, slow, _, session = _train(package, name, footprint // 4, rows)
    assert_same(dict(model.named_parameters()), dict(plain.named_parameters()), "parameters")
    mine = [one for _, one in state_of(optimizer)]
    assert_same(mine, [one for _, one in state_of(its)], "state")
    peak = max(step.peak_fast_bytes for step in session.log.steps)
    return median(fast[1:]), median(slow[1:]), footprint, peak


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "name"), [(package, name) for package in OPTIMIZERS for name in OPTIMIZERS[package]]
)
def test_an_optimizer_of_another_package(package: str, name: str) -> None:
    pytest.importorskip(package)
    plain, paged, footprint, peak = measured(package, name, rows=1024)
    assert paged < SLOWEST * max(plain, LEAST_S)
    if name != "SophiaH":  # its gradients have a graph, which lies beside the budget
        assert peak <= footprint // 4
