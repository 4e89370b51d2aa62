"""Parts of samples by where they are from: what is held out, and parts to try in turn.

Samples of one source, a file or a family, are alike: one that is learned from tells of the others.
So a source is in one part as a whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def split_by_source(sources: Sequence[str], share: float, seed: int) -> tuple[list[int], list[int]]:
    """Return the indices to learn from and those held out: whole sources, about ``share`` of all.

    With one source only, the last samples are held out: the nearest there is to unseen ones.

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
    """Return the number of the part each sample belongs to: whole sources, parts of like size.

    With fewer sources than parts, samples that follow one another make a part; there are never
    more parts than samples.
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
