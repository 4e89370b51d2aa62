"""A residual network that leaves out the blocks a sample does not need.

SkipNet (Wang et al., 2018, arXiv 1711.09485): before each residual block a small gate looks at what
the block would be given and says, for every image, whether it runs; a block runs on the images that
want it, and not at all if none does. The gate is hard forward and soft backward (straight through,
section 3.3), and running costs, so that blocks are left out where they do not pay. The paper's
second stage, reinforcement, is left out. A sample shows little of which blocks run before the step.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dynoffload.datasets.images import ImageBatch, digits
from dynoffload.experiments.zoo.building import Output, singly
from dynoffload.profiler.input_features import InputFeatures
from dynoffload.profiler.routing import RoutingProbe

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"width": 32},
    "small": {"width": 64, "stages": 3, "blocks": 6},
    "base": {"width": 128, "stages": 4, "blocks": 9},
}
samples = singly(digits)


class Block(nn.Module):
    """Two convolutions around a residual; norms are over groups, as a batch may be one image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first_norm = nn.GroupNorm(min(8, width), width)
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(min(8, width), width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the block adds to ``[images, width, height, width]``."""
        x = self.first(F.relu(self.first_norm(x)))
        out: Tensor = self.second(F.relu(self.second_norm(x)))
        return out


class Gate(nn.Module):
    """Says for each image whether a block runs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, 16)
        self.out = nn.Linear(16, 1)
        nn.init.constant_(self.out.bias, 1.0)  # at first most run

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[images]``, 0 or 1, with the gradient of the chance."""
        chance = torch.sigmoid(self.out(F.relu(self.hidden(x.mean(dim=(2, 3)))))).squeeze(1)
        hard = (chance > 0.5).to(chance.dtype)
        return hard + (chance - chance.detach())

    def foretell(self, x: Tensor) -> Tensor | None:
        """Return how likely the block would run if ``x`` came here, ``[1]``; None if it cannot."""
        hidden, out = self.hidden, self.out
        if x.shape[1] != hidden.in_features:
            return None
        inner = F.relu(F.linear(x.mean(dim=(2, 3)), hidden.weight, hidden.bias))
        return torch.sigmoid(F.linear(inner, out.weight, out.bias)).amax(dim=0)


class SkipNet(nn.Module):
    """Classifies images.

    Args:
        width: channels of the first stage; each later one has twice as many.
        stages: groups of blocks, each of half the resolution of the one before.
        blocks: residual blocks in a stage.
        channels: of an image.
        classes: how many there are.
        cost: of the loss, what running every block adds.
    """

    def __init__(
        self,
        width: int,
        stages: int = 2,
        blocks: int = 4,
        channels: int = 1,
        classes: int = 10,
        cost: float = 0.1,
    ) -> None:
        super().__init__()
        self.each, self.cost = blocks, cost
        widths = [width * 2**stage for stage in range(stages)]
        self.stem = nn.Conv2d(channels, width, 3, padding=1)
        self.downs = nn.ModuleList(
            nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in pairwise(widths)
        )
        self.gates = nn.ModuleList(Gate(width) for width in widths for _ in range(blocks))
        self.blocks = nn.ModuleList(Block(width) for width in widths for _ in range(blocks))
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, batch: ImageBatch) -> Output:
        """Classify ``batch.images``, ``[images, channels, height, width]``."""
        x, gates = self.stem(batch.images), []
        for index, (gate, block) in enumerate(zip(self.gates, self.blocks, strict=True)):
            if index and index % self.each == 0:
                x = self.downs[index // self.each - 1](x)
            runs = gate(x)
            gates.append(runs)
            wanted = torch.where(runs > 0.5)[0]
            if len(wanted):
                added = block(x[wanted]) * runs[wanted, None, None, None]
                x = x.index_add(0, wanted, added)
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        loss = F.cross_entropy(logits, batch.labels) + self.cost * torch.stack(gates).mean()
        return Output(loss, logits)

    def sample_features(self, batch: ImageBatch) -> InputFeatures:
        """Describe images by how much ink they have, and how it is spread."""
        return batch.described()

    def routing_probes(self) -> list[RoutingProbe]:
        """Return the gates, in order: each can be asked about what another is given."""
        return [
            RoutingProbe(f"gates.{number}", (f"blocks.{number}",), gate.foretell)
            for number, gate in enumerate(self.gates)
            if isinstance(gate, Gate)
        ]
