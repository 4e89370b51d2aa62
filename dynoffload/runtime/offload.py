"""``offload`` and ``materialize``: the two calls by which users meet the runtime."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dynoffload.config import Defaults, OffloadConfig, defaults
from dynoffload.errors import ConfigError, ProfilingDone
from dynoffload.memory.spill import default_spill_dir
from dynoffload.profiler.network import fingerprint
from dynoffload.runtime.forecast import Predictor
from dynoffload.runtime.materialize import Init, remember
from dynoffload.runtime.session import Session
from dynoffload.runtime.sizing import sizing_of
from dynoffload.runtime.update import check_optimizer
from dynoffload.units import parse_bytes

logger = logging.getLogger(__name__)

_open: dict[int, Session] = {}  # id of a managed root -> its session


@contextlib.contextmanager
def offload(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    budget: int | str | None = None,
    pilot: Predictor | str | Path | None = "auto",
    spill_dir: str | Path | None = None,
    config: OffloadConfig | Mapping[str, Any] | None = None,
) -> Iterator[Session]:
    """Train ``model`` within ``budget`` bytes of fast memory; results stay bit for bit the same.

    Args:
        model: the root module; its call marks a sample. It may be on the meta device.
        optimizer: any dense optimizer of `torch.optim` with state per parameter.
        budget: bytes, or a text such as ``"8GiB"``; a hard cap on parameters, gradients, optimizer
            state and saved activations in fast memory. ``None`` takes the command line's.
        pilot: path of a ``.pilot`` file, a `Pilot`, ``"auto"`` (repeat the last order, learn during
            the first steps, and let what was learned steer once it does better) or ``None`` (fetch
            on demand only, unless ``OffloadConfig.policy`` is ``"repeat"``).
        spill_dir: a directory on a disk; the system's for temporary files by default.
        config: further options, as `OffloadConfig` or a mapping of its fields.

    Yields:
        The session, with its statistics.

    Raises:
        ConfigError: an option is wrong, or the optimizer cannot be split by parameter.
        BudgetError: the budget cannot hold the largest operator.
        SpillError: the spill directory is missing, in memory, or too full.
        PilotError: the pilot is corrupt, or of another network.
        BackendError: the backend asked for does not work on this system.
    """
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer | None):
        raise ConfigError(
            "offload(model, optimizer) takes a torch.nn.Module and a torch.optim.Optimizer or "
            f"None, not {type(model).__name__} and {type(optimizer).__name__}"
        )
    given = defaults()
    options = OffloadConfig.of(config)
    if given.policy is not None:
        options = replace(options, policy=given.policy)
    if given.profile_dir is not None:
        with _profiling(model, optimizer, given, options) as session:
            yield session
        return
    limit = given.budget if budget is None else parse_bytes(budget)
    if limit is None:
        raise ConfigError(
            "no budget: pass offload(..., budget='8GiB'), or run the script with "
            "'dynoffload run --budget 8GiB'"
        )
    if pilot is None and options.policy == "pilot":
        options = replace(options, policy="on-demand")
    _check_open(model, optimizer)
    if optimizer is not None:
        check_optimizer(optimizer)
        _check_parameters(model, optimizer)
    predictor = _predictor(given.pilot if pilot == "auto" and given.pilot else pilot)
    if predictor is not None and not isinstance(predictor, str):
        predictor.check(fingerprint(model))
    directory = Path(spill_dir or given.spill_dir or default_spill_dir())
    sizing = sizing_of(model, optimizer, limit, options)
    session = Session(model, optimizer, sizing, options, directory, predictor)
    _open[id(model)] = session
    try:
        yield session
    finally:
        del _open[id(model)]
        session.close()
        if given.report is not None:
            session.report(given.report)


def materialize(model: nn.Module, init: Init = None) -> nn.Module:
    """Give a model built on the meta device its weights, without ever holding it whole.

    Inside an `offload` block of ``model`` this happens now, module by module; outside it is noted,
    and happens when the model is first used under `offload`.

    Args:
        model: the root, or any model that an `offload` block will manage.
        init: None for each module's ``reset_parameters``, a function called with each module that
            owns parameters or buffers, or the path of a safetensors file.

    Returns:
        ``model``.

    Raises:
        ConfigError: a module cannot initialise itself, or the file lacks a tensor.
    """
    session = _open.get(id(model))
    if session is None:
        remember(model, init)
    else:
        session.materialize(init)
    return model


def _predictor(pilot: Predictor | str | Path | None) -> Predictor | str | None:
    if pilot is None or pilot == "auto":
        return pilot
    if isinstance(pilot, str | Path):
        from dynoffload.pilot.pilot import Pilot

        return Pilot.load(pilot)
    for name in ("vocabulary", "predict", "check"):
        if not hasattr(pilot, name):
            raise ConfigError(
                f"pilot={pilot!r} has no {name!r}: pass the path of a .pilot file, a Pilot, "
                "'auto' or None"
            )
    return pilot


def _check_open(model: nn.Module, optimizer: Optimizer | None) -> None:
    mine = {id(parameter) for parameter in model.parameters()}
    for session in _open.values():
        if session.model is model:
            raise ConfigError(f"this {type(model).__name__} is already inside an offload() block")
        if any(id(parameter) in mine for parameter in session.model.parameters()):
            raise ConfigError(
                f"this {type(model).__name__} has parameters of the {type(session.model).__name__} "
                "that is already inside an offload() block: pass one module that holds them all to "
                "one block"
            )
        if optimizer is not None and session.optimizer is optimizer:
            raise ConfigError(
                f"this {type(optimizer).__name__} already belongs to an offload() block: make an "
                "optimizer for each block, or pass one module that holds both models to one block"
            )


def _check_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    mine = {id(parameter) for parameter in model.parameters()}
    theirs = [p for group in optimizer.param_groups for p in group["params"]]
    if theirs and not any(id(parameter) in mine for parameter in theirs):
        raise ConfigError(
            f"none of the optimizer's parameters belong to this {type(model).__name__}: make the "
            "optimizer from model.parameters()"
        )


@contextlib.contextmanager
def _profiling(
    model: nn.Module, optimizer: Optimizer | None, given: Defaults, config: OffloadConfig
) -> Iterator[Any]:
    """Record traces in place of paging, as ``dynoffload profile`` asks for."""
    from dynoffload.profiler import Recorder
    from dynoffload.profiler.trace import Trace

    assert given.profile_dir is not None
    directory, limit = given.profile_dir, given.profile_steps
    directory.mkdir(parents=True, exist_ok=True)
    saved = 0

    def save(trace: Trace) -> None:
        nonlocal saved
        trace.save(directory / f"step-{saved:06d}.parquet")
        saved += 1
        if limit is not None and saved >= limit:
            raise ProfilingDone

    with Recorder(model, optimizer, features=config.features, on_step=save) as recorder:
        yield recorder
