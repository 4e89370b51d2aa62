"""Calls the function that builds a training job: ``MODULE:FUNCTION`` or ``FILE.py:FUNCTION``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from dynoffload.errors import ConfigError
from dynoffload.estimation.measuring import Loss

_RETURNS = (
    "return (model, optimizer, batches) or (model, optimizer, batches, loss); optimizer and loss "
    "may be None, and batches are a list of what the model is called with"
)


class Job(NamedTuple):
    """A training job.

    Attributes:
        model: the network, in memory or on the meta device.
        optimizer: its optimizer, or None.
        batches: as for `dynoffload.profile`.
        loss: as for `dynoffload.profile`.
    """

    model: nn.Module
    optimizer: Optimizer | None
    batches: Iterable[Any]
    loss: Loss | None = None


def job_of(name: str) -> Job:
    """Return the job that the function ``name`` builds; it is called without arguments.

    Raises:
        ConfigError: there is no such function, it failed, or its result is not a training job.
    """
    where, _, function = name.rpartition(":")
    if not where or not function:
        raise ConfigError(f"{name!r} names no function: write MODULE:FUNCTION or FILE.py:FUNCTION")
    is_file = where.endswith(".py")
    before = sys.path[:]
    sys.path.insert(0, str(Path(where).parent.resolve() if is_file else Path.cwd()))
    try:
        build = getattr(_module(where, is_file=is_file), function, None)
        if not callable(build):
            raise ConfigError(f"{where} has no function {function!r} that can be called")
        try:
            made = build()
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{name}() failed ({type(error).__name__}: {error})") from error
    finally:
        sys.path[:] = before
    if not isinstance(made, tuple) or len(made) not in (3, 4):
        raise ConfigError(f"{name}() returned {type(made).__name__}: {_RETURNS}")
    job = Job(*made)
    for key, fits in (
        ("model", isinstance(job.model, nn.Module)),
        ("optimizer", isinstance(job.optimizer, Optimizer | None)),
        (
            "batches",
            isinstance(job.batches, Iterable)
            and not isinstance(job.batches, Mapping | str | torch.Tensor),
        ),
        ("loss", job.loss is None or callable(job.loss)),
    ):
        if not fits:
            kind = type(getattr(job, key)).__name__
            raise ConfigError(f"{name}() returned {kind} as the {key}: {_RETURNS}")
    return job


def _module(where: str, *, is_file: bool) -> ModuleType:
    try:
        if not is_file:
            return importlib.import_module(where)
        name = f"dynoffload_factory_{Path(where).stem}"  # so that it shadows no other module
        spec = importlib.util.spec_from_file_location(name, where)
        assert spec is not None  # the name ends in .py
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and pickle look it up
        spec.loader.exec_module(module)
        return module
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"importing {where} failed ({type(error).__name__}: {error}): mend it; what runs the "
            "script, such as parse_args(), belongs under if __name__ == '__main__':"
        ) from error
