"""Whether a checkpoint is of the run that asks for it: names, shapes, dtypes, groups, values.

Nothing here touches training state.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dynoffload.checkpoint.contents import (
    groups_of,
    hyperparameters,
    names_of,
    stateful_modules,
    tensors_of,
    type_of,
)
from dynoffload.checkpoint.extents import UNPLACED, Extents
from dynoffload.checkpoint.files import Place, kind_of
from dynoffload.checkpoint.reading import Opened, Stored
from dynoffload.checkpoint.values import is_tensor
from dynoffload.errors import CheckpointError
from dynoffload.memory.local import is_spread

_TILE = re.compile(r"\.tiles\.\d+\.")  # of a layer that `dynoffload.tile` has split

_SHOWN = 3  # names of each sort that an error tells


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more


def _of_tiles(names: Sequence[str]) -> str:
    """Return what to add to a remedy where names of tiles are missing or too many."""
    if not any(_TILE.search(name) for name in names):
        return ""
    return (
        ", and split layers by dynoffload.tile() with the same max_bytes; or save a model that "
        "dynoffload.untile() has made whole"
    )


def _fail(checkpoint: Opened, differences: Mapping[str, list[str]], of: str, remedy: str) -> None:
    told = [f"{sort} {_some(names)}" for sort, names in differences.items() if names]
    if told:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} is not of this {of}: {'; '.join(told)}. {remedy}; "
            "nothing was loaded"
        )


def place_of(checkpoint: Opened, name: str) -> Place:
    """Return where the checkpoint has the model's tensor ``name``."""
    return checkpoint.tensors["model"][checkpoint.said.tied.get(name, name)]


