"""Synthetic protein families: alignments whose columns covary where residues of the fold touch.

An endless, seeded stream of batches for AlphaFold-like networks: a multiple sequence alignment with
masked entries, the distances of the underlying fold, and the number of recycling cycles. Families
are not real proteins; each is drawn by its number from the model below. Samples of a family differ
in the sequences, the window and the mask.

[Note: the model]
*Fold.* Residues are 3.8 angstrom apart on a random walk with a persistent direction and a pull to
the centre that keeps it compact. Residues at least `SEPARATION` apart in sequence and within
`CONTACT` angstrom touch; each has at most one partner, the nearest first.
*Ancestor.* Each site prefers residues by the Robinson frequencies of amino acids (1991), shifted
towards hydrophobic ones (Kyte and Doolittle, 1982) near the centre and away from them outside.
`_COMPLEMENT` maps a residue's preferences to its partner's.
*Family.* Each new sequence copies a random earlier one and mutates its sites at rates drawn from a
gamma distribution, as in real proteins. A mutated site is drawn again from its preferences; its
partner follows with probability `COUPLING`. Then runs of sites are deleted, which leaves gaps, but
never in the first sequence, the query.
*Mask.* 15% of all entries are hidden; they are the prediction targets, as for AlphaFold's alignment
(Jumper et al., 2021, supplement 1.2.7), but without its random replacements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dynoffload.datasets.sources import Split

RESIDUES = "ARNDCQEGHILKMFPSTWYV"
"""The amino acids, in the order of their numbers."""
GAP, MASK = len(RESIDUES), len(RESIDUES) + 1
TOKENS = len(RESIDUES) + 2
"""Number of different entries of an alignment: residues, the gap, the mask."""
BINS = 16
"""Number of distance bins, even from 4 to 20 angstrom, the first and the last open."""
FAMILIES = 256
"""Number of families of each split."""
LONGEST = 512
"""Residues of a family's longest protein."""
SEPARATION, CONTACT = 4, 8.0
COUPLING = 0.8
HIDDEN = 0.15
"""Share of an alignment's entries that are masked."""

_SEQUENCES = 128  # of a family; a sample contains some of them
# For each residue: Kyte and Doolittle's hydropathy, Robinson's frequency, its complement.
_HYDROPATHY = np.fromstring(
    "1.8 -4.5 -3.5 -3.5 2.5 -3.5 -3.5 -0.4 -3.2 4.5 3.8 -3.9 1.9 2.8 -1.6 -0.8 -0.7 -0.9 -1.3 4.2",
    sep=" ",
)
_FREQUENCY = np.fromstring(
    ".078 .051 .045 .054 .019 .043 .063 .074 .022 .051 "
    ".091 .057 .022 .039 .052 .071 .058 .013 .032 .064",
    sep=" ",
)
_COMPLEMENT = np.array([RESIDUES.index(residue) for residue in "VDQRCNKGYLIEFMWTSPHA"])

_Floats = npt.NDArray[np.float64]
_Codes = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Alignments:
    """A batch of alignments of one depth and one length.

    Attributes:
        tokens: int64 ``[rows, depth, length]``: residues, `GAP`, or `MASK` where hidden; the query
            comes first.
        hidden: int64 ``[rows, depth, length]``: the true residues where masked, -100 elsewhere.
        distances: int64 ``[rows, length, length]``: bins of the distances of the query's residues.
        cycles: number of times the trunk runs, 1 without recycling.
        source: the families, such as ``"family-017+family-201"``.
    """

    tokens: Tensor
    hidden: Tensor
    distances: Tensor
    cycles: int
    source: str


