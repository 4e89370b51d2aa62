"""Draws the arguments of one forward for each kind of network in transformers, in tiny sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

WORDS = 64
"""Size of the vocabularies."""


def _tokens(generator: torch.Generator, rows: int = 2, longest: int = 12) -> Tensor:
    length = int(torch.randint(longest // 2, longest, (), generator=generator))
    return torch.randint(3, WORDS, (rows, length), generator=generator)


def language(generator: torch.Generator, config: Any) -> dict[str, Tensor]:
    ids = _tokens(generator)
    return {"input_ids": ids, "labels": ids}


def translation(generator: torch.Generator, config: Any) -> dict[str, Tensor]:
    return {"input_ids": _tokens(generator), "labels": _tokens(generator)}


def classes(generator: torch.Generator, config: Any) -> dict[str, Tensor]:
    return {
        "input_ids": _tokens(generator),
        "labels": torch.randint(0, 2, (2,), generator=generator),
    }


def _pixels(generator: torch.Generator, config: Any) -> Tensor:
    size = getattr(config, "image_size", 32)
    return torch.randn(2, 3, size, size, generator=generator)


def image(generator: torch.Generator, config: Any) -> dict[str, Tensor]:
    return {
        "pixel_values": _pixels(generator, config),
        "labels": torch.randint(0, 2, (2,), generator=generator),
    }


def masked_image(generator: torch.Generator, config: Any) -> dict[str, Tensor]:
    return {"pixel_values": _pixels(generator, config)}


def image_and_text(generator: torch.Generator, config: Any) -> dict[str, Any]:
    return {
        "pixel_values": _pixels(generator, config.vision_config),
        "input_ids": torch.randint(3, WORDS, (2, 6), generator=generator),
        "return_loss": True,
    }


def wave(generator: torch.Generator, config: Any) -> dict[str, Tensor]:
    length = int(torch.randint(300, 450, (), generator=generator))
    return {
        "input_values": torch.randn(2, length, generator=generator),
        "labels": torch.randint(1, 20, (2, 3), generator=generator),
    }


def spectrum(generator: torch.Generator, config: Any) -> dict[str, Tensor]:
    frames = 2 * config.max_source_positions
    return {
        "input_features": torch.randn(2, config.num_mel_bins, frames, generator=generator),
        "labels": _tokens(generator),
    }


def spectrogram(generator: torch.Generator, config: Any) -> dict[str, Tensor]:
    return {
        "input_values": torch.randn(2, config.max_length, config.num_mel_bins, generator=generator),
        "labels": torch.randint(0, 2, (2,), generator=generator),
    }


def protein(generator: torch.Generator, config: Any) -> dict[str, Tensor]:
    length = int(torch.randint(6, 10, (), generator=generator))
    return {"input_ids": torch.randint(0, 20, (1, length), generator=generator)}
