"""Plans the expert-parallel all-to-all: which token rows go to which rank, in which part.

`dispatch` builds the plan with two exchanges: row counts, then each row's expert ids and gates.

A token with several experts on one rank is sent once; their weighted outputs are summed before they
return. The batch is cut into a fixed number of parts, so ranks with different batch sizes make the
same exchanges. Parts and per-rank shares may be empty.
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
        index: token index of each row sent, grouped by destination rank; (S,), into the batch.
        gives: number of rows sent to each rank.
        takes: number of rows received from each rank.
        routing: of received rows to this rank's experts.
        gates: of each (received row, expert) pair, in routing order, (R·k).
        places: position of each received row among the received rows of all parts, (R,).
    """

    index: torch.Tensor
    gives: tuple[int, ...]
    takes: tuple[int, ...]
    routing: Routing
    gates: torch.Tensor
    places: torch.Tensor

    @property
    def sent(self) -> int:
        """Number of rows sent."""
        return sum(self.gives)

    @property
    def taken(self) -> int:
        """Number of rows received."""
        return sum(self.takes)


@dataclass(frozen=True, eq=False)
class Dispatch:
    """All parts of a batch.

    Attributes:
        parts: in order.
        index: token index of each row sent in all parts, grouped by destination rank.
        gives: number of rows sent to each rank, in all parts.
        takes: number of rows received from each rank, in all parts.
        mine: for each row in ``index``, which of the token's k experts are on its destination.
        need_tokens: whether any rank needs the gradient of its tokens.
        need_gates: whether any rank needs the gradient of its gates.
    """

    parts: tuple[Part, ...]
    index: torch.Tensor
    gives: tuple[int, ...]
    takes: tuple[int, ...]
    mine: torch.Tensor
    need_tokens: bool
    need_gates: bool


def bounds(length: int, parts: int) -> list[tuple[int, int]]:
    """Return the (start, stop) bounds of each of ``parts`` parts of ``length`` tokens."""
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
    """Return the dispatch plan; collective, so all ranks must call it.

    Args:
        exchange: of the layer.
        chosen: global expert indices of this rank's tokens, (L, k).
        gates: (L, k), as they are sent.
        held: number of experts per rank.
        parts: number of parts of the batch.
        need_tokens: this rank needs the gradient of its tokens.
        need_gates: this rank needs the gradient of its gates.
    """
    length, k = chosen.shape
    owner = chosen // held
    needed = torch.zeros(length, exchange.world, dtype=torch.bool, device=chosen.device)
    needed.scatter_(1, owner, True)
    edges = bounds(length, parts)
    counts = torch.stack([needed[start:stop].sum(0) for start, stop in edges], 1)  # (world, parts)
    gives: list[list[int]] = counts.tolist()
    flags = [int(need_tokens), int(need_gates)]
    counted = exchange.numbers([[*row, *flags] for row in gives], chosen.device, "counts of rows")
    takes = [row[:parts] for row in counted]
    to, index = needed.t().nonzero().unbind(1)
    mine = owner[index] == to.unsqueeze(1)
    local = torch.where(mine, chosen[index] - to.unsqueeze(1) * held, held).to(torch.int32)
    payload = torch.cat((_bytes(local), _bytes(gates[index].masked_fill(~mine, 0))), 1)
    all_gives = tuple(sum(row) for row in gives)
    all_takes = tuple(sum(row) for row in takes)
    received = payload.new_empty(sum(all_takes), payload.shape[1])
    exchange.start(received, payload, all_takes, all_gives, "choices of rows").wait()
    width = k * local.element_size()
    kept = torch.contiguous_format
    experts = received[:, :width].clone(memory_format=kept).view(torch.int32)
    weights = received[:, width:].clone(memory_format=kept).view(gates.dtype)
    # Grouped by rank, and by part within each rank.
    send_splits = torch.split(index, [count for row in gives for count in row])
    positions = torch.arange(len(received), device=chosen.device)
    receive_splits = torch.split(positions, [count for row in takes for count in row])
    made = []
    for number in range(parts):
        places = torch.cat(receive_splits[number::parts])
        routing = route(experts[places], held)
        own = torch.empty_like(weights[places].reshape(-1)).index_copy_(
            0, routing.token_index_map.reshape(-1), weights[places].reshape(-1)
        )
        made.append(
            Part(
                torch.cat(send_splits[number::parts]),
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
        any(row[parts] for row in counted),
        any(row[parts + 1] for row in counted),
    )


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    """View each row as bytes."""
    width = rows.shape[1] * rows.element_size()
    return rows.reshape(-1).view(torch.uint8).view(len(rows), width)
