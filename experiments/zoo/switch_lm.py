"""A Switch Transformer language model: one expert for each token, in every other layer.

A decoder whose feed-forward networks are, in every other layer, one of many experts (Fedus, Zoph
and Shazeer, 2022, arXiv 2101.03961, section 2): a token goes to its most likely expert, the output
is scaled by that chance, an expert takes at most its capacity of tokens, and what is above passes
by on the residual. Experts are modules of their own, called in ascending order if any token goes
there. The paper's jitter of the router's input is left out.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dynoffload.experiments.zoo.building import Output, chosen_by_any, texts
from dynoffload.experiments.zoo.moe_lm import Attention, Rotary, described
from dynoffload.profiler.input_features import InputFeatures
from dynoffload.profiler.routing import RoutingProbe

PRESETS: dict[str, dict[str, int]] = {
    "tiny": {"hidden": 64, "layers": 4, "heads": 4, "experts": 32, "width": 64},
    "tiny-128": {"hidden": 64, "layers": 4, "heads": 4, "experts": 128, "width": 32},
    "small": {"hidden": 256, "layers": 6, "heads": 8, "experts": 32, "width": 512},
    "small-128": {"hidden": 256, "layers": 6, "heads": 8, "experts": 128, "width": 256},
    "base": {"hidden": 768, "layers": 12, "heads": 12, "experts": 128, "width": 3072},
}
"""Sizes by name, with 32 or 128 experts."""
samples = texts


class FeedForward(nn.Module):
    """Two matrices with a ReLU between, dense or as an expert."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[tokens, hidden]`` for the same."""
        out: Tensor = self.down(F.relu(self.up(x)))
        return out


class Switch(nn.Module):
    """Experts of which each token takes the most likely one, while that has room."""

    def __init__(self, hidden: int, width: int, experts: int, capacity: float) -> None:
        super().__init__()
        self.capacity = capacity
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(hidden, width) for _ in range(experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Run the experts that any token goes to, in ascending order.

        Args:
            x: ``[tokens, hidden]``.

        Returns:
            The experts' outputs, ``[tokens, hidden]``, zeros where a token found no room, and the
            balancing loss, a scalar.
        """
        experts = len(self.experts)
        chances = F.softmax(self.router(x), dim=-1, dtype=torch.float32)
        chance, chosen = chances.max(dim=-1)
        room = max(1, math.ceil(self.capacity * len(x) / experts))
        mixed = torch.zeros_like(x)
        for index in sorted(set(chosen.tolist())):
            token = torch.where(chosen == index)[0][:room]
            out = self.experts[index](x[token]) * chance[token, None]
            mixed.index_copy_(0, token, out.to(mixed.dtype))
        load = F.one_hot(chosen, experts).float().mean(dim=0)
        return mixed, experts * (load * chances.mean(dim=0)).sum()

    def foretell(self, x: Tensor) -> Tensor:
        """Return how likely each expert would run if ``x``, ``[tokens, hidden]``, came here."""
        return chosen_by_any(F.linear(x, self.router.weight).float(), 1)


class Layer(nn.Module):
    """Attention, then a feed-forward network, each behind a norm and around a residual."""

    def __init__(self, hidden: int, heads: int, width: int, experts: int, capacity: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.norm = nn.RMSNorm(hidden)
        dense = FeedForward(hidden, width)
        self.feed_forward: nn.Module = (
            Switch(hidden, width, experts, capacity) if experts else dense
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return ``[rows, length, hidden]`` for the same, and the balancing loss of experts."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        given = self.norm(x).flatten(0, 1)
        if isinstance(self.feed_forward, Switch):
            mixed, balance = self.feed_forward(given)
        else:
            mixed, balance = self.feed_forward(given), None
        return x + mixed.view_as(x), balance


class SwitchLM(nn.Module):
    """The language model.

    Args:
        hidden: width of the residual stream.
        layers: how many blocks, of which every other one has experts.
        heads: attention heads; divides ``hidden`` into even widths.
        experts: experts per layer that has them.
        width: inner width of an expert, and of a dense feed-forward network.
        capacity: times its even share of the tokens that an expert takes at most.
        vocabulary: how many different tokens; bytes by default.
        balance: weight of the load-balancing loss (equation 4).
    """

    def __init__(
        self,
        hidden: int,
        layers: int,
        heads: int,
        experts: int,
        width: int,
        capacity: float = 1.25,
        vocabulary: int = 256,
        balance: float = 0.01,
    ) -> None:
        super().__init__()
        self.vocabulary, self.balance = vocabulary, balance
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.rotary = Rotary(hidden // heads)
        self.layers = nn.ModuleList(
            Layer(hidden, heads, width, experts if n % 2 else 0, capacity) for n in range(layers)
        )
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Output:
        """Predict each token's successor.

        Args:
            tokens: int64 ``[rows, length]``.
            targets: int64 ``[rows, length]``; without them there is no loss.
        """
        x = self.embedding(tokens)
        cos, sin = self.rotary(tokens.shape[1])
        balances = []
        for layer in self.layers:
            x, balance = layer(x, cos, sin)
            if balance is not None:
                balances.append(balance)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return Output(None, logits)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        if balances:
            loss = loss + self.balance * torch.stack(balances).mean()
        return Output(loss, logits)

    def sample_features(self, tokens: Tensor, targets: Tensor | None = None) -> InputFeatures:
        """Describe a sample by its tokens, each with the two before it; see `described`."""
        return described(tokens, self.vocabulary)

    def routing_probes(self) -> list[RoutingProbe]:
        """Return the layers that have experts, in order."""
        return [
            RoutingProbe(
                f"layers.{number}.feed_forward",
                tuple(
                    f"layers.{number}.feed_forward.experts.{expert}"
                    for expert in range(len(layer.feed_forward.experts))
                ),
                layer.feed_forward.foretell,
            )
            for number, layer in enumerate(self.layers)
            if isinstance(layer.feed_forward, Switch)
        ]
