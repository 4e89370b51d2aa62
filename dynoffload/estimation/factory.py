"""Calls the function that builds a training job: ``MODULE:FUNCTION`` or ``FILE.py:FUNCTION``."""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
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
    before, what = sys.path[:], f"importing {where}"
    sys.path.insert(0, str(Path(where).parent.resolve() if is_file else Path.cwd()))
    try:
        found = runpy.run_path(where) if is_file else vars(importlib.import_module(where))
        build = found.get(function)
        if not callable(build):
            raise ConfigError(f"{where} has no function {function!r} that can be called")
        what = f"{name}()"
        made = build()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{what} failed ({type(error).__name__}: {error}): mend it; what runs the script, such "
            "as parse_args(), belongs under if __name__ == '__main__':"
        ) from error
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
