"""Fits a pilot to samples and the orders they ran.

Cross-validation over whole sources measures the model's errors and chooses the threshold; the final
model is trained on all samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dynoffload.errors import PilotError
from dynoffload.pilot.boosting import TrainingSet, train_tables
from dynoffload.pilot.correction import learn_correction
from dynoffload.pilot.evaluate import block_order_accuracy, most_frequent_order, varying_blocks
from dynoffload.pilot.features import Example, Floats, block_features, sites_of
from dynoffload.pilot.loops import LoopModel, Rule, learn_loop
from dynoffload.pilot.pilot import Pilot, shown_by
from dynoffload.pilot.sources import source_folds
from dynoffload.pilot.template import LOOP, OrderTemplate, Slot, learn_template, tokens
from dynoffload.pilot.workers import run_tasks
from dynoffload.planning.blocks import Vocabulary
from dynoffload.profiler.input_features import InputFeatures

FOLDS = 3
"""Cross-validation folds."""
MAX_VALIDATION = 256
"""The most samples that thresholds are tried on."""
THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(2, 17))

BUNDLED = 8
"""Steps in which slots must have run, and must not have run, to be bundled."""
MAX_UNROLLED = 768
"""The longest loop that is unrolled into a slot for each block."""

Progress = Callable[[str], None]
Filled = dict[Slot, tuple[int, ...]]


def fit_pilot(
    vocabulary: Vocabulary,
    examples: Sequence[Example],
    *,
    seed: int = 0,
    on_progress: Progress | None = None,
    jobs: int | None = 1,
) -> Pilot:
    """Fit a pilot.

    Args:
        vocabulary: the network's blocks.
        examples: recorded samples, at least two.
        seed: makes the result reproducible.
        on_progress: called with a description of the current work.
        jobs: processes that fit the models of cross-validation, as `run_tasks` takes them. They
            use one thread each; the result does not depend on them if this process does too.

    Raises:
        PilotError: if there are too few samples, or an order names a block that is not in the
            vocabulary.
    """
    _validate(vocabulary, examples)
    say = on_progress or (lambda _: None)
    orders = [example.blocks for example in examples]
    template, filled, loops = _learn_shape(vocabulary, examples)
    card: dict[str, Any] = {
        "samples": len(examples),
        "sources": len({example.source for example in examples}),
        "seed": seed,
        "seen": shown_by([example.sample for example in examples]),
    }
    bare = Pilot(
        vocabulary,
        template,
        None,
        loops,
        0.5,
        varying_blocks(orders, len(vocabulary)),
        tuple(most_frequent_order(orders, vocabulary.blocks)),
        card,
    )
    optional = [template.slots[index] for index in template.optional]
    if not optional:
        return bare
    present = np.array([[slot in slots for slot in optional] for slots in filled], dtype=np.bool_)
    bundles = bundled(present)
    firsts = np.unique(bundles, return_index=True)[1]
    chosen = [optional[first][0] for first in firsts.tolist()]
    data = TrainingSet(
        [example.sample for example in examples],
        present[:, firsts],
        [example.source for example in examples],
        block_features(vocabulary.blocks, chosen),
        sites_of(vocabulary.blocks, chosen),
    )
    hints = np.fmax.reduceat(placed_hints(template, examples), firsts, axis=1)
    bare = replace(bare, bundles=tuple(bundles.tolist()))
    folds = source_folds(data.groups, FOLDS, seed)
    parts = [np.flatnonzero(folds == part) for part in np.unique(folds)]
    tasks = [
        (data.part(np.setdiff1d(np.arange(len(folds)), part)), data.part(part).samples, seed)
        for part in parts
    ]
    chances = np.empty(data.present.shape, dtype=np.float32)
    for done, (number, predicted) in enumerate(run_tasks(predict_others, tasks, jobs), 1):
        chances[parts[number]] = predicted
        say(f"cross-validation: {done} of {len(parts)} fits")
    correction, calibrated = learn_correction(chances, data.present, data.sites, folds, hints)
    threshold, accuracy = _best_threshold(bare, examples, calibrated[:, bundles])
    say("training")
    return replace(
        bare,
        model=train_tables(data, seed),
        correction=correction,
        threshold=threshold,
        card={**card, "validation_accuracy": round(accuracy, 4)},
    )


def predict_others(data: TrainingSet, others: Sequence[InputFeatures], seed: int) -> Floats:
    """Train a model and return its predictions for other samples, ``[others, blocks]``."""
    model = train_tables(data, seed)
    return np.stack([model.probabilities(sample) for sample in others])


def _best_threshold(
    pilot: Pilot, examples: Sequence[Example], chances: Floats
) -> tuple[float, float]:
    """Return the threshold with the best block-order accuracy on some samples, and that accuracy.
    Of equals the nearest to 0.5 is taken, so that drifted probabilities can still cross it."""
    found = np.zeros(len(THRESHOLDS))
    tried = np.linspace(0, len(examples) - 1, min(len(examples), MAX_VALIDATION)).astype(int)
    for example, predicted in ((examples[i], chances[i]) for i in tried):
        for number, threshold in enumerate(THRESHOLDS):
            order, _ = pilot.decode(example.sample, predicted, threshold)
            found[number] += block_order_accuracy(order, example.blocks)
    good = np.flatnonzero(found >= found.max() - 1e-9)
    best = int(min(good, key=lambda number: abs(THRESHOLDS[number] - 0.5)))
    return THRESHOLDS[best], float(found[best] / len(tried))


def bundled(present: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return the number of the bundle of each optional slot, ascending, ``[optional]``.

    Consecutive slots that ran in exactly the same steps are predicted as one: the layers between
    two exits, the cells of a round. Slots that ran, or did not run, in fewer than `BUNDLED` steps
    are not bundled, as they may agree by chance.

    Args:
        present: which optional slot ran in which step, ``[steps, optional]``.
    """
    ran = present.sum(axis=0)
    often = np.minimum(ran, len(present) - ran) >= BUNDLED
    alike = (present[:, 1:] == present[:, :-1]).all(axis=0) & often[1:]
    return np.concatenate(([0], np.cumsum(~alike))).astype(np.int64)


