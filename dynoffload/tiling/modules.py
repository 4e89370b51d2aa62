"""Tiled modules: a linear layer or an embedding as tiles that run one after the other.

A tile is an ordinary module with a parameter of its own, so that under
``offload()`` each one, its gradient and its optimizer state move by themselves, and of the weight
no more than a tile must be in memory at a time. A session knows nothing of tiles but
`Tiled.tile_pieces`. After the memory-centric tiling of ZeRO-Infinity (Rajbhandari et al., SC 2021).

[Note: bits]  A linear layer is split by output features. An element of its output, or of a tile's
gradient, is the same sum of products as in the whole, and has the same bits where the library of
matrix products adds in the same order. It did on the CPU measured where tiles begin at multiples of
64 features and have no fewer, as they do if there are enough; nobody promises it. The gradient of
the *input* is a sum over output features, which tiles cut: it is the sum of the tiles' products,
each rounded to its dtype, and differs from the whole's by rounding. Products that are added into
one buffer (``addmm``) differ too, with errors no smaller, so autograd adds them, from the last tile
to the first. An embedding is split by columns, or by rows where a linear layer has its weight too;
nothing is added there, and its bits are the whole's. A tiled model under ``offload()`` has the bits
of the same tiled model in plain PyTorch.

[Note: memory]  The tiles' outputs are joined, so for a moment the output is there twice. Of the
weight nothing is joined but by `untile` and `whole_state_dict`. Autograd makes a tile's gradient
and hands it over before it turns to the next tile. Under autocast, as of any layer, the casts of
all tiles are kept until backward has used them, half of a float32 weight; a session pages them as
activations, on the CPU.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from dynoffload.errors import ConfigError
from dynoffload.units import format_bytes, parse_bytes

_ALIGNED = 64  # features of which tiles are multiples where they can be; see [Note: bits]


class Piece(NamedTuple):
    """Where a tile's tensor lies in the whole one.

    Attributes:
        whole: name of the whole tensor.
        shape: of the whole tensor.
        part: which part of it the tile is; the last slice is along the dimension that is split.
    """

    whole: str
    shape: tuple[int, ...]
    part: tuple[slice, ...]


class Tiled(nn.Module):
    """What tiled modules share: tiles, each a module that holds a part of the whole's tensors.

    ``load_state_dict`` takes the whole's names, ``weight`` and ``bias``, as well as the tiles'.
    """

    plain: ClassVar[type[nn.Module]]
    """The type of a tile, and of the whole."""
    dim: ClassVar[int]
    """The dimension of ``weight`` that is split."""

    tiles: nn.ModuleList

    def forward(self, x: Tensor) -> Tensor:
        """Return what the whole would, ``[..., width]``; the tiles run one after the other."""
        return torch.cat([tile(x) for tile in self.tiles], dim=-1)

    def tile_pieces(self, prefix: str = "") -> dict[str, Piece]:
        """Return by name where each tensor of the tiles lies in the whole one; all names begin with
        ``prefix``. A session that reads weights from files calls it, too."""
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
        """Split what has the whole's names, by views; see `nn.Module.load_state_dict`."""
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

    The last tiles may be smaller. Output and gradients of the tiles are as a rule the whole's bit
    for bit, the input's gradient within rounding; see [Note: bits].

    Args:
        in_features: of the input, ``[..., in_features]``.
        out_features: of the output, ``[..., out_features]``.
        bias: whether there is one.
        device: of the parameters.
        dtype: of the parameters.
        tiles: how many, at most: fewer if fewer tiles of equal size, but for the last, are enough.
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
        """Give all tiles values as `nn.Linear` draws them: all weights in order, then all biases.

        On the CPU they are the numbers that the whole would be given. Where each tile is reset by
        itself, as `materialize` does, a tile's bias is drawn before the next tile's weight.
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
        """Return what `nn.Linear` says of itself."""
        bias = self.tiles[0].bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}"


class TiledTable(Tiled):
    """`nn.Embedding` as tiles, made by `tile`. Output and gradients are the whole's bit for bit."""

    plain = nn.Embedding

    num_embeddings: int
    embedding_dim: int

    def extra_repr(self) -> str:
        """Return what `nn.Embedding` says of itself."""
        return f"{self.num_embeddings}, {self.embedding_dim}"


class TiledEmbedding(TiledTable):
    """A table split by columns; ``padding_idx`` and the like are those of each tile."""

    dim = 1

    def reset_parameters(self) -> None:
        """Give all tiles values as `nn.Embedding` draws them; other numbers than the whole's."""
        for tile in self.tiles:
            assert isinstance(tile, nn.Embedding)
            tile.reset_parameters()


class TiledRows(TiledTable):
    """A table split by rows, as it is the weight of a linear layer too.

    Tiles are parameters of both. Each looks up the indices that are its own; how many it has is
    known only as it runs, so that ``torch.compile`` breaks its graph here.
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
    """Return how many features each tile has: the same of all but the last, or the last two.

    Args:
        features: to split.
        row: bytes of one.
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
        each = -(-features // -(-features // most))  # of as few tiles, the most even
        each = _rounded(each) if most >= _ALIGNED else each
    lengths = [min(each, features - begin) for begin in range(0, features, each)]
    if len(lengths) > 1 and lengths[-1] < _ALIGNED and lengths[-2] >= 2 * _ALIGNED:
        lengths[-2] -= _ALIGNED  # narrow ones are multiplied in another order
        lengths[-1] += _ALIGNED
    return lengths


def _rounded(features: int) -> int:
    return -(-features // _ALIGNED) * _ALIGNED
