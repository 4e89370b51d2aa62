"""Online learning: corrects a pilot while the network trains, or trains one from scratch.

`OnlineLearner` predicts before each step and observes it after. It corrects each block's log-odds
by how often the block ran recently, as routing drifts faster than a pilot is retrained. It keeps
the latest steps to train a new pilot and compares its accuracy with repeating the last order. If
the pilot's accuracy falls, older steps are dropped and a new pilot is due soon. `learn` takes
seconds; the caller chooses when and on which thread.

The correction is online gradient descent on two numbers per optional block: a bias of its log-odds,
with decay, and a habit, the weight of the previous step. With p the corrected probability, y
whether the block ran and l whether it ran in the previous step (1 or -1),
bias <- (1 - FORGET) * (bias + RATE * (y - p)) and habit <- habit + HABIT_RATE * (y - p) * l.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynoffload.pilot.evaluate import block_order_accuracy
from dynoffload.pilot.features import BlockHint, Example
from dynoffload.pilot.fit import fit_pilot
from dynoffload.pilot.pilot import Floats, Pilot, Prediction
from dynoffload.pilot.template import tokens
from dynoffload.pilot.tracking import StepTracker
from dynoffload.planning.blocks import Vocabulary
from dynoffload.profiler.input_features import InputFeatures

logger = logging.getLogger(__name__)

RATE = 0.8
"""Learning rate of a block's bias."""
HABIT_RATE = 0.05
"""Learning rate of a block's habit."""
FORGET = 0.02
"""Share of the bias that decays each step."""
MAX_HABIT = 4.0
"""Limit of a block's habit, in either direction."""
FIRST = 16
"""Steps after which a first pilot can be learned."""
GROWTH = 2.0
"""A new pilot is due at this multiple of the steps that the previous one was learned from."""
WINDOW = 1024
"""The number of latest steps kept to learn from."""
AVERAGE = 0.1
"""Weight of the newest step in the running accuracies."""
SETTLED = 16
"""Steps after which a pilot's running accuracy is taken as its reference level."""
DRIFT = 0.1
"""Drop of accuracy below that level that counts as drift of the network or its data."""


@dataclass(frozen=True)
class Standing:
    """Recent accuracy of the pilot in use: running means of block-order accuracy.

    Attributes:
        pilot: accuracy of the pilot's predictions; NaN before the first.
        last_order: accuracy of repeating the last order, on the same steps; NaN before the first.
        steps: number of steps averaged.
    """

    pilot: float = float("nan")
    last_order: float = float("nan")
    steps: int = 0


class _Correction:
    """A pilot with its correction; replaced as a whole when a new pilot is learned."""

    def __init__(self, pilot: Pilot) -> None:
        self.pilot = pilot
        self.standing = Standing()
        self.level = math.nan  # accuracy after `SETTLED` steps, or at the last drift
        self.slots = [pilot.template.slots[index] for index in pilot.template.optional]
        self.bias = np.zeros(len(self.slots), dtype=np.float32)
        self.habit = np.zeros(len(self.slots), dtype=np.float32)
        self.last = np.zeros(len(self.slots), dtype=np.float32)  # 1 ran, -1 did not, 0 unknown

    def corrected(self, chances: Floats) -> Floats:
        """Return the probabilities with corrected log-odds."""
        clipped = np.clip(chances, 1e-6, 1 - 1e-6)
        odds = np.log(clipped / (1 - clipped)) + self.bias + self.habit * self.last
        return np.asarray(1 / (1 + np.exp(-odds)), dtype=np.float32)

    def follow(self, corrected: Floats, blocks: Sequence[int]) -> None:
        """Update the correction with the blocks that ran."""
        filled = tokens(blocks, self.pilot.template.families)
        ran: npt.NDArray[np.float32] = np.array([slot in filled for slot in self.slots], np.float32)
        residual = ran - corrected
        self.bias = np.asarray((1 - FORGET) * (self.bias + RATE * residual), np.float32)
        habit = self.habit + HABIT_RATE * residual * self.last
        self.habit = np.asarray(np.clip(habit, -MAX_HABIT, MAX_HABIT), np.float32)
        self.last = 2 * ran - 1


class _Asked(NamedTuple):
    """The latest prediction."""

    sample: InputFeatures
    current: _Correction
    chances: Floats
    predicted: list[int]
    step: StepTracker


