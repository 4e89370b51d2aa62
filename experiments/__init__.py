"""The experiments: the measurements behind the published numbers, by name.

An experiment is a class; see `dynoffload.experiments.harness`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynoffload.errors import ConfigError

EXPERIMENTS: dict[str, str] = {
    "demo": "dynoffload.experiments.demo:Demo",
    "paged": "dynoffload.experiments.paged:Paged",
    "exactness": "dynoffload.experiments.exactness:Exactness",
    "general": "dynoffload.experiments.general:GeneralPilot",
    "ablation": "dynoffload.experiments.ablation:Ablation",
    "overhead": "dynoffload.experiments.overhead:Overhead",
    "ablations": "dynoffload.experiments.ablations:Ablations",
    "memory-expansion": "dynoffload.experiments.memory_expansion:MemoryExpansion",
    "cluster": "dynoffload.experiments.cluster:Clusters",
    "simulation": "dynoffload.experiments.simulation:Simulated",
    "step-time": "dynoffload.experiments.step_time:StepTime",
    "estimates": "dynoffload.experiments.estimates:Estimates",
    "whatif": "dynoffload.experiments.whatif:WhatIf",
    "idioms": "dynoffload.experiments.idioms:Idioms",
    "capacity": "dynoffload.experiments.largest:Capacity",
    "max-batch": "dynoffload.experiments.largest:MaxBatch",
    "costs": "dynoffload.experiments.costs:Costs",
    "host-optimizer": "dynoffload.experiments.host_optimizer:DelayedUpdates",
    "tiling": "dynoffload.experiments.tiling:Tiling",
    "moe-layer": "dynoffload.experiments.moe_layer:Layers",
    "ranks": "dynoffload.experiments.ranks:Ranks",
    "moe-pipeline": "dynoffload.experiments.moe_pipeline:Pipeline",
    "lora": "dynoffload.experiments.lora:Lora",
    "gpu": "dynoffload.experiments.gpu:Gpu",
}
"""Name on the command line -> ``module:class``."""
BENCH: dict[str, str] = {
    **{name: "" for name in EXPERIMENTS if name not in ("demo", "gpu", "general", "ablations")},
    "estimates": "estimates --calibration {folder}/simulation.json",
    "resident": "step-time --network moe,tree --budgets 2 --policies repeat --steps 40 --warmup 12",
    "moe-pipeline-4": "moe-pipeline --ranks 4 --mbit 200",
}
"""Runs of ``dynoffload experiment all``: name of the result -> arguments; "" is just the name."""


def load(name: str) -> Any:
    """Return the class of the experiment ``name``.

    Raises:
        ConfigError: if there is no such experiment.
    """
    if name not in EXPERIMENTS:
        raise ConfigError(f"no experiment is named {name!r}: there are {', '.join(EXPERIMENTS)}")
    module, _, kind = EXPERIMENTS[name].partition(":")
    return getattr(importlib.import_module(module), kind)


def summary(name: str) -> str:
    """Return the first line of the experiment's module docstring, without importing the module."""
    module = EXPERIMENTS[name].partition(":")[0]
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"experiment {name!r} is registered but {module} does not exist")
    text = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8")))
    return (text or "").split("\n", 1)[0]


def make_room(path: Path, option: str) -> None:
    """Create the folder of an experiment's output file, before anything is measured.

    Args:
        path: the output file.
        option: its command-line option, for the error.

    Raises:
        ConfigError: the folder cannot be created, or the file cannot be written.
    """
    remedy = f"name another file for {option}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"{path} cannot be written ({why}): {remedy}") from error
    if path.is_dir() or (path.exists() and not os.access(path, os.W_OK)):
        what = "is a directory" if path.is_dir() else "must not be written"
        raise ConfigError(f"{path} {what}: {remedy}")


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write ``result`` to ``path`` as JSON, atomically.

    Raises:
        ValueError: if a number is NaN or infinite, which JSON does not have.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=2, allow_nan=False) + "\n"
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
