"""Recorded samples with their orders, hints and sites: what pilots learn from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynoffload.planning.blocks import Block
from dynoffload.profiler.experts import split_path
from dynoffload.profiler.input_features import InputFeatures

Floats = npt.NDArray[np.float32]

_LAST_NUMBER = re.compile(r"(?<=\.)\d+((?:\.(?!\d+(?:\.|$))[^.]+)*)$")


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


def sites_of(blocks: Sequence[Block], chosen: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the number of the site each chosen block belongs to.

    Blocks share a site if they are experts of one fused layer, or if their paths differ only in
    the last number: ``layers.0.experts.3.up`` and ``layers.0.experts.4.up``.
    """
    names: dict[str, int] = {}
    sites = []
    for site, part in (split_path(blocks[i].path) for i in chosen):
        sites.append(site if part is not None else _LAST_NUMBER.sub(r"*\1", f".{site}"))
    return np.array([names.setdefault(site, len(names)) for site in sites], np.int64)


def sigmoid(x: Floats) -> Floats:
    """Return 1 / (1 + exp(-x))."""
    return np.asarray(1 / (1 + np.exp(-np.maximum(x, -30))), dtype=np.float32)
