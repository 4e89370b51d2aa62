"""Fitting a pilot from samples and the orders they ran.

Cross-validation over whole sources chooses the length of training, the threshold and, for
``"auto"``, the kind of model; the final model then learns from all of them. A kind that is far
behind the best where one part is left out is not tried on the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dynoffload.errors import PilotError
from dynoffload.pilot.baselines import most_frequent_order
from dynoffload.pilot.evaluate import varying_blocks
from dynoffload.pilot.features import Example, Floats, block_features, sites_of
from dynoffload.pilot.models import KINDS, Lesson, PresenceModel
from dynoffload.pilot.pilot import Pilot, shown_by
from dynoffload.pilot.segments import Rule, SegmentModel, learn_segment
from dynoffload.pilot.skeleton import SEGMENT, Skeleton, Slot, learn_skeleton, tokens
from dynoffload.pilot.sources import source_folds
from dynoffload.pilot.trials import (
    LeftOut,
    Taught,
    at_first,
    is_behind,
    judge,
    learn_or_teach,
    teach,
)
from dynoffload.pilot.workers import run_tasks
from dynoffload.planning.blocks import Vocabulary

AUTO = "auto"
FOLDS = 3
"""Parts of the samples, each foretold by what the others teach."""
MAX_CHOOSING = 512
"""Samples that kinds are tried on at most, spread evenly; the chosen kind learns from all."""
MAX_VALIDATION = 256
"""Samples that thresholds are tried on at most."""

BUNDLED = 8
"""Steps in which slots must have run, and not run, to be taken for one."""
MAX_UNROLLED = 768
"""The longest loop that gets a slot for each block."""

Progress = Callable[[str], None]
Filled = dict[Slot, tuple[int, ...]]


def fit_pilot(
    vocabulary: Vocabulary,
    examples: Sequence[Example],
    *,
    model: str = AUTO,
    seed: int = 0,
    on_progress: Progress | None = None,
    jobs: int | None = 1,
) -> Pilot:
    """Fit a pilot.

    Args:
        vocabulary: the network's blocks.
        examples: recorded samples, at least two.
        model: one of `dynoffload.pilot.models.KINDS`, or ``"auto"`` for the best of them by
            cross-validation.
        seed: makes the result the same every time.
        on_progress: called now and then with what is being done.
        jobs: processes that fit the models of cross-validation, as `run_tasks` takes them. They do
            not change the result if this process uses one thread, as they do.

    Raises:
        PilotError: if there are too few samples, an order names a block that the vocabulary does
            not have, or the model is unknown.
    """
    kinds = KINDS if model == AUTO else (model,)
    _validate(vocabulary, examples, kinds)
    orders = [example.blocks for example in examples]
    skeleton, filled, segments = _learn_shape(vocabulary, examples)
    card: dict[str, Any] = {
        "samples": len(examples),
        "sources": len({example.source for example in examples}),
        "seed": seed,
        "seen": shown_by([example.sample for example in examples]),
    }
    bare = Pilot(
        vocabulary,
        skeleton,
        None,
        segments,
        0.5,
        varying_blocks(orders, len(vocabulary)),
        tuple(most_frequent_order(orders, vocabulary.blocks)),
        card,
    )
    optional = [skeleton.slots[index] for index in skeleton.optional]
    if not optional:
        return bare
    present = np.array([[slot in slots for slot in optional] for slots in filled], dtype=np.bool_)
    bundles = bundled(present)
    firsts = np.unique(bundles, return_index=True)[1]
    chosen = [optional[first][0] for first in firsts.tolist()]
    lesson = Lesson(
        [example.sample for example in examples],
        present[:, firsts],
        [example.source for example in examples],
        block_features(vocabulary.blocks, chosen),
        sites_of(vocabulary.blocks, chosen),
        np.fmax.reduceat(placed_hints(bare, examples), firsts, axis=1),
    )
    bare = replace(bare, bundles=tuple(bundles.tolist()))
    return _fit_models(bare, lesson, examples, kinds, seed, on_progress or (lambda _: None), jobs)


def _fit_models(
    bare: Pilot,
    lesson: Lesson,
    examples: Sequence[Example],
    kinds: Sequence[str],
    seed: int,
    on_progress: Progress,
    jobs: int | None,
) -> Pilot:
    """Choose kind, length of training and threshold by cross-validation; then learn from all.

    What is foretold of steps that were left out also tells how the chosen kind errs.
    """
    chosen = np.linspace(0, len(examples) - 1, min(len(examples), MAX_CHOOSING)).astype(int)
    some = lesson.part(chosen)
    folds = source_folds(some.groups, FOLDS, seed)
    parts = [int(part) for part in np.unique(folds)]
    shown = np.linspace(0, len(chosen) - 1, min(len(chosen), MAX_VALIDATION)).astype(int)
    taught: dict[tuple[str, int], Taught] = {}

    def try_on(parts: Sequence[int]) -> None:
        questions = [(kind, part) for kind in reversed(kinds) for part in parts]  # longest first
        tasks = [(kind, some, folds, part, seed) for kind, part in questions]
        expected = len(taught) + len(tasks)
        for number, made in run_tasks(teach, tasks, jobs):
            taught[questions[number]] = made
            on_progress(f"choosing a model: {len(taught)} of {expected} trial fits")

    try_on(parts[:1])
    behind: dict[str, float] = {}
    if len(kinds) > 1:
        steps = shown[folds[shown] == parts[0]]
        seen = [examples[i] for i in chosen[steps]]
        behind = _behind(bare, seen, steps, {k: taught[k, parts[0]] for k in kinds}, jobs)
        kinds = [kind for kind in kinds if kind not in behind]
    try_on(parts[1:])
    trials = [(kind, some, folds, [taught[kind, part] for part in parts]) for kind in kinds]
    judged = [(bare, [examples[i] for i in chosen[shown]], shown, *trial) for trial in trials]
    tried: dict[str, LeftOut] = {}
    for number, left_out in run_tasks(judge, judged, jobs):
        tried[kinds[number]] = left_out
        on_progress(f"choosing a model: {len(tried)} of {len(kinds)} kinds judged")
    told = max((tried[kind] for kind in kinds), key=lambda left_out: left_out.accuracy)
    model, told = _train(bare, lesson, examples, told, seed, on_progress, jobs)
    card = {
        **bare.card,
        "validation_accuracy": {kind: round(tried[kind].accuracy, 4) for kind in kinds},
        "validation_samples": len(chosen),
        "folds": len(parts),
        "behind": {kind: round(gap, 4) for kind, gap in behind.items()},
    }
    return replace(
        bare, model=model, threshold=told.threshold, card=card, correction=told.correction
    )


def _behind(
    bare: Pilot,
    examples: Sequence[Example],
    steps: npt.NDArray[np.int64],
    told: Mapping[str, Taught],
    jobs: int | None,
) -> dict[str, float]:
    """Return the kinds that do worse than the best on the first part, each with how much less of
    the order they have right."""
    kinds = list(told)
    found: dict[str, npt.NDArray[np.float64]] = {}
    tasks = [(bare, examples, steps, told[kind]) for kind in kinds]
    for number, accuracies in run_tasks(at_first, tasks, jobs):
        found[kinds[number]] = accuracies
    best = found[max(kinds, key=lambda kind: found[kind].mean())]
    return {
        kind: float((best - found[kind]).mean()) for kind in kinds if is_behind(found[kind], best)
    }


def _train(
    bare: Pilot,
    lesson: Lesson,
    examples: Sequence[Example],
    told: LeftOut,
    seed: int,
    on_progress: Progress,
    jobs: int | None,
) -> tuple[PresenceModel, LeftOut]:
    """Train the chosen kind on all samples; return the model, and how it errs.

    Models of fewer samples err otherwise: where a part alone was tried, how the kind errs is
    learned anew from all samples, each left out once.
    """
    doing = f"training: {told.kind}"
    on_progress(doing)
    tasks: list[tuple[Any, ...]] = [(told.kind, lesson, seed, told.share)]
    folds = source_folds(lesson.groups, FOLDS, seed)
    if len(examples) > MAX_CHOOSING:
        parts = [int(part) for part in np.unique(folds)]
        tasks += [(told.kind, lesson, seed, None, folds, part) for part in parts]
    made: dict[int, PresenceModel | Taught] = {}
    for number, each in run_tasks(learn_or_teach, tasks, jobs):
        made[number] = each
        on_progress(f"{doing} ({len(made)} of {len(tasks)} fits)")
    model = made.pop(0)
    assert not isinstance(model, Taught)
    taught = [part for _, part in sorted(made.items()) if isinstance(part, Taught)]
    if taught:
        shown = np.linspace(0, len(examples) - 1, MAX_VALIDATION).astype(int)
        seen = [examples[i] for i in shown]
        told = judge(bare, seen, shown, told.kind, lesson, folds, taught)
    return model, told


def bundled(present: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return the number of the bundle of each optional slot, ascending, ``[optional]``.

    Slots that follow one another and ran in the same steps, always, are one question to a model:
    the layers between two exits, the cells of a round. Of what ran, or did not, in fewer steps
    than `BUNDLED`, that may be by chance.

    Args:
        present: which optional slot ran in which step, ``[steps, optional]``.
    """
    ran = present.sum(axis=0)
    often = np.minimum(ran, len(present) - ran) >= BUNDLED
    alike = (present[:, 1:] == present[:, :-1]).all(axis=0) & often[1:]
    return np.concatenate(([0], np.cumsum(~alike))).astype(np.int64)


