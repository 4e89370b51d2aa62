"""The kinds of model that say which optional blocks a sample will run.

`PresenceModel` is their one interface; `learn_model` trains one and `load_model` reads one back.
The order of the blocks is `dynoffload.pilot.template`'s, and what is made of a model's errors
within a step `dynoffload.pilot.correction`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dynoffload.errors import PilotError
from dynoffload.pilot.boosting import BoostedTables, train_tables
from dynoffload.pilot.features import Floats
from dynoffload.pilot.markov import Markov, learn_markov
from dynoffload.pilot.sequence import SiteSequence
from dynoffload.pilot.sequence_training import train_sequence
from dynoffload.profiler.input_features import InputFeatures

Bools = npt.NDArray[np.bool_]
Rest = Callable[[Sequence[bool]], Floats]
"""Predicts all optional blocks of one step once its first ones are known to have run or not."""

_LOADERS: dict[str, Callable[..., PresenceModel]] = {
    "lightgbm": BoostedTables.load,
    "markov": Markov.load,
    "sequence": SiteSequence.load,
}
KINDS = tuple(_LOADERS)
"""The kinds of model there are."""
AUTO_KINDS = ("lightgbm", "sequence")
"""Those that ``"auto"`` chooses from: ``markov``, a baseline, knows nothing of the sample."""


class PresenceModel(Protocol):
    """Says, before a step, how likely each optional block is to run in it."""

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        ...

    def probabilities(self, sample: InputFeatures) -> Floats:
        """Return P(the block runs) for each optional block, float32 ``[blocks]``."""
        ...

    def rest(self, sample: InputFeatures) -> Rest | None:
        """Return how the model itself predicts the rest of a step; None where it does not."""
        ...

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays that make up the model."""
        ...

    def document(self) -> dict[str, Any]:
        """Return the rest of the model, as plain JSON data."""
        ...


@dataclass(frozen=True)
class TrainingSet:
    """What a model learns from.

    Attributes:
        samples: one per step.
        present: which optional block ran in which step, ``[steps, blocks]``.
        groups: the source of each step.
        described: the blocks' features, ``[blocks, features]``.
        sites: the number of each block's site, ``[blocks]``.
        hints: the network's last hint about each block, ahead and at hand, NaN where there was
            none, ``[steps, blocks, 2]``; see `dynoffload.pilot.correction`.
    """

    samples: Sequence[InputFeatures]
    present: Bools
    groups: Sequence[str]
    described: Floats
    sites: npt.NDArray[np.int64]
    hints: Floats

    def part(self, steps: npt.NDArray[np.int64]) -> TrainingSet:
        """Return the training set of some of the steps."""
        return TrainingSet(
            [self.samples[i] for i in steps],
            self.present[steps],
            [self.groups[i] for i in steps],
            self.described,
            self.sites,
            self.hints[steps],
        )


def learn_model(
    kind: str,
    data: TrainingSet,
    *,
    seed: int,
    held_out: TrainingSet | None = None,
    epochs: int | None = None,
) -> tuple[PresenceModel, int | None]:
    """Train a model.

    Args:
        kind: one of `KINDS`.
        data: what to learn from.
        seed: for everything that is drawn.
        held_out: what to choose the length of training by, where the kind needs that.
        epochs: the length of training, where it is known.

    Returns:
        the model, and the length of training that was best (None where the kind has none).
    """
    if kind == "lightgbm":
        return train_tables(
            data.samples,
            data.present,
            data.described,
            data.sites,
            data.groups,
            seed=seed,
        ), None
    if kind == "markov":
        return learn_markov(data.present, data.groups), None
    return train_sequence(
        data.samples,
        data.present,
        data.described,
        data.sites,
        seed=seed,
        validation=(held_out.samples, held_out.present) if held_out else None,
        epochs=epochs,
    )


def load_model(
    kind: str, document: Any, arrays: Mapping[str, npt.NDArray[Any]], blocks: int
) -> PresenceModel:
    """Build a model from its stored parts.

    Raises:
        PilotError: if the kind is unknown or the parts are not those of such a model.
    """
    if kind not in _LOADERS:
        raise PilotError(f"its model is of the unknown kind {kind!r}")
    try:
        return _LOADERS[kind](document, arrays, blocks)
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise PilotError(f"its {kind} model is damaged: {error}") from error