def match_model(checkpoint: Opened, model: nn.Module, extents: Extents) -> None:
    """Check that every tensor of ``model`` is there, as it is here, and no other.

    Raises:
        CheckpointError: naming the first that differ.
    """
    live, tied = tensors_of(model)
    places, their_ties = checkpoint.tensors["model"], checkpoint.said.tied
    for first in their_ties.values():
        if first not in places:
            raise ValueError(f"tied tensor {first!r} is in no file")
    here = [*live, *tied, *stateful_modules(model)]
    there = [*places, *their_ties, *checkpoint.said.module_state]
    known, wanted = set(there), set(here)
    kinds = [
        (name, kind_of(name, extents.held(tensor)), place_of(checkpoint, name).kind)
        for name, tensor in live.items()
        if name in known
    ]
    _fail(
        checkpoint,
        {
            "missing": [repr(name) for name in here if name not in known],
            "unexpected": [repr(name) for name in there if name not in wanted],
            "different": [f"{n!r} ({b} there, {a} here)" for n, a, b in kinds if a != b],
        },
        type(model).__name__,
        "Build the model, and convert its dtypes, as before it was saved"
        + _of_tiles([name for name in (*here, *there) if (name in known) != (name in wanted)]),
    )
    _fail(
        checkpoint,
        {
            "one tensor there and two here are": [
                f"{name!r} and {first!r}"
                for name, first in their_ties.items()
                if tied.get(name, name) != tied.get(first, first)
            ],
            "one tensor here and two there are": [
                f"{name!r} and {first!r}"
                for name, first in tied.items()
                if their_ties.get(name, name) != their_ties.get(first, first)
            ],
        },
        type(model).__name__,
        "Tie and clone tensors as before it was saved",
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


@dataclass(frozen=True)
class OptimizerPlan:
    """What an optimizer is to be given.

    Attributes:
        groups: of each group its hyperparameters.
        state: of each parameter that has some; tensors are `Stored`, all else is the value.
    """

    groups: list[dict[str, Any]]
    state: dict[str, dict[str, Any]]


def match_optimizer(
    checkpoint: Opened, model: nn.Module, optimizer: Optimizer, extents: Extents
) -> OptimizerPlan:
    """Check that the state of ``optimizer`` is there.

    Raises:
        CheckpointError: the type or a group differs, there is no state at all, or state of experts
            of which nobody knows which is of those here.
        ValueError, KeyError, TypeError, AttributeError, RuntimeError: what is there is malformed.
    """
    said = checkpoint.said.optimizer
    path, kind = checkpoint.path, type_of(optimizer)
    if said is None:
        raise CheckpointError(
            f"checkpoint {path} was saved without an optimizer: load it without one, and begin "
            f"with a new {kind}; nothing was loaded"
        )
    if said["type"] != kind:
        raise CheckpointError(
            f"checkpoint {path} has the state of an optimizer {said['type']}, and this is "
            f"{kind}: make the optimizer of the run that saved it, or load without one; nothing "
            "was loaded"
        )
    here, there = groups_of(optimizer, names_of(model)), [g["parameters"] for g in said["groups"]]
    if len(here) != len(there):
        raise CheckpointError(
            f"checkpoint {path} has {len(there)} parameter groups, and this {kind} has "
            f"{len(here)}: make them, as by add_param_group, before it is loaded; nothing was "
            "loaded"
        )
    for number, (ours, theirs) in enumerate(zip(here, there, strict=True)):
        _fail(
            checkpoint,
            {
                "missing": [repr(name) for name in ours if name not in set(theirs)],
                "unexpected": [repr(name) for name in theirs if name not in set(ours)],
            },
            f"{kind} (group {number})",
            "Make the optimizer's groups as before it was saved",
        )
    known = {name for group in here for name in group}
    if foreign := said["state"].keys() - known:
        raise ValueError(f"state of {min(foreign)!r}, which is in no group")
    plan = OptimizerPlan(
        [
            hyperparameters(checkpoint.decode("optimizer", group["values"]))
            for group in said["groups"]
        ],
        {
            name: {
                key: checkpoint.stored("optimizer", item)
                if is_tensor(item)
                else checkpoint.decode("optimizer", item)
                for key, item in entry.items()
            }
            for name, entry in said["state"].items()
        },
    )
    for parameter, name in names_of(model).items():
        extent = None if is_spread(parameter) else extents.of(parameter)
        if extent is None:
            continue
        for key, item in plan.state.get(name, {}).items():
            if isinstance(item, Stored) and item.shape != extent.shape and prod(item.shape) != 1:
                raise CheckpointError(
                    f"checkpoint {path} has optimizer state {f'{name}.{key}'!r} of shape "
                    f"{list(item.shape)}, where all experts have {list(extent.shape)}, and this "
                    f"rank has some of them: {UNPLACED}, or load without the optimizer; nothing "
                    "was loaded"
                )
    return plan


def match_extra(checkpoint: Opened, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of what was given as ``extra``.

    Raises:
        CheckpointError: one is not there, or is of another type.
        ValueError, KeyError, TypeError, AttributeError, RuntimeError: what is there is malformed.
    """
    found = {}
    for name, thing in extra.items():
        kind, said = type(thing).__name__, checkpoint.said.extra.get(name)
        if said is None:
            raise CheckpointError(
                f"checkpoint {checkpoint.path} has no {name!r} among what was saved as extra "
                f"({_some(map(repr, checkpoint.said.extra)) or 'nothing'}): leave it out of extra, "
                "or name it as it was saved; nothing was loaded"
            )
        if said["type"] != kind:
            raise CheckpointError(
                f"checkpoint {checkpoint.path} has the state of a {said['type']} as {name!r}, and "
                f"this is a {kind}: pass what was saved; nothing was loaded"
            )
        found[name] = checkpoint.decode("extra", said["state"])
    return found


def is_tensor_like(one: Any, other: Any) -> bool:
    """Return whether ``other`` can be copied into ``one`` without a change of kind."""
    return (
        isinstance(one, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and (one.dtype, one.shape) == (other.dtype, other.shape)
    )