def placed_hints(pilot: Pilot, examples: Sequence[Example]) -> Floats:
    """Return what was hinted last about each optional slot while others were undecided before it,
    and what when it was at hand; NaN if nothing was, ``[examples, optional, 2]``."""
    layout = pilot.layout
    hints = np.full((len(examples), len(layout.optional), 2), np.nan, dtype=np.float32)
    for row, example in zip(hints, examples, strict=True):
        seen: Counter[int] = Counter()
        passed = passed_slots = 0
        for hint in example.hints:
            for block in example.blocks[passed : hint.place]:
                place = layout.place_of.get((block, seen[block]), -1)
                seen[block] += 1
                upto = int(np.searchsorted(layout.optional, place, side="right"))
                passed_slots = max(passed_slots, upto)
            passed = hint.place
            places = (layout.place_of.get((block, seen[block]), -1) for block in hint.blocks)
            numbers = [layout.optional_number.get(place, -1) for place in places]
            open_ones = [number for number in numbers if number >= passed_slots]
            at_hand = int(min(open_ones, default=-1) == passed_slots)
            for number, value in zip(numbers, hint.values, strict=True):
                if number >= passed_slots:
                    row[number, at_hand] = value
    return hints


def _learn_shape(
    vocabulary: Vocabulary, examples: Sequence[Example]
) -> tuple[Skeleton, list[Filled], tuple[SegmentModel, ...]]:
    """Learn the skeleton and its segments.

    A loop whose length no rule tells, and whose shorter runs are the longest with parts left out
    (its end, or of its last round the middle), is unrolled: what runs is asked of the models, round
    by round.
    """
    orders = [example.blocks for example in examples]
    skeleton = learn_skeleton(orders, vocabulary.blocks)
    filled = [tokens(order, skeleton.families) for order in orders]
    segments = _learn_segments(skeleton, examples, filled, vocabulary)
    unrolled: set[int] = set()
    for place, segment in zip(skeleton.segments, segments, strict=True):
        slot = skeleton.slots[place]
        runs = {f.get(slot, ()) for f in filled}
        longest = max(runs, key=len)
        nested = all(_is_part(run, longest) for run in runs)
        nested = nested and sum(skeleton.slots[p][0] == slot[0] for p in skeleton.segments) == 1
        if not isinstance(segment.how, Rule) and nested and len(longest) <= MAX_UNROLLED:
            unrolled |= skeleton.families[SEGMENT - slot[0]]
    if not unrolled:
        return skeleton, filled, segments
    skeleton = learn_skeleton(orders, vocabulary.blocks, frozenset(unrolled))
    filled = [tokens(order, skeleton.families) for order in orders]
    return skeleton, filled, _learn_segments(skeleton, examples, filled, vocabulary)


