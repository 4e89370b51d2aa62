"""Features of samples and blocks: the inputs of the pilot's models.

`Example` is one recorded sample with its order. Nothing is scaled, as trees only compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynoffload.planning.blocks import Block
from dynoffload.profiler.experts import split_path
from dynoffload.profiler.input_features import InputFeatures

Floats = npt.NDArray[np.float32]

MAX_VALUES = 32
"""The most named numbers of a sample that the models use."""
LARGEST = 3e38
"""The largest magnitude of a number of a sample; larger ones are cut off."""


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


def varying_numbers(samples: Sequence[InputFeatures]) -> tuple[str, ...]:
    """Return the names of the numbers that vary between samples, at most `MAX_VALUES`."""
    names = sorted({name for sample in samples for name in sample.values})
    varying = [n for n in names if len({sample.values.get(n, 0.0) for sample in samples}) > 1]
    return tuple(varying[:MAX_VALUES])


def numbers_of(sample: InputFeatures, names: Sequence[str]) -> Floats:
    """Return a sample's number of elements and its named numbers, ``[1 + names]``; 0 if missing."""
    values = [float(len(sample.elements)), *(sample.values.get(name, 0.0) for name in names)]
    limited = np.clip(np.array(values, dtype=np.float64), -LARGEST, LARGEST)
    return np.nan_to_num(limited).astype(np.float32)


def block_features(blocks: Sequence[Block], chosen: Sequence[int]) -> Floats:
    """Return the features of blocks, ``[chosen, 9]``: log(1 + n) of each of the six idiom counts,
    of the block's bytes and of its activation bytes, and its place in the vocabulary."""
    rows = [(*blocks[i].idioms, blocks[i].nbytes, blocks[i].activation_bytes) for i in chosen]
    counts = np.log1p(np.array(rows, dtype=np.float64).reshape(len(rows), 8))
    return np.column_stack((counts, np.array(chosen) / len(blocks))).astype(np.float32)


def sites_of(blocks: Sequence[Block], chosen: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the number of the site each chosen block belongs to.

    The experts of one layer share a site: those of a fused layer, and modules whose paths differ
    only in a last number.
    """
    names: dict[str, int] = {}
    sites = []
    for site, part in (split_path(blocks[i].path) for i in chosen):
        head, _, tail = site.rpartition(".")
        sites.append(head if part is None and tail.isdigit() else site)
    return np.array([names.setdefault(site, len(names)) for site in sites], np.int64)


def site_stops(sites: npt.NDArray[np.int64]) -> tuple[int, ...]:
    """Return where each run of equal sites ends, for the sites of blocks ``[blocks]``."""
    return (*(np.flatnonzero(np.diff(sites)) + 1).tolist(), len(sites))


def sigmoid(x: Floats) -> Floats:
    """Return 1 / (1 + exp(-x))."""
    return np.asarray(1 / (1 + np.exp(-np.maximum(x, -30))), dtype=np.float32)
