"""What is done with a mutated file: all that a user's commands do with one that loads.

What it is: `use_pilot` and `use_trace`, which raise `Malformed` where an answer is not well-formed.
What it is not: the judge of what else they raise; see `fuzzing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from synthetic_pilot import label_of

from dynoffload.errors import DynOffloadError, PilotError
from dynoffload.pilot.features import Example
from dynoffload.pilot.fit import fit_pilot
from dynoffload.pilot.following import Following
from dynoffload.pilot.labels import Label, encode_example, make_label
from dynoffload.pilot.online import OnlineLearner
from dynoffload.pilot.pilot import Pilot
from dynoffload.planning.blocks import Vocabulary
from dynoffload.planning.cutting import build_vocabulary
from dynoffload.planning.footprint import footprint, temporaries
from dynoffload.profiler.program import resolve
from dynoffload.profiler.sample import Sample
from dynoffload.profiler.storage import load_trace, save_trace

MAX_TOLD = 60
"""Blocks of a step that is followed that a pilot is told."""

STRANGE = (
    Sample({}),
    Sample({"a": float("nan"), "nodes": 1e308}, np.array([[2**62, -(2**62)], [0, 1]])),
    Sample({"x": float("-inf")}, np.arange(3000) % 50),
)
"""Samples that no recorded network shows."""


class Malformed(Exception):
    """A file was taken for good, and what came of it is not."""


class Unnamed(Exception):
    """A refusal that does not say which file it is about."""


@dataclass(frozen=True)
class Good:
    """What an undamaged trace of each network gives, for learning beside mutated ones."""

    labels: dict[str, list[Label]]


def use_pilot(path: Path, examples: Sequence[Example], folder: Path) -> None:
    """Load a pilot, predict, follow steps, learn on, and save it again."""
    pilot = _named(path, lambda: Pilot.load(path))
    pilot.check(pilot.vocabulary.network)
    try:
        pilot.check("0" * 64 + pilot.vocabulary.network)
    except PilotError:
        pass
    else:
        raise Malformed("a pilot that knows every network")
    samples = [*(example.sample for example in examples), *STRANGE]
    for sample in samples:
        _predict(pilot, sample)
    for example in examples[:2]:
        _follow(pilot, example)
    learner = OnlineLearner(pilot.vocabulary, pilot=pilot, grow=False)
    size = len(pilot.vocabulary)
    for example in examples[:1]:
        order = [block if block < size else -1 for block in example.blocks]
        learner.predict(example.sample)
        learner.observe(example.sample, order)
    again = folder / "again.pilot"
    pilot.save(again)
    for sample in samples[:1]:
        if _predict(Pilot.load(again), sample) != _predict(pilot, sample):
            raise Malformed("a pilot that predicts otherwise once it is saved")


def _predict(pilot: Pilot, sample: Sample) -> list[int]:
    pilot.unlike(sample)
    prediction = pilot.predict(sample)
    _check_blocks(prediction.blocks, len(pilot.vocabulary))
    surety = prediction.confidence
    if surety is None or surety.shape != (len(prediction.blocks),):
        raise Malformed("confidence of another length than the blocks")
    for told in (surety, pilot.chances(sample)):
        if not (np.isfinite(told) & (told >= 0) & (told <= 1)).all():
            raise Malformed("chances that are none")
    return prediction.blocks


def _follow(pilot: Pilot, example: Example) -> None:
    size = len(pilot.vocabulary)
    step = Following(pilot, example.sample)
    order = [*example.blocks[:MAX_TOLD], -1, *pilot.predict(example.sample).blocks[:MAX_TOLD]]
    for place, block in enumerate(order):
        if place % 8 == 0:
            _check_blocks(step.rest(), size)
            hinted = [number for number in range(min(size, 8)) if number >= 0]
            step.hint(hinted, [0.5] * len(hinted))
        step.tell(block if block < size else -1)
    _check_blocks(step.rest(), size)
    if not np.isfinite(step.chances).all():
        raise Malformed("chances that are none, within a step")


def use_trace(path: Path, good: Good, folder: Path, *, learn: bool) -> None:
    """Load a trace, resolve and cut it, encode it, measure it, merge it, and save it again.

    Args:
        path: of the trace.
        good: what it is learned with, if its network says so.
        folder: to write into.
        learn: whether a pilot is trained on it.
    """
    trace = _named(path, lambda: load_trace(path))
    program = resolve(trace)
    if sum(visit.operators[1] - visit.operators[0] for visit in program.visits) != len(
        trace.operators
    ):
        raise Malformed("a program that lacks operators")
    label = label_of(program)
    beside = good.labels.get(trace.network, [])
    for labels in ([label], [*beside, label])[0 if learn else 1 :]:
        vocabulary = build_vocabulary([one.outline for one in labels], budget=1 << 20)
        example = encode_example(vocabulary, label)
        _check_blocks([b for b in example.blocks if b != -1], len(vocabulary))
        if Vocabulary.from_json(vocabulary.to_json()) != vocabulary:
            raise Malformed("a vocabulary that does not come back")
    if learn:
        examples = [encode_example(vocabulary, one) for one in labels]
        pilot = _tried(lambda: fit_pilot(vocabulary, examples, model="markov"))
        if pilot is not None:
            _predict(pilot, program.sample)
        made = make_label(str(path))
        if isinstance(made, str):
            raise Malformed(f"a trace that loads, and gives no label: {made}")
    sizes = _tried(lambda: footprint(trace))
    if sizes is not None and min(sizes.total, sizes.need, temporaries(trace)) < 0:
        raise Malformed("a footprint below zero")
    if learn:
        again = folder / "again.trace"
        save_trace(trace, again)
        if load_trace(again).operators != trace.operators:
            raise Malformed("a trace that does not come back")


def _tried(make):  # type: ignore[no-untyped-def]
    """Return what is made, or None where it is refused in words."""
    try:
        return make()
    except DynOffloadError:
        return None


def _named(path, load):  # type: ignore[no-untyped-def]
    """Return what is loaded; a refusal must name the file."""
    try:
        return load()
    except DynOffloadError as error:
        if path.name not in str(error):
            raise Unnamed(str(error)[:200]) from error
        raise


def _check_blocks(blocks: Sequence[int], size: int) -> None:
    if not all(isinstance(block, int) and 0 <= block < size for block in blocks):
        raise Malformed("a block outside the vocabulary")
