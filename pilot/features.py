"""Features: what the pilot's models see of a sample and of a block.

`Example` is one recorded sample with its order, `Scaler` turns a sample's named numbers into a
vector of fixed length, `block_features` a block into its idiom vector, size and place.
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
"""The most named numbers of a sample that the models look at."""
MAX_CENTRE, MIN_SCALE, MAX_SCALE = 100.0, 1e-7, 100.0
"""What centres and scales of numbers on a logarithmic scale can be."""
CLIP = 8.0
"""Scaled numbers farther out than this many deviations are brought back to it."""


@dataclass(frozen=True)
class Example:
    """One sample and the order in which it ran the blocks.

    Attributes:
        sample: what was seen before the step.
        blocks: indices into the vocabulary in forward order; -1 for a block unknown to it.
        source: the file or document the sample is from, so that splits hold whole sources out.
        hints: what the network foretold of its decisions while it ran, in order.
    """

    sample: InputFeatures
    blocks: Sequence[int]
    source: str = ""
    hints: Sequence[BlockHint] = ()


@dataclass(frozen=True)
class BlockHint:
    """What the network foretold at one moment of a step.

    Attributes:
        place: how many blocks had begun by then.
        blocks: the blocks it is about.
        values: how likely each is to run, 0 to 1.
    """

    place: int
    blocks: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Scaler:
    """Names and scales of the numbers a model looks at.

    Attributes:
        names: the sample's values used, besides its number of elements.
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
        """Read a scaler back.

        Raises:
            ValueError: if the data is not a scaler's.
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
    """Choose the numbers that vary between samples and scale them to mean 0, deviation 1."""
    names = sorted({name for sample in samples for name in sample.values})
    varying = [n for n in names if len({sample.values.get(n, 0.0) for sample in samples}) > 1]
    kept = tuple(varying[:MAX_VALUES])
    points = np.stack([_numbers(sample, kept) for sample in samples])
    scale = points.std(axis=0)
    scale[scale < 1e-6] = 1.0
    return Scaler(kept, points.mean(axis=0), scale)


def _numbers(sample: InputFeatures, names: Sequence[str]) -> Floats:
    """Return the size of a sample and its values, on a signed logarithmic scale."""
    values = [float(len(sample.elements)), *(sample.values.get(name, 0.0) for name in names)]
    numbers = np.nan_to_num(np.array(values, dtype=np.float64), nan=0.0, posinf=1e30, neginf=-1e30)
    return (np.sign(numbers) * np.log1p(np.abs(numbers))).astype(np.float32)


def block_features(blocks: Sequence[Block], chosen: Sequence[int]) -> Floats:
    """Return the idiom-encoded blocks, ``[chosen, 9]``, each column of mean 0 and deviation 1.

    Columns: log of each of the six idiom counts, log of the bytes of the block and of its
    activations, and its place in the vocabulary.
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
    """Return where each run of one site ends, of the sites of blocks ``[blocks]``."""
    return (*(np.flatnonzero(np.diff(sites)) + 1).tolist(), len(sites))


def sigmoid(x: Floats) -> Floats:
    """Return 1 / (1 + exp(-x))."""
    return np.asarray(1 / (1 + np.exp(-np.maximum(x, -30))), dtype=np.float32)