def _is_part(run: Sequence[int], longest: Sequence[int]) -> bool:
    """Return whether a run is another with some calls left out, where the n-th call of a block is
    the n-th in both."""
    ran = _calls(run)
    there = set(ran)
    return [call for call in _calls(longest) if call in there] == ran


def _calls(run: Sequence[int]) -> list[tuple[int, int]]:
    """Return each block of a run with how often it ran before."""
    seen: Counter[int] = Counter()
    calls = []
    for block in run:
        calls.append((block, seen[block]))
        seen[block] += 1
    return calls


def _learn_segments(
    skeleton: Skeleton,
    examples: Sequence[Example],
    filled: Sequence[Filled],
    vocabulary: Vocabulary,
) -> tuple[SegmentModel, ...]:
    samples = [example.sample for example in examples]
    slots = [skeleton.slots[index] for index in skeleton.segments]
    blocks = vocabulary.blocks
    return tuple(
        learn_segment(samples, [f.get(slot, ()) for f in filled], blocks) for slot in slots
    )


def _validate(vocabulary: Vocabulary, examples: Sequence[Example], kinds: Sequence[str]) -> None:
    for kind in kinds:
        if kind not in KINDS:
            choices = ", ".join((AUTO, *KINDS))
            raise PilotError(f"there is no pilot model {kind!r}: choose one of {choices}")
    if len(examples) < 2:
        raise PilotError(
            f"a pilot learns from at least 2 recorded samples, and there are {len(examples)}: "
            "profile more steps"
        )
    size = len(vocabulary.blocks)
    codes: npt.NDArray[np.int64] = np.array(
        [block for example in examples for block in example.blocks], dtype=np.int64
    )
    if not (codes >= 0).any() or int(codes.max()) >= size:
        raise PilotError(
            f"the recorded orders do not fit the vocabulary of {size} blocks: "
            "build the vocabulary from the same traces"
        )
