"""Tiled modules: a linear layer or an embedding split into tiles that run one after the other.

A tile is an ordinary module with its own parameter. So under ``offload()`` each tile, its gradient
and its optimizer state are paged separately, and at most one tile of the weight must be in memory
at a time. A session uses only `tile_pieces`. The design follows the memory-centric tiling of
ZeRO-Infinity (Rajbhandari et al., SC 2021).

[Note: bits]  A linear layer is split by output features. Each element of its output, or of a tile's
gradient, is the same sum of products as in the whole layer. It has the same bits if the matrix
library adds in the same order. On the CPU measured this holds, without guarantee, if tiles begin at
multiples of 64 features and have at least 64, as they do where possible. The gradient of the
*input* is a sum over output features, so it is the sum of the tiles' products, each rounded, and
differs from the whole layer's by rounding. Accumulating products in one buffer (``addmm``) differs
too, with errors no smaller, so autograd adds them, from the last tile to the first. An embedding is
split by columns, or by rows if a linear layer shares its weight; nothing is summed, so its bits are
the whole's. Under ``offload()`` a tiled model has the bits of the same model in plain PyTorch.

[Note: memory]  The tiles' outputs are joined, so the output is briefly in memory twice. Only
`untile` and `whole_state_dict` join weights. Autograd computes and delivers a tile's gradient
before the next tile's. Under autocast, as for any layer, the casts of all tiles are kept until
backward has used them, half of a float32 weight; on the CPU a session pages them as activations.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from dynoffload.errors import ConfigError
from dynoffload.units import format_bytes, parse_bytes

_ALIGNED = 64  # tiles are multiples of this many features where possible; see [Note: bits]


class Piece(NamedTuple):
    """The part of a whole tensor that a tile holds.

    Attributes:
        whole: name of the whole tensor.
        shape: of the whole tensor.
        part: index of the part in it; the last slice is along the dimension that is split.
    """

    whole: str
    shape: tuple[int, ...]
    part: tuple[slice, ...]


class Tiled(nn.Module):
    """Base of tiled modules, whose tiles are modules that each hold a part of the whole's tensors.

    ``load_state_dict`` accepts the whole's names, ``weight`` and ``bias``, as well as the tiles'.
    """

    plain: ClassVar[type[nn.Module]]
    """The type of each tile, and of the whole module."""
    dim: ClassVar[int]
    """The dimension of ``weight`` that is split."""

    tiles: nn.ModuleList

    def forward(self, x: Tensor) -> Tensor:
        """Return the whole module's output, ``[..., width]``; the tiles run one after the other."""
        return torch.cat([tile(x) for tile in self.tiles], dim=-1)

    def tile_pieces(self, prefix: str = "") -> dict[str, Piece]:
        """Return for each tensor of the tiles its part of the whole tensor; all names begin with
        ``prefix``. Also called by a session that reads weights from files."""
        found = {}
        for key in ("weight", "bias"):
            tensors: list[Any] = [tile._parameters.get(key) for tile in self.tiles]
            if tensors[0] is None:
                continue
            dim = self.dim if key == "weight" else 0
            lengths = [tensor.shape[dim] for tensor in tensors]
            shape = list(tensors[0].shape)
            shape[dim] = sum(lengths)
            for number, (length, end) in enumerate(zip(lengths, accumulate(lengths), strict=True)):
                part = (slice(None),) * dim + (slice(end - length, end),)
                piece = Piece(f"{prefix}{key}", tuple(shape), part)
                found[f"{prefix}tiles.{number}.{key}"] = piece
        return found

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        """Split tensors with the whole's names into views; see `nn.Module.load_state_dict`."""
        assigned = bool(local_metadata.get("assign_to_params_buffers"))  # then views would be tied
        wholes: dict[str, Tensor] = {}
        for name, piece in self.tile_pieces(prefix).items():
            if piece.whole in state_dict and name not in state_dict:
                wholes[piece.whole] = state_dict.pop(piece.whole)
            if piece.whole not in wholes:
                continue
            whole = wholes[piece.whole]
            if tuple(whole.shape) == piece.shape:
                part = whole[piece.part]
                state_dict[name] = part.clone() if assigned else part
            elif not piece.part[-1].start:
                rest[-1].append(
                    f"size mismatch for {piece.whole}: copying a param with shape "
                    f"{tuple(whole.shape)} from checkpoint, the shape of the tiles of the current "
                    f"model together is {piece.shape}."
                )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class TiledLinear(Tiled):
    """`nn.Linear` whose weight is split by output features into tiles that run in turn.

    The last tiles may be smaller. Output and the tiles' gradients usually equal the whole layer's
    bit for bit; the input's gradient differs by rounding; see [Note: bits].

    Args:
        in_features: of the input, ``[..., in_features]``.
        out_features: of the output, ``[..., out_features]``.
        bias: whether there is one.
        device: of the parameters.
        dtype: of the parameters.
        tiles: the most tiles; fewer if fewer tiles, equal except for the last, are enough.
        tile_bytes: the most bytes of a tile's weight, or a text such as ``"256MB"``; give either
            this or ``tiles``.

    Raises:
        ConfigError: neither or both of ``tiles`` and ``tile_bytes`` are given, one is out of range,
            or one output feature is larger than ``tile_bytes``.
    """

    plain = nn.Linear
    dim = 0

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        tiles: int | None = None,
        tile_bytes: int | str | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        dtype = dtype or torch.get_default_dtype()
        lengths = lengths_of(out_features, in_features * dtype.itemsize, tiles, tile_bytes)
        self.tiles = nn.ModuleList(
            nn.Linear(in_features, length, bias, device="meta", dtype=dtype) for length in lengths
        )
        self.tiles.to_empty(device=device or torch.get_default_device())
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize all tiles as `nn.Linear` does: all weights in order, then all biases.

        On the CPU the values are those of the whole layer. If each tile is reset separately, as by
        `materialize`, a tile's bias is drawn before the next tile's weight.
        """
        own = [tile._parameters for tile in self.tiles]
        for weight in (one["weight"] for one in own):
            assert weight is not None
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0.0
        for bias in (one["bias"] for one in own):
            if bias is not None:
                nn.init.uniform_(bias, -bound, bound)

    def extra_repr(self) -> str:
        """Return the same text as `nn.Linear`."""
        bias = self.tiles[0].bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}"


class TiledTable(Tiled):
    """`nn.Embedding` as tiles, made by `tile`; output and gradients have the whole's bits."""

    plain = nn.Embedding

    num_embeddings: int
    embedding_dim: int

    def extra_repr(self) -> str:
        """Return the same text as `nn.Embedding`."""
        return f"{self.num_embeddings}, {self.embedding_dim}"


