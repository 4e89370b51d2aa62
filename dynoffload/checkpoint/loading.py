"""Loads a checkpoint into live tensors in place, after verifying all of it.

Any defect of the checkpoint, or mismatch with the current run, is found before training state
changes. `reading` verifies sizes and checksums; `matching` compares names, shapes, dtypes, groups
and values. After that, only I/O or a user object's ``load_state_dict`` can fail.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dynoffload.checkpoint import randomness
from dynoffload.checkpoint.contents import names_of, stateful_modules, tensors_of
from dynoffload.checkpoint.extents import Extents, extents_of
from dynoffload.checkpoint.matching import (
    OptimizerPlan,
    match_extra,
    match_model,
    match_optimizer,
    place_of,
)
from dynoffload.checkpoint.peers import Peers, peers_of
from dynoffload.checkpoint.reading import Opened, Stored
from dynoffload.checkpoint.saving import state_of, things_of
from dynoffload.checkpoint.tensors import Memory
from dynoffload.distributed.sharded import drop_gradients, reshard
from dynoffload.errors import CheckpointError, DynOffloadError
from dynoffload.host_optimizer import HostOptimizer

logger = logging.getLogger(__name__)


def load(
    model: nn.Module,
    optimizer: Optimizer | None,
    directory: str | os.PathLike[str],
    *,
    extra: Mapping[str, Any] | None,
    memory: Memory,
    prepare: Callable[[], None],
    peers: Peers | None = None,
) -> None:
    """Load; see `dynoffload.load_checkpoint`.

    Args:
        model, optimizer, directory, extra: as there.
        memory: where their tensors are stored.
        prepare: called after verification, before anything changes; it must give all tensors
            memory and complete pending updates.
        peers: the processes that load together, by default those of the model; none changes
            anything until all have verified.
    """
    peers = peers_of(model) if peers is None else peers
    peers.check(directory)
    with contextlib.ExitStack() as stack:
        fills: list[Callable[[Memory], None]] = []

        def verify() -> tuple[str, int]:
            things = things_of(extra)
            for name, thing in things.items():
                state_of(name, thing)  # raises if it has no state
            reshard(model)
            checkpoint = Opened(directory, stack, peers)
            fills.append(_verified(checkpoint, model, optimizer, things, peers))
            return str(checkpoint.path), checkpoint.checksum

        def fill() -> None:
            prepare()
            try:
                fills[0](memory)
            except (OSError, EOFError) as error:
                if isinstance(error, DynOffloadError):
                    raise
                why = getattr(error, "strerror", None) or error
                raise CheckpointError(
                    getattr(error, "errno", None) or errno.EIO,
                    f"reading checkpoint {everyone[0][0]} has failed half-way ({why}): the model "
                    "is partly loaded; load it again, or another, before training goes on",
                ) from error

        everyone = peers.share(verify)
        _check_same(everyone)
        peers.share(fill)
    logger.info("loaded checkpoint %s", everyone[0][0])


def _check_same(everyone: Sequence[Sequence[Any]]) -> None:
    """Check that all ranks load the same checkpoint, given path and checksum of each rank's.

    Raises:
        CheckpointError: they differ; names the first pair that does.
    """
    for rank, (path, checksum) in enumerate(everyone):
        if checksum != everyone[0][1]:
            raise CheckpointError(
                f"ranks 0 and {rank} load two checkpoints, {everyone[0][0]} and {path}: give all "
                "ranks the same; nothing was loaded"
            )


def _verified(
    checkpoint: Opened,
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Mapping[str, Any],
    peers: Peers,
) -> Callable[[Memory], None]:
    """Check that a checkpoint matches the current run; return a function that loads it."""
    with checkpoint.sound("content"):
        extents = extents_of(model)
        match_model(checkpoint, model, extents)
        plan = None
        if optimizer is not None:
            plan = match_optimizer(checkpoint, model, optimizer, extents)
        states = match_extra(checkpoint, extra)
        of_modules = checkpoint.decode("extra", checkpoint.said.module_state)
        everyone = [checkpoint.said.random, *checkpoint.said.random_of_others]
        own = everyone[peers.rank] if peers.rank < len(everyone) else {}
        random = {name: checkpoint.decode("extra", state) for name, state in own.items()}
        if random:
            randomness.check(random)
        else:
            logger.warning(
                "checkpoint %s has the random numbers of %d ranks, and this is rank %d: its own go "
                "on",
                checkpoint.path,
                len(everyone),
                peers.rank,
            )
    if optimizer is not None and (unused := checkpoint.said.extra.keys() - extra.keys()):
        logger.warning(
            "checkpoint %s also has the state of %s, which is not loaded: pass extra= to go on "
            "as the run would have",
            checkpoint.path,
            ", ".join(sorted(unused)),
        )

    def fill(memory: Memory) -> None:
        for name, thing in extra.items():
            if isinstance(thing, torch.Generator):
                thing.set_state(states[name])
            else:
                thing.load_state_dict(states[name])
        for name, module in stateful_modules(model).items():
            module.set_extra_state(of_modules[name])
        _fill_model(checkpoint, model, memory)
        if optimizer is not None and plan is not None:
            _fill_optimizer(checkpoint, plan, model, optimizer, memory)
        if random:
            randomness.restore(random)

    return fill


def _fill_model(checkpoint: Opened, model: nn.Module, memory: Memory) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    drop_gradients(model)
    extents = extents_of(model)
    for name, tensor in tensors_of(model)[0].items():
        checkpoint.read(place_of(checkpoint, name), extents.held(tensor, tensor), memory)


@torch.no_grad()
def _fill_optimizer(
    checkpoint: Opened, plan: OptimizerPlan, model: nn.Module, optimizer: Optimizer, memory: Memory
) -> None:
    names, extents = names_of(model), extents_of(model)
    if isinstance(optimizer, HostOptimizer):
        optimizer.begin_load()
    for group, values in zip(optimizer.param_groups, plan.groups, strict=True):
        for key, value in values.items():
            known = group.get(key)
            if (
                isinstance(known, torch.Tensor)
                and isinstance(value, torch.Tensor)
                and (known.dtype, known.shape) == (value.dtype, value.shape)
            ):
                known.copy_(value)  # a scheduler, or a compiled step, may hold a reference
            else:
                group[key] = value
        for parameter in group["params"]:
            entry = plan.state.get(names[parameter])
            if entry is None:
                optimizer.state.pop(parameter, None)
            else:
                _fill_state(checkpoint, entry, parameter, optimizer, memory, extents)
    if isinstance(optimizer, HostOptimizer):
        optimizer.end_load()


def _fill_state(
    checkpoint: Opened,
    entry: dict[str, Any],
    parameter: nn.Parameter,
    optimizer: Optimizer,
    memory: Memory,
    extents: Extents,
) -> None:
    live = optimizer.state.get(parameter, {})
    extent = extents.held(parameter, parameter).extent
    state, known = {}, None
    for key, item in entry.items():
        known = live.get(key)
        if not isinstance(item, Stored):
            state[key] = item
        elif isinstance(known, torch.Tensor) and item.fits(extents.held(known, parameter)):
            state[key] = known
        elif extent is not None and item.shape == extent.shape:
            state[key] = item.part(parameter)
        else:
            state[key] = item.empty(parameter.device)
    del live, known
    optimizer.state[parameter] = state
    memory.adopt(parameter)  # before it has content, so that at most a piece is outside the budget
    for key, item in entry.items():
        if isinstance(item, Stored):
            checkpoint.read(item.place, extents.held(state[key], parameter), memory)