@dataclass(frozen=True, eq=False)
class Family:
    """One family.

    Attributes:
        places: float64 ``[length, 3]``: positions of the query's residues, in angstrom.
        partner: int64 ``[length]``: the residue each touches, -1 for none.
        sequences: int8 ``[sequences, length]``: the query first.
    """

    places: _Floats
    partner: _Codes
    sequences: npt.NDArray[np.int8]

    def __len__(self) -> int:
        """Return the number of residues of the query."""
        return len(self.partner)

    def bins(self, start: int, length: int) -> _Codes:
        """Return the bins of the distances within a window, ``[length, length]``."""
        places = self.places[start : start + length]
        apart = np.linalg.norm(places[:, None] - places[None], axis=-1)
        found: _Codes = np.digitize(apart, np.linspace(4.0, 20.0, BINS - 1)).astype(np.int64)
        return found


def alignments(
    split: Split | str = Split.TRAIN,
    *,
    rows: int = 1,
    min_depth: int = 4,
    max_depth: int = 16,
    min_length: int = 16,
    max_length: int = 48,
    max_cycles: int = 4,
    seed: int = 0,
) -> Iterator[Alignments]:
    """Yield batches endlessly, the same ones for the same arguments.

    Depth, length and the number of cycles are drawn uniformly for each batch, as AlphaFold draws
    its training cycles; they do not depend on the number of rows. The families and windows of the
    rows are drawn uniformly.

    Args:
        split: training or held-out families.
        rows: alignments per batch.
        min_depth: fewest sequences.
        max_depth: most sequences.
        min_length: fewest residues.
        max_length: most residues.
        max_cycles: most cycles.
        seed: seed of the draws; the families do not depend on it.

    Raises:
        ValueError: the bounds leave no sample, or exceed the families' depth or length.
    """
    if not (1 <= min_depth <= max_depth <= _SEQUENCES):
        raise ValueError(
            f"alignments of {min_depth} to {max_depth} sequences cannot be drawn from families of "
            f"{_SEQUENCES}"
        )
    if not (1 <= min_length <= max_length <= LONGEST):
        raise ValueError(
            f"alignments of {min_length} to {max_length} residues cannot be drawn from proteins of "
            f"up to {LONGEST}"
        )
    if rows < 1 or max_cycles < 1:
        raise ValueError(f"rows={rows} and max_cycles={max_cycles} must be at least 1")
    bounds = (min_depth, max_depth), (min_length, max_length), (1, max_cycles)
    return _draw(Split(split), rows, bounds, seed)


def _draw(
    split: Split, rows: int, bounds: tuple[tuple[int, int], ...], seed: int
) -> Iterator[Alignments]:
    """Yield the batches; separate from `alignments` so that bad arguments raise at the call."""
    shapes, generator = (np.random.default_rng((seed, stream)) for stream in range(2))
    while True:
        depth, length, cycles = (int(shapes.integers(a, b + 1)) for a, b in bounds)
        drawn = [_sample(split, depth, length, generator) for _ in range(rows)]
        tokens, hidden, distances, names = zip(*drawn, strict=True)
        yield Alignments(
            torch.from_numpy(np.stack(tokens)),
            torch.from_numpy(np.stack(hidden)),
            torch.from_numpy(np.stack(distances)),
            cycles,
            "+".join(names),
        )


def _sample(
    split: Split, depth: int, length: int, generator: np.random.Generator
) -> tuple[_Codes, _Codes, _Codes, str]:
    while True:
        number = int(generator.integers(FAMILIES))
        drawn = family(number, split)
        if len(drawn) >= length:
            break
    start = int(generator.integers(len(drawn) - length + 1))
    others = 1 + generator.choice(_SEQUENCES - 1, size=depth - 1, replace=False)
    shown = drawn.sequences[np.concatenate(([0], others)), start : start + length]
    chosen = shown.astype(np.int64)
    masked = generator.random(chosen.shape) < HIDDEN
    masked.flat[generator.integers(masked.size)] = True  # at least one target
    tokens = np.where(masked, MASK, chosen)
    hidden = np.where(masked, chosen, -100)
    return tokens, hidden, drawn.bins(start, length), f"family-{number:03d}"


