"""A Switch Transformer language model: one expert per token, in every other layer.

A decoder whose feed-forward network is, in every other layer, one of many experts (Fedus, Zoph and
Shazeer, 2022, arXiv 2101.03961, section 2). A token goes to its likeliest expert, whose output is
scaled by that probability. An expert takes at most its capacity of tokens; the rest skip it by the
residual. Experts are modules, called in ascending order if any token goes there. The paper's jitter
of the router's input is left out.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dynoffload.experiments.zoo.building import texts
from dynoffload.experiments.zoo.moe_lm import Decoder, Layer, Routed

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
    """Two linear layers with a ReLU between, dense or as an expert."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[tokens, hidden]`` for an input of that shape."""
        out: Tensor = self.down(F.relu(self.up(x)))
        return out


class Switch(Routed):
    """Experts with a router that selects the likeliest for each token, up to the capacity."""

    def __init__(self, hidden: int, width: int, experts: int, capacity: float) -> None:
        super().__init__(hidden, experts, 1, lambda: FeedForward(hidden, width))
        self.capacity = capacity

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Run the experts that any token goes to, in ascending order.

        Args:
            x: ``[tokens, hidden]``.

        Returns:
            The experts' outputs, ``[tokens, hidden]``, zeros for tokens above the capacity, and the
            balancing loss, a scalar.
        """
        chance, chosen, balance = self.chosen(x)
        room = max(1, math.ceil(self.capacity * len(x) / len(self.experts)))
        mixed = torch.zeros_like(x)
        for index in sorted(set(chosen.flatten().tolist())):
            token = torch.where(chosen[:, 0] == index)[0][:room]
            out = self.experts[index](x[token]) * chance[token]
            mixed.index_copy_(0, token, out.to(mixed.dtype))
        return mixed, balance


class SwitchLM(Decoder):
    """The language model; every other layer has experts; see `Decoder`.

    Args:
        experts: per layer that has them.
        width: hidden width of an expert, and of a dense feed-forward network.
        capacity: maximum tokens of an expert, as a multiple of its even share.
    """

    def __init__(
        self,
        hidden: int,
        layers: int,
        heads: int,
        experts: int,
        width: int,
        capacity: float = 1.25,
    ) -> None:
        def layer(number: int) -> nn.Module:
            if number % 2:
                return Layer(hidden, heads, lambda: Switch(hidden, width, experts, capacity))
            return Layer(hidden, heads, lambda: FeedForward(hidden, width))

        super().__init__(hidden, layers, heads, layer)
