"""Loads a checkpoint into live tensors in place, after verifying all of it.

Any defect of the checkpoint, or mismatch with the current run, is found before training state
changes: `reading` verifies files, and `_verified` compares names, shapes, dtypes, groups and
values. After that, only I/O or a user object's ``load_state_dict`` can fail.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dynoffload.checkpoint import randomness
from dynoffload.checkpoint.contents import (
    NO_VALUES,
    groups_of,
    names_of,
    stateful_modules,
    tensors_of,
    type_of,
)
from dynoffload.checkpoint.extents import UNPLACED, Extents, extents_of
from dynoffload.checkpoint.files import kind_of
from dynoffload.checkpoint.peers import Peers, peers_of
from dynoffload.checkpoint.reading import Opened, Stored
from dynoffload.checkpoint.saving import state_of, things_of
from dynoffload.checkpoint.tensors import Memory
from dynoffload.checkpoint.values import is_tensor
from dynoffload.distributed.sharded import drop_gradients, reshard
from dynoffload.errors import CheckpointError, DynOffloadError
from dynoffload.host_optimizer import HostOptimizer
from dynoffload.memory.local import is_spread

logger = logging.getLogger(__name__)

_TILE = re.compile(r"\.tiles\.\d+\.")  # of a layer split by `dynoffload.tile`
_SHOWN = 3  # names per category in an error

_State = dict[str, dict[str, Any]]  # by parameter and key; tensors are `Stored`


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
        for rank, (path, checksum) in enumerate(everyone):
            if checksum != everyone[0][1]:
                raise CheckpointError(
                    f"ranks 0 and {rank} load two checkpoints, {everyone[0][0]} and {path}: give "
                    "all ranks the same; nothing was loaded"
                )
        peers.share(fill)
    logger.info("loaded checkpoint %s", everyone[0][0])


def _verified(
    checkpoint: Opened,
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Mapping[str, Any],
    peers: Peers,
) -> Callable[[Memory], None]:
    """Check that a checkpoint matches the current run; return a function that loads it."""
    said = checkpoint.said
    with checkpoint.sound("content"):
        extents = extents_of(model)
        _match_model(checkpoint, model, extents)
        groups: list[dict[str, Any]] = []
        state: _State = {}
        if optimizer is not None:
            groups, state = _match_optimizer(checkpoint, model, optimizer, extents)
        _compare(
            checkpoint,
            "extra",
            {name: type(thing).__name__ for name, thing in extra.items()},
            {name: one["type"] for name, one in said.extra.items()},
            f"Pass in extra what was saved ({_some([*map(repr, said.extra)]) or 'nothing'}), by "
            "the same names",
            unused_is_fine=True,
        )
        states = {name: checkpoint.decode("extra", said.extra[name]["state"]) for name in extra}
        of_modules = checkpoint.decode("extra", said.module_state)
        everyone = [said.random, *said.random_of_others]
        own = everyone[peers.rank] if peers.rank < len(everyone) else {}
        random = {name: checkpoint.decode("extra", value) for name, value in own.items()}
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
    if optimizer is not None and (unused := said.extra.keys() - extra.keys()):
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
        if optimizer is not None:
            _fill_optimizer(checkpoint, groups, state, model, optimizer, memory)
        if random:
            randomness.restore(random)

    return fill


# Comparing; nothing here changes training state


def _compare(
    checkpoint: Opened,
    of: str,
    here: Mapping[str, str],
    there: Mapping[str, str],
    remedy: str,
    *,
    unused_is_fine: bool = False,
) -> None:
    """Check that the run and the checkpoint have the same names, and the same under each.

    Raises:
        CheckpointError: they differ; shows the first differences.
    """
    differences = {
        "missing": [repr(name) for name in here if name not in there],
        "unexpected": [repr(name) for name in there if name not in here and not unused_is_fine],
        "different": [
            f"{name!r} ({there[name]} there, {what} here)"
            for name, what in here.items()
            if name in there and there[name] != what
        ],
    }
    parts = [f"{sort} {_some(names)}" for sort, names in differences.items() if names]
    if not parts:
        return
    if any(_TILE.search(name) for name in here.keys() ^ there.keys()):
        remedy += (
            ", and split layers by dynoffload.tile() with the same max_bytes; or save a model that "
            "dynoffload.untile() has made whole"
        )
    raise CheckpointError(
        f"checkpoint {checkpoint.path} is not of this {of}: {'; '.join(parts)}. {remedy}; "
        "nothing was loaded"
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _match_model(checkpoint: Opened, model: nn.Module, extents: Extents) -> None:
    """Check that the checkpoint has exactly the tensors of ``model``, with equal dtype and shape.

    Raises:
        CheckpointError: naming the first differences.
    """
    live, tied = tensors_of(model)
    places, ties = checkpoint.tensors["model"], checkpoint.said.tied
    if lost := set(ties.values()) - places.keys():
        raise ValueError(f"tied tensor {min(lost)!r} is in no file")

    def described(
        kinds: Mapping[str, Any], tied: Mapping[str, str], modules: Iterable[str]
    ) -> dict[str, str]:
        least: dict[str, str] = {}  # of a tensor's names: which is registered first may differ
        for name, first in tied.items():
            least[first] = min(name, least.get(first, first))
        return {
            name: str(kinds[first]) if known == name else f"tied to {known!r}"
            for name in (*kinds, *tied)
            for first in [tied.get(name, name)]
            for known in [least.get(first, first)]
        } | dict.fromkeys(modules, "of get_extra_state()")

    held = {name: extents.held(tensor, tensor) for name, tensor in live.items()}
    _compare(
        checkpoint,
        type(model).__name__,
        described(
            {name: kind_of(name, one) for name, one in held.items()}, tied, stateful_modules(model)
        ),
        described(
            {name: place.kind for name, place in places.items()},
            ties,
            checkpoint.said.module_state,
        ),
        "Build the model, convert its dtypes and tie its tensors, as before it was saved",
    )
    expanded = [
        repr(name)
        for name, tensor in live.items()
        if tensor.numel() > 1 and not is_spread(tensor) and 0 in tensor.squeeze().stride()
    ]
    if expanded:  # by `Tensor.expand`; nor does load_state_dict fill it
        raise CheckpointError(
            f"elements share memory in {_some(expanded)} of this {type(model).__name__}, so "
            f"checkpoint {checkpoint.path} cannot be loaded into it: put a clone in the place of "
            "each, then load; nothing was loaded"
        )


def _match_optimizer(
    checkpoint: Opened, model: nn.Module, optimizer: Optimizer, extents: Extents
) -> tuple[list[dict[str, Any]], _State]:
    """Check that the checkpoint has the state of ``optimizer``.

    Returns:
        The hyperparameters of each group, and the state of each parameter that has state.

    Raises:
        CheckpointError: the type or a group differs, there is no optimizer state, or state of
            experts has a shape whose rows cannot be assigned to ranks.
        ValueError, KeyError, TypeError, AttributeError, RuntimeError: the state is malformed.
    """
    said, names = checkpoint.said.optimizer, names_of(model)
    if said is None:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} was saved without an optimizer: load it without one, "
            f"and begin with a new {type_of(optimizer)}; nothing was loaded"
        )

    def described(kind: str, groups: Sequence[Sequence[str]]) -> dict[str, str]:
        return {
            "the type": kind,
            "the groups": str(len(groups)),
            **{name: f"group {n}" for n, group in enumerate(groups) for name in group},
        }

    here = described(type_of(optimizer), groups_of(optimizer, names))
    _compare(
        checkpoint,
        type_of(optimizer),
        here,
        described(said["type"], [group["parameters"] for group in said["groups"]]),
        "Make the optimizer and its groups as before it was saved, or load without one",
    )
    if foreign := said["state"].keys() - here.keys():
        raise ValueError(f"state of {min(foreign)!r}, which is in no group")
    values = [checkpoint.decode("optimizer", group["values"]) for group in said["groups"]]
    groups = [{k: v for k, v in group.items() if k not in NO_VALUES} for group in values]
    state: _State = {
        name: {
            key: (checkpoint.stored if is_tensor(item) else checkpoint.decode)("optimizer", item)
            for key, item in entry.items()
        }
        for name, entry in said["state"].items()
    }
    for parameter, extent in extents.items():
        name = names[parameter]
        for key, item in state.get(name, {}).items():
            if isinstance(item, Stored) and item.shape != extent.shape and prod(item.shape) != 1:
                raise CheckpointError(
                    f"checkpoint {checkpoint.path} has optimizer state {f'{name}.{key}'!r} of "
                    f"shape {list(item.shape)}, where all experts have {list(extent.shape)}, and "
                    f"this rank has some of them: {UNPLACED}, or load without the optimizer; "
                    "nothing was loaded"
                )
    return groups, state


# Filling


def _fill_model(checkpoint: Opened, model: nn.Module, memory: Memory) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    drop_gradients(model)
    extents = extents_of(model)
    for name, tensor in tensors_of(model)[0].items():
        place = checkpoint.tensors["model"][checkpoint.said.tied.get(name, name)]
        checkpoint.read(place, extents.held(tensor, tensor), memory)


@torch.no_grad()
def _fill_optimizer(
    checkpoint: Opened,
    groups: Sequence[Mapping[str, Any]],
    state: _State,
    model: nn.Module,
    optimizer: Optimizer,
    memory: Memory,
) -> None:
    names, extents = names_of(model), extents_of(model)
    if isinstance(optimizer, HostOptimizer):
        optimizer.begin_load()
    for group, values in zip(optimizer.param_groups, groups, strict=True):
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
            entry = state.get(names[parameter])
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
