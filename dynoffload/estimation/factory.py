"""Loads a training job from a function: ``MODULE:FUNCTION`` or ``FILE.py:FUNCTION``.

`job_of` finds the function, calls it and checks its result. It trains nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dynoffload.errors import ConfigError
from dynoffload.estimation.measuring import Loss

_KEYS = ("model", "optimizer", "batches", "loss")
_RETURNS = (
    "return (model, optimizer, batches) or (model, optimizer, batches, loss), or a dict with these "
    "keys; optimizer and loss may be None"
)
_NO_BATCHES = (Mapping, str, torch.Tensor)


@dataclass(frozen=True)
class Job:
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
    """Return the job that the function ``name`` builds.

    Args:
        name: ``MODULE:FUNCTION`` or ``FILE.py:FUNCTION``; the function is called without arguments.

    Raises:
        ConfigError: there is no such function, it failed, or its result is not a training job.
    """
    where, colon, function = name.rpartition(":")
    if not colon or not where or not function:
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
            raise ConfigError(f"{name}() failed: {type(error).__name__}: {error}") from error
    finally:
        sys.path[:] = before
    return _job(name, made)


def _module(where: str, *, is_file: bool) -> ModuleType:
    try:
        if not is_file:
            return importlib.import_module(where)
        path = Path(where)
        name = f"dynoffload_factory_{path.stem}"  # so that it shadows no other module
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise ConfigError(f"there is no file {where}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and pickle look it up
        spec.loader.exec_module(module)
        return module
    except ConfigError:
        raise
    except SystemExit as error:
        raise ConfigError(
            f"{where} ends the process as it is imported: put what runs it, such as parse_args(), "
            "under if __name__ == '__main__':"
        ) from error
    except Exception as error:
        raise ConfigError(f"{where} cannot be imported: {type(error).__name__}: {error}") from error


def _job(name: str, made: object) -> Job:
    if isinstance(made, Mapping):
        unknown = sorted(map(str, made.keys() - set(_KEYS)))
        if unknown:
            raise ConfigError(f"{name}() returned the key {unknown[0]!r}: {_RETURNS}")
        values: list[Any] = [made.get(key) for key in _KEYS]
    elif isinstance(made, tuple) and len(made) in (3, 4):
        values = [*made, None][:4]
    else:
        what = type(made).__name__
        what += f" of {len(made)}" if isinstance(made, tuple) else ""
        raise ConfigError(f"{name}() returned {what}: {_RETURNS}")
    model, optimizer, batches, loss = values
    is_iterated = isinstance(batches, Iterable) and not isinstance(batches, _NO_BATCHES)
    for what, value, fits in (
        ("model", model, isinstance(model, nn.Module)),
        ("optimizer", optimizer, isinstance(optimizer, Optimizer | None)),
        ("batches", batches, is_iterated),
        ("loss", loss, loss is None or callable(loss)),
    ):
        if not fits:
            more = (
                "; batches are iterated, each is passed to the model: put a single one into a list"
                if what == "batches"
                else ""
            )
            raise ConfigError(
                f"{name}() returned {type(value).__name__} as the {what}: {_RETURNS}{more}"
            )
    return Job(*values)