class TiledEmbedding(TiledTable):
    """A table split by columns; ``padding_idx`` and similar options apply to each tile."""

    dim = 1

    def reset_parameters(self) -> None:
        """Initialize all tiles as `nn.Embedding` does; the values differ from the whole's."""
        for tile in self.tiles:
            assert isinstance(tile, nn.Embedding)
            tile.reset_parameters()


class TiledRows(TiledTable):
    """A table split by rows, as its weight is shared with a linear layer.

    Tiles are parameters of both. Each looks up its own indices; their number depends on the data,
    so ``torch.compile`` breaks its graph here.
    """

    dim = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return the rows ``[..., embedding_dim]`` of indices ``[...]``.

        Raises:
            IndexError: an index is not in the table.
        """
        indices = x.reshape(-1)
        places, rows, begin = [], [], 0
        for tile in self.tiles:
            end = begin + tile.get_parameter("weight").shape[0]
            own = ((indices >= begin) & (indices < end)).nonzero()[:, 0]
            places.append(own)
            rows.append(tile(indices[own] - begin))
            begin = end
        order = torch.cat(places)
        if len(order) != len(indices):
            raise IndexError(
                f"indices from {int(indices.min())} to {int(indices.max())} are out of range of a "
                f"table of {self.num_embeddings} rows"
            )
        found = torch.cat(rows).index_select(0, order.argsort())
        return found.reshape(*x.shape, self.embedding_dim)


def lengths_of(
    features: int, row: int, tiles: int | None, tile_bytes: int | str | None
) -> list[int]:
    """Return the number of features of each tile, equal for all but the last one or two.

    Args:
        features: number to split.
        row: bytes of one feature.
        tiles: the most tiles, or None.
        tile_bytes: the most bytes of a tile, or None.
    """
    if (tiles is None) == (tile_bytes is None):
        raise ConfigError("give either tiles= or tile_bytes=")
    if tiles is not None:
        if not 1 <= tiles <= features:
            raise ConfigError(f"tiles={tiles} of {features} features: give 1 to {features}")
        each = -(-features // tiles)
        aligned = _rounded(each)
        each = aligned if -(-features // aligned) == tiles else each
    else:
        assert tile_bytes is not None
        allowed = parse_bytes(tile_bytes, "tile_bytes")
        most = allowed // row if row else features
        if most < 1:
            raise ConfigError(
                f"one feature takes {format_bytes(row)}, and a tile may have "
                f"{format_bytes(allowed)}: allow {format_bytes(row)} at least"
            )
        if most >= features:
            return [features]
        if most >= _ALIGNED:
            most -= most % _ALIGNED
        each = -(-features // -(-features // most))  # the most even split into as few tiles
        each = _rounded(each) if most >= _ALIGNED else each
    lengths = [min(each, features - begin) for begin in range(0, features, each)]
    if len(lengths) > 1 and lengths[-1] < _ALIGNED and lengths[-2] >= 2 * _ALIGNED:
        lengths[-2] -= _ALIGNED  # products of narrow tiles are summed in another order
        lengths[-1] += _ALIGNED
    return lengths


def _rounded(features: int) -> int:
    return -(-features // _ALIGNED) * _ALIGNED
