"""``offload`` and ``materialize``: the runtime's two entry points."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dynoffload.config import ACCELERATOR, Defaults, OffloadConfig, defaults, no_budget
from dynoffload.distributed import sharded
from dynoffload.distributed.replicas import (
    bucket_bytes,
    check_replicas,
    replicas_of,
    unwrapped,
)
from dynoffload.errors import ConfigError, PilotError
from dynoffload.launch import own_file
from dynoffload.managed import managers
from dynoffload.memory.filesystems import why_not_temporary
from dynoffload.memory.pager import probe
from dynoffload.memory.reused import suspended
from dynoffload.memory.spill import check_room, default_spill_dir
from dynoffload.numerics import settle_kernels
from dynoffload.profiler.network import fingerprint
from dynoffload.runtime.block import OffloadBlock, Planned
from dynoffload.runtime.budgeted import BudgetedSession
from dynoffload.runtime.counting import check_stored, images_bytes
from dynoffload.runtime.host import within
from dynoffload.runtime.meta_init import Init, check_parts, frozen_in_files, place_of, remember
from dynoffload.runtime.migration.forecast import Predictor
from dynoffload.runtime.opening import Setup
from dynoffload.runtime.profiled import profiled
from dynoffload.runtime.session import Session
from dynoffload.runtime.sizing import sizing_of
from dynoffload.runtime.target import target_of
from dynoffload.runtime.updates.update import can_split, check_optimizer, innermost
from dynoffload.units import format_bytes, parse_bytes

logger = logging.getLogger(__name__)


def offload(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    budget: int | str | None = None,
    pilot: Predictor | str | Path | None = "auto",
    spill_dir: str | Path | None = None,
    host_budget: int | str | None = None,
    device: torch.device | str | int | None = None,
    config: OffloadConfig | Mapping[str, Any] | None = None,
) -> OffloadBlock:
    """Train ``model`` within ``budget`` bytes of fast memory; results are the same bit for bit.

    Args:
        model: the root module; each call of it is a sample. It may be on the meta device. Pass one
            wrapped in `DistributedDataParallel` as it is; see docs/distributed.md.
        optimizer: any dense optimizer of `torch.optim` with state per parameter. Wrappers, such as
            that of accelerate's ``prepare``, are removed.
        budget: bytes, or a text such as ``"8GiB"``, of parameters, gradients, optimizer state and
            saved activations in fast memory. On the pager it is a hard cap on the pool;
            docs/limits.md lists what is outside it. ``None`` takes the command line's. A budget
            above the available memory is lowered to that, with a warning.
        pilot: path of a ``.pilot`` file, a `Pilot`, ``"auto"`` or ``None``. ``"auto"`` starts
            from the general pilot, which adapts to the network. A session uses a pilot's prediction
            while it does better than the last order, and asks it within 1% of its time.
            ``None`` fetches on demand only, unless ``OffloadConfig.policy`` is ``"repeat"``.
        spill_dir: a directory on a disk; the system's for temporary files by default.
        host_budget: for training on an accelerator: bytes of pinned host memory for what is not on
            it; the rest is stored in the spill file. ``None``: all of it is in host memory, without
            a file.
        device: where to train, such as ``"cuda"``; ``None``: where the model is. A model on the CPU
            or the meta device is paged from there and is on the CPU after the block; the loop still
            moves samples itself. On an accelerator ``budget`` caps its allocator's memory.
        config: further options, as `OffloadConfig` or a mapping of its fields.

    Returns:
        A block for one ``with``, which yields the session with its statistics. Where ``with`` is
        impractical, its ``start()`` returns the session, whose ``close()`` ends the block. Errors,
        except for unknown arguments, are raised as the block is entered.

    Raises:
        ConfigError: an option is wrong, or the optimizer cannot be split by parameter.
        BudgetError: the budget is too small for the largest operator, or the host for the rest.
        SpillError: the spill directory is missing, in memory, or too full.
        PilotError: the pilot is corrupt, or of another network.
        BackendError: the backend does not work on this system, or there is no such accelerator.
    """
    return OffloadBlock(
        functools.partial(
            _plan, model, optimizer, budget, pilot, spill_dir, host_budget, device, config
        )
    )


def _plan(
    model: nn.Module,
    optimizer: Optimizer | None,
    budget: int | str | None,
    pilot: Predictor | str | Path | None,
    spill_dir: str | Path | None,
    host_budget: int | str | None,
    device: torch.device | str | int | None,
    config: OffloadConfig | Mapping[str, Any] | None,
) -> Planned:
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer | None):
        raise ConfigError(
            "offload(model, optimizer) takes a torch.nn.Module and a torch.optim.Optimizer or "
            f"None, not {type(model).__name__} and {type(optimizer).__name__}"
        )
    replicas = replicas_of(model)
    model = unwrapped(model)
    _check_model(model)
    check_stored(model)
    check_parts(model)
    settle_kernels()
    if not (spill_dir is None or (isinstance(spill_dir, str | Path) and str(spill_dir))):
        raise ConfigError(
            f"spill_dir={spill_dir!r} is no directory: pass a path, or None for the system's "
            "directory for temporary files"
        )
    optimizer = None if optimizer is None else innermost(optimizer)
    given = defaults()
    asked = OffloadConfig.of(config)
    options = asked.with_policy(given.policy)
    target = target_of(
        model,
        next((one for one in (device, given.device, place_of(model)) if one is not None), None),
        given.host_budget if host_budget is None else host_budget,
        options,
    )
    check_replicas(replicas, optimizer, accelerator=target.queues is not None)
    if given.profile_dir is not None:
        return Planned(profiled(model, optimizer, given, options), lambda session: None)
    limit = given.budget if budget is None else parse_bytes(budget, "budget")
    if limit is None:
        raise no_budget("offload(..., budget='8GiB')")
    if pilot is None and options.policy == "pilot":
        options = replace(options, policy="on-demand")
    call = {"budget": limit, "pilot": pilot, "spill_dir": spill_dir, "host_budget": host_budget}
    _log_overruled(given, {**call, "device": device, "policy": asked.policy})
    _check_open(model, optimizer)
    if optimizer is not None:
        check_optimizer(optimizer)
        check_parameters(model, optimizer)
    from_command = given.pilot is not None and pilot == "auto"
    predictor = _predictor(given.pilot if from_command else pilot)
    if predictor is not None and not isinstance(predictor, str):
        try:
            predictor.check(fingerprint(model))
        except PilotError as error:
            named = given.pilot if from_command else pilot
            file = f"{named}: " if isinstance(named, str | Path) else ""
            raise PilotError(f"{file}not a pilot of this {type(model).__name__}: {error}") from None
        if options.policy != "pilot":
            logger.warning(
                "%s is not used, as the policy is %r and not 'pilot'",
                f"--pilot {given.pilot}" if from_command else "the pilot",
                options.policy,
            )
    chosen = spill_dir or given.spill_dir
    directory = Path(chosen or default_spill_dir())
    reason = "" if chosen else why_not_temporary(directory)
    if target.queues is not None:
        check_stored(model, accelerator=True)
        options = replace(options, backend=ACCELERATOR)
    sharded.check(model, accelerator=target.queues is not None)
    sharded.reshard(model)
    with within(target, limit, options.heap_slack_bytes, model, optimizer) as possible:
        options = replace(options, heap_slack_bytes=possible.slack)
        buckets = bucket_bytes(replicas)
        host = target.host_budget
        may_source = target.queues is None and options.backend != "mapped" and not probe()
        sourced = frozen_in_files(model) if may_source else frozenset()
        sizing = sizing_of(model, optimizer, possible.budget, options, buckets, host, sourced)
    if options.rollback and optimizer is not None and can_split(optimizer):
        images = images_bytes(model, optimizer)
        check_room(directory, {"training": sizing.spill_bytes, "rollback": images})
    setup = Setup(
        model=model,
        optimizer=optimizer,
        sizing=sizing,
        config=options,
        spill_dir=directory,
        target=target,
        pilot=predictor,
        spill_reason=reason,
        replicas=replicas,
        possible=possible,
        sourced=sourced,
    )
    return Planned(_paged(setup), functools.partial(_report, given))


@contextlib.contextmanager
def _paged(setup: Setup) -> Iterator[Session]:
    with suspended():
        session = managers[id(setup.model)] = BudgetedSession(setup)
        watchdog = None
        left_by: BaseException | None = None
        try:
            watchdog = session._watch_ranks()
            yield session
        except BaseException as error:
            left_by = error
            explained = None if watchdog is None else watchdog.explain(error)
            if explained is not None:
                raise explained from error
            raise
        finally:
            managers.pop(id(setup.model), None)
            try:
                if watchdog is not None and os.getpid() == session._pid:
                    watchdog.end(left_by)
            finally:
                session._close()


def _report(given: Defaults, session: Session) -> None:
    files = None
    try:
        if given.report is not None:
            files = session.report(own_file(given.report))
    finally:
        if given.on_end is not None:
            given.on_end(session, files)


def materialize(model: nn.Module, init: Init = None) -> nn.Module:
    """Give a model built on the meta device its weights, without ever holding it whole.

    Call it before `offload`. The weights are given module by module as the block begins. Without
    this call, each module's ``reset_parameters`` is used.

    Args:
        model: the model that `offload` is given later.
        init: None for each module's ``reset_parameters``; a function called with each module that
            owns parameters or buffers; the path of a safetensors file, of an index of such files or
            of a directory with either, using the model's own names; or a tuple of such a path and a
            function that makes unsaved buffers. For models of transformers see
            `dynoffload.integrations.transformers.materialize`. Tensors not on the meta device keep
            their values, unless a file has them.

    Returns:
        ``model``.

    Raises:
        ConfigError: ``init`` is none of these, the file cannot be read or does not fit, or the
            block has begun. `offload` raises it if a module cannot initialise itself, or leaves a
            tensor without a value.
    """
    if id(unwrapped(model)) in managers:
        raise ConfigError(
            f"materialize() was called inside the offload() block of this {type(model).__name__}, "
            "whose weights were given as the block began: call it before offload()"
        )
    remember(unwrapped(model), init)
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


def _log_overruled(given: Defaults, call: Mapping[str, Any]) -> None:
    """Log which command-line options, ``given``, are overridden by the script's ``call``."""
    for name, value in call.items():
        option = getattr(given, name)
        if option is None or value == ("auto" if name in ("pilot", "policy") else None):
            continue
        if name in ("budget", "host_budget"):
            value = parse_bytes(value, name)
            theirs, ours = format_bytes(value), format_bytes(option)
            same = value == option
        else:
            theirs, ours = repr(value if value is None else str(value)), str(option)
            same = (
                _same_device(value, ours)
                if name == "device"
                else os.path.normpath(str(value)) == os.path.normpath(ours)
            )
        if not same:
            logger.warning(
                "the script's own offload(%s=%.80s) counts, and --%s %s does not",
                name,
                theirs,
                name.replace("_", "-"),
                ours,
            )


