"""``offload`` and ``materialize``: the two calls by which users meet the runtime."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from dynoffload import memory, runtime
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
from dynoffload.memory.reused import suspended
from dynoffload.memory.spill import check_room, default_spill_dir
from dynoffload.numerics import settle_kernels
from dynoffload.profiler.network import fingerprint
from dynoffload.runtime.budgeted import BudgetedSession
from dynoffload.runtime.counting import images_bytes
from dynoffload.runtime.frames import clear_frames
from dynoffload.runtime.host import within
from dynoffload.runtime.interrupts import admit, hold
from dynoffload.runtime.meta_init import Init, check_parts, place_of, remember
from dynoffload.runtime.migration.forecast import Predictor
from dynoffload.runtime.profiled import profiled
from dynoffload.runtime.session import Session
from dynoffload.runtime.sizing import sizing_of
from dynoffload.runtime.target import target_of
from dynoffload.runtime.updates.update import can_split, check_optimizer, innermost
from dynoffload.units import format_bytes, parse_bytes

logger = logging.getLogger(__name__)

_REMEDY = "write 'with dynoffload.offload(...) as session:' around the training loop"
_OURS = tuple(f"{directory}{os.sep}" for p in (runtime, memory) for directory in p.__path__)


class OffloadBlock(contextlib.AbstractContextManager[Session]):
    """What `offload` returns: entered once, by ``with`` or `start`, it yields the session.

    Until then nothing is offloaded. As that is easily overlooked, a block that nobody ever entered
    is warned of.

    It ends as ``with`` is left, by the session's ``close()``, or as the interpreter exits, which
    must find no tensor in paged memory; the first of these counts.

    It begins and ends wholly or not at all, as ``with`` calls `__exit__` only after `__enter__` has
    returned: a signal that comes in between is held off, and what it raises undoes the beginning.
    """

    def __init__(self, plan: Callable[[], _Planned]) -> None:
        self._plan = plan
        self._entered = self._left = False
        self._forgotten = weakref.finalize(self, _warn_of_forgotten, *_place_of_call())

    def start(self) -> Session:
        """Enter the block where no ``with`` can be, as over several cells of a notebook.

        Returns:
            The session, whose ``close()`` ends the block.

        Raises:
            DynOffloadError: see `offload`.
        """
        return self.__enter__()

    def __enter__(self) -> Session:
        if self._entered:
            raise ConfigError(
                "this offload() block was entered before: each 'with' needs an offload() of its own"
            )
        self._entered = True
        self._pid = os.getpid()
        self._forgotten.detach()
        self._planned = self._plan()
        begun = False
        try:
            hold()
            try:
                self._session = self._planned.block.__enter__()
                begun = True
                self._session._leave_block = self._leave_now
                if not _entered:
                    atexit.register(leave_all)
                _entered.append(self)
            finally:
                admit()
            return self._session
        except BaseException as error:
            if begun:
                self._leave(type(error), error, error.__traceback__, undo=True)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        if self._left:
            return None
        try:
            return self._leave(kind, error, trace)
        finally:
            if os.getpid() == self._pid:  # else it is the block of the process that forked this one
                self._planned.report(self._session)

    def _leave_now(self) -> None:
        self.__exit__(None, None, None)

    def _leave(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        *,
        undo: bool = False,
    ) -> bool | None:
        try:
            hold()
        except BaseException:  # a signal that came before; the block ends all the same
            self._leave(kind, error, trace, undo=undo)
            raise
        self._left, self._session._leave_block = True, None
        _entered.remove(self)
        if not _entered:
            atexit.unregister(leave_all)
        try:
            if undo and isinstance(self._session, BudgetedSession):
                self._session._undo(error)
            clear_frames(error)
            return self._planned.block.__exit__(kind, error, trace)
        finally:
            admit()


_entered: list[OffloadBlock] = []  # and not left, in order


def leave_all() -> None:
    """Leave the blocks that are open, the last first: the program that entered them has ended."""
    with contextlib.ExitStack() as each:
        for block in _entered:
            if block._pid == os.getpid():  # else this is a forked child, and it is its parent's
                each.callback(block._leave_now)


class _Planned(NamedTuple):
    """What entering a block will do: so far nothing was changed."""

    block: contextlib.AbstractContextManager[Session]  # undoes its beginning if that fails
    report: Callable[[Session], None]  # called after the block has ended


def _warn_of_forgotten(file: str, line: int) -> None:
    warnings.warn_explicit(
        f"offload() was called without 'with', so nothing was offloaded: {_REMEDY}",
        RuntimeWarning,
        file,
        line,
    )


def _place_of_call() -> tuple[str, int]:
    """Return file and line of the innermost caller outside this file."""
    frame = sys._getframe()
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


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
    """Train ``model`` within ``budget`` bytes of fast memory; results stay bit for bit the same.

    Args:
        model: the root module; its call marks a sample. It may be on the meta device. One that is
            wrapped in `DistributedDataParallel` is passed as it is; see docs/distributed.md.
        optimizer: any dense optimizer of `torch.optim` with state per parameter; what wraps it, as
            accelerate's ``prepare`` does, is unwrapped.
        budget: bytes, or a text such as ``"8GiB"``, of parameters, gradients, optimizer state and
            saved activations in fast memory. On the pager it is a hard cap on the pool;
            docs/limits.md says what lies outside of it. ``None`` takes the command line's. One that
            is larger than the memory there is, is lowered to that, with a warning.
        pilot: path of a ``.pilot`` file, a `Pilot`, ``"auto"`` (repeat the last order, learn during
            the first steps, and let what was learned steer once it does better) or ``None`` (fetch
            on demand only, unless ``OffloadConfig.policy`` is ``"repeat"``).
        spill_dir: a directory on a disk; the system's for temporary files by default.
        host_budget: of a model that is trained on an accelerator: bytes of pinned host memory for
            what is not on it, and the rest lies in the file; ``None``: all of it is in host memory,
            and there is no file.
        device: where to train, such as ``"cuda"``; ``None``: where the model is. A model on the CPU
            or the meta device is paged from there and is on the CPU after the block; samples are
            moved by the loop, as ever. On an accelerator ``budget`` caps what its allocator gives.
        config: further options, as `OffloadConfig` or a mapping of its fields.

    Returns:
        A block for one ``with``, which yields the session with its statistics; where none can be,
        its ``start()`` returns the session, whose ``close()`` ends the block. All but an unknown
        argument is refused as the block is entered.

    Raises:
        ConfigError: an option is wrong, or the optimizer cannot be split by parameter.
        BudgetError: the budget cannot hold the largest operator, or the host what lies below it.
        SpillError: the spill directory is missing, in memory, or too full.
        PilotError: the pilot is corrupt, or of another network.
        BackendError: the backend asked for does not work on this system, or there is no such
            accelerator.
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
) -> _Planned:
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer | None):
        raise ConfigError(
            "offload(model, optimizer) takes a torch.nn.Module and a torch.optim.Optimizer or "
            f"None, not {type(model).__name__} and {type(optimizer).__name__}"
        )
    replicas = replicas_of(model)
    model = unwrapped(model)
    _check_model(model)
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
    if replicas:
        options = replace(options, draft_share=0.0)  # gradients are not final before step()
    if given.profile_dir is not None:
        return _Planned(_profiled(model, optimizer, given, options), lambda session: None)
    limit = given.budget if budget is None else parse_bytes(budget, "budget")
    if limit is None:
        raise no_budget("offload(..., budget='8GiB')")
    if pilot is None and options.policy == "pilot":
        options = replace(options, policy="on-demand")
    _say_overruled(given, limit, pilot, spill_dir, host_budget, device, asked.policy)
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
        options = replace(options, backend=ACCELERATOR)
    sharded.check(model, accelerator=target.queues is not None)
    sharded.reshard(model)
    with within(target, limit, options.heap_slack_bytes, model, optimizer) as possible:
        options = replace(options, heap_slack_bytes=possible.slack)
        buckets = bucket_bytes(replicas)
        host = target.host_budget
        sizing = sizing_of(model, optimizer, possible.budget, options, buckets, host)
    if options.rollback and optimizer is not None and can_split(optimizer):
        images = images_bytes(model, optimizer)
        check_room(directory, {"training": sizing.spill_bytes, "rollback": images})
    parts = (model, optimizer, sizing, options, directory, target, predictor, reason, replicas)
    block = _paged(*parts)
    return _Planned(block, functools.partial(_report, given))


