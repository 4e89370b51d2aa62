"""Splits samples by source, into training and held-out sets or into folds.

Samples of one source, a file or a family, are similar, so training on some would leak the others. A
source is therefore never divided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def split_by_source(sources: Sequence[str], share: float, seed: int) -> tuple[list[int], list[int]]:
    """Return the training and the held-out indices: whole sources, about ``share`` held out.

    With only one source, the last samples are held out.

    Raises:
        ValueError: if there are fewer than two samples.
    """
    if len(sources) < 2:
        raise ValueError("a split needs at least two samples")
    names = sorted(set(sources))
    wanted = max(1, round(share * len(sources)))
    if len(names) == 1:
        cut = min(max(len(sources) - wanted, 1), len(sources) - 1)
        return list(range(cut)), list(range(cut, len(sources)))
    sizes = Counter(sources)
    shuffled = [names[i] for i in np.random.default_rng(seed).permutation(len(names))]
    held: set[str] = set()
    count = 0
    for name in shuffled[:-1]:
        if count >= wanted:
            break
        if held and count + sizes[name] - wanted > wanted - count:
            continue
        held.add(name)
        count += sizes[name]
    inside = [i for i, name in enumerate(sources) if name not in held]
    return inside, [i for i, name in enumerate(sources) if name in held]


def source_folds(sources: Sequence[str], folds: int, seed: int) -> npt.NDArray[np.int64]:
    """Return the fold of each sample: whole sources, folds of similar size.

    With fewer sources than folds, each fold is a run of consecutive samples. There are never more
    folds than samples.
    """
    folds = min(folds, len(sources))
    sizes = Counter(sources)
    if len(sizes) < folds:
        return np.arange(len(sources)) * folds // max(len(sources), 1)
    names = sorted(sizes)
    shuffled = [names[i] for i in np.random.default_rng(seed).permutation(len(names))]
    filled = [0] * folds
    home: dict[str, int] = {}
    for name in sorted(shuffled, key=lambda name: -sizes[name]):
        smallest = filled.index(min(filled))
        home[name] = smallest
        filled[smallest] += sizes[name]
    return np.array([home[source] for source in sources], dtype=np.int64)
