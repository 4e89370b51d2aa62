"""Parameters and masters that do not agree: written by others, or by an update that was delayed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import torch

from dynoffload.optim.shelves import MASTER, Entry, flat
from dynoffload.optim.stores import Stores
from dynoffload.optim.work import mark_uploaded

_PIECE = 1 << 20  # elements that are compared at one time


def agree(entries: Iterable[Entry], stores: Stores) -> None:
    """Let masters take over what others have written into parameters: each element that is not what
    its master rounds to."""
    changed = [e for e in entries if e.parameter._version != e.version and not e.lags]
    if not changed:
        return
    stores.settle()
    for entry in changed:
        ours, theirs = entry.flat(MASTER), flat(entry.parameter)
        for begin in range(0, entry.numel, _PIECE):
            master = ours[begin : begin + _PIECE]
            here = theirs[begin : begin + _PIECE].to("cpu")
            bits = torch.int32 if here.dtype == torch.float32 else torch.int16
            same = master.to(here.dtype).view(bits) == here.view(bits)
            if not bool(same.all()):
                master.copy_(torch.where(same, master, here.float()))
        entry.version = entry.parameter._version
    stores.sync()


def catch_up(late: Sequence[Entry], stores: Stores) -> None:
    """Let parameters take over masters that they lag behind.

    Raises:
        SpillError: a file cannot be read.
    """
    stores.settle()
    wanted = set(late)
    tiles = [t for t in stores.tiles if any(piece.entry in wanted for piece in t.pieces)]
    with contextlib.closing(stores.staging.through(tiles, writes=False)) as leases:
        for lease in leases:
            views = lease.tile.views(lease.memory, packed=lease.packed)
            for (entry, begin, end), kept in zip(lease.tile.pieces, views, strict=True):
                if entry in wanted:
                    flat(entry.parameter)[begin:end].copy_(kept[MASTER])
    mark_uploaded(late)
