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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from dynoffload.checkpoint.extents import Held
from dynoffload.checkpoint.files import bytes_of
from dynoffload.checkpoint.peers import Peers
from dynoffload.checkpoint.tensors import Memory
from dynoffload.errors import CheckpointError
from dynoffload.memory.local import local
from dynoffload.memory.pieces import Buffer

logger = logging.getLogger(__name__)


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

    def checksums() -> dict[str, int]:
        buffer = Buffer()
        found = {}
        for sort, some in (("", model), ("optimizer state", state)):
            for name, held in some.items():
                if held.extent is not None and not held.extent.several:
                    continue
                own = "parameter" if isinstance(held.tensor, nn.Parameter) else "buffer"
                what = f"{sort or own} {name!r}"
                if held.extent is not None:
                    what += f", of experts {held.extent.begin} and on, which both hold,"
                checksum = 0
                for data in bytes_of(local(held.tensor.detach()), memory, buffer):
                    checksum = zlib.crc32(data, checksum)
                found[what] = checksum
        numbers = json.dumps(optimizer, sort_keys=True).encode()
        return {**found, "what the optimizer has beside tensors": zlib.crc32(numbers)}

    first: dict[str, tuple[int, int]] = {}  # checksum, and whose
    differing = []
    for rank, found in enumerate(peers.share(checksums)):
        for what, checksum in found.items():
            known, before = first.setdefault(what, (checksum, rank))
            if known != checksum:
                differing.append((what, f"differs between ranks {before} and {rank}"))
    for what, differs in differing:
        if not what.startswith("buffer "):
            raise CheckpointError(
                f"{what} {differs} of {peers.world}, and a checkpoint has it once for all: begin "
                "alike; sum the gradients of replicated_parameters(), and of all else that several "
                "ranks hold, over those ranks before each step; clip by a norm that is the same on "
                "all, as of dynoffload.moe.parallel.clip_grad_norm_; step a scheduler on each; "
                "nothing was written, and what was saved there before is as it was"
            )
        if peers.first:
            logger.warning("%s %s: checkpoint %s has the first rank's", what, differs, target)
