"""The experiments: measurements behind the published numbers, each a module with a function.

What it is: the list of names that ``dynoffload experiment`` knows, imported only when one is asked
for. What it is not: the measurements.

An experiment is a function ``run(json_path: Path | None = None, **options) -> dict``. It prints
its own tables, returns what JSON can hold, and gives each option a type and a default; the caller
writes the returned numbers to ``json_path``, which the function may use for what it has so far.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dynoffload.errors import ConfigError

EXPERIMENTS: dict[str, str] = {
    "demo": "dynoffload.experiments.demo:run",
    "paged": "dynoffload.experiments.paged:run",
    "breakdown": "dynoffload.experiments.breakdown:run",
    "exactness": "dynoffload.experiments.exactness:run",
    "resident": "dynoffload.experiments.resident:run",
    "pilot-accuracy": "dynoffload.experiments.pilot_accuracy:run",
    "pilot-benefit": "dynoffload.experiments.pilot_benefit:run",
    "memory-expansion": "dynoffload.experiments.memory_expansion:run",
    "cluster": "dynoffload.experiments.cluster:run",
    "simulation": "dynoffload.experiments.simulation:run",
    "step-time": "dynoffload.experiments.step_time:run",
    "estimates": "dynoffload.experiments.estimates:run",
    "whatif": "dynoffload.experiments.whatif:run",
    "planner-optimality": "dynoffload.experiments.planner.optimality:run",
    "idioms": "dynoffload.experiments.idioms:run",
    "capacity": "dynoffload.experiments.capacity:run",
    "max-batch": "dynoffload.experiments.max_batch:run",
    "costs": "dynoffload.experiments.costs:run",
    "host-optimizer": "dynoffload.experiments.host_optimizer:run",
    "tiling": "dynoffload.experiments.tiling:run",
    "moe-layer": "dynoffload.experiments.moe_layer:run",
    "ranks": "dynoffload.experiments.ranks:run",
    "moe-pipeline": "dynoffload.experiments.moe_pipeline:run",
    "gpu": "dynoffload.experiments.gpu:run",
}
"""Name on the command line -> ``module:function``."""


def load(name: str) -> Callable[..., dict[str, Any]]:
    """Return the function of the experiment ``name``.

    Raises:
        ConfigError: if there is none of this name.
    """
    if name not in EXPERIMENTS:
        raise ConfigError(f"no experiment is named {name!r}: there are {', '.join(EXPERIMENTS)}")
    module, _, function = EXPERIMENTS[name].partition(":")
    found: Callable[..., dict[str, Any]] = getattr(importlib.import_module(module), function)
    return found


def summary(name: str) -> str:
    """Return the first line of the experiment's module docstring, without importing the module."""
    module = EXPERIMENTS[name].partition(":")[0]
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"experiment {name!r} is registered but {module} does not exist")
    text = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8")))
    return (text or "").split("\n", 1)[0]


def make_room(path: Path, option: str) -> None:
    """Make the folder of what an experiment writes, before anything is measured.

    Args:
        path: of the file.
        option: that names it, for the error.

    Raises:
        ConfigError: the folder cannot be made, or the file not be written.
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
    """Write ``result`` to ``path`` as JSON, whole or not at all.

    Raises:
        ValueError: if a number is NaN or infinite, which JSON does not have.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=2, allow_nan=False) + "\n"
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
