"""Labelled images: an endless, seeded stream of scikit-learn's handwritten digits.

These are the 1,797 digits of 8 by 8 pixels of the UCI Optical Recognition of Handwritten Digits
data set (Alpaydin and Kaynak, 1998). Each batch names its images, so that some can be held out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dynoffload.datasets.sources import DataError, Split, split_of
from dynoffload.profiler.input_features import MAX_ELEMENTS, InputFeatures

_LEVELS = 16  # grey levels of a pixel, as a feature


@dataclass(frozen=True)
class ImageBatch:
    """Images and their classes.

    Attributes:
        images: float32 ``[images, channels, height, width]``, from 0 to 1.
        labels: int64 ``[images]``.
        source: the images' names.
    """

    images: Tensor
    labels: Tensor
    source: str

    def described(self) -> InputFeatures:
        """Return the images' number, size and brightness, and their pixels, as input features.

        Returns:
            A sample whose elements are int64 ``[pixels, 2]``: the position and the grey level (of
            sixteen) of each pixel of all images.
        """
        count, _, height, width = self.images.shape
        grey = self.images.mean(dim=1).flatten(1)
        levels = (grey * (_LEVELS - 1)).round().long()
        places = torch.arange(height * width, device=levels.device).expand_as(levels)
        codes = torch.stack((places, levels), dim=2).flatten(0, 1)[:MAX_ELEMENTS]
        values = {
            "images": float(count),
            "height": float(height),
            "width": float(width),
            "mean": float(grey.mean()),
            "deviation": float(grey.std()),
        }
        return InputFeatures(values=values, elements=codes.cpu().numpy())


def digits(
    split: Split | str = Split.TRAIN, *, rows: int = 1, seed: int = 0
) -> Iterator[ImageBatch]:
    """Yield digits endlessly, the same ones for the same arguments.

    Args:
        split: training or held-out digits, by the hash of their numbers.
        rows: images per batch.
        seed: seed of the draws.

    Raises:
        DataError: scikit-learn, which contains them, is not installed.
        ValueError: rows is not positive.
    """
    if rows < 1:
        raise ValueError(f"a batch has at least one image, not {rows}")
    images, labels = _digits()
    wanted = Split(split)
    numbers = [n for n in range(len(labels)) if split_of(f"digit {n}") is wanted]
    return _draw(images[:, None], labels, numbers, rows, seed)


@lru_cache(maxsize=1)
def _digits() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            "the digits come with scikit-learn, which is not installed: pip install scikit-learn"
        ) from error
    found = load_digits()
    return (found.images / 16).astype(np.float32), found.target.astype(np.int64)


def _draw(
    images: npt.NDArray[np.float32],
    labels: npt.NDArray[np.int64],
    numbers: Sequence[int],
    rows: int,
    seed: int,
) -> Iterator[ImageBatch]:
    generator = np.random.default_rng(seed)
    while True:
        picks = generator.choice(numbers, size=rows)
        yield ImageBatch(
            torch.from_numpy(images[picks]),
            torch.from_numpy(labels[picks]),
            "+".join(f"digit {n}" for n in dict.fromkeys(picks.tolist())),
        )
