"""Cross-validation: what a kind of model predicts of steps that were left out, and how it errs.

`fit_fold` fits one model on all but one part of the steps; `cross_validate` learns from what the
models of all parts predicted how far to believe the kind, and scores it. Both are tasks of
`dynoffload.pilot.fit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynoffload.pilot.correction import Correction, learn_correction
from dynoffload.pilot.evaluate import block_order_accuracy
from dynoffload.pilot.features import Example, Floats
from dynoffload.pilot.models import PresenceModel, Rest, TrainingSet, learn_model
from dynoffload.pilot.pilot import Pilot
from dynoffload.pilot.sequence_training import planned_epochs

MAX_WATCHED = 96
"""Samples of the part left out that the length of training is chosen by at most."""
THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(2, 17))


@dataclass(frozen=True)
class FoldResult:
    """What a model predicted of one part of the steps, which it had not learned from.

    Attributes:
        steps: the numbers of that part's steps.
        chances: what it predicted of them, ``[part, blocks]``.
        share: the length of training that was best, as a share of the usual; None: it has none.
        model: kept where it predicts the rest of a step itself, else None.
    """

    steps: npt.NDArray[np.int64]
    chances: Floats
    share: float | None
    model: PresenceModel | None


def fit_fold(
    kind: str, data: TrainingSet, folds: npt.NDArray[np.int64], part: int, seed: int
) -> FoldResult:
    """Fit a model of one kind on all but one part, and predict that."""
    aside, inside = np.flatnonzero(folds == part), np.flatnonzero(folds != part)
    held_out = data.part(aside)
    watched = aside[np.linspace(0, len(aside) - 1, min(len(aside), MAX_WATCHED)).astype(int)]
    model, epochs = learn_model(kind, data.part(inside), seed=seed, held_out=data.part(watched))
    chances = np.stack([model.probabilities(sample) for sample in held_out.samples])
    kept = model if model.rest(held_out.samples[0]) is not None else None
    share = None if epochs is None else epochs / planned_epochs(len(inside))
    return FoldResult(aside, chances, share, kept)


def fit_all(kind: str, data: TrainingSet, share: float | None, seed: int) -> PresenceModel:
    """Fit a model on all samples, for a ``share`` of the usual length."""
    epochs = None
    if share is not None:
        epochs = max(1, round(share * planned_epochs(len(data.samples))))
    return learn_model(kind, data, seed=seed, epochs=epochs)[0]


@dataclass(frozen=True)
class Validation:
    """What cross-validation tells of a kind.

    Attributes:
        kind: of the models.
        accuracy: block-order accuracy at the threshold, on steps that it had not learned from.
        threshold: the best one.
        share: the length of training that was best, in the median, as a share of the usual; None:
            the kind has none.
        correction: learned from what they predicted and what ran.
    """

    kind: str
    accuracy: float
    threshold: float
    share: float | None
    correction: Correction


def cross_validate(
    bare: Pilot,
    examples: Sequence[Example],
    shown: npt.NDArray[np.int64],
    kind: str,
    data: TrainingSet,
    folds: npt.NDArray[np.int64],
    results: Sequence[FoldResult],
) -> Validation:
    """Learn how a kind errs, and score what it predicted of the steps left out.

    Args:
        bare: the pilot, as yet without a model.
        examples: what it is scored on.
        shown: their numbers in the training set.
        kind: of the models.
        data: all steps.
        folds: the part of each.
        results: of each part.
    """
    chances = np.empty(data.present.shape, dtype=np.float32)
    rests: list[Rest | None] = [None] * len(chances)
    for result in results:
        chances[result.steps] = result.chances
        if result.model is not None:
            for step in result.steps.tolist():
                rests[step] = result.model.rest(data.samples[step])

    def again(step: int, ran: Sequence[bool]) -> Floats:
        rest = rests[step]
        assert rest is not None
        return rest(ran)

    correction, calibrated = learn_correction(
        chances,
        data.present,
        data.sites,
        folds,
        data.hints,
        again=None if rests[0] is None else again,
    )
    bundles = bare.layout.bundles
    threshold, accuracy = _best_threshold(bare, examples, [calibrated[i][bundles] for i in shown])
    shares = [result.share for result in results if result.share is not None]
    share = float(np.median(shares)) if shares else None
    return Validation(kind, accuracy, threshold, share, correction)


def _best_threshold(
    pilot: Pilot, examples: Sequence[Example], chances: Sequence[Floats]
) -> tuple[float, float]:
    """Return the threshold with the best block-order accuracy on some samples, the nearest to a
    half of equals (what drifts later must be able to pass it), and that accuracy."""
    found = np.zeros(len(THRESHOLDS))
    for example, predicted in zip(examples, chances, strict=True):
        for number, threshold in enumerate(THRESHOLDS):
            order, _ = pilot.decode(example.sample, predicted, threshold)
            found[number] += block_order_accuracy(order, example.blocks)
    good = np.flatnonzero(found >= found.max() - 1e-9)
    best = int(min(good, key=lambda number: abs(THRESHOLDS[number] - 0.5)))
    return THRESHOLDS[best], float(found[best] / len(examples))
