"""An Evoformer trunk with recycling: number of runs, depth and length differ by sample.

The trunk of AlphaFold 2 (Jumper et al., 2021, supplement, algorithms 3, 6 to 15 and 31, 32).
Blocks update an alignment and a pair representation from each other. They run several times, with
gradients through the last run alone. It predicts the masked alignment entries and the distances of
residues. Templates, the extra alignment and the structure module are left out. Memory grows with
rows * depth * length and rows * length squared, so batches must be small.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dynoffload.datasets.proteins import BINS, TOKENS, Alignments, alignments
from dynoffload.experiments.zoo.building import singly
from dynoffload.profiler.input_features import InputFeatures


def _sizes(alignment: int, pair: int, heads: tuple[int, int], product: int, blocks: int) -> Any:
    return {
        "alignment": alignment,
        "pair": pair,
        "alignment_heads": heads[0],
        "pair_heads": heads[1],
        "product": product,
        "blocks": blocks,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _sizes(32, 16, (4, 2), 8, blocks=2),
    "small": _sizes(128, 64, (8, 4), 16, blocks=8),
    "base": _sizes(256, 128, (8, 4), 32, blocks=48),
}
"""Sizes by name; ``base`` is AlphaFold's."""
samples = singly(alignments)


class EvoformerOutput(NamedTuple):
    """Result of forward.

    Attributes:
        loss: scalar: mean cross entropy of the masked entries plus 0.3 times that of the distances.
        hidden: ``[rows, depth, length, TOKENS]``: logits of the alignment's entries.
        distances: ``[rows, length, length, BINS]``: logits, symmetric.
    """

    loss: Tensor
    hidden: Tensor
    distances: Tensor


class GatedAttention(nn.Module):
    """Attention along the second to last dimension, gated by its input (algorithm 7).

    Args:
        width: of the input and output.
        heads: number of heads.
        pair: width of the pairs that bias it; 0 for no bias.
    """

    def __init__(self, width: int, heads: int, pair: int = 0) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"a width of {width} must be a multiple of its {heads} heads")
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.gate = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.pair_norm = nn.LayerNorm(pair) if pair else None
        self.bias = nn.Linear(pair, heads, bias=False) if pair else None

    def forward(self, x: Tensor, pairs: Tensor | None = None) -> Tensor:
        """Return the update of ``x``, ``[rows, sequences, length, width]``.

        Args:
            x: of that shape; attention is along ``length``.
            pairs: ``[rows, length, length, pair]``, or None.
        """
        x = self.norm(x)
        q, k, v = self.qkv(x).unflatten(-1, (self.heads, -1)).transpose(-3, -2).chunk(3, dim=-1)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if self.bias is not None and self.pair_norm is not None and pairs is not None:
            scores = scores + self.bias(self.pair_norm(pairs)).permute(0, 3, 1, 2)[:, None]
        mixed = (scores.softmax(dim=-1) @ v).transpose(-3, -2).flatten(-2)
        out: Tensor = self.out(torch.sigmoid(self.gate(x)) * mixed)
        return out


class Transition(nn.Sequential):
    """Two layers with a wide hidden layer (algorithm 9)."""

    def __init__(self, width: int, factor: int) -> None:
        super().__init__(
            nn.LayerNorm(width),
            nn.Linear(width, factor * width),
            nn.ReLU(),
            nn.Linear(factor * width, width),
        )


