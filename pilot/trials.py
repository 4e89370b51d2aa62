"""Trial fits: what a kind of model predicts of steps that were left out, and how it errs.

These are the tasks of `dynoffload.pilot.fit`: `teach`, one model on all but one part of the steps;
`at_first` and `is_behind`, whether a kind is given up after the first part; `judge`, the verdict of
all parts; `learn_or_teach`, the same beside the final model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynoffload.pilot.correction import Correction, learn_correction
from dynoffload.pilot.evaluate import block_order_accuracy
from dynoffload.pilot.features import Example, Floats
from dynoffload.pilot.models import Lesson, PresenceModel, Rest, learn_model
from dynoffload.pilot.pilot import Pilot
from dynoffload.pilot.sequence_training import planned_epochs

MAX_WATCHED = 96
"""Samples of the part left out that the length of training is chosen by at most."""

LEAST_COMPARED = 24
"""Steps that kinds are compared on before some are given up."""
FAR = 3.0
"""Standard errors that a kind is behind the best by when it is given up."""

THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(2, 17))


def learn_or_teach(
    kind: str,
    lesson: Lesson,
    seed: int,
    share: float | None,
    folds: npt.NDArray[np.int64] | None = None,
    part: int = 0,
) -> PresenceModel | Taught:
    """Have a model learn from all samples, for a ``share`` of the usual length, or `teach`."""
    if folds is not None:
        return teach(kind, lesson, folds, part, seed)
    epochs = None
    if share is not None:
        epochs = max(1, round(share * planned_epochs(len(lesson.samples))))
    return learn_model(kind, lesson, seed=seed, epochs=epochs)[0]


@dataclass(frozen=True)
class Taught:
    """What a model foretold of one part of the steps, which it had not learned from.

    Attributes:
        steps: the numbers of that part's steps.
        chances: what it foretold of them, ``[part, blocks]``.
        share: the length of training that was best, as a share of the usual; None: it has none.
        model: kept where it foretells the rest of a step itself, else None.
    """

    steps: npt.NDArray[np.int64]
    chances: Floats
    share: float | None
    model: PresenceModel | None


def teach(kind: str, lesson: Lesson, folds: npt.NDArray[np.int64], part: int, seed: int) -> Taught:
    """Have a model of one kind learn from all but one part, and foretell that."""
    aside, inside = np.flatnonzero(folds == part), np.flatnonzero(folds != part)
    held_out = lesson.part(aside)
    watched = aside[np.linspace(0, len(aside) - 1, min(len(aside), MAX_WATCHED)).astype(int)]
    model, epochs = learn_model(kind, lesson.part(inside), seed=seed, held_out=lesson.part(watched))
    chances = np.stack([model.probabilities(sample) for sample in held_out.samples])
    kept = model if model.rest(held_out.samples[0]) is not None else None
    share = None if epochs is None else epochs / planned_epochs(len(inside))
    return Taught(aside, chances, share, kept)


@dataclass(frozen=True)
class LeftOut:
    """What became of the trial fits of one kind.

    Attributes:
        kind: of the models.
        accuracy: block-order accuracy at the threshold, on steps that had not taught it.
        threshold: the best one.
        share: the length of training that was best, in the median, as a share of the usual; None:
            the kind has none.
        correction: learned from what they foretold and what ran.
    """

    kind: str
    accuracy: float
    threshold: float
    share: float | None
    correction: Correction


def judge(
    bare: Pilot,
    examples: Sequence[Example],
    shown: npt.NDArray[np.int64],
    kind: str,
    lesson: Lesson,
    folds: npt.NDArray[np.int64],
    taught: Sequence[Taught],
) -> LeftOut:
    """Learn how a kind errs, and score what it foretold of the steps left out.

    Args:
        bare: the pilot, as yet without a model.
        examples: what it is scored on.
        shown: their numbers in the lesson.
        kind: of the models.
        lesson: all steps.
        folds: the part of each.
        taught: what was foretold of each part.
    """
    chances = np.empty(lesson.present.shape, dtype=np.float32)
    rests: list[Rest | None] = [None] * len(chances)
    for told in taught:
        chances[told.steps] = told.chances
        if told.model is not None:
            for step in told.steps.tolist():
                rests[step] = told.model.rest(lesson.samples[step])

    def again(step: int, ran: Sequence[bool]) -> Floats:
        rest = rests[step]
        assert rest is not None
        return rest(ran)

    correction, calibrated = learn_correction(
        chances,
        lesson.present,
        lesson.sites,
        folds,
        lesson.hints,
        again=None if rests[0] is None else again,
    )
    bundles = bare.layout.bundles
    threshold, accuracies = _best_threshold(bare, examples, [calibrated[i][bundles] for i in shown])
    shares = [told.share for told in taught if told.share is not None]
    share = float(np.median(shares)) if shares else None
    return LeftOut(kind, float(accuracies.mean()), threshold, share, correction)


def at_first(
    bare: Pilot, examples: Sequence[Example], steps: npt.NDArray[np.int64], told: Taught
) -> npt.NDArray[np.float64]:
    """Return how well a kind foretold steps of the one part it was tried on, ``[steps]``.

    Args:
        bare: the pilot, as yet without a model.
        examples: those steps.
        steps: their numbers, as they are in ``told``.
        told: what was foretold, as yet not calibrated.
    """
    place = {step: row for row, step in enumerate(told.steps.tolist())}
    bundles = bare.layout.bundles
    chances = [told.chances[place[step]][bundles] for step in steps.tolist()]
    return _best_threshold(bare, examples, chances)[1]


def is_behind(accuracies: npt.NDArray[np.float64], best: npt.NDArray[np.float64]) -> bool:
    """Return whether a kind does worse than the best on the same steps, and not by chance."""
    less = best - accuracies
    if len(less) < LEAST_COMPARED:
        return False
    return bool(less.mean() > FAR * less.std(ddof=1) / np.sqrt(len(less)))


def _best_threshold(
    pilot: Pilot, examples: Sequence[Example], chances: Sequence[Floats]
) -> tuple[float, npt.NDArray[np.float64]]:
    """Return the threshold with the best block-order accuracy on some samples, the nearest to a
    half of equals (what drifts later must be able to pass it), and the accuracy on each."""
    found = np.zeros((len(THRESHOLDS), len(examples)))
    for row, (example, told) in enumerate(zip(examples, chances, strict=True)):
        for number, threshold in enumerate(THRESHOLDS):
            order, _ = pilot.decode(example.sample, told, threshold)
            found[number, row] = block_order_accuracy(order, example.blocks)
    totals = found.sum(axis=1)
    good = np.flatnonzero(totals >= totals.max() - 1e-9)
    best = int(min(good, key=lambda number: abs(THRESHOLDS[number] - 0.5)))
    return THRESHOLDS[best], found[best]
