"""An LSTM that reads a statement piece by piece until it can classify it.

A stacked LSTM over the bytes of a Python statement. After each piece a classifier predicts the kind
of statement; reading ends when it is confident or the text ends. This is early stopping like that
of Yu et al. (2018, "Fast and accurate text classification: skimming, rereading and early
stopping"), with a threshold where they learn a policy. The loss averages all predictions made, so
early ones are trained too. The number of pieces is known before the step; the number read is not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dynoffload.datasets.statements import KINDS, Statement, statements
from dynoffload.experiments.zoo.building import Output, singly
from dynoffload.profiler.input_features import InputFeatures

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"embedding": 32, "hidden": 64},
    "small": {"embedding": 128, "hidden": 512},
    "base": {"embedding": 256, "hidden": 1536, "layers": 3},
}
samples = singly(statements)


class EarlyLSTM(nn.Module):
    """Classifies statements.

    Args:
        embedding: width of a byte's vector.
        hidden: width of a layer's state.
        layers: of the LSTM.
        piece: bytes read between two predictions.
        sure: probability of the likeliest kind at which reading stops.
        kinds: number of statement kinds.
        vocabulary: number of different bytes.
    """

    def __init__(
        self,
        embedding: int,
        hidden: int,
        layers: int = 2,
        piece: int = 4,
        sure: float = 0.9,
        kinds: int = len(KINDS),
        vocabulary: int = 256,
    ) -> None:
        super().__init__()
        self.hidden, self.piece, self.sure, self.vocabulary = hidden, piece, sure, vocabulary
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.cells = nn.ModuleList(
            nn.LSTMCell(hidden if layer else embedding, hidden) for layer in range(layers)
        )
        self.judge = nn.Linear(hidden, kinds)

    def forward(self, statement: Statement) -> Output:
        """Read ``statement.tokens``, int64 ``[length]``, until the classifier is confident."""
        label = statement.label.view(1)
        vectors = self.embedding(statement.tokens)
        zeros = vectors.new_zeros((1, self.hidden))
        states = [(zeros, zeros)] * len(self.cells)
        losses: list[Tensor] = []
        for piece in vectors.split(self.piece):
            for x in piece.split(1):
                for layer, cell in enumerate(self.cells):
                    states[layer] = cell(x, states[layer])
                    x = states[layer][0]
            logits = self.judge(states[-1][0])
            losses.append(F.cross_entropy(logits, label))
            if logits.detach().softmax(dim=1).max() >= self.sure:
                break
        return Output(torch.stack(losses).mean(), logits)

    def sample_features(self, statement: Statement) -> InputFeatures:
        """Describe a statement by its bytes, each with its predecessor, and their number.

        Returns:
            A sample whose elements are int64 ``[length, 2]``; the first byte's predecessor is
            ``vocabulary``.
        """
        tokens = statement.tokens.cpu()
        before = torch.cat((torch.tensor([self.vocabulary]), tokens[:-1]))
        pieces = -(-len(tokens) // self.piece)
        return InputFeatures(
            values={"length": float(len(tokens)), "pieces": float(pieces)},
            elements=torch.stack((tokens, before), dim=1).numpy(),
        )
