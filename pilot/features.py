"""Features of samples and blocks: the inputs of the pilot's models.

`Example` is one recorded sample with its order. `Scaler` turns a sample's named numbers into a
vector of fixed length; `block_features` turns a block into its idiom counts, sizes and place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dynoffload.planning.blocks import Block
from dynoffload.profiler.input_features import InputFeatures

Floats = npt.NDArray[np.float32]

MAX_VALUES = 32
"""The most named numbers of a sample that the models use."""
MAX_CENTRE, MIN_SCALE, MAX_SCALE = 100.0, 1e-7, 100.0
"""Valid range of centres (magnitude) and scales, on a logarithmic scale."""
CLIP = 8.0
"""Scaled numbers are clipped to this many standard deviations."""


@dataclass(frozen=True)
class Example:
    """One sample and the order in which it ran the blocks.

    Attributes:
        sample: input features, known before the step.
        blocks: indices into the vocabulary in forward order; -1 for a block unknown to it.
        source: the file or document the sample is from, so that splits hold out whole sources.
        hints: the network's routing hints during the step, in order.
    """

    sample: InputFeatures
    blocks: Sequence[int]
    source: str = ""
    hints: Sequence[BlockHint] = ()


@dataclass(frozen=True)
class BlockHint:
    """A routing hint, in blocks of the vocabulary.

    Attributes:
        place: number of blocks that had begun when it was given.
        blocks: the blocks it is about.
        values: probability that each runs, 0 to 1.
    """

    place: int
    blocks: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Scaler:
    """Names and scales of the numbers a model uses.

    Attributes:
        names: names of the sample's values used, in addition to its number of elements.
        centre: ``[1 + names]``.
        scale: ``[1 + names]``, none zero.
    """

    names: tuple[str, ...]
    centre: Floats
    scale: Floats

    def __call__(self, sample: InputFeatures) -> Floats:
        """Return a sample's numbers, scaled, ``[1 + names]``."""
        scaled = (_numbers(sample, self.names) - self.centre) / self.scale
        return np.asarray(np.clip(scaled, -CLIP, CLIP), dtype=np.float32)

    def __len__(self) -> int:
        """Return the length of the vector."""
        return 1 + len(self.names)

    def to_json(self) -> dict[str, Any]:
        """Return the scaler as plain JSON data."""
        return {
            "names": list(self.names),
            "centre": self.centre.tolist(),
            "scale": self.scale.tolist(),
        }

    @classmethod
    def from_json(cls, data: Any) -> Scaler:
        """Return the scaler from what `to_json` returned.

        Raises:
            ValueError: if the data is not a valid scaler.
        """
        names = tuple(str(name) for name in data["names"])
        centre = np.array(data["centre"], dtype=np.float32)
        scale = np.array(data["scale"], dtype=np.float32)
        good = centre.shape == scale.shape == (1 + len(names),) and len(names) <= MAX_VALUES
        good = good and bool((np.abs(centre) <= MAX_CENTRE).all())
        good = good and bool(((scale >= MIN_SCALE) & (scale <= MAX_SCALE)).all())
        if not good:
            raise ValueError("a scaler of the wrong shape")
        return cls(names, centre, scale)


def learn_scaler(samples: Sequence[InputFeatures]) -> Scaler:
    """Choose the numbers that vary between samples; scale them to mean 0, deviation 1."""
    names = sorted({name for sample in samples for name in sample.values})
    varying = [n for n in names if len({sample.values.get(n, 0.0) for sample in samples}) > 1]
    kept = tuple(varying[:MAX_VALUES])
    points = np.stack([_numbers(sample, kept) for sample in samples])
    scale = points.std(axis=0)
    scale[scale < 1e-6] = 1.0
    return Scaler(kept, points.mean(axis=0), scale)


def _numbers(sample: InputFeatures, names: Sequence[str]) -> Floats:
    """Return a sample's number of elements and its values, on a signed logarithmic scale."""
    values = [float(len(sample.elements)), *(sample.values.get(name, 0.0) for name in names)]
    numbers = np.nan_to_num(np.array(values, dtype=np.float64), nan=0.0, posinf=1e30, neginf=-1e30)
    return (np.sign(numbers) * np.log1p(np.abs(numbers))).astype(np.float32)


def block_features(blocks: Sequence[Block], chosen: Sequence[int]) -> Floats:
    """Return the features of blocks, ``[chosen, 9]``, each column of mean 0 and deviation 1.

    Columns: log(1 + n) of each of the six idiom counts, of the block's bytes and of its activation
    bytes, and its index in the vocabulary.
    """
    rows = [
        [*map(float, blocks[i].idioms), float(blocks[i].nbytes), float(blocks[i].activation_bytes)]
        for i in chosen
    ]
    counts = np.log1p(np.array(rows, dtype=np.float64).reshape(len(rows), 8))
    place = np.array(chosen, dtype=np.float64)[:, None]
    columns = np.concatenate([counts, place], axis=1)
    if not len(columns):
        return columns.astype(np.float32)
    deviation = columns.std(axis=0)
    deviation[deviation < 1e-9] = 1.0
    return np.asarray((columns - columns.mean(axis=0)) / deviation, dtype=np.float32)


def sites_of(blocks: Sequence[Block], chosen: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the number of the site each chosen block belongs to.

    Blocks whose paths differ only in a last number (the experts of one layer) share a site.
    """
    names: dict[str, int] = {}
    parts = [blocks[i].path.rpartition(".") for i in chosen]
    sites = [head if tail.isdigit() else head + dot + tail for head, dot, tail in parts]
    return np.array([names.setdefault(site, len(names)) for site in sites], np.int64)


def site_stops(sites: npt.NDArray[np.int64]) -> tuple[int, ...]:
    """Return where each run of equal sites ends, for the sites of blocks ``[blocks]``."""
    return (*(np.flatnonzero(np.diff(sites)) + 1).tolist(), len(sites))


def sigmoid(x: Floats) -> Floats:
    """Return 1 / (1 + exp(-x))."""
    return np.asarray(1 / (1 + np.exp(-np.maximum(x, -30))), dtype=np.float32)
