"""The nearest recorded paths: what samples like this one ran.

What it is: `NearestPaths`, which keeps recorded samples as vectors, with what each ran, and answers
with the mean of the nearest, weighed by their distance. A sample's vector is made of its scaled
numbers and of how often each of its elements' codes occurs, folded into a fixed width by signs that
follow from a hash (Weinberger et al., 2009, "Feature hashing for large scale multitask learning",
arXiv 0902.2206). What it is not: a compression; a prediction looks at every record, so there are
at most `MAX_RECORDS`.

How it fits: one of the models of `dynoffload.pilot.models`. How many neighbours count, and how much
the codes weigh beside the numbers, is chosen by leaving whole sources out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dynoffload.pilot.artifact import checked_weights
from dynoffload.pilot.codes import columns_of, hash_prefixes
from dynoffload.pilot.features import Floats, Scaler, learn_scaler
from dynoffload.profiler.sample import Sample

MAX_RECORDS = 2048
"""The most records that are kept, the latest ones."""
FOLDED = 64
"""The width that codes are folded into."""
NEIGHBOURS = (1, 2, 4, 8, 16, 32, 64)
WEIGHTS = (0.0, 0.3, 1.0, 3.0)
"""What is tried: records that count, and the weight of codes beside numbers."""

_CHUNK = 64  # records whose neighbours are held at once
_ORDERS = 2  # a code, and a code with the one before it


@dataclass(frozen=True)
class NearestPaths:
    """Recorded samples, and what each ran.

    Attributes:
        scaler: of a sample's numbers.
        codes: the weight of the codes' part of a vector.
        neighbours: how many records count.
        points: the records' vectors, float32 ``[records, numbers + FOLDED]``.
        packed: what each ran, a bit for each optional block, uint8 ``[records, bytes]``.
        blocks: how many optional blocks there are.
    """

    scaler: Scaler
    codes: float
    neighbours: int
    points: Floats
    packed: npt.NDArray[np.uint8]
    blocks: int

    kind = "paths"

    def probabilities(self, sample: Sample) -> Floats:
        """Return P(the block runs) for each optional block, float32 ``[blocks]``."""
        point = _vector(sample, self.scaler, self.codes)
        nearest, weights = _nearest(self.points, point, self.neighbours)
        ran = np.unpackbits(self.packed[nearest], axis=1, count=self.blocks)
        return np.asarray(weights @ ran.astype(np.float32), dtype=np.float32)

    def rest(self, sample: Sample) -> None:
        """Return None: what has run tells this model nothing."""

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the records."""
        return {"points": self.points, "packed": self.packed}

    def document(self) -> dict[str, Any]:
        """Return the rest, as plain JSON data."""
        return {
            "scaler": self.scaler.to_json(),
            "codes": self.codes,
            "neighbours": self.neighbours,
        }

    @classmethod
    def load(
        cls, document: Any, arrays: Mapping[str, npt.NDArray[Any]], blocks: int
    ) -> NearestPaths:
        """Build the model from its stored parts.

        Raises:
            ValueError, KeyError, TypeError: if the parts are not those of such a model.
        """
        scaler = Scaler.from_json(document["scaler"])
        codes, neighbours = float(document["codes"]), int(document["neighbours"])
        points, packed = arrays["points"], arrays["packed"]
        good = points.dtype == np.float32 and packed.dtype == np.uint8
        good = good and points.shape == (len(packed), len(scaler) + FOLDED)
        good = good and packed.shape == (len(packed), -(-blocks // 8))
        good = good and neighbours >= 1 and 0 < len(packed) <= MAX_RECORDS
        if not good or not 0 <= codes <= max(WEIGHTS):
            raise ValueError("records of the wrong shape")
        points = checked_weights("points", points)
        return cls(scaler, codes, neighbours, points, packed, blocks)


def learn_paths(
    samples: Sequence[Sample], present: npt.NDArray[np.bool_], groups: Sequence[str]
) -> NearestPaths:
    """Keep records and choose how to look among them.

    Args:
        samples: one per step.
        present: which optional block ran in which step, ``[steps, blocks]``.
        groups: the source of each step; a record's own source never counts in choosing.
    """
    samples, present = samples[-MAX_RECORDS:], present[-MAX_RECORDS:]
    groups = groups[-MAX_RECORDS:]
    scaler = learn_scaler(samples)
    best: tuple[float, float, int] | None = None
    numbers = np.stack([_vector(sample, scaler, 1.0) for sample in samples])
    other = np.array(groups)[:, None] != np.array(groups)[None]
    if not other.any():
        other = ~np.eye(len(samples), dtype=np.bool_)
    ran = present.astype(np.float32)
    for weight in WEIGHTS:
        points = _weighed(numbers, len(scaler), weight)
        apart = _distances(points, points)
        apart[~other] = np.inf
        order = np.argsort(apart, axis=1, kind="stable")[:, : max(NEIGHBOURS)]
        for count in NEIGHBOURS:
            loss = _loss(apart, order[:, :count], ran)
            if best is None or loss < best[0] - 1e-9:
                best = (loss, weight, count)
    assert best is not None
    _, weight, count = best
    points = _weighed(numbers, len(scaler), weight)
    packed = np.packbits(present, axis=1)
    return NearestPaths(scaler, weight, count, points, packed, present.shape[1])


def _loss(apart: Floats, nearest: npt.NDArray[np.int64], ran: Floats) -> float:
    """Return the mean squared error of the mean of the ``nearest``; unknown where there is none."""
    weights = _weights(np.take_along_axis(apart, nearest, axis=1))
    wrong = 0.0
    for start in range(0, len(ran), _CHUNK):
        rows = slice(start, start + _CHUNK)
        told = np.einsum("rk,rkb->rb", weights[rows], ran[nearest[rows]])
        wrong += float(((told - ran[rows]) ** 2).sum())
    return wrong / max(ran.size, 1)


def _vector(sample: Sample, scaler: Scaler, weight: float) -> Floats:
    """Return a sample's numbers and its folded codes, ``[numbers + FOLDED]``."""
    folded = np.zeros(FOLDED, dtype=np.float32)
    if len(sample.elements):
        hashes = np.concatenate(hash_prefixes(columns_of(sample.elements), _ORDERS))
        unsigned = hashes.view(np.uint64)
        places = (unsigned % np.uint64(FOLDED)).astype(np.int64)
        signs = 1.0 - 2.0 * ((unsigned >> np.uint64(40)) & np.uint64(1)).astype(np.float32)
        np.add.at(folded, places, signs)
        length = float(np.linalg.norm(folded))
        folded /= length if length else 1.0
    return np.concatenate((scaler(sample), np.float32(weight) * folded)).astype(np.float32)


def _weighed(points: Floats, numbers: int, weight: float) -> Floats:
    weighed = points.copy()
    weighed[:, numbers:] *= np.float32(weight)
    return weighed


def _distances(points: Floats, others: Floats) -> Floats:
    squares = (points**2).sum(axis=1)[:, None] + (others**2).sum(axis=1)[None]
    return np.asarray(np.maximum(squares - 2 * points @ others.T, 0.0), dtype=np.float32)


def _nearest(points: Floats, point: Floats, count: int) -> tuple[npt.NDArray[np.int64], Floats]:
    """Return the records nearest to a point, and their weights, which sum to one."""
    apart = ((points - point) ** 2).sum(axis=1)
    count = min(count, len(points))
    chosen = np.argpartition(apart, count - 1)[:count]
    chosen = chosen[np.lexsort((chosen, apart[chosen]))]
    return chosen, _weights(apart[chosen][None])[0]


def _weights(apart: Floats) -> Floats:
    """Return weights that fall with distance, in units of the farthest that counts."""
    finite = np.where(np.isfinite(apart), apart, 0.0)
    scale = np.maximum(finite.max(axis=1, keepdims=True), 1e-12)
    raw = np.where(np.isfinite(apart), np.exp(-4.0 * finite / scale), 0.0)
    total = raw.sum(axis=1, keepdims=True)
    return np.asarray(raw / np.where(total > 0, total, 1.0), dtype=np.float32)
