"""An LSTM that reads a statement of any length, piece by piece, until it knows what it is.

What it is: a stacked LSTM over the bytes of a Python statement; after each piece a judge says which
kind of statement it is, and reading ends when the judge is sure or the text is over: early stopping
in the manner of Yu et al. (2018, "Fast and accurate text classification: skimming, rereading and
early stopping"), with a threshold where they learn a policy. All judgements made count in the loss,
so that early ones are learned too. What it is not: batched; each text has its own end.

How it fits: it knows nothing of offloading. How many pieces there are is seen before the step, how
many are read is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dynoffload.datasets.sources import Split
from dynoffload.datasets.statements import KINDS, Statement, statements
from dynoffload.experiments.zoo.building import ZooSample, built
from dynoffload.profiler.input_features import InputFeatures


@dataclass(frozen=True)
class EarlyConfig:
    """The sizes of a network.

    Attributes:
        embedding: width of a byte's vector.
        hidden: width of a layer's state.
        layers: of the LSTM.
        piece: bytes that are read between two judgements.
        sure: chance of the likeliest kind from which the judge is sure.
        kinds: of statements.
        vocabulary: how many different bytes.
        seed: of the initial weights.
    """

    embedding: int
    hidden: int
    layers: int = 2
    piece: int = 4
    sure: float = 0.9
    kinds: int = len(KINDS)
    vocabulary: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes that make no network."""
        if min(self.embedding, self.hidden, self.layers, self.piece) < 1:
            raise ValueError(
                f"embedding={self.embedding}, hidden={self.hidden}, layers={self.layers} and "
                f"piece={self.piece} must be at least 1"
            )
        if not 0 < self.sure <= 1:
            raise ValueError(f"sure={self.sure} must be a chance: above 0 and at most 1")


PRESETS: dict[str, EarlyConfig] = {
    "tiny": EarlyConfig(embedding=32, hidden=64),
    "small": EarlyConfig(embedding=128, hidden=512),
    "base": EarlyConfig(embedding=256, hidden=1536, layers=3),
}
"""Sizes by name."""


class EarlyOutput(NamedTuple):
    """What a forward pass returns.

    Attributes:
        loss: scalar: mean cross entropy of all judgements, in nats.
        logits: of the last judgement, ``[1, kinds]``.
        pieces: how many were read.
    """

    loss: Tensor
    logits: Tensor
    pieces: int


class EarlyLSTM(nn.Module):
    """Says which kind of statement a text is."""

    def __init__(self, config: EarlyConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.embedding)
        self.cells = nn.ModuleList(
            nn.LSTMCell(config.hidden if layer else config.embedding, config.hidden)
            for layer in range(config.layers)
        )
        self.judge = nn.Linear(config.hidden, config.kinds)

    def forward(self, statement: Statement) -> EarlyOutput:
        """Read ``statement.tokens``, int64 ``[length]``, until the judge is sure."""
        label = statement.label.view(1)
        vectors = self.embedding(statement.tokens)
        zeros = vectors.new_zeros((1, self.config.hidden))
        states = [(zeros, zeros)] * len(self.cells)
        losses: list[Tensor] = []
        for piece in vectors.split(self.config.piece):
            for x in piece.split(1):
                for layer, cell in enumerate(self.cells):
                    states[layer] = cell(x, states[layer])
                    x = states[layer][0]
            logits = self.judge(states[-1][0])
            losses.append(F.cross_entropy(logits, label))
            if logits.detach().softmax(dim=1).max() >= self.config.sure:
                break
        return EarlyOutput(torch.stack(losses).mean(), logits, len(losses))

    def sample_features(self, statement: Statement) -> InputFeatures:
        """Describe a statement by its bytes, each with the one before it, and how many there are.

        Returns:
            A sample whose elements are int64 ``[length, 2]``; ``vocabulary`` stands before the
            first byte.
        """
        tokens = statement.tokens.cpu()
        before = torch.cat((torch.tensor([self.config.vocabulary]), tokens[:-1]))
        pieces = -(-len(tokens) // self.config.piece)
        return InputFeatures(
            values={"length": float(len(tokens)), "pieces": float(pieces)},
            elements=torch.stack((tokens, before), dim=1).numpy(),
        )


def build(
    preset: str = "tiny", *, device: str | torch.device = "cpu", **overrides: float
) -> EarlyLSTM:
    """Return a network of the sizes in `PRESETS`; see `built`."""
    return built(EarlyLSTM, PRESETS, preset, device, overrides)


def samples(split: Split | str = "train", *, seed: int = 0, **shape: Any) -> Iterator[ZooSample]:
    """Yield statements; see `dynoffload.datasets.statements.statements` for ``shape``."""
    return (ZooSample((one,), one.source) for one in statements(split, seed=seed, **shape))
