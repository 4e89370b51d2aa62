"""A network that runs at the width its sample requests.

A slimmable network (Yu et al., 2019, arXiv 1812.08928). The channels of each layer come in groups,
and a sample requests a number of groups. A narrow run uses the first groups of a wide one, with
separate norms for each width (section 3.2). Each group is a module with the weights from all groups
before it, so a narrow sample touches no weights of the groups that it skips.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dynoffload.datasets.images import ImageBatch, digits
from dynoffload.datasets.sources import Split
from dynoffload.experiments.zoo.building import Output, ZooSample
from dynoffload.profiler.input_features import InputFeatures

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"group": 16},
    "small": {"group": 32, "layers": 8},
    "base": {"group": 64, "groups": 8, "layers": 10},
}


class Group(nn.Module):
    """A convolution that belongs to a layer's n-th group: from the first n input groups to the n-th
    output group, or from the n-th input group to the earlier output groups."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[images, outputs, height, width]``."""
        out: Tensor = self.convolution(x)
        return out


class Layer(nn.Module):
    """Groups of channels, of which the requested number runs, and a norm for each width."""

    def __init__(self, inputs: list[int], outputs: list[int], stride: int) -> None:
        super().__init__()
        # The n-th group adds one input group and one output group to a layer: its modules have
        # the weights of both (``rows`` of the output group, ``columns`` of the input group).
        self.rows = nn.ModuleList(
            Group(sum(inputs[: n + 1]), width, stride) for n, width in enumerate(outputs)
        )
        self.columns = nn.ModuleList(
            Group(width, sum(outputs[:n]), stride) for n, width in enumerate(inputs) if n
        )
        self.norms = nn.ModuleList(
            nn.GroupNorm(n + 1, sum(outputs[: n + 1])) for n in range(len(outputs))
        )

    def forward(self, groups: list[Tensor], wide: int) -> list[Tensor]:
        """Return ``wide`` groups of channels for as many input groups, or for an image."""
        made: list[Tensor] = []
        for n in range(wide):
            row = self.rows[n](torch.cat(groups[: n + 1], dim=1))
            if n and n < len(groups):
                column = self.columns[n - 1](groups[n])
                sizes = [one.shape[1] for one in made]
                made = [a + b for a, b in zip(made, column.split(sizes, dim=1), strict=True)]
            made.append(row)
        sizes = [one.shape[1] for one in made]
        normed = F.relu(self.norms[wide - 1](torch.cat(made, dim=1)))
        return list(normed.split(sizes, dim=1))  # type: ignore[no-untyped-call]


class Slimmable(nn.Module):
    """Classifies images.

    Args:
        group: channels per group of the first layer.
        groups: per layer; also the number of widths.
        layers: number of layers; every other one halves the sides, then channels double.
        channels: of an image.
        classes: number of classes.
    """

    def __init__(
        self, group: int, groups: int = 4, layers: int = 4, channels: int = 1, classes: int = 10
    ) -> None:
        super().__init__()
        self.groups = groups
        inputs, self.layers = [channels], nn.ModuleList()
        for index in range(layers):
            outputs = [group * 2 ** (index // 2)] * groups
            self.layers.append(Layer(inputs, outputs, 2 if index % 2 else 1))
            inputs = outputs
        self.heads = nn.ModuleList(nn.Linear(width, classes) for width in inputs)

    def forward(self, batch: ImageBatch, groups: int) -> Output:
        """Classify ``batch.images``, ``[images, channels, height, width]``, at a width.

        Args:
            batch: images and their classes.
            groups: number of groups that run in each layer, from 1 to all.
        """
        if not 1 <= groups <= self.groups:
            raise ValueError(f"groups={groups} must lie between 1 and {self.groups}")
        features = [batch.images]
        for layer in self.layers:
            features = layer(features, groups)
        pooled = [one.mean(dim=(2, 3)) for one in features]
        heads = [head(one) for head, one in zip(self.heads, pooled, strict=False)]
        logits = torch.stack(heads).sum(dim=0)
        return Output(F.cross_entropy(logits, batch.labels), logits)

    def sample_features(self, batch: ImageBatch, groups: int) -> InputFeatures:
        """Describe images, and the width they request."""
        seen = batch.described()
        return InputFeatures(
            values={**seen.values, "groups": float(groups)}, elements=seen.elements
        )


def samples(
    split: Split | str = "train", *, seed: int = 0, groups: int = 4, **shape: int
) -> Iterator[ZooSample]:
    """Yield handwritten digits, each with a width.

    Args:
        split: training or held-out digits.
        seed: of the draws.
        groups: the largest width.
        shape: as for `dynoffload.datasets.images.digits`.
    """
    generator = np.random.default_rng((seed, groups))
    for batch in digits(split, seed=seed, **shape):
        yield ZooSample((batch, int(generator.integers(1, groups + 1))), batch.source)
