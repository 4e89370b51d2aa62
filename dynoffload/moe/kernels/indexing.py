# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Index structures on a GPU: the kernels of `dynoffload.moe.indices.route`.

A tile of tokens by experts is a dense map in registers. Its column counts are scanned over tiles
and then over columns; a scan of the map along its tokens gives the place of each choice. There is
neither a sort nor an atomic.

Source: MoEBlaze (arXiv 2601.05296), section 3. The kernels have run in Triton's interpreter only,
not on a GPU.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

TILE = 32
"""Tokens of one dense map."""

_COLUMNS = 64
_SCANNED = 64


@triton.jit
def _dense(chosen, tokens, columns, length, experts, K: tl.constexpr):
    """Return the dense map of a tile; a choice of none has the column of its place."""
    dense = (tokens[:, None] < 0).to(tl.int32) + (columns[None, :] < 0).to(tl.int32)
    for j in tl.static_range(K):
        own = tl.load(chosen + tokens.to(tl.int64) * K + j, mask=tokens < length, other=-1)
        own = tl.where(own == experts, experts + j, own)
        dense += (own[:, None] == columns[None, :]).to(tl.int32)
    return dense


@triton.jit
def count_kernel(
    chosen,
    counts,
    wrong,
    length,
    experts,
    width,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Counts (tiles, E + k) of a choice (L, k), and what is wrong: 2 for a range, 1 for twice."""
    tile, block = tl.program_id(0), tl.program_id(1)
    tokens = tile * TOKENS + tl.arange(0, TOKENS)
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    dense = _dense(chosen, tokens, columns, length, experts, K)
    tl.store(counts + tile * width + columns, tl.sum(dense, 0), mask=columns < width)
    found = tl.where(tl.max(tl.max(dense, 1), 0) > 1, 1, 0)
    for j in tl.static_range(K):
        own = tl.load(chosen + tokens.to(tl.int64) * K + j, mask=tokens < length, other=0)
        beyond = ((own < 0) | (own > experts)).to(tl.int32)
        found = tl.maximum(found, 2 * tl.max(beyond, 0))
    tl.store(wrong + tile * tl.num_programs(1) + block, found)


@triton.jit
def scan_tiles_kernel(counts, bases, tiles, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Exclusive sums (tiles + 1, E + k) of counts along tiles; the last row has the totals."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    before = (columns < 0).to(tl.int32)
    for start in range(0, tiles, ROWS):
        rows = start + tl.arange(0, ROWS)
        where = rows[:, None] * width + columns[None, :]
        inside = (rows[:, None] < tiles) & (columns[None, :] < width)
        block = tl.load(counts + where, mask=inside, other=0)
        tl.store(bases + where, before[None, :] + tl.cumsum(block, 0) - block, mask=inside)
        before += tl.sum(block, 0)
    tl.store(bases + tiles * width + columns, before, mask=columns < width)


@triton.jit
def scan_columns_kernel(totals, offsets, width, COLUMNS: tl.constexpr):
    """Exclusive sums (E + k) of the totals, by one program."""
    columns = tl.arange(0, COLUMNS)
    total = tl.load(totals + columns, mask=columns < width, other=0)
    tl.store(offsets + columns, tl.cumsum(total, 0) - total, mask=columns < width)


@triton.jit
def place_kernel(
    chosen,
    bases,
    order,
    places,
    length,
    experts,
    width,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Places (L, k) of the choices, and the tokens (L·k) at them."""
    tile = tl.program_id(0)
    tokens = tile * TOKENS + tl.arange(0, TOKENS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    dense = _dense(chosen, tokens, columns, length, experts, K)
    base = tl.load(bases + tile * width + columns, mask=columns < width, other=0)
    place = tl.cumsum(dense, 0) - 1 + base[None, :]
    for j in tl.static_range(K):
        where = tokens.to(tl.int64) * K + j
        own = tl.load(chosen + where, mask=tokens < length, other=-1)
        own = tl.where(own == experts, experts + j, own)
        hit = own[:, None] == columns[None, :]
        mine = tl.sum(hit.to(tl.int32), 1) > 0
        found = tl.sum(tl.where(hit, place, 0), 1)
        tl.store(places + where, found.to(tl.int64), mask=mine)
        tl.store(order + found, tokens.to(tl.int64), mask=mine)


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Return what makes a device that to which kernels go."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def bounds_of(chosen: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where each tile's tokens begin within each expert's run, and what is wrong.

    Args:
        chosen: int64, (L, k), contiguous; L and k are not 0.
        experts: E.

    Returns:
        int32, (tiles + 1, E + k), where a row of one tile of `TILE` tokens is followed by that of
        the next, and the last k columns are choices of none; and int32, what is wrong: 2 where
        numbers are beyond the experts, 1 where a token names an expert twice, 0 otherwise.
    """
    length, k = chosen.shape
    width, tiles = experts + k, triton.cdiv(length, TILE)
    blocks = triton.cdiv(width, _COLUMNS)
    made = chosen.new_empty(0, dtype=torch.int32)
    counts, bases = made.new_empty(tiles, width), made.new_empty(tiles + 1, width)
    wrong, offsets = made.new_empty(tiles, blocks), made.new_empty(width)
    count_kernel[(tiles, blocks)](
        chosen, counts, wrong, length, experts, width, K=k, TOKENS=TILE, COLUMNS=_COLUMNS
    )
    scan_tiles_kernel[(blocks,)](counts, bases, tiles, width, ROWS=_SCANNED, COLUMNS=_COLUMNS)
    scan_columns_kernel[(1,)](bases[-1], offsets, width, COLUMNS=triton.next_power_of_2(width))
    bases += offsets
    return bases, wrong


def places_of(
    chosen: torch.Tensor, bounds: torch.Tensor, experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens in the order of experts, (L·k), and the place of each choice, (L, k).

    Args:
        chosen: int64, (L, k), contiguous and right.
        bounds: of `bounds_of`.
        experts: E.
    """
    length, k = chosen.shape
    width = experts + k
    order, places = chosen.new_empty(length * k), torch.empty_like(chosen)
    grid = (triton.cdiv(length, TILE), triton.cdiv(width, _COLUMNS))
    place_kernel[grid](
        chosen, bounds, order, places, length, experts, width, K=k, TOKENS=TILE, COLUMNS=_COLUMNS
    )
    return order, places
