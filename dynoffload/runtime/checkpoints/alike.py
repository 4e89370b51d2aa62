"""Whether what several processes have is alike, where nobody but the user's loop keeps it so.

Beside experts that are spread over ranks, router, shared expert and all other layers are on each
rank, and so are rows of experts that two groups hold. They stay alike if the loop sums their
gradients. A checkpoint has them once, so it would lose what differs: before anything is written,
checksums are compared. What it is not: a check of shapes and names, which saving makes before.

Buffers are the first rank's, as in every checkpoint of several ranks; where they differ a warning
says so.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from dynoffload.errors import CheckpointError
from dynoffload.memory.local import local
from dynoffload.memory.pieces import Buffer
from dynoffload.runtime.checkpoints.extents import Held
from dynoffload.runtime.checkpoints.peers import Peers
from dynoffload.runtime.checkpoints.shards import bytes_of
from dynoffload.runtime.checkpoints.tensors import Memory

logger = logging.getLogger(__name__)

_KEPT = "nothing was written, and what was saved there before is as it was"
_ALL = -1  # in the place of a first row


class _Difference(NamedTuple):
    """What is not the same on two ranks: its name, its first row or `_ALL`, and the ranks."""

    name: str
    begin: int
    one: int
    other: int


def check_alike(
    peers: Peers,
    target: Path,
    model: Mapping[str, Held],
    state: Mapping[str, Held],
    optimizer: Mapping[str, Any] | None,
    memory: Memory,
) -> None:
    """Compare what several of ``peers`` have; all call it.

    Args:
        peers: who save together.
        target: where to.
        model: its parameters and buffers, by name.
        state: tensors of the optimizer, by name.
        optimizer: what the checkpoint says of it beside its tensors.
        memory: where the tensors live.

    Raises:
        CheckpointError: something differs; all raise it.
    """

    def sums() -> dict[str, Any]:
        trained = {n: one for n, one in model.items() if isinstance(one.tensor, nn.Parameter)}
        numbers = json.dumps(optimizer, sort_keys=True).encode()
        return {
            "parameters": _checksums(trained, memory),
            "state": _checksums(state, memory),
            "numbers": zlib.crc32(numbers),
            "buffers": _checksums({n: model[n] for n in model if n not in trained}, memory),
        }

    everyone = peers.share(sums)
    for kind, what in (("parameters", "parameter"), ("state", "optimizer state")):
        for found in _differences([one[kind] for one in everyone]):
            raise CheckpointError(_told(found, what, len(everyone)))
    for rank, one in enumerate(everyone):
        if one["numbers"] != everyone[0]["numbers"]:
            raise CheckpointError(
                "hyperparameters of the optimizer, or numbers in its state, differ between ranks 0 "
                f"and {rank} of {len(everyone)}, and a checkpoint has them once for all: give all "
                f"ranks the same, as by a scheduler on each; {_KEPT}"
            )
    if peers.first:
        for found in _differences([one["buffers"] for one in everyone]):
            logger.warning(
                "buffer %r differs between ranks %d and %d: checkpoint %s has the first rank's",
                found.name,
                found.one,
                found.other,
                target,
            )


def _checksums(tensors: Mapping[str, Held], memory: Memory) -> dict[str, list[int]]:
    """Return first row and checksum of each tensor that others have, too."""
    buffer, found = Buffer(), {}
    for name, held in tensors.items():
        if held.extent is None or held.extent.several:
            checksum = 0
            for data in bytes_of(local(held.tensor.detach()), memory, buffer):
                checksum = zlib.crc32(data, checksum)
            found[name] = [_ALL if held.extent is None else held.extent.begin, checksum]
    return found


def _differences(everyone: Sequence[Mapping[str, Sequence[int]]]) -> Iterator[_Difference]:
    """Yield what differs, each once, in the order of the names."""
    names = dict.fromkeys(name for one in everyone for name in one)
    for name in names:
        first: dict[int, tuple[int, int]] = {}  # first row -> checksum, and whose
        for rank, one in enumerate(everyone):
            if name not in one:
                continue
            begin, checksum = one[name]
            known, before = first.setdefault(begin, (checksum, rank))
            if known != checksum:
                yield _Difference(name, begin, before, rank)
                break


def _told(found: _Difference, what: str, world: int) -> str:
    """Return the error for a difference."""
    between = f"between ranks {found.one} and {found.other} of {world}"
    what = f"{what} {found.name!r}"
    all_else, over = "replicated_parameters(), and of all else that is replicated,", "the ranks"
    if found.begin != _ALL:
        what = f"{what}, of experts {found.begin} and on, which both hold,"
        all_else, over = "experts", "the ranks that hold the same"
    return (
        f"{what} differs {between}, and a checkpoint has it once for all: begin alike, and sum the "
        f"gradients of {all_else} over {over} before each step, and clip by a norm that is the "
        "same on all, as of dynoffload.moe.parallel.clip_grad_norm_; or write what is meant to be "
        f"each rank's own to files of its own; {_KEPT}"
    )