def placed_hints(template: OrderTemplate, examples: Sequence[Example]) -> Floats:
    """Return the last hint about each optional slot, ``[examples, optional, 2]``: first given ahead
    (while earlier slots were undecided), then given at hand; NaN if there was none."""
    hints = np.full((len(examples), len(template.optional), 2), np.nan, dtype=np.float32)
    for row, example in zip(hints, examples, strict=True):
        seen: Counter[int] = Counter()
        passed = passed_slots = 0
        for hint in example.hints:
            for block in example.blocks[passed : hint.place]:
                place = template.place_of.get((block, seen[block]), -1)
                seen[block] += 1
                upto = int(np.searchsorted(template.optional, place, side="right"))
                passed_slots = max(passed_slots, upto)
            passed = hint.place
            number_of = template.optional_number
            numbers = [number_of.get((block, seen[block]), -1) for block in hint.blocks]
            open_ones = [number for number in numbers if number >= passed_slots]
            at_hand = int(min(open_ones, default=-1) == passed_slots)
            for number, value in zip(numbers, hint.values, strict=True):
                if number >= passed_slots:
                    row[number, at_hand] = value
    return hints


def _learn_shape(
    vocabulary: Vocabulary, examples: Sequence[Example]
) -> tuple[OrderTemplate, list[Filled], tuple[LoopModel, ...]]:
    """Learn the template and its loops.

    A loop is unrolled if no rule gives its length and all its runs are its longest run with parts
    left out (such as its end). Each of its calls then has a slot that the model predicts.
    """
    orders = [example.blocks for example in examples]
    samples = [example.sample for example in examples]
    unrolled: frozenset[int] = frozenset()
    while True:
        template = learn_template(orders, vocabulary.blocks, unrolled)
        filled = [tokens(order, template.families) for order in orders]
        slots = [template.slots[place] for place in template.loops]
        runs = [[f.get(slot, ()) for f in filled] for slot in slots]
        loops = tuple(learn_loop(samples, each, vocabulary.blocks) for each in runs)
        if unrolled:
            return template, filled, loops
        for slot, loop, each in zip(slots, loops, runs, strict=True):
            longest = max(each, key=len)
            alone = sum(other[0] == slot[0] for other in slots) == 1
            nested = alone and all(_is_part(run, longest) for run in set(each))
            if nested and not isinstance(loop.how, Rule) and len(longest) <= MAX_UNROLLED:
                unrolled |= template.families[LOOP - slot[0]]
        if not unrolled:
            return template, filled, loops


def _is_part(run: Sequence[int], longest: Sequence[int]) -> bool:
    """Return whether ``run`` is ``longest`` with some calls left out; the n-th call of a block in
    one matches the n-th in the other."""

    def calls(blocks: Sequence[int]) -> list[tuple[int, int]]:
        seen: Counter[int] = Counter()
        found = []
        for block in blocks:
            found.append((block, seen[block]))
            seen[block] += 1
        return found

    ran = calls(run)
    there = set(ran)
    return [call for call in calls(longest) if call in there] == ran


def _validate(vocabulary: Vocabulary, examples: Sequence[Example]) -> None:
    if len(examples) < 2:
        raise PilotError(
            f"a pilot learns from at least 2 recorded samples, and there are {len(examples)}: "
            "profile more steps"
        )
    size = len(vocabulary.blocks)
    largest = max((block for example in examples for block in example.blocks), default=-1)
    if not 0 <= largest < size:
        raise PilotError(
            f"the recorded orders do not fit the vocabulary of {size} blocks: "
            "build the vocabulary from the same traces"
        )