@contextlib.contextmanager
def _paged(model: nn.Module, *arguments: Any) -> Iterator[Session]:
    with suspended():
        session = managers[id(model)] = BudgetedSession(model, *arguments)
        beside = None
        left_by: BaseException | None = None
        try:
            beside = session._watch_ranks()
            yield session
        except BaseException as error:
            left_by = error
            told = None if beside is None else beside.explain(error)
            if told is not None:
                raise told from error
            raise
        finally:
            managers.pop(id(model), None)
            try:
                if beside is not None and os.getpid() == session._pid:
                    beside.end(left_by)
            finally:
                session._close()


@contextlib.contextmanager
def _profiled(
    model: nn.Module, optimizer: Optimizer | None, given: Defaults, options: OffloadConfig
) -> Iterator[Session]:
    with profiled(model, optimizer, given, options) as session:
        managers[id(model)] = session
        try:
            yield session
        finally:
            managers.pop(id(model), None)


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

    Call it before `offload`: it is noted, and happens module by module as the block begins. Where
    it is not called, each module's ``reset_parameters`` is.

    Args:
        model: what `offload` will be given.
        init: None for each module's ``reset_parameters``, a function called with each module that
            owns parameters or buffers, the path of a safetensors file, of an index of such files or
            of a directory with either, with the model's own names, or such a path and a function
            that makes the buffers which the file lacks as they are never saved. For models
            of transformers see `dynoffload.integrations.transformers.materialize`. What is not on
            the meta device keeps its values, except by a file.

    Returns:
        ``model``.

    Raises:
        ConfigError: ``init`` is none of these, the file cannot be read or does not fit, or the
            block has begun. That a module cannot initialise itself, or leaves a tensor without a
            value, `offload` says.
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


