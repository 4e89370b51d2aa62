"""Whether what several ranks hold is equal, where only the user's loop keeps it so.

Beside experts that are spread over ranks, and beside a `DistributedDataParallel` within the model,
all other layers are on each rank. They stay equal if the loop sums their gradients. A checkpoint
has them once, so checksums are compared before anything is written. Buffers are the first rank's,
as in every checkpoint of several ranks; where they differ a warning says so.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from dynoffload.checkpoint.extents import Held
from dynoffload.checkpoint.files import bytes_of
from dynoffload.checkpoint.peers import Peers
from dynoffload.checkpoint.tensors import Memory
from dynoffload.errors import CheckpointError
from dynoffload.memory.local import local
from dynoffload.memory.pieces import Buffer

logger = logging.getLogger(__name__)

_NUMBERS = "hyperparameters of the optimizer, or numbers in its state,"


class _Part(NamedTuple):
    """What has one checksum on all ranks that have it: its sort, its name, its first row."""

    sort: str
    name: str = ""
    begin: int | None = None


def check_replicated(
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

    def checksums() -> dict[_Part, int]:
        buffer = Buffer()
        found = {}
        for part, held in _shared(model, state):
            checksum = 0
            for data in bytes_of(local(held.tensor.detach()), memory, buffer):
                checksum = zlib.crc32(data, checksum)
            found[part] = checksum
        found[_Part(_NUMBERS)] = zlib.crc32(json.dumps(optimizer, sort_keys=True).encode())
        return found

    first: dict[_Part, tuple[int, int]] = {}  # checksum, and whose
    for rank, found in enumerate(peers.share(checksums)):
        for part, checksum in found.items():
            known, before = first.setdefault(part, (checksum, rank))
            if known == checksum:
                continue
            if part.sort != "buffer":
                raise _difference(part, f"between ranks {before} and {rank} of {peers.world}")
            if peers.first:
                logger.warning(
                    "buffer %r differs between ranks %d and %d: checkpoint %s has the first rank's",
                    part.name,
                    before,
                    rank,
                    target,
                )


def _shared(model: Mapping[str, Held], state: Mapping[str, Held]) -> Iterator[tuple[_Part, Held]]:
    """Yield the tensors of which other ranks have the same, buffers last."""
    trained = {n: one for n, one in model.items() if isinstance(one.tensor, nn.Parameter)}
    buffers = {n: one for n, one in model.items() if n not in trained}
    for sort, some in (
        ("parameter", trained),
        ("optimizer state", state),
        ("buffer", buffers),
    ):
        for name, held in some.items():
            extent = held.extent
            if extent is None or extent.several:
                yield _Part(sort, name, None if extent is None else extent.begin), held


def _difference(part: _Part, between: str) -> CheckpointError:
    kept = "nothing was written, and what was saved there before is as it was"
    if part.sort == _NUMBERS:
        return CheckpointError(
            f"{_NUMBERS} differ {between}, and a checkpoint has them once for all: give all ranks "
            f"the same, as by a scheduler on each; {kept}"
        )
    what, over = f"{part.sort} {part.name!r}", "the ranks"
    all_else = "replicated_parameters(), and of all else that is replicated,"
    if part.begin is not None:
        what = f"{what}, of experts {part.begin} and on, which both hold,"
        all_else, over = "experts", "the ranks that hold the same"
    return CheckpointError(
        f"{what} differs {between}, and a checkpoint has it once for all: begin alike, and sum the "
        f"gradients of {all_else} over {over} before each step, and clip by a norm that is the "
        "same on all, as of dynoffload.moe.parallel.clip_grad_norm_; or write what is meant to be "
        f"each rank's own to files of its own; {kept}"
    )
