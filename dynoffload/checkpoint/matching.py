"""Checks that a checkpoint matches the current run: names, shapes, dtypes, groups and values.

Nothing here changes training state.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from dynoffload.checkpoint.contents import (
    NO_VALUES,
    groups_of,
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

_TILE = re.compile(r"\.tiles\.\d+\.")  # of a layer split by `dynoffload.tile`

_SHOWN = 3  # names per category in an error


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more


def _tile_remedy(names: Sequence[str]) -> str:
    """Return what to add to a remedy where names of tiles are missing or unexpected."""
    if not any(_TILE.search(name) for name in names):
        return ""
    return (
        ", and split layers by dynoffload.tile() with the same max_bytes; or save a model that "
        "dynoffload.untile() has made whole"
    )


def _fail(checkpoint: Opened, differences: Mapping[str, list[str]], of: str, remedy: str) -> None:
    parts = [f"{sort} {_some(names)}" for sort, names in differences.items() if names]
    if parts:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} is not of this {of}: {'; '.join(parts)}. {remedy}; "
            "nothing was loaded"
        )


def place_of(checkpoint: Opened, name: str) -> Place:
    """Return where the checkpoint stores the model's tensor ``name``."""
    return checkpoint.tensors["model"][checkpoint.said.tied.get(name, name)]


def match_model(checkpoint: Opened, model: nn.Module, extents: Extents) -> None:
    """Check that the checkpoint has exactly the tensors of ``model``, with equal dtype and shape.

    Raises:
        CheckpointError: naming the first differences.
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
        (name, kind_of(name, extents.held(tensor, tensor)), place_of(checkpoint, name).kind)
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
        + _tile_remedy([name for name in (*here, *there) if (name in known) != (name in wanted)]),
    )
    sides = {"there and two here": (their_ties, tied), "here and two there": (tied, their_ties)}
    _fail(
        checkpoint,
        {
            f"one tensor {where} are": [
                f"{name!r} and {first!r}"
                for name, first in one.items()
                if other.get(name, name) != other.get(first, first)
            ]
            for where, (one, other) in sides.items()
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


class OptimizerPlan(NamedTuple):
    """The values to load into an optimizer.

    Attributes:
        groups: hyperparameters of each group.
        state: of each parameter that has state; tensors are `Stored`, others are the value.
    """

    groups: list[dict[str, Any]]
    state: dict[str, dict[str, Any]]


def match_optimizer(
    checkpoint: Opened, model: nn.Module, optimizer: Optimizer, extents: Extents
) -> OptimizerPlan:
    """Check that the checkpoint has the state of ``optimizer``; return what to load.

    Raises:
        CheckpointError: the type or a group differs, there is no optimizer state, or state of
            experts has a shape whose rows cannot be assigned to ranks.
        ValueError, KeyError, TypeError, AttributeError, RuntimeError: the state is malformed.
    """
    said = checkpoint.said.optimizer
    path, kind, names = checkpoint.path, type_of(optimizer), names_of(model)
    here = groups_of(optimizer, names)
    there = [] if said is None else [group["parameters"] for group in said["groups"]]
    why = ""
    if said is None:
        why = f"was saved without an optimizer: load it without one, and begin with a new {kind}"
    elif said["type"] != kind:
        why = (
            f"has the state of an optimizer {said['type']}, and this is {kind}: make the optimizer "
            "of the run that saved it, or load without one"
        )
    elif len(here) != len(there):
        why = (
            f"has {len(there)} parameter groups, and this {kind} has {len(here)}: make them, as by "
            "add_param_group, before it is loaded"
        )
    if said is None or why:
        raise CheckpointError(f"checkpoint {path} {why}; nothing was loaded")
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
    if foreign := said["state"].keys() - {name for group in here for name in group}:
        raise ValueError(f"state of {min(foreign)!r}, which is in no group")
    values = [checkpoint.decode("optimizer", group["values"]) for group in said["groups"]]
    plan = OptimizerPlan(
        [{k: v for k, v in group.items() if k not in NO_VALUES} for group in values],
        {
            name: {
                key: (checkpoint.stored if is_tensor(item) else checkpoint.decode)(
                    "optimizer", item
                )
                for key, item in entry.items()
            }
            for name, entry in said["state"].items()
        },
    )
    for parameter, extent in extents.items():
        name = names[parameter]
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
    """Return the saved states of the objects passed as ``extra``.

    Raises:
        CheckpointError: one is not in the checkpoint, or is of another type.
        ValueError, KeyError, TypeError, AttributeError, RuntimeError: the state is malformed.
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
