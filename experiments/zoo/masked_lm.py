"""A masked language model over texts of any length.

A BERT encoder (Devlin et al., 2019, arXiv 1810.04805): attention in both directions, post-norm
blocks, learned positions; some tokens are masked and have to be named. Each sample has its own
length and is not padded, so what moves differs from sample to sample though every block runs. There
are no segments, no dropout, no tied head and no next sentence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dynoffload.datasets.sources import Split
from dynoffload.datasets.statements import statements
from dynoffload.datasets.text import VOCABULARY
from dynoffload.experiments.zoo.building import Output, ZooSample
from dynoffload.profiler.input_features import MAX_ELEMENTS, InputFeatures

MASK = VOCABULARY
"""The token that stands where one is hidden."""


PRESETS: dict[str, dict[str, int]] = {
    "tiny": {"hidden": 64, "layers": 3, "heads": 4},
    "small": {"hidden": 384, "layers": 6, "heads": 6},
    "base": {"hidden": 768, "layers": 12, "heads": 12},
}
"""Sizes by name; ``base`` has the paper's widths, heads and layers."""


class Block(nn.Module):
    """Attention, then a feed-forward network, each around a residual and before a norm."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.attention_norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[rows, length, hidden]`` for the same."""
        rows, length, hidden = x.shape
        split = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*split)
        attended = self.out(mixed.transpose(1, 2).reshape(rows, length, hidden))
        x = self.attention_norm(x + attended)
        out: Tensor = self.norm(x + self.down(F.gelu(self.up(x))))
        return out


class MaskedLM(nn.Module):
    """Names the tokens that are hidden.

    Args:
        hidden: width of a token's vector.
        layers: how many blocks.
        heads: attention heads; divides ``hidden``.
        longest: tokens of the longest text.
    """

    def __init__(self, hidden: int, layers: int, heads: int, longest: int = 512) -> None:
        super().__init__()
        self.longest = longest
        self.embedding = nn.Embedding(VOCABULARY + 1, hidden)
        self.positions = nn.Embedding(longest, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.head = nn.Linear(hidden, VOCABULARY)
        for module in self.modules():  # the deviation of the paper's code
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, hidden: Tensor) -> Output:
        """Name what is hidden.

        Args:
            tokens: int64 ``[rows, length]``.
            hidden: bool of the same shape, with at least one that is.
        """
        length = tokens.shape[1]
        if length > self.longest:
            raise ValueError(f"a text of {length} tokens is longer than {self.longest}")
        given = tokens.masked_fill(hidden, MASK)
        places = torch.arange(length, device=tokens.device)
        x = self.norm(self.embedding(given) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return Output(F.cross_entropy(logits[hidden].float(), tokens[hidden]), logits)

    def sample_features(self, tokens: Tensor, hidden: Tensor) -> InputFeatures:
        """Describe a sample by its size and its tokens, int64 ``[rows * length]``."""
        rows, length = tokens.shape
        return InputFeatures(
            values={"rows": float(rows), "length": float(length)},
            elements=tokens.flatten()[:MAX_ELEMENTS].cpu().numpy(),
        )


def samples(
    split: Split | str = "train", *, seed: int = 0, share: float = 0.15, **shape: Any
) -> Iterator[ZooSample]:
    """Yield statements of all lengths, some of whose bytes are hidden.

    Args:
        split: training or held-out files.
        seed: of the draws.
        share: of the bytes that are hidden, at least one.
        shape: as for `dynoffload.datasets.statements.statements`.
    """
    generator = torch.Generator().manual_seed(seed)
    for one in statements(split, seed=seed, **shape):
        tokens = one.tokens[None]
        hidden = torch.rand(tokens.shape, generator=generator) < share
        hidden[0, int(torch.randint(len(one.tokens), (), generator=generator))] = True
        yield ZooSample((tokens, hidden), one.source)
