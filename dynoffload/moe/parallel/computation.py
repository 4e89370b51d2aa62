"""Forward and backward of one rank's experts on the rows of one part, without autograd.

Unlike `dynoffload.moe.computation`, it saves the first product, called the middle, in memory that
the caller provides. A middle recomputed in backward exists one tile at a time.

[Note: rows]  A row's bits must not depend on its part. BLAS uses different kernels, with other
orders of sums, for few rows than for many, and for the last rows of a matrix. So an expert's rows
are padded with zeros to a multiple of `ROWS`. Then, on the CPU, all rows of a product have the same
bits at any position (`tests/test_moe_parallel.py`). Gradients of matrices are sums over rows; with
other parts they differ by rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch

from dynoffload.moe.activations import Activation
from dynoffload.moe.parallel.dispatch import Part

ROWS = 8
"""An expert's rows are padded to a multiple of this; see [Note: rows]."""

TILE = 256
"""Number of an expert's rows gathered at a time, a multiple of `ROWS`."""


def _filled(count: int) -> int:
    return -(-count // ROWS) * ROWS


def middle_rows(part: Part) -> int:
    """Return the number of rows of a part's middle."""
    starts = part.routing.starts
    return sum(_filled(stop - start) for start, stop in itertools.pairwise(starts))


def _experts(part: Part) -> Iterator[tuple[int, slice, slice]]:
    """Yield each expert with tokens, the range of its pairs, and its rows of the middle."""
    at = 0
    for expert in part.routing.hit():
        own = part.routing.of(expert)
        count = _filled(own.stop - own.start)
        yield expert, own, slice(at, at + count)
        at += count


def _tiles(own: slice, middle: slice) -> Iterator[tuple[slice, slice]]:
    """Yield an expert's pairs and rows of the middle, `TILE` of them at a time."""
    for start in range(0, own.stop - own.start, TILE):
        pairs = slice(own.start + start, min(own.start + start + TILE, own.stop))
        first = middle.start + start
        yield pairs, slice(first, first + _filled(pairs.stop - pairs.start))


def _gathered(rows: torch.Tensor, index: torch.Tensor, count: int) -> torch.Tensor:
    """Return ``rows`` at ``index``, padded with zeros to ``count`` rows."""
    made = rows.new_empty(count, rows.shape[1])
    made[len(index) :].zero_()
    torch.index_select(rows, 0, index, out=made[: len(index)])
    return made


def _column(gates: torch.Tensor, count: int) -> torch.Tensor:
    made = gates.new_zeros(count, 1)
    made[: len(gates), 0] = gates
    return made


def forward(
    part: Part,
    given: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    middle: torch.Tensor | None,
    out: torch.Tensor,
    activation: Activation,
    made: Callable[[slice], None] | None = None,
) -> None:
    """Fill ``out``, (R, d), with the weighted sum of each row's experts, and fill the middle.

    Args:
        part: routing of the rows.
        given: (R, d).
        up: (E/world, p·h, d).
        down: (E/world, d, h).
        middle: filled, (`middle_rows`, p·h); None if it is not needed.
        out: overwritten.
        activation: between the products.
        made: called with the rows of the middle of each expert as soon as they are final.
    """
    out.zero_()
    for expert, own, rows in _experts(part):
        w_up, w_down = up[expert].t(), down[expert].t()
        for pairs, tile in _tiles(own, rows):
            index = part.routing.expert_token_indices[pairs]
            count = tile.stop - tile.start
            first = given.new_empty(count, w_up.shape[1]) if middle is None else middle[tile]
            torch.mm(_gathered(given, index, count), w_up, out=first)
            between = given.new_empty(count, w_down.shape[0])
            activation.forward(first, between)
            del first
            last = torch.mm(between, w_down)
            last *= _column(part.gates[pairs], count)
            out.index_add_(0, index, last[: len(index)])
        if made is not None:
            made(rows)


def backward(
    part: Part,
    given: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    middle: torch.Tensor | None,
    d_out: torch.Tensor,
    activation: Activation,
    d_given: torch.Tensor | None,
    d_gates: torch.Tensor | None,
    d_up: torch.Tensor | None,
    d_down: torch.Tensor | None,
) -> None:
    """Compute the gradients of a part; those passed as None are skipped.

    Args:
        part: routing of the rows.
        given: (R, d).
        up: (E/world, p·h, d).
        down: (E/world, d, h).
        middle: as filled by forward; None to recompute it.
        d_out: gradient of the result, (R, d).
        activation: between the products.
        d_given: (R, d), overwritten.
        d_gates: by pair, (R·k), overwritten.
        d_up: of ``up``, added to.
        d_down: of ``down``, added to.
    """
    if d_given is not None:
        d_given.zero_()
    if d_gates is not None:
        d_gates.zero_()
    for expert, own, rows in _experts(part):
        for pairs, tile in _tiles(own, rows):
            index = part.routing.expert_token_indices[pairs]
            count = tile.stop - tile.start
            gates = _column(part.gates[pairs], count)
            rows_in = _gathered(given, index, count)
            first = torch.mm(rows_in, up[expert].t()) if middle is None else middle[tile]
            between, made = activation.again(first)
            d_last = _gathered(d_out, index, count)
            back = torch.mm(d_last, down[expert])
            if d_gates is not None:
                d_gates[pairs] = (back * between).sum(1)[: len(index)]
            d_last *= gates
            back *= gates
            if d_down is not None:
                d_down[expert].addmm_(d_last.t(), between)
            del between, d_last
            d_first = activation.backward(first, back, made)
            del back, first, made
            if d_up is not None:
                d_up[expert].addmm_(d_first.t(), rows_in)
            if d_given is not None:
                d_given.index_add_(0, index, torch.mm(d_first, up[expert])[: len(index)])
