"""One step's updates, as they were asked for, wherever they are computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynoffload.optim.departures import Arrived
from dynoffload.optim.reading import Reading
from dynoffload.optim.rules import Group
from dynoffload.optim.shelves import Entry, flat
from dynoffload.optim.tiles import Tile


@dataclass(frozen=True)
class Work:
    """The updates of one step.

    Attributes:
        groups: hyperparameters of each parameter that is updated, as they were at ``step()``.
        tiles: those that hold any of these, in the order of parameters.
        arrived: their gradients on the host; none where they are on the accelerator.
        reading: what is made of gradients.
    """

    groups: Mapping[Entry, Group]
    tiles: Sequence[Tile]
    arrived: Mapping[Entry, Arrived]
    reading: Reading


def work_of(
    groups: Mapping[Entry, Group],
    tiles: Sequence[Tile],
    arrived: Mapping[Entry, Arrived],
    reading: Reading,
) -> Work:
    """Return the updates of the parameters in ``groups``, which ``tiles`` hold with others."""
    wanted = [tile for tile in tiles if any(piece.entry in groups for piece in tile.pieces)]
    return Work(groups, wanted, arrived, reading)


def count(work: Work) -> None:
    """Every update was made."""
    for entry in work.groups:
        entry.step += 1


def upload(tile: Tile, arrived: Mapping[Entry, Arrived]) -> None:
    """Give parameters what the host has made of them, on the compute queue.

    An operator of the calling thread does that: it comes after all that reads the old values and
    before all that reads the new ones by itself, and brings a region that is absent. In ``step()``
    the compute queue has nothing else to do, so nothing is lost by it.
    """
    for entry, begin, end in tile.pieces:
        here = arrived.get(entry)
        if here is not None:
            target: Any = flat(entry.parameter)[begin:end]
            target.copy_(here.memory[begin:end], non_blocking=True)


def mark_uploaded(entries: Sequence[Entry]) -> None:
    """Parameters agree with their masters again."""
    for entry in entries:
        entry.version = entry.parameter._version
        entry.lags.fill_(False)