def _same_device(one: torch.device | str | int, name: str) -> bool:
    """Return whether ``one`` matches ``name``; a name without index matches any of its kind."""
    try:
        named = torch.device(name)
    except RuntimeError:
        return False
    if isinstance(one, int):
        return named.type != "cpu" and named.index in (None, one)
    one = torch.device(one)
    return one.type == named.type and named.index in (None, one.index)


def _check_model(model: nn.Module) -> None:
    """Refuse a model that spans devices, takes no hooks, or has lazy parameters."""
    if isinstance(model, nn.DataParallel):
        raise ConfigError(
            f"the {type(model.module).__name__} is wrapped in {type(model).__name__}: offload() "
            "serves one device in a process; pass the model itself, or start a process for each "
            "device and wrap it in DistributedDataParallel"
        )
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"module {path!r} is TorchScript, which takes no hooks: put the module from which "
                "it was scripted or traced in its place"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ConfigError(
                f"{name!r} of a lazy module has no shape yet: call the model on one sample under "
                "torch.no_grad(), then make the optimizer, before the offload() block"
            )


def _check_open(model: nn.Module, optimizer: Optimizer | None) -> None:
    mine = {id(parameter) for parameter in model.parameters()}
    for session in managers.values():
        if session.model is model:
            raise ConfigError(
                f"this {type(model).__name__} is already inside an offload() block: leave that "
                "block first, or close() its session"
            )
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


def check_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer that trains another model.

    Raises:
        ConfigError: it has parameters, and none of them is the model's.
    """
    mine = {id(parameter) for parameter in model.parameters()}
    theirs = [p for group in optimizer.param_groups for p in group["params"]]
    if theirs and not any(id(parameter) in mine for parameter in theirs):
        raise ConfigError(
            f"none of the optimizer's parameters belong to this {type(model).__name__}: make the "
            "optimizer from model.parameters(), and after dynoffload.tile() or untile(), which "
            "make other parameters"
        )
    known = {id(parameter) for parameter in theirs}
    strange = sum(id(parameter) not in mine for parameter in theirs)
    untrained = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in known
    ]
    if strange and untrained:
        logger.warning(
            "the optimizer has %d parameters that are not of this %s, and lacks %d of it that "
            "require gradients, such as %r: if the model was changed since the optimizer was made, "
            "as by dynoffload.tile() or untile(), make the optimizer anew",
            strange,
            type(model).__name__,
            len(untrained),
            untrained[0],
        )
