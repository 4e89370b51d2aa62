"""Which token goes to which expert: four index structures, made without a sort.

They are the fields of `Routing`, made of a router's choice.

Source: MoEBlaze (arXiv 2601.05296), section 3. Tokens are taken in tiles. A tile's choices are a
dense map of tokens by experts; the sums of its columns are scanned over tiles and then over
experts, which gives each tile a place within each expert's run; within a tile the map itself is
scanned along its tokens. So every choice finds its place alone, and tokens of an expert stay in
order.
"""

from __future__ import annotations

import torch

from dynoffload.errors import ConfigError
from dynoffload.moe import kernels as gpu
from dynoffload.moe.routing import Routing

_TILE = 512
_TWICE = "a router's choice names an expert twice for one token"


def _check(chosen: torch.Tensor, experts: int) -> None:
    """Refuse a choice with numbers beyond the experts."""
    low, high = (int(one) for one in chosen.aminmax())
    if low < 0 or high > experts:
        raise ConfigError(
            f"a router's choice names expert {low if low < 0 else high}, and there are {experts}"
        )


def route(chosen: torch.Tensor, experts: int, *, kernels: bool | None = None) -> Routing:
    """Return the index structures of a router's choice.

    Args:
        chosen: integers, (L, k), each from 0 to ``experts``; a token names no expert twice. The
            number ``experts`` itself stands for none, as for experts of other processes.
        experts: how many there are.
        kernels: made by Triton's kernels; by default where the choice is on a GPU.

    Raises:
        ConfigError: the choice has another shape or dtype, or numbers beyond the experts;
            or kernels that were asked for cannot run where it is.
    """
    if chosen.dim() != 2 or chosen.is_floating_point() or chosen.is_complex():
        raise ConfigError(
            f"a router's choice is integers of shape (tokens, k), not {chosen.dtype} of "
            f"{tuple(chosen.shape)}"
        )
    chosen = chosen.long()
    length, k = chosen.shape
    if not length or not k:
        empty = chosen.new_zeros(0)
        zeros = (0,) * (experts + 1)
        return Routing(empty, chosen.new_zeros(experts + 1), chosen, chosen.clone(), zeros)
    if gpu.suits(chosen) if kernels is None else kernels:
        if why := gpu.missing(chosen):
            raise ConfigError(f"kernels cannot route this choice: {why}")
        order, offsets, places, wrong = gpu.routed(chosen, experts)
        *starts, found = torch.cat((offsets, wrong.view(1))).tolist()
        if found == 2:
            _check(chosen, experts)
        if found:
            raise ConfigError(_TWICE)
        return Routing(order, offsets, chosen, places, tuple(starts))
    _check(chosen, experts)
    # A choice of none has a column for its place, so that no two of a token are in one.
    place = torch.arange(k, device=chosen.device)
    own = torch.where(chosen == experts, experts + place, chosen)
    tiles = -(-length // _TILE)
    padded = (experts + place).expand(tiles * _TILE, k).clone()
    padded[:length] = own
    counts = chosen.new_empty(tiles, experts + k)
    within = torch.empty_like(padded)
    for tile in range(tiles):
        rows = slice(tile * _TILE, (tile + 1) * _TILE)
        dense = torch.zeros(_TILE, experts + k, dtype=torch.int32, device=chosen.device)
        dense.scatter_(1, padded[rows], 1)
        if int(dense.sum()) != _TILE * k:
            raise ConfigError(_TWICE)
        scanned = dense.cumsum(0, dtype=torch.int32)
        within[rows] = scanned.gather(1, padded[rows]).long() - 1
        counts[tile] = scanned[-1]
    counts[-1, experts:] -= tiles * _TILE - length
    total = counts.sum(0)
    offsets = total.cumsum(0) - total
    base = counts.cumsum(0) - counts + offsets
    tokens = torch.arange(length, device=chosen.device)
    places = base[tokens // _TILE].gather(1, own) + within[:length]
    order = torch.empty(length * k, dtype=torch.int64, device=chosen.device)
    order[places.reshape(-1)] = tokens.repeat_interleave(k)
    offsets = offsets[: experts + 1]
    return Routing(order, offsets, chosen, places, tuple(offsets.tolist()))
