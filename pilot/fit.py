"""Fitting a pilot from samples and the orders they ran.

Cross-validation over whole sources chooses the length of training, the threshold and, for
``"auto"``, the kind of model; the final model then learns from all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dynoffload.errors import PilotError
from dynoffload.pilot.baselines import most_frequent_order
from dynoffload.pilot.evaluate import varying_blocks
from dynoffload.pilot.features import Example, Floats, block_features, sites_of
from dynoffload.pilot.loops import LoopModel, Rule, learn_loop
from dynoffload.pilot.models import AUTO_KINDS, KINDS, TrainingSet
from dynoffload.pilot.pilot import Pilot, shown_by
from dynoffload.pilot.sources import source_folds
from dynoffload.pilot.template import LOOP, OrderTemplate, Slot, learn_template, tokens
from dynoffload.pilot.validation import (
    FoldResult,
    Validation,
    cross_validate,
    fit_all,
    fit_fold,
)
from dynoffload.pilot.workers import run_tasks
from dynoffload.planning.blocks import Vocabulary

AUTO = "auto"
FOLDS = 3
"""Parts of the samples, each predicted by what is learned from the others."""
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
    kinds = AUTO_KINDS if model == AUTO else (model,)
    _validate(vocabulary, examples, kinds)
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
        np.fmax.reduceat(placed_hints(bare, examples), firsts, axis=1),
    )
    bare = replace(bare, bundles=tuple(bundles.tolist()))
    return _fit_models(bare, data, examples, kinds, seed, on_progress or (lambda _: None), jobs)


def _fit_models(
    bare: Pilot,
    data: TrainingSet,
    examples: Sequence[Example],
    kinds: Sequence[str],
    seed: int,
    on_progress: Progress,
    jobs: int | None,
) -> Pilot:
    """Choose kind, length of training and threshold by cross-validation; then learn from all.

    What is predicted of steps that were left out also tells how the chosen kind errs.
    """
    chosen = np.linspace(0, len(examples) - 1, min(len(examples), MAX_CHOOSING)).astype(int)
    tried = _validations(bare, data, examples, chosen, kinds, seed, on_progress, jobs)
    best = max((tried[kind] for kind in kinds), key=lambda one: one.accuracy)
    if len(examples) > MAX_CHOOSING:  # models of fewer samples err otherwise
        every = np.arange(len(examples))
        found = _validations(bare, data, examples, every, [best.kind], seed, on_progress, jobs)
        best = replace(found[best.kind], share=best.share)
    on_progress(f"training: {best.kind}")
    ((_, model),) = run_tasks(fit_all, [(best.kind, data, best.share, seed)], jobs)
    card = {
        **bare.card,
        "validation_accuracy": {kind: round(tried[kind].accuracy, 4) for kind in kinds},
        "validation_samples": len(chosen),
        "folds": FOLDS,
    }
    return replace(
        bare, model=model, threshold=best.threshold, card=card, correction=best.correction
    )


def _validations(
    bare: Pilot,
    data: TrainingSet,
    examples: Sequence[Example],
    chosen: npt.NDArray[np.int64],
    kinds: Sequence[str],
    seed: int,
    on_progress: Progress,
    jobs: int | None,
) -> dict[str, Validation]:
    """Return what cross-validation over the ``chosen`` examples tells of each kind."""
    some = data.part(chosen)
    folds = source_folds(some.groups, FOLDS, seed)
    parts = [int(part) for part in np.unique(folds)]
    questions = [(kind, part) for kind in reversed(kinds) for part in parts]  # longest first
    results: dict[tuple[str, int], FoldResult] = {}
    tasks = [(kind, some, folds, part, seed) for kind, part in questions]
    for number, made in run_tasks(fit_fold, tasks, jobs):
        results[questions[number]] = made
        on_progress(f"choosing a model: {len(results)} of {len(tasks)} trial fits")
    shown = np.linspace(0, len(chosen) - 1, min(len(chosen), MAX_VALIDATION)).astype(int)
    scored = [examples[i] for i in chosen[shown]]
    of_kind = {kind: [results[kind, part] for part in parts] for kind in kinds}
    trials = [(bare, scored, shown, kind, some, folds, of_kind[kind]) for kind in kinds]
    return {kinds[number]: found for number, found in run_tasks(cross_validate, trials, jobs)}


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
) -> tuple[OrderTemplate, list[Filled], tuple[LoopModel, ...]]:
    """Learn the template and its loops.

    A loop whose length no rule tells, and whose shorter runs are the longest with parts left out
    (its end, or of its last round the middle), is unrolled: what runs is asked of the models, round
    by round.
    """
    orders = [example.blocks for example in examples]
    template = learn_template(orders, vocabulary.blocks)
    filled = [tokens(order, template.families) for order in orders]
    loops = _learn_loops(template, examples, filled, vocabulary)
    unrolled: set[int] = set()
    for place, loop in zip(template.loops, loops, strict=True):
        slot = template.slots[place]
        runs = {f.get(slot, ()) for f in filled}
        longest = max(runs, key=len)
        nested = all(_is_part(run, longest) for run in runs)
        nested = nested and sum(template.slots[p][0] == slot[0] for p in template.loops) == 1
        if not isinstance(loop.how, Rule) and nested and len(longest) <= MAX_UNROLLED:
            unrolled |= template.families[LOOP - slot[0]]
    if not unrolled:
        return template, filled, loops
    template = learn_template(orders, vocabulary.blocks, frozenset(unrolled))
    filled = [tokens(order, template.families) for order in orders]
    return template, filled, _learn_loops(template, examples, filled, vocabulary)


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


def _learn_loops(
    template: OrderTemplate,
    examples: Sequence[Example],
    filled: Sequence[Filled],
    vocabulary: Vocabulary,
) -> tuple[LoopModel, ...]:
    samples = [example.sample for example in examples]
    slots = [template.slots[index] for index in template.loops]
    blocks = vocabulary.blocks
    return tuple(learn_loop(samples, [f.get(slot, ()) for f in filled], blocks) for slot in slots)


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