class OnlineLearner:
    """Predicts, observes and learns within one run.

    Attributes:
        drifts: number of times drift was detected.

    `predict` and `observe` are for the training thread and take well under a millisecond each.
    `learn` may run on another thread at the same time; it swaps the new pilot in at its end.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        pilot: Pilot | None = None,
        grow: bool = True,
        seed: int = 0,
    ) -> None:
        """Start with a trained pilot or from nothing.

        Args:
            vocabulary: the network's blocks, which all observed orders index.
            pilot: an existing pilot of the same network, if any.
            grow: whether to keep samples for learning; if False, only the correction learns.
            seed: seed of `learn`.

        Raises:
            PilotError: if the pilot is of another network.
        """
        if pilot is not None:
            pilot.check(vocabulary.network)
        self._vocabulary = vocabulary
        self._seed = seed
        self._grow = grow
        self._current = _Correction(pilot) if pilot is not None else None
        self._examples: deque[Example] = deque(maxlen=WINDOW)
        self._lock = threading.Lock()
        self._seen = 0
        self._next = FIRST
        self._asked: _Asked | None = None
        self._last: list[int] | None = None
        self.drifts = 0

    @property
    def pilot(self) -> Pilot | None:
        """The pilot now in use."""
        return self._current.pilot if self._current is not None else None

    @property
    def standing(self) -> Standing:
        """Recent accuracy of the predictions."""
        return Standing() if self._current is None else self._current.standing

    @property
    def due(self) -> bool:
        """Whether enough steps were seen since the last `learn` to learn again."""
        return self._grow and self._seen >= self._next

    def predict(self, sample: InputFeatures) -> Prediction | None:
        """Return the predicted order of a sample, or None while there is no pilot."""
        current = self._current
        if current is None:
            self._asked = None
            return None
        start = perf_counter()
        step = StepTracker(current.pilot, sample, current.corrected)
        chances = step.chances
        blocks, confidence = current.pilot.decode(sample, chances, current.pilot.threshold)
        self._asked = _Asked(sample, current, chances, blocks, step)
        return Prediction(blocks, perf_counter() - start, confidence)

    @property
    def tracker(self) -> StepTracker | None:
        """The tracker of the step predicted last; None once that step is observed."""
        return None if self._asked is None else self._asked.step

    def observe(
        self,
        sample: InputFeatures,
        blocks: Sequence[int],
        source: str = "",
        hints: Sequence[BlockHint] = (),
    ) -> None:
        """Learn from the order that a sample ran.

        Args:
            sample: the object passed to `predict`, if it was called.
            blocks: the order it ran, -1 for a block unknown to the vocabulary.
            source: the file or document it is from, if known.
            hints: the network's routing hints during the step.
        """
        order = list(blocks)
        asked, self._asked = self._asked, None
        if asked is not None and asked.sample is sample:
            asked.current.follow(asked.chances, order)
            self._judge(asked, order)
        elif self._current is not None:
            current = self._current
            current.follow(current.corrected(current.pilot.chances(sample)), order)
        self._last = [block for block in order if block >= 0]
        self._seen += 1
        if self._grow:
            with self._lock:
                self._examples.append(Example(sample, order, source, tuple(hints)))

    def learn(self) -> Pilot:
        """Learn a new pilot from the steps kept, and use it from the next prediction on.

        Raises:
            PilotError: if too few steps were seen.
        """
        with self._lock:
            examples = list(self._examples)
            seen, drifts = self._seen, self.drifts
        pilot = fit_pilot(self._vocabulary, examples, seed=self._seed)
        with self._lock:
            if self.drifts == drifts:  # otherwise it was learned from steps before the drift
                self._next = seen + max(FIRST, int((GROWTH - 1) * len(examples)))
            self._current = _Correction(pilot)
        return pilot

    def _judge(self, asked: _Asked, order: Sequence[int]) -> None:
        """Update the running accuracies of the pilot that predicted; detect drift."""
        if self._last is None:
            return
        pilot = block_order_accuracy(asked.predicted, order)
        last = block_order_accuracy(self._last, order)
        current, old = asked.current, asked.current.standing
        if old.steps:
            weight = max(AVERAGE, 1 / (old.steps + 1))
            pilot = old.pilot + weight * (pilot - old.pilot)
            last = old.last_order + weight * (last - old.last_order)
        current.standing = Standing(pilot, last, old.steps + 1)
        if current.standing.steps == SETTLED:
            current.level = pilot
        elif pilot < current.level - DRIFT:
            with self._lock:
                if current is self._current:  # the pilot was not replaced
                    self._forget(current)

    def _forget(self, current: _Correction) -> None:
        """Handle drift: keep only the latest steps."""
        logger.info(
            "the pilot's accuracy has fallen from %.0f%% to %.0f%%: %s",
            100 * current.level,
            100 * current.standing.pilot,
            "another is learned from what runs now"
            if self._grow
            else "it is used while it does no worse than repeating the last order",
        )
        self.drifts += 1
        current.level = current.standing.pilot
        while len(self._examples) > FIRST:
            self._examples.popleft()
        self._next = min(self._next, self._seen + FIRST)
