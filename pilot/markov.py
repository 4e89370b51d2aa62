"""Order-k Markov: whether a block runs, from which of the k optional ones before it ran.

`Markov` is a table of counts for each optional slot by the k slots before it in canonical order.
Before a step, chances of all 2^k histories are carried along the slots; once some slots are known,
from these. It does not see the sample: it is the baseline of a prefetcher with a history. The order
k is chosen by leaving whole sources out, between 0 (how often each block runs) and `MAX_ORDER`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dynoffload.pilot.features import Floats
from dynoffload.pilot.sources import source_folds
from dynoffload.profiler.input_features import InputFeatures
from dynoffload.profiler.safefile import checked_weights

MAX_ORDER = 6
"""The most slots that are looked back at."""
HORIZON = 64
"""How many slots ahead what is known is carried: farther, it has worn off, and it takes time."""
_PRIOR = 1.0  # imagined steps, that ran a slot as often as it runs whatever was before
_FOLDS = 4


@dataclass(frozen=True)
class Markov:
    """Chances by history.

    Attributes:
        order: how many slots are looked back at.
        table: P(a slot runs | history), float32 ``[slots, 2**order]``; the lowest bit of a history
            is the slot just before. Slots before the first count as not run.
    """

    order: int
    table: Floats
    _before: Floats = field(init=False, repr=False, compare=False)

    kind = "markov"

    def __post_init__(self) -> None:
        """Carry the chances along all slots, once."""
        start = np.zeros(1 << self.order)
        start[0] = 1.0
        object.__setattr__(self, "_before", self._carry(start, 0, len(self.table)))

    def probabilities(self, sample: InputFeatures) -> Floats:
        """Return P(the block runs) for each optional block, float32 ``[blocks]``."""
        return self._before.copy()

    def given(self, ran: Sequence[bool]) -> Floats:
        """Return the chances of all slots once the first ones are known.

        Args:
            ran: whether each of the first slots ran.
        """
        known = len(ran)
        chances = self._before.copy()
        chances[:known] = ran
        history = np.zeros(1 << self.order)
        last = [bool(ran[known - 1 - back]) for back in range(min(self.order, known))]
        history[sum(bit << back for back, bit in enumerate(last))] = 1.0
        stop = min(known + HORIZON, len(self.table))
        chances[known:stop] = self._carry(history, known, stop)
        return chances

    def _carry(self, history: npt.NDArray[np.float64], start: int, stop: int) -> Floats:
        """Return the chances of the slots from ``start`` to ``stop``, from those of histories."""
        half = len(history) // 2
        chances = np.empty(stop - start, dtype=np.float32)
        for place, row in enumerate(self.table[start:stop]):
            runs = history * row
            chances[place] = runs.sum()
            if half:
                not_run = history - runs
                history = np.empty_like(history)
                history[0::2] = not_run[:half] + not_run[half:]
                history[1::2] = runs[:half] + runs[half:]
        return chances

    def rest(self, sample: InputFeatures) -> Callable[[Sequence[bool]], Floats]:
        """Return how the rest of a step is foretold: `given`."""
        return self.given

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the table."""
        return {"table": self.table}

    def document(self) -> dict[str, Any]:
        """Return the rest, as plain JSON data."""
        return {"order": self.order}

    @classmethod
    def load(cls, document: Any, arrays: Mapping[str, npt.NDArray[Any]], blocks: int) -> Markov:
        """Build the model from its stored parts.

        Raises:
            ValueError, KeyError, TypeError: if the parts are not those of such a model.
        """
        order, table = int(document["order"]), checked_weights("table", arrays["table"])
        if not 0 <= order <= MAX_ORDER or table.shape != (blocks, 1 << order):
            raise ValueError("a table of the wrong shape")
        if not ((table >= 0) & (table <= 1)).all():
            raise ValueError("chances that are none")
        return cls(order, table)


def learn_markov(present: npt.NDArray[np.bool_], groups: Sequence[str]) -> Markov:
    """Count histories, and choose how far to look back.

    Args:
        present: which optional slot ran in which step, ``[steps, slots]``, in canonical order.
        groups: the source of each step; a source is told by the others in choosing.
    """
    folds = source_folds(groups, _FOLDS, seed=0)
    best: tuple[float, int] | None = None
    for order in range(MAX_ORDER + 1):
        loss = 0.0
        for fold in np.unique(folds):
            table = _table(present[folds != fold], order)
            aside = present[folds == fold]
            chance = table[np.arange(table.shape[0]), _histories(aside, order)]
            right = np.where(aside, chance, 1 - chance)
            loss += float(-np.log(np.maximum(right, 1e-6)).sum())
        if best is None or loss < best[0] * (1 - 1e-3):
            best = (loss, order)
    assert best is not None
    return Markov(best[1], _table(present, best[1]))


def _histories(present: npt.NDArray[np.bool_], order: int) -> npt.NDArray[np.int64]:
    """Return the history of each slot in each step, ``[steps, slots]``."""
    steps, slots = present.shape
    histories = np.zeros((steps, slots), dtype=np.int64)
    for back in range(1, min(order, slots) + 1):
        histories[:, back:] |= present[:, : slots - back].astype(np.int64) << (back - 1)
    return histories


def _table(present: npt.NDArray[np.bool_], order: int) -> Floats:
    steps, slots = present.shape
    size = 1 << order
    places = (_histories(present, order) + np.arange(slots) * size).ravel()
    seen = np.bincount(places, minlength=slots * size).reshape(slots, size)
    ran = np.bincount(places, present.ravel(), minlength=slots * size).reshape(slots, size)
    share = (present.sum(axis=0) + 0.5) / (steps + 1.0)
    return np.asarray((ran + _PRIOR * share[:, None]) / (seen + _PRIOR), dtype=np.float32)
