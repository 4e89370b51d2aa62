"""A multi-scale dense network with early exits: it stops at the first confident exit.

MSDNet (Huang et al., 2018, arXiv 1703.09844): every layer computes features at all scales from
those of all earlier layers, so coarse features exist from the start. A classifier after each block
gets the coarsest scale. In training, as in inference, a batch stops at the first exit that is
confident about all its images; the losses of the exits passed have equal weights. The paper's
reduction of scales towards the end is left out. How far a sample runs depends on the weights.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dynoffload.datasets.images import ImageBatch, digits
from dynoffload.experiments.zoo.building import Output, singly
from dynoffload.profiler.input_features import InputFeatures
from dynoffload.profiler.routing import RoutingProbe

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"width": 16, "growth": 8},
    "small": {"width": 32, "growth": 16, "blocks": 6, "layers": 3},
    "base": {"width": 64, "growth": 32, "blocks": 10, "layers": 4},
}
samples = singly(digits)


def _convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution, a norm (over groups, as a batch may be one image) and a ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
        nn.GroupNorm(min(4, outputs), outputs),
        nn.ReLU(),
    )


class First(nn.Module):
    """The first layer: an image at all scales."""

    def __init__(self, channels: int, widths: list[int]) -> None:
        super().__init__()
        inputs = [channels, *widths[:-1]]
        self.convolutions = nn.ModuleList(
            _convolution(a, b, 2 if scale else 1)
            for scale, (a, b) in enumerate(zip(inputs, widths, strict=True))
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the features of ``[images, channels, height, width]``, finest first."""
        features = []
        for convolution in self.convolutions:
            x = convolution(x)
            features.append(x)
        return features


class Layer(nn.Module):
    """Computes new features at each scale from that scale and the next finer one."""

    def __init__(self, widths: list[int], growth: list[int]) -> None:
        super().__init__()
        self.same = nn.ModuleList(
            _convolution(width, more if not scale else more // 2)
            for scale, (width, more) in enumerate(zip(widths, growth, strict=True))
        )
        self.finer = nn.ModuleList(
            _convolution(width, more - more // 2, 2)
            for width, more in zip(widths[:-1], growth[1:], strict=True)
        )

    def forward(self, features: list[Tensor]) -> list[Tensor]:
        """Return the features, with this layer's new channels concatenated."""
        added = [same(x) for same, x in zip(self.same, features, strict=True)]
        for scale, finer in enumerate(self.finer):
            added[scale + 1] = torch.cat((added[scale + 1], finer(features[scale])), dim=1)
        return [torch.cat(pair, dim=1) for pair in zip(features, added, strict=True)]


class MultiScale(nn.Module):
    """Classifies images.

    Args:
        width: channels at the finest scale; each coarser one has twice as many.
        growth: channels that a layer adds at the finest scale; twice as many at each coarser one.
        scales: number of resolutions, each half of the previous one.
        blocks: number of blocks, each with an exit.
        layers: per block.
        channels: of an image.
        classes: number of classes.
        sure: probability of the likeliest class at which an exit is confident.
    """

    def __init__(
        self,
        width: int,
        growth: int,
        scales: int = 3,
        blocks: int = 4,
        layers: int = 2,
        channels: int = 1,
        classes: int = 10,
        sure: float = 0.9,
    ) -> None:
        super().__init__()
        self.sure, self.depth = sure, layers
        widths = [width * 2**scale for scale in range(scales)]
        growing = [growth * 2**scale for scale in range(scales)]
        self.first = First(channels, widths)
        self.blocks, self.exits = nn.ModuleList(), nn.ModuleList()
        for _ in range(blocks):
            made = nn.ModuleList()
            for _ in range(layers):
                made.append(Layer(widths, growing))
                widths = [width + more for width, more in zip(widths, growing, strict=True)]
            self.blocks.append(made)
            self.exits.append(nn.Linear(widths[-1], classes))

    def forward(self, batch: ImageBatch) -> Output:
        """Classify ``batch.images``, ``[images, channels, height, width]``."""
        features, losses = self.first(batch.images), []
        for layers, leave in zip(self.blocks, self.exits, strict=True):
            for layer in layers:  # type: ignore[attr-defined]
                features = layer(features)
            logits: Tensor = leave(features[-1].mean(dim=(2, 3)))
            losses.append(F.cross_entropy(logits, batch.labels))
            if logits.detach().softmax(dim=1).amax(dim=1).min() >= self.sure:
                break
        return Output(torch.stack(losses).mean(), logits)

    def sample_features(self, batch: ImageBatch) -> InputFeatures:
        """Describe images by their amount of ink and its distribution."""
        return batch.described()

    def routing_probes(self) -> list[RoutingProbe]:
        """Return the exits except the last: each decides whether the next block runs."""
        return [
            RoutingProbe(
                f"exits.{number}",
                tuple(f"blocks.{number + 1}.{layer}" for layer in range(self.depth)),
                partial(self._goes_on, number),
            )
            for number in range(len(self.blocks) - 1)
        ]

    def _goes_on(self, number: int, pooled: Tensor) -> Tensor | None:
        """Return the estimated chance that some image passes an exit, ``[layers]``; None for
        features of another width, to which the exit does not apply."""
        leave = self.exits[number]
        if pooled.shape[1] != leave.in_features:
            return None
        logits = F.linear(pooled, leave.weight, leave.bias)  # type: ignore[arg-type]
        surest = logits.softmax(dim=1).amax(dim=1).min()
        return torch.sigmoid(16 * (self.sure - surest)).expand(self.depth)
