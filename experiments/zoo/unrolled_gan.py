"""A generative adversarial network whose generator loss unrolls discriminator steps.

An unrolled GAN (Metz et al., 2017, arXiv 1611.02163): before the generator's loss is computed, the
discriminator makes several gradient steps on copies of its weights, through which the generator's
gradient flows back. The sample gives their number. One call returns the sum of both losses, so one
step of one optimizer trains both networks. A forward contains one backward of the discriminator for
each unrolled step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from dynoffload.datasets.images import ImageBatch, digits
from dynoffload.datasets.sources import Split
from dynoffload.experiments.zoo.building import ZooSample
from dynoffload.profiler.input_features import InputFeatures

NOISE = 128
"""Columns of noise in a sample; enough for all presets."""


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"noise": 16, "width": 64},
    "small": {"noise": 64, "width": 768, "layers": 3},
    "base": {"noise": 128, "width": 2048, "layers": 4},
}


class GANOutput(NamedTuple):
    """Result of forward.

    Attributes:
        loss: scalar: sum of the discriminator's and the generator's loss, in nats.
        images: the generated images, ``[images, pixels]``.
    """

    loss: Tensor
    images: Tensor


def _layers(inputs: int, width: int, layers: int, outputs: int) -> nn.Sequential:
    made: list[nn.Module] = []
    for _ in range(layers):
        made += [nn.Linear(inputs, width), nn.Tanh()]
        inputs = width
    return nn.Sequential(*made, nn.Linear(inputs, outputs))


class UnrolledGAN(nn.Module):
    """Generates images, and discriminates them from real ones.

    Args:
        noise: width of the generator's input.
        width: hidden width of both networks.
        layers: hidden layers of each.
        pixels: of an image.
        rate: learning rate of the discriminator's unrolled steps.
    """

    def __init__(
        self, noise: int, width: int, layers: int = 2, pixels: int = 64, rate: float = 0.1
    ) -> None:
        super().__init__()
        if noise > NOISE:
            raise ValueError(f"noise={noise} is more than the {NOISE} columns of a sample")
        self.noise, self.rate = noise, rate
        self.generator = _layers(noise, width, layers, pixels)
        self.discriminator = _layers(pixels, width, layers, 1)

    def forward(self, batch: ImageBatch, noise: Tensor, unrolled: int) -> GANOutput:
        """Return both losses.

        Args:
            batch: real images.
            noise: input of the generator, ``[images, at least self.noise]``; extra columns are
                ignored.
            unrolled: number of discriminator steps to unroll.
        """
        real = batch.images.flatten(1)
        made = torch.sigmoid(self.generator(noise[:, : self.noise]))
        real_logits, made_logits = self.discriminator(real), self.discriminator(made.detach())
        discriminator = _gan_loss(real_logits, made_logits)
        weights = {name: one.detach() for name, one in self.discriminator.named_parameters()}
        for one in weights.values():
            one.requires_grad_()
        for _ in range(unrolled):
            loss = _gan_loss(self._discriminate(weights, real), self._discriminate(weights, made))
            gradients = torch.autograd.grad(loss, tuple(weights.values()), create_graph=True)
            weights = {
                name: one - self.rate * gradient
                for (name, one), gradient in zip(weights.items(), gradients, strict=True)
            }
        judged = self._discriminate(weights, made)
        generator = F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged))
        return GANOutput(discriminator + generator, made.detach())

    def _discriminate(self, weights: dict[str, Tensor], images: Tensor) -> Tensor:
        judged: Tensor = functional_call(self.discriminator, weights, (images,))
        return judged

    def sample_features(self, batch: ImageBatch, noise: Tensor, unrolled: int) -> InputFeatures:
        """Describe a sample by its images and its number of unrolled steps."""
        seen = batch.described()
        return InputFeatures(
            values={**seen.values, "unrolled": float(unrolled)}, elements=seen.elements
        )


def _gan_loss(real: Tensor, made: Tensor) -> Tensor:
    """Return the loss of discriminating real images from generated ones."""
    return F.binary_cross_entropy_with_logits(
        real, torch.ones_like(real)
    ) + F.binary_cross_entropy_with_logits(made, torch.zeros_like(made))


def samples(
    split: Split | str = "train",
    *,
    seed: int = 0,
    most: int = 5,
    rows: int = 8,
) -> Iterator[ZooSample]:
    """Yield handwritten digits, each with noise and the number of steps to unroll.

    Args:
        split: training or held-out digits.
        seed: of the draws.
        most: maximum number of unrolled steps.
        rows: images per batch.
    """
    generator = torch.Generator().manual_seed(seed)
    for batch in digits(split, seed=seed, rows=rows):
        drawn = torch.randn(rows, NOISE, generator=generator)
        unrolled = int(torch.randint(most + 1, (), generator=generator))
        yield ZooSample((batch, drawn, unrolled), batch.source)
