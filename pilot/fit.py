"""Fitting a pilot from samples and the orders they ran.

What it is: `fit_pilot`, from a list of `Example` to a `Pilot`, without files. What it is not:
reading traces or scoring on held-out sources; that is `dynoffload.pilot.train`.

Part of the sources is set aside inside to choose the length of training, the threshold and, for
``"auto"``, the kind of model; the final model then learns from all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dynoffload.errors import PilotError
from dynoffload.pilot.baselines import MostFrequent
from dynoffload.pilot.evaluate import block_order_accuracy, split_by_source, varying_blocks
from dynoffload.pilot.features import Example, block_features, sites_of
from dynoffload.pilot.models import KINDS, Lesson, learn_model
from dynoffload.pilot.pilot import Pilot
from dynoffload.pilot.segments import SegmentModel, learn_segment
from dynoffload.pilot.skeleton import Skeleton, learn_skeleton, tokens
from dynoffload.planning.blocks import Vocabulary

AUTO = "auto"
VALIDATION = 0.2
"""Share of the samples set aside to choose by."""
MAX_VALIDATION = 256
"""Samples that thresholds are tried on at most."""
THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(2, 17))

Progress = Callable[[str], None]


def fit_pilot(
    vocabulary: Vocabulary,
    examples: Sequence[Example],
    *,
    model: str = AUTO,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> Pilot:
    """Fit a pilot.

    Args:
        vocabulary: the network's blocks.
        examples: recorded samples, at least two.
        model: ``"lightgbm"``, ``"mlp"``, or ``"auto"`` for the better of the two on samples set
            aside.
        seed: makes the result the same every time.
        on_progress: called now and then with what is being done.

    Raises:
        PilotError: if there are too few samples, an order names a block that the vocabulary does
            not have, or the model is unknown.
    """
    kinds = KINDS if model == AUTO else (model,)
    _validate(vocabulary, examples, kinds)
    orders = [example.blocks for example in examples]
    skeleton = learn_skeleton(orders, vocabulary.blocks)
    filled = [tokens(order, skeleton.families) for order in orders]
    segments = _learn_segments(skeleton, examples, filled)
    card: dict[str, Any] = {
        "samples": len(examples),
        "sources": len({example.source for example in examples}),
        "seed": seed,
    }
    bare = Pilot(
        vocabulary,
        skeleton,
        None,
        segments,
        0.5,
        varying_blocks(orders),
        tuple(MostFrequent(orders, vocabulary.blocks).order),
        card,
    )
    optional = [skeleton.slots[index] for index in skeleton.optional]
    if not optional:
        return bare
    chosen = [block for block, _ in optional]
    lesson = Lesson(
        [example.sample for example in examples],
        np.array([[slot in slots for slot in optional] for slots in filled], dtype=np.bool_),
        [example.source for example in examples],
        block_features(vocabulary.blocks, chosen),
        sites_of(vocabulary.blocks, chosen),
    )
    return _fit_models(bare, lesson, examples, kinds, seed, on_progress or (lambda _: None))


def _fit_models(
    bare: Pilot,
    lesson: Lesson,
    examples: Sequence[Example],
    kinds: Sequence[str],
    seed: int,
    on_progress: Progress,
) -> Pilot:
    """Choose kind, length of training and threshold on sources set aside; then learn from all."""
    inside, aside = split_by_source(lesson.groups, VALIDATION, seed)
    aside = aside[:: max(1, -(-len(aside) // MAX_VALIDATION))]
    held_out = lesson.part(np.array(aside))
    best: tuple[float, str, float, int | None] | None = None
    tried: dict[str, float] = {}
    for kind in kinds:
        on_progress(f"choosing: {kind}")
        model, epochs = learn_model(
            kind,
            lesson.part(np.array(inside)),
            seed=seed,
            held_out=held_out,
            on_stage=lambda kind=kind: on_progress(f"choosing: {kind}"),  # type: ignore[misc]
        )
        trial = replace(bare, model=model)
        threshold, accuracy = choose_threshold(trial, [examples[i] for i in aside])
        tried[kind] = round(accuracy, 4)
        if best is None or accuracy > best[0]:
            best = (accuracy, kind, threshold, epochs)
    assert best is not None
    _, kind, threshold, epochs = best
    on_progress(f"training: {kind}")
    model, _ = learn_model(
        kind,
        lesson,
        seed=seed,
        epochs=epochs,
        on_stage=lambda: on_progress(f"training: {kind}"),
    )
    card = {**bare.card, "validation_accuracy": tried}
    return replace(bare, model=model, threshold=threshold, card=card)


def choose_threshold(pilot: Pilot, examples: Sequence[Example]) -> tuple[float, float]:
    """Return the threshold with the best block-order accuracy on some samples, and that
    accuracy."""
    totals = np.zeros(len(THRESHOLDS))
    for example in examples:
        chances = pilot.chances(example.sample)
        for number, threshold in enumerate(THRESHOLDS):
            order, _ = pilot.decode(example.sample, chances, threshold)
            totals[number] += block_order_accuracy(order, example.blocks)
    best = int(totals.argmax())
    return THRESHOLDS[best], float(totals[best]) / len(examples)


def _learn_segments(
    skeleton: Skeleton,
    examples: Sequence[Example],
    filled: Sequence[dict[tuple[int, int], tuple[int, ...]]],
) -> tuple[SegmentModel, ...]:
    samples = [example.sample for example in examples]
    slots = [skeleton.slots[index] for index in skeleton.segments]
    return tuple(learn_segment(samples, [f.get(slot, ()) for f in filled]) for slot in slots)


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
