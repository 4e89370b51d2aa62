"""A residual network that leaves out the blocks a sample does not need.

What it is: SkipNet (Wang et al., 2018, arXiv 1711.09485): before each residual block a small gate
looks at what the block would be given and says, for every image, whether it runs; a block runs on
the images that want it, and not at all if none does. The gate is hard forward and soft backward
(straight through, section 3.3), and running costs, so that blocks are left out where they do not
pay. What it is not: trained by reinforcement, the paper's second stage; nor does an image that
leaves a block out teach its gate what the block would have added, as the block is not run.

How it fits: it knows nothing of offloading. Which blocks run depends on what the network has
learned; a sample shows little of it before the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dynoffload.datasets.images import ImageBatch, digits
from dynoffload.datasets.sources import Split
from dynoffload.experiments.zoo.building import ZooSample, built
from dynoffload.profiler.input_features import InputFeatures
from dynoffload.profiler.routing import RoutingProbe


@dataclass(frozen=True)
class SkipConfig:
    """The sizes of a network.

    Attributes:
        width: channels of the first stage; each later one has twice as many.
        stages: groups of blocks, each of half the resolution of the one before.
        blocks: residual blocks in a stage.
        channels: of an image.
        classes: how many there are.
        cost: of the loss, what running every block adds.
        seed: of the initial weights.
    """

    width: int
    stages: int = 2
    blocks: int = 4
    channels: int = 1
    classes: int = 10
    cost: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes that make no network."""
        if min(self.width, self.stages, self.blocks) < 1:
            raise ValueError(
                f"width={self.width}, stages={self.stages} and blocks={self.blocks} must be at "
                "least 1"
            )


PRESETS: dict[str, SkipConfig] = {
    "tiny": SkipConfig(width=32),
    "small": SkipConfig(width=64, stages=3, blocks=6),
    "base": SkipConfig(width=128, stages=4, blocks=9),
}
"""Sizes by name."""


class SkipOutput(NamedTuple):
    """What a forward pass returns.

    Attributes:
        loss: scalar: cross entropy in nats, and what running costs.
        logits: ``[images, classes]``.
        ran: share of the blocks that ran, over images, a scalar.
    """

    loss: Tensor
    logits: Tensor
    ran: Tensor


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
    """Classifies images."""

    def __init__(self, config: SkipConfig) -> None:
        super().__init__()
        self.config = config
        widths = [config.width * 2**stage for stage in range(config.stages)]
        self.stem = nn.Conv2d(config.channels, config.width, 3, padding=1)
        self.downs = nn.ModuleList(
            nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in pairwise(widths)
        )
        self.gates = nn.ModuleList(Gate(width) for width in widths for _ in range(config.blocks))
        self.blocks = nn.ModuleList(Block(width) for width in widths for _ in range(config.blocks))
        self.head = nn.Linear(widths[-1], config.classes)

    def forward(self, batch: ImageBatch) -> SkipOutput:
        """Classify ``batch.images``, ``[images, channels, height, width]``."""
        x, gates = self.stem(batch.images), []
        for index, (gate, block) in enumerate(zip(self.gates, self.blocks, strict=True)):
            if index and index % self.config.blocks == 0:
                x = self.downs[index // self.config.blocks - 1](x)
            runs = gate(x)
            gates.append(runs)
            wanted = torch.where(runs > 0.5)[0]
            if len(wanted):
                added = block(x[wanted]) * runs[wanted, None, None, None]
                x = x.index_add(0, wanted, added)
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        ran = torch.stack(gates).mean()
        loss = F.cross_entropy(logits, batch.labels) + self.config.cost * ran
        return SkipOutput(loss, logits, ran.detach())

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


def build(
    preset: str = "tiny", *, device: str | torch.device = "cpu", **overrides: float
) -> SkipNet:
    """Return a network of the sizes in `PRESETS`; see `built`."""
    return built(SkipNet, PRESETS, preset, device, overrides)


def samples(split: Split | str = "train", *, seed: int = 0, **shape: int) -> Iterator[ZooSample]:
    """Yield handwritten digits; see `dynoffload.datasets.images.digits` for ``shape``."""
    return (ZooSample((batch,), batch.source) for batch in digits(split, seed=seed, **shape))