@lru_cache(maxsize=2 * FAMILIES)
def family(number: int, split: Split | str = Split.TRAIN) -> Family:
    """Return one family of a split; see [Note: the model].

    Raises:
        ValueError: ``number`` is not from 0 up to `FAMILIES`.
    """
    if not 0 <= number < FAMILIES:
        raise ValueError(f"no family {number}: they are numbered from 0 to {FAMILIES - 1}")
    generator = np.random.default_rng((Split(split) is Split.HELD_OUT, number))
    # One in four has the full length, so that long samples can be drawn.
    length = LONGEST if number % 4 == 0 else int(generator.integers(LONGEST // 4, LONGEST))
    places = _fold(length, generator)
    partner = _partners(places)
    return Family(places, partner, _descend(places, partner, generator))


def _fold(length: int, generator: np.random.Generator) -> _Floats:
    """Return the positions of a compact walk, ``[length, 3]``."""
    places = np.zeros((length, 3))
    direction = np.array([1.0, 0.0, 0.0])
    radius = 2.2 * length**0.38  # of gyration, of real proteins (Skolnick et al., 1997)
    for index in range(1, length):
        inward = places[:index].mean(axis=0) - places[index - 1]
        pull = inward / radius * (np.linalg.norm(inward) / radius)
        direction = direction + 0.6 * generator.normal(size=3) + 0.2 * pull
        direction /= np.linalg.norm(direction)
        places[index] = places[index - 1] + 3.8 * direction
    return places


def _partners(places: _Floats) -> _Codes:
    """Return the residue that each residue touches, -1 for none."""
    length = len(places)
    apart = np.linalg.norm(places[:, None] - places[None], axis=-1)
    partner = np.full(length, -1, dtype=np.int64)
    left, right = np.triu_indices(length, SEPARATION)
    near = apart[left, right]
    for pair in np.argsort(near, kind="stable"):
        i, j = left[pair], right[pair]
        if near[pair] > CONTACT:
            break
        if partner[i] < 0 and partner[j] < 0:
            partner[i], partner[j] = j, i
    return partner


def _descend(
    places: _Floats, partner: _Codes, generator: np.random.Generator
) -> npt.NDArray[np.int8]:
    """Return a family's sequences, ``[sequences, length]``."""
    length = len(partner)
    outward = np.linalg.norm(places - places.mean(axis=0), axis=1)
    buried = (np.median(outward) - outward) / (outward.std() + 1e-9)
    liking = _FREQUENCY * np.exp(0.25 * buried[:, None] * _HYDROPATHY)
    # The second of two partners takes the complement of the first's preferences.
    second = (partner >= 0) & (partner < np.arange(length))
    liking[second] = liking[partner[second]][:, _COMPLEMENT]
    sums = np.cumsum(liking, axis=1)
    sums /= sums[:, -1:]

    def draw(sites: _Codes) -> _Codes:
        found: _Codes = (generator.random(len(sites))[:, None] > sums[sites]).sum(axis=1)
        return found.clip(max=len(RESIDUES) - 1)

    sequences = np.empty((_SEQUENCES, length), dtype=np.int64)
    everywhere = np.arange(length)
    sequences[0] = draw(everywhere)
    paired = np.flatnonzero((partner >= 0) & ~second)
    sequences[0, partner[paired]] = _COMPLEMENT[sequences[0, paired]]
    rates = generator.gamma(0.7, 1 / 0.7, size=length)
    for index in range(1, _SEQUENCES):
        child = sequences[generator.integers(index)].copy()
        branch = generator.exponential(0.25)
        changed = np.flatnonzero(generator.random(length) < -np.expm1(-rates * branch))
        child[changed] = draw(changed)
        follows = changed[(partner[changed] >= 0) & (generator.random(len(changed)) < COUPLING)]
        child[partner[follows]] = _COMPLEMENT[child[follows]]
        sequences[index] = child
    for index in range(1, _SEQUENCES):
        for _ in range(generator.poisson(length / 100)):
            start = int(generator.integers(length))
            sequences[index, start : start + int(generator.geometric(0.25))] = GAP
    return sequences.astype(np.int8)