class OuterProductMean(nn.Module):
    """Updates pairs from the alignment: how two columns covary (algorithm 10)."""

    def __init__(self, alignment: int, product: int, pair: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(alignment)
        self.left = nn.Linear(alignment, product)
        self.right = nn.Linear(alignment, product)
        self.out = nn.Linear(product * product, pair)

    def forward(self, alignment: Tensor) -> Tensor:
        """Return ``[rows, length, length, pair]`` for ``[rows, depth, length, alignment]``."""
        x = self.norm(alignment)
        outer = torch.einsum("bsic,bsjd->bijcd", self.left(x), self.right(x))
        out: Tensor = self.out(outer.flatten(-2) / alignment.shape[1])
        return out


class TriangleProduct(nn.Module):
    """Updates each pair from the other two sides of all its triangles (algorithms 11 and 12).

    Args:
        pair: width of the pairs.
        outgoing: whether sides leave the two residues; otherwise they enter them.
    """

    def __init__(self, pair: int, *, outgoing: bool) -> None:
        super().__init__()
        self.sides = "bikc,bjkc->bijc" if outgoing else "bkic,bkjc->bijc"
        self.norm = nn.LayerNorm(pair)
        self.factors = nn.Linear(pair, 2 * pair)
        self.gates = nn.Linear(pair, 2 * pair)
        self.out_norm = nn.LayerNorm(pair)
        self.out = nn.Linear(pair, pair)
        self.out_gate = nn.Linear(pair, pair)

    def forward(self, pairs: Tensor) -> Tensor:
        """Return the update of ``[rows, length, length, pair]``."""
        x = self.norm(pairs)
        left, right = (torch.sigmoid(self.gates(x)) * self.factors(x)).chunk(2, dim=-1)
        product = torch.einsum(self.sides, left, right)
        out: Tensor = torch.sigmoid(self.out_gate(x)) * self.out(self.out_norm(product))
        return out


class TriangleAttention(nn.Module):
    """Attention among the pairs that start, or end, at one residue (algorithms 13 and 14)."""

    def __init__(self, pair: int, heads: int, *, starting: bool) -> None:
        super().__init__()
        self.starting = starting
        self.attention = GatedAttention(pair, heads, pair)

    def forward(self, pairs: Tensor) -> Tensor:
        """Return the update of ``[rows, length, length, pair]``."""
        if self.starting:
            out: Tensor = self.attention(pairs, pairs)
            return out
        turned = pairs.transpose(1, 2)
        out = self.attention(turned, turned)
        return out.transpose(1, 2)


class Block(nn.Module):
    """One Evoformer block (algorithm 6)."""

    def __init__(
        self,
        alignment: int,
        pair: int,
        alignment_heads: int,
        pair_heads: int,
        product: int,
        transition: int,
        dropout: tuple[float, float],
    ) -> None:
        super().__init__()
        self.row_attention = GatedAttention(alignment, alignment_heads, pair)
        self.column_attention = GatedAttention(alignment, alignment_heads)
        self.alignment_transition = Transition(alignment, transition)
        self.outer_product = OuterProductMean(alignment, product, pair)
        self.outgoing = TriangleProduct(pair, outgoing=True)
        self.incoming = TriangleProduct(pair, outgoing=False)
        self.starting = TriangleAttention(pair, pair_heads, starting=True)
        self.ending = TriangleAttention(pair, pair_heads, starting=False)
        self.pair_transition = Transition(pair, transition)
        self.alignment_dropout, self.pair_dropout = dropout

    def forward(self, alignment: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
        """Return both representations, updated.

        Args:
            alignment: ``[rows, depth, length, alignment]``.
            pairs: ``[rows, length, length, pair]``.
        """
        update = self.row_attention(alignment, pairs)
        alignment = alignment + self._drop(update, self.alignment_dropout, 1)
        turned = alignment.transpose(1, 2)
        alignment = alignment + self.column_attention(turned).transpose(1, 2)
        alignment = alignment + self.alignment_transition(alignment)
        pairs = pairs + self.outer_product(alignment)
        pairs = pairs + self._drop(self.outgoing(pairs), self.pair_dropout, 1)
        pairs = pairs + self._drop(self.incoming(pairs), self.pair_dropout, 1)
        pairs = pairs + self._drop(self.starting(pairs), self.pair_dropout, 1)
        pairs = pairs + self._drop(self.ending(pairs), self.pair_dropout, 2)
        pairs = pairs + self.pair_transition(pairs)
        return alignment, pairs

    def _drop(self, update: Tensor, share: float, along: int) -> Tensor:
        """Drop the same elements everywhere along one dimension."""
        if not self.training:
            return update
        shape = list(update.shape)
        shape[along] = 1
        return update * F.dropout(update.new_ones(shape), share)


class Recycling(nn.Module):
    """Adds the last run's results to the inputs of the next (algorithm 32 without distances)."""

    def __init__(self, alignment: int, pair: int) -> None:
        super().__init__()
        self.query_norm = nn.LayerNorm(alignment)
        self.pair_norm = nn.LayerNorm(pair)

    def forward(
        self, alignment: Tensor, pairs: Tensor, query: Tensor, before: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return both representations plus those of the last run."""
        first = alignment[:, :1] + self.query_norm(query)[:, None]
        return torch.cat((first, alignment[:, 1:]), dim=1), pairs + self.pair_norm(before)


class Evoformer(nn.Module):
    """The trunk with embeddings and two heads.

    Args:
        alignment: width of an alignment's entry.
        pair: width of a pair.
        alignment_heads: of attention over the alignment; divides ``alignment``.
        pair_heads: of attention over pairs; divides ``pair``.
        product: width of the outer product's factors.
        blocks: number of blocks.
        transition: hidden width of a transition, as a multiple of its width.
        reach: sequence distance at which relative positions are clamped.
        alignment_dropout: of whole rows of the alignment's updates.
        pair_dropout: of whole rows or columns of the pairs' updates.
    """

    def __init__(
        self,
        alignment: int,
        pair: int,
        alignment_heads: int,
        pair_heads: int,
        product: int,
        blocks: int,
        transition: int = 4,
        reach: int = 32,
        alignment_dropout: float = 0.15,
        pair_dropout: float = 0.25,
    ) -> None:
        super().__init__()
        self.reach = reach
        self.entries = nn.Embedding(TOKENS, alignment)
        self.query = nn.Embedding(TOKENS, alignment)
        self.left = nn.Embedding(TOKENS, pair)
        self.right = nn.Embedding(TOKENS, pair)
        self.relative = nn.Embedding(2 * reach + 1, pair)
        self.recycling = Recycling(alignment, pair)
        dropout, heads = (alignment_dropout, pair_dropout), (alignment_heads, pair_heads)
        self.blocks = nn.ModuleList(
            Block(alignment, pair, *heads, product, transition, dropout) for _ in range(blocks)
        )
        self.hidden_head = nn.Linear(alignment, TOKENS)
        self.distance_head = nn.Linear(pair, BINS)

    def forward(self, sample: Alignments) -> EvoformerOutput:
        """Run the trunk ``sample.cycles`` times, the last one with gradients.

        Args:
            sample: its tokens are ``[rows, depth, length]``.
        """
        carried: tuple[Tensor, Tensor] | None = None
        with torch.no_grad():
            for _ in range(sample.cycles - 1):
                alignment, pairs = self._run(sample.tokens, carried)
                carried = alignment[:, 0], pairs
        alignment, pairs = self._run(sample.tokens, carried)
        hidden: Tensor = self.hidden_head(alignment)
        apart: Tensor = self.distance_head(pairs)
        apart = apart + apart.transpose(1, 2)
        masked = F.cross_entropy(hidden.flatten(0, 2).float(), sample.hidden.flatten())
        far = F.cross_entropy(apart.flatten(0, 2).float(), sample.distances.flatten())
        return EvoformerOutput(masked + 0.3 * far, hidden, apart)

    def _run(self, tokens: Tensor, carried: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Embed ``tokens`` (algorithm 3), add the results ``carried`` over, and run all blocks."""
        query = tokens[:, 0]
        alignment = self.entries(tokens) + self.query(query)[:, None]
        places = torch.arange(query.shape[1], device=tokens.device)
        apart = (places[:, None] - places[None]).clamp(-self.reach, self.reach) + self.reach
        pairs = self.left(query)[:, :, None] + self.right(query)[:, None] + self.relative(apart)
        if carried is not None:
            alignment, pairs = self.recycling(alignment, pairs, *carried)
        for block in self.blocks:
            alignment, pairs = block(alignment, pairs)
        return alignment, pairs

    def sample_features(self, sample: Alignments) -> InputFeatures:
        """Describe a sample by its shape and its number of trunk runs."""
        rows, depth, length = sample.tokens.shape
        shape = {"rows": rows, "depth": depth, "length": length, "cycles": sample.cycles}
        return InputFeatures(values={name: float(value) for name, value in shape.items()})
