"""Hazard: one weight used twice, so that two uses meet in one gradient and one update.

The graph: embedding and head over one parameter, as language models tie them; the same module
called twice; ``F.linear(x, embedding.weight)``, which no module's hook announces; and two
parameters over one memory.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exactness import HOME
from hazards import Side, batch, compared, each_backend, stepwise
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW


class Tied(nn.Module):
    """A language model of one layer; ``how`` its head gets the embedding's weight."""

    def __init__(self, how: str, words: int = 96, width: int = 64) -> None:
        super().__init__()
        self.how = how
        self.embedding = nn.Embedding(words, width)
        self.inner = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, words, bias=False)
        if how == "parameter":
            self.head.weight = self.embedding.weight
        elif how == "linear":
            del self.head
        elif how == "memory":
            self.head.weight = nn.Parameter(self.embedding.weight.data)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.inner:
            x = x + torch.tanh(layer(x))
        if self.how == "linear":
            return F.linear(x, self.embedding.weight)
        return self.head(x)


def sample(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 96, (9,), generator=generator).to(HOME)


@stepwise(each_backend, lambda how: Tied(how), steps=5)
@pytest.mark.parametrize("how", ["parameter", "linear", "memory"])
def test_tied_embedding_and_head(
    side: Side, model: Any, optimizer: Any, step: int, how: str
) -> None:
    tokens = sample(step)
    side.step(F.cross_entropy(model(tokens[:-1]), tokens[1:]), optimizer)


@compared(each_backend)
def test_one_module_called_twice(side: Side) -> None:
    """Recurrent: each weight's gradient is complete only with its first use."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    model.append(model[0]).append(nn.Tanh()).append(nn.Linear(64, 64)).append(model[0])
    optimizer = AdamW(model.parameters(), lr=1e-2)
    with side.offload(model, optimizer):
        for step in range(5):
            side.step(model(batch(step, rows=4)[0]).square().mean(), optimizer)


@stepwise(each_backend, lambda: Tied("own"), steps=6, aside=False)
def test_tied_in_the_middle_of_a_run(side: Side, model: Any, optimizer: Any, step: int) -> None:
    """The head takes the embedding's weight after two steps; its own is used no more."""
    if step == 2:
        model.head.weight = model.embedding.weight
    tokens = sample(step)
    side.step(F.cross_entropy(model(tokens[:-1]), tokens[1:]), optimizer)