def _say_overruled(
    given: Defaults,
    budget: int,
    pilot: object,
    spill_dir: str | Path | None,
    host_budget: int | str | None,
    device: torch.device | str | int | None,
    policy: str,
) -> None:
    """Say which options of the command line the script's own call leaves without effect."""
    overruled = []
    if given.budget is not None and given.budget != budget:
        ours, theirs = format_bytes(given.budget), format_bytes(budget)
        overruled.append((f"budget={theirs}", f"--budget {ours}"))
    if given.pilot is not None and str(pilot) not in ("auto", str(given.pilot)):
        overruled.append((f"pilot={pilot!r:.80}", f"--pilot {given.pilot}"))
    if given.spill_dir is not None and spill_dir and Path(spill_dir) != given.spill_dir:
        overruled.append((f"spill_dir={str(spill_dir)!r}", f"--spill-dir {given.spill_dir}"))
    if given.policy not in (None, policy) and policy != "auto":
        overruled.append((f"policy={policy!r}", f"--policy {given.policy}"))
    if given.device is not None and device is not None and not _same_device(device, given.device):
        overruled.append((f"device={str(device)!r}", f"--device {given.device}"))
    if (
        given.host_budget is not None
        and host_budget is not None
        and (parse_bytes(host_budget, "host_budget") != given.host_budget)
    ):
        overruled.append(
            (f"host_budget={host_budget!r}", f"--host-budget {format_bytes(given.host_budget)}")
        )
    for argument, option in overruled:
        logger.warning("the script's own offload(%s) counts, and %s does not", argument, option)


def _same_device(one: torch.device | str | int, name: str) -> bool:
    """Return whether a device has this name; a name without an index means any of its kind."""
    try:
        named = torch.device(name)
    except RuntimeError:
        return False
    if isinstance(one, int):
        return named.type != "cpu" and named.index in (None, one)
    one = torch.device(one)
    return one.type == named.type and named.index in (None, one.index)


def _check_model(model: nn.Module) -> None:
    """Refuse what is spread over devices, takes no hooks, or has no shape yet."""
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
