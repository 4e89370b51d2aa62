"""Which rows go to which rank in which part of the batch.

`Dispatch` is made of a router's choice by two exchanges: of counts, and of each row's experts and
gates.

A token that has several experts on one rank goes there once, and comes back as the sum of them. The
batch is cut into parts by their number, not by their size, so ranks with batches of different sizes
make the same exchanges; parts and shares may be empty.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from dynoffload.moe.indices import Routing, route
from dynoffload.moe.parallel.exchange import Exchange


@dataclass(frozen=True, eq=False)
class Part:
    """One part of the batch, as one rank sees it.

    Attributes:
        index: the token of each row that is sent, rank by rank; (S,), into the whole batch.
        gives: rows to each rank.
        takes: rows from each rank.
        routing: what each row that is taken is for, by this rank's experts.
        gates: of each pair of such a row and an expert, in the order of the routing, (R·k).
        places: of each row that is taken among all of all parts, (R,).
    """

    index: torch.Tensor
    gives: tuple[int, ...]
    takes: tuple[int, ...]
    routing: Routing
    gates: torch.Tensor
    places: torch.Tensor

    @property
    def sent(self) -> int:
        """Rows that leave."""
        return sum(self.gives)

    @property
    def taken(self) -> int:
        """Rows that arrive."""
        return sum(self.takes)


@dataclass(frozen=True, eq=False)
class Dispatch:
    """All parts of a batch.

    Attributes:
        parts: in order.
        index: the token of each row that is sent in all parts, rank by rank.
        gives: rows to each rank, in all parts.
        takes: rows from each rank, in all parts.
        mine: of each row in ``index``, which of the token's k choices are for its rank.
        need_tokens: some rank needs the gradient of its tokens.
        need_gates: some rank needs the gradient of its gates.
    """

    parts: tuple[Part, ...]
    index: torch.Tensor
    gives: tuple[int, ...]
    takes: tuple[int, ...]
    mine: torch.Tensor
    need_tokens: bool
    need_gates: bool


def bounds(length: int, parts: int) -> list[tuple[int, int]]:
    """Return where each of ``parts`` parts of ``length`` tokens begins and ends."""
    edges = [length * number // parts for number in range(parts + 1)]
    return list(itertools.pairwise(edges))


def dispatch(
    exchange: Exchange,
    chosen: torch.Tensor,
    gates: torch.Tensor,
    held: int,
    parts: int,
    *,
    need_tokens: bool,
    need_gates: bool,
) -> Dispatch:
    """Return what goes where; all ranks call this together.

    Args:
        exchange: of the layer.
        chosen: experts of this rank's tokens, (L, k), of all ranks' experts.
        gates: (L, k), as they are sent.
        held: experts of each rank.
        parts: of the batch.
        need_tokens: this rank needs the gradient of its tokens.
        need_gates: this rank needs the gradient of its gates.
    """
    length, k = chosen.shape
    owner = chosen // held
    wanted = torch.zeros(length, exchange.world, dtype=torch.bool, device=chosen.device)
    wanted.scatter_(1, owner, True)
    edges = bounds(length, parts)
    counts = torch.stack([wanted[start:stop].sum(0) for start, stop in edges], 1)  # (world, parts)
    gives: list[list[int]] = counts.tolist()
    flags = [int(need_tokens), int(need_gates)]
    said = exchange.numbers([[*row, *flags] for row in gives], chosen.device, "counts of rows")
    takes = [row[:parts] for row in said]
    to, index = wanted.t().nonzero().unbind(1)
    mine = owner[index] == to.unsqueeze(1)
    local = torch.where(mine, chosen[index] - to.unsqueeze(1) * held, held).to(torch.int32)
    described = torch.cat((_bytes(local), _bytes(gates[index].masked_fill(~mine, 0))), 1)
    all_gives = tuple(sum(row) for row in gives)
    all_takes = tuple(sum(row) for row in takes)
    arrived = described.new_empty(sum(all_takes), described.shape[1])
    exchange.start(arrived, described, all_takes, all_gives, "choices of rows").wait()
    width = k * local.element_size()
    kept = torch.contiguous_format
    experts = arrived[:, :width].clone(memory_format=kept).view(torch.int32)
    weights = arrived[:, width:].clone(memory_format=kept).view(gates.dtype)
    # Rank by rank, part by part.
    leaving = torch.split(index, [count for row in gives for count in row])
    everything = torch.arange(len(arrived), device=chosen.device)
    coming = torch.split(everything, [count for row in takes for count in row])
    made = []
    for number in range(parts):
        places = torch.cat(coming[number::parts])
        routing = route(experts[places], held)
        own = torch.empty_like(weights[places].reshape(-1)).index_copy_(
            0, routing.token_index_map.reshape(-1), weights[places].reshape(-1)
        )
        made.append(
            Part(
                torch.cat(leaving[number::parts]),
                tuple(row[number] for row in gives),
                tuple(row[number] for row in takes),
                routing,
                own,
                places,
            )
        )
    return Dispatch(
        tuple(made),
        index,
        all_gives,
        all_takes,
        mine,
        any(row[parts] for row in said),
        any(row[parts + 1] for row in said),
    )


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    """Return each row as bytes."""
    width = rows.shape[1] * rows.element_size()
    return rows.reshape(-1).view(torch.uint8).view(len(rows), width)
