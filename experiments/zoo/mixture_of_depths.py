"""A decoder whose tokens leave out blocks: which ones run, and on how much, depends on the tokens.

Mixture of depths (Raposo et al., 2024, arXiv 2404.02258) with the router that decides token by
token, as sampling needs it (section 3.5): in every other block a token takes part if its router
says so, and the block's output is scaled by what the router said; a block that no token wants is
not called. A loss on the share of the tokens that take part holds it near the capacity asked for.
Attention is `moe_lm`'s, over the tokens that take part, at their own positions.
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
    """Attention, then a feed-forward network, each behind a norm; returns what they add."""

    def __init__(self, hidden: int, heads: int, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.norm = nn.RMSNorm(hidden)
        self.feed_forward = Expert(hidden, width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return what is added to ``[1, tokens, hidden]``, whose turns are ``[tokens, ...]``."""
        attended = self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = attended + self.feed_forward(self.norm(x + attended))
        return out


class Router(nn.Module):
    """Says for each token whether it takes part."""

    def __init__(self, hidden: int, capacity: float) -> None:
        super().__init__()
        self.score = nn.Linear(hidden, 1)
        nn.init.constant_(self.score.bias, math.log(capacity / (1 - capacity)))

    def forward(self, x: Tensor) -> Tensor:
        """Return chances ``[tokens]`` for ``[tokens, hidden]``."""
        return torch.sigmoid(self.score(x)).squeeze(-1)

    def foretell(self, x: Tensor) -> Tensor:
        """Return how likely any token would take part if ``x`` came here, ``[1]``."""
        return torch.sigmoid(F.linear(x, self.score.weight, self.score.bias)).amax(dim=0)


class MixtureOfDepths(Decoder):
    """The language model; a batch's rows are taken one after the other, as each takes its path.

    Args:
        layers: how many blocks, of which every other one may be left out.
        width: inner width of a feed-forward network.
        capacity: share of the tokens that should take part in a block that may be left out.
        balance: weight of the loss that holds the share there.
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
                soft = takes + (chance - chance.detach())  # the share's gradient is the chance's
                losses.append((soft.mean() - self.capacity).square())
            rows.append(row)
        return torch.cat(rows), losses

    def routing_probes(self) -> list[RoutingProbe]:
        """Return the routers, in order: each can be asked about what another is given."""
        return [
            RoutingProbe(f"routers.{number}", (f"layers.{2 * number + 1}",), router.foretell)
            for number, router in enumerate(self.routers)
            if isinstance(router, Router)
        ]
