"""A decoder whose tokens skip blocks: the tokens determine which blocks run, and on how many.

Mixture of depths (Raposo et al., 2024, arXiv 2404.02258) with a router that decides token by token,
as sampling requires (section 3.5). In every other block a token takes part if its router selects
it, and the block's output is scaled by the router's output. A block that no token selects is not
called. A loss on the share of participating tokens keeps it near the requested capacity.
Attention is `moe_lm`'s, over the participating tokens, at their own positions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dynoffload.experiments.zoo.building import texts
from dynoffload.experiments.zoo.moe_lm import Attention, Decoder, Expert
from dynoffload.profiler.routing import RoutingProbe

PRESETS: dict[str, dict[str, int]] = {
    "tiny": {"hidden": 64, "layers": 8, "heads": 4, "width": 128},
    "small": {"hidden": 256, "layers": 12, "heads": 8, "width": 768},
    "base": {"hidden": 768, "layers": 24, "heads": 12, "width": 2048},
}
samples = texts


class Block(nn.Module):
    """Attention, then a feed-forward network, each after a norm; returns the residual update."""

    def __init__(self, hidden: int, heads: int, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.norm = nn.RMSNorm(hidden)
        self.feed_forward = Expert(hidden, width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the update of ``[1, tokens, hidden]``; ``cos``, ``sin`` are ``[tokens, ...]``."""
        attended = self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = attended + self.feed_forward(self.norm(x + attended))
        return out


class Router(nn.Module):
    """Decides for each token whether it takes part."""

    def __init__(self, hidden: int, capacity: float) -> None:
        super().__init__()
        self.score = nn.Linear(hidden, 1)
        nn.init.constant_(self.score.bias, math.log(capacity / (1 - capacity)))

    def forward(self, x: Tensor) -> Tensor:
        """Return probabilities ``[tokens]`` for ``[tokens, hidden]``."""
        return torch.sigmoid(self.score(x)).squeeze(-1)

    def predict(self, x: Tensor) -> Tensor:
        """Return the largest probability that a token of ``x`` takes part, ``[1]``."""
        return torch.sigmoid(F.linear(x, self.score.weight, self.score.bias)).amax(dim=0)


class MixtureOfDepths(Decoder):
    """The language model; it processes a batch's rows one after the other, as their paths differ.

    Args:
        layers: number of blocks; every other one can be skipped.
        width: hidden width of a feed-forward network.
        capacity: target share of the tokens that take part in a block that can be skipped.
        balance: weight of the loss that keeps the share there.
    """

    def __init__(
        self,
        hidden: int,
        layers: int,
        heads: int,
        width: int,
        capacity: float = 0.125,
        balance: float = 0.1,
    ) -> None:
        super().__init__(
            hidden, layers, heads, lambda _: Block(hidden, heads, width), balance=balance
        )
        self.capacity = capacity
        self.routers = nn.ModuleList(Router(hidden, capacity) for _ in range(layers // 2))

    def run(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, list[Tensor]]:
        """See `Decoder.run`."""
        rows, losses = [], []
        for row in x.split(1):  # type: ignore[no-untyped-call]
            for index, block in enumerate(self.layers):
                if index % 2 == 0:
                    row = row + block(row, cos, sin)
                    continue
                chance = self.routers[index // 2](row[0])
                takes = (chance > 0.5).to(chance.dtype)
                part = torch.where(chance > 0.5)[0]
                if len(part):
                    added = block(row[:, part], cos[part], sin[part])
                    row = row.index_add(1, part, added * chance[part, None])
                soft = takes + (chance - chance.detach())  # straight-through gradient
                losses.append((soft.mean() - self.capacity).square())
            rows.append(row)
        return torch.cat(rows), losses

    def routing_probes(self) -> list[RoutingProbe]:
        """Return the routers in order; each can be evaluated on an earlier router's input."""
        return [
            RoutingProbe(f"routers.{number}", (f"layers.{2 * number + 1}",), router.predict)
            for number, router in enumerate(self.routers)
            if isinstance(router, Router)
        ]
