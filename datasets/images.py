"""Images with their classes: scikit-learn's handwritten digits, or a folder of one's own.

What it is: endless, seeded streams of batches: `digits`, of the 1,797 digits of 8 by 8 pixels of
the UCI Optical Recognition of Handwritten Digits data set (Alpaydin and Kaynak, 1998), and
`folder`, of images in one folder for each class. What it is not: augmented.

How it fits: each batch names its images, so that whoever records or scores steps can hold some out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dynoffload.datasets.sources import HELD_OUT_OF_TEN, DataError, Split
from dynoffload.profiler.sample import MAX_ELEMENTS, Sample

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
"""Files that a folder of images is made of."""

_LEVELS = 16  # of a pixel, as a feature


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

    def described(self) -> Sample:
        """Describe the images by their number, and how bright they are, and by their pixels.

        Returns:
            A sample whose elements are int64 ``[pixels, 2]``: each pixel's place and its level, of
            sixteen, over the images.
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
        return Sample(values=values, elements=codes.cpu().numpy())


def digits(
    split: Split | str = Split.TRAIN, *, rows: int = 1, seed: int = 0
) -> Iterator[ImageBatch]:
    """Yield digits for ever, the same ones for the same arguments.

    Args:
        split: training or held-out digits, by the hash of their numbers.
        rows: images per batch.
        seed: of the draws.

    Raises:
        DataError: scikit-learn, which brings them, is not installed.
        ValueError: rows is not positive.
    """
    if rows < 1:
        raise ValueError(f"a batch has at least one image, not {rows}")
    images, labels = _digits()
    wanted = Split(split)
    numbers = [n for n in range(len(labels)) if _split_of(f"digit {n}") is wanted]
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


def _split_of(name: str) -> Split:
    digest = hashlib.sha256(name.encode()).digest()
    return Split.HELD_OUT if digest[0] % 10 < HELD_OUT_OF_TEN else Split.TRAIN


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


def folder(
    root: str | Path,
    split: Split | str = Split.TRAIN,
    *,
    rows: int = 1,
    side: int = 32,
    seed: int = 0,
) -> Iterator[ImageBatch]:
    """Yield images of a folder that has one folder for each class, for ever.

    Args:
        root: its folders' names, in order, are the classes.
        split: training or held-out images, by the hash of their paths.
        rows: images per batch.
        side: to which each is scaled.
        seed: of the draws.

    Raises:
        DataError: there is no such folder, it has no images of that split, or a file is none.
        ValueError: rows or side is not positive.
    """
    if rows < 1 or side < 1:
        raise ValueError(f"a batch has images with pixels, not {rows} of {side}")
    top, wanted = Path(root), Split(split)
    if not top.is_dir():
        raise DataError(f"the folder of images {top} does not exist; point root at one")
    classes = sorted(one for one in top.iterdir() if one.is_dir())
    files = [
        (path, label)
        for label, one in enumerate(classes)
        for path in sorted(one.rglob("*"))
        if path.suffix.lower() in SUFFIXES and _split_of(path.relative_to(top).as_posix()) is wanted
    ]
    if not files:
        raise DataError(
            f"no {wanted.value} image below the {len(classes)} folders of {top}: it needs a folder "
            f"for each class with files that end in {', '.join(SUFFIXES)}"
        )
    return _read(top, files, rows, side, seed)


def _read(
    top: Path, files: Sequence[tuple[Path, int]], rows: int, side: int, seed: int
) -> Iterator[ImageBatch]:
    generator = np.random.default_rng(seed)

    @lru_cache(maxsize=1024)
    def image(pick: int) -> npt.NDArray[np.float32]:
        try:
            from PIL import Image, UnidentifiedImageError
        except ImportError as error:
            raise DataError(
                "images of a folder need Pillow, which is not installed: pip install pillow"
            ) from error

        path = files[pick][0]
        try:
            with Image.open(path) as opened:
                scaled = opened.convert("RGB").resize((side, side))
        except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            why = getattr(error, "strerror", None) or error
            raise DataError(
                f"{path} cannot be read as an image ({why}); take it out of the folder"
            ) from error
        return np.asarray(np.asarray(scaled).transpose(2, 0, 1) / 255, dtype=np.float32)

    while True:
        picks = generator.integers(len(files), size=rows)
        yield ImageBatch(
            torch.from_numpy(np.stack([image(int(pick)) for pick in picks])),
            torch.tensor([files[pick][1] for pick in picks]),
            "+".join(dict.fromkeys(files[pick][0].relative_to(top).as_posix() for pick in picks)),
        )
