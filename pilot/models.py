"""The pilot's models: which optional blocks a sample will run.

What it is: `PresenceModel`, the one interface, and how a model of each kind is made and loaded.
What it is not: the models themselves (`dynoffload.pilot.boosting`, `mlp`, `markov`, `paths` and
`sequence`), nor the order of the blocks, which is in `dynoffload.pilot.skeleton`, nor what is made
of their errors within a step, which is in `dynoffload.pilot.correction`.
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
from dynoffload.pilot.mlp import NoisyOrNet
from dynoffload.pilot.mlp_training import train_net
from dynoffload.pilot.paths import NearestPaths, learn_paths
from dynoffload.pilot.sequence import SiteSequence
from dynoffload.pilot.sequence_training import train_sequence
from dynoffload.profiler.sample import Sample

Bools = npt.NDArray[np.bool_]
Rest = Callable[[Sequence[bool]], Floats]
"""Foretells all optional blocks of one step once its first ones are known to have run or not."""

KINDS = ("lightgbm", "mlp", "markov", "paths", "sequence")
"""The kinds of model there are."""


class PresenceModel(Protocol):
    """Says, before a step, how likely each optional block is to run in it."""

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        ...

    def probabilities(self, sample: Sample) -> Floats:
        """Return P(the block runs) for each optional block, float32 ``[blocks]``."""
        ...

    def rest(self, sample: Sample) -> Rest | None:
        """Return how the model itself foretells the rest of a step; None where it does not."""
        ...

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays that make up the model."""
        ...

    def document(self) -> dict[str, Any]:
        """Return the rest of the model, as plain JSON data."""
        ...


@dataclass(frozen=True)
class Lesson:
    """What a model learns from.

    Attributes:
        samples: one per step.
        present: which optional block ran in which step, ``[steps, blocks]``.
        groups: the source of each step.
        described: the blocks' features, ``[blocks, features]``.
        sites: the number of each block's site, ``[blocks]``.
        hints: what the network hinted last about each block, ahead and at hand, NaN if nothing,
            ``[steps, blocks, 2]``; see `dynoffload.pilot.correction`.
    """

    samples: Sequence[Sample]
    present: Bools
    groups: Sequence[str]
    described: Floats
    sites: npt.NDArray[np.int64]
    hints: Floats

    def part(self, steps: npt.NDArray[np.int64]) -> Lesson:
        """Return the lesson of some of the steps."""
        return Lesson(
            [self.samples[i] for i in steps],
            self.present[steps],
            [self.groups[i] for i in steps],
            self.described,
            self.sites,
            self.hints[steps],
        )


def learn_model(
    kind: str,
    lesson: Lesson,
    *,
    seed: int,
    held_out: Lesson | None = None,
    epochs: int | None = None,
    on_stage: Callable[[], None] | None = None,
) -> tuple[PresenceModel, int | None]:
    """Train a model.

    Args:
        kind: one of `KINDS`.
        lesson: what to learn from.
        seed: for everything that is drawn.
        held_out: what to choose the length of training by, where the kind needs that.
        epochs: the length of training, where it is known.
        on_stage: called now and then, for a progress bar.

    Returns:
        the model, and the length of training that was best (None where the kind has none).

    Raises:
        PilotError: if the kind is unknown.
    """
    if kind == "lightgbm":
        tables = train_tables(
            lesson.samples,
            lesson.present,
            lesson.described,
            lesson.sites,
            lesson.groups,
            seed=seed,
            on_stage=on_stage,
        )
        return tables, None
    if kind == "mlp":
        trained = train_net(
            lesson.samples,
            lesson.present,
            lesson.described,
            seed=seed,
            validation=(held_out.samples, held_out.present) if held_out else None,
            epochs=epochs,
            on_epoch=on_stage,
        )
        return trained.net, trained.epochs
    if kind == "markov":
        return learn_markov(lesson.present, lesson.groups), None
    if kind == "paths":
        return learn_paths(lesson.samples, lesson.present, lesson.groups), None
    if kind == "sequence":
        return train_sequence(
            lesson.samples,
            lesson.present,
            lesson.described,
            lesson.sites,
            seed=seed,
            validation=(held_out.samples, held_out.present) if held_out else None,
            epochs=epochs,
            on_epoch=on_stage,
        )
    raise PilotError(f"there is no pilot model {kind!r}: choose one of {', '.join(KINDS)}")


def load_model(
    kind: str, document: Any, arrays: Mapping[str, npt.NDArray[Any]], blocks: int
) -> PresenceModel:
    """Build a model from its stored parts.

    Raises:
        PilotError: if the kind is unknown or the parts are not those of such a model.
    """
    kinds: dict[str, Callable[..., PresenceModel]] = {
        "lightgbm": BoostedTables.load,
        "mlp": NoisyOrNet.load,
        "markov": Markov.load,
        "paths": NearestPaths.load,
        "sequence": SiteSequence.load,
    }
    if kind not in kinds:
        raise PilotError(f"its model is of the unknown kind {kind!r}")
    try:
        return kinds[kind](document, arrays, blocks)
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise PilotError(f"its {kind} model is damaged: {error}") from error
