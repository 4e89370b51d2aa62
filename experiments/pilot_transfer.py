"""A sequence model learned from several networks, for one that none of them is.

What it is: `train_shared`, which fits one state and one way to read a block (`SiteSequence`) on the
recordings of many networks, each block also with a vector of its own that half of the batches leave
out, as strangers have none; `transferred_pilot`, a pilot for a network whose order of blocks is
known from a few steps, and of whose choices nothing is known but what other networks taught; and
`transfer`, its scores beside those of pilots that learned from these few steps. What it is not: a
way to know the blocks of a network before any step of it.

A code means something only among samples of one kind: tokens are not pixels. Samples are of one
kind if their numbers have the same names, and codes of different kinds are kept apart.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dynoffload.errors import PilotError
from dynoffload.experiments.pilot_cases import CASES
from dynoffload.experiments.pilot_recording import Recording
from dynoffload.experiments.trainer import finite
from dynoffload.pilot.baselines import LastOrder
from dynoffload.pilot.codes import PAD, columns_of, learn_fields
from dynoffload.pilot.evaluate import Scores, score
from dynoffload.pilot.features import (
    Example,
    Floats,
    block_features,
    learn_scaler,
    site_stops,
    sites_of,
)
from dynoffload.pilot.fit import AUTO, fit_pilot
from dynoffload.pilot.models import Rest
from dynoffload.pilot.pilot import RULE, Pilot
from dynoffload.pilot.sequence import SiteSequence
from dynoffload.pilot.sequence_training import (
    BATCH,
    DECAY,
    LEARNING_RATE,
    Inputs,
    Trainee,
    planned_epochs,
)
from dynoffload.pilot.skeleton import tokens
from dynoffload.profiler.sample import Sample

FIRST = 50
"""Steps of the network at hand that are known, first ones of those that are learned from."""
TAUGHT = 120
"""Steps that each other network teaches, at most, spread over its training."""
COLUMNS = 3
"""Columns of an element that all networks' samples are brought to."""
QUICK = "markov"
"""The kind that is learned where only the skeleton counts."""
OWN = frozenset(("own", "odds"))
"""The weights that are a network's own."""


@dataclass(frozen=True)
class Course:
    """What one network teaches.

    Attributes:
        samples: one per step, brought to one form by `common`.
        present: which bundle of optional slots ran in which step, ``[steps, blocks]``.
        described: the blocks' features, ``[blocks, features]``.
        stops: where each site ends among the blocks.
    """

    samples: Sequence[Sample]
    present: npt.NDArray[np.bool_]
    described: Floats
    stops: tuple[int, ...]


def common(sample: Sample) -> Sample:
    """Return a sample with `COLUMNS` columns of codes, each apart from other kinds' codes."""
    if not len(sample.elements):
        return sample
    codes = columns_of(sample.elements)[:, :COLUMNS]
    kind = zlib.crc32("\0".join(sorted(sample.values)).encode())
    wide = np.full((len(codes), COLUMNS), PAD, dtype=np.int64)
    wide[:, : codes.shape[1]] = codes
    return Sample(sample.values, wide + (kind << 24))


def course_of(pilot: Pilot, examples: Sequence[Example]) -> Course:
    """Return what examples teach, as the optional slots of a pilot see them.

    Raises:
        PilotError: the pilot has no optional slots.
    """
    described, sites = _questions(pilot)
    skeleton, bundles = pilot.skeleton, pilot.layout.bundles
    firsts = np.unique(bundles, return_index=True)[1]
    slots = [skeleton.slots[skeleton.optional[first]] for first in firsts.tolist()]
    filled = [tokens(example.blocks, skeleton.families) for example in examples]
    present = np.array([[slot in ran for slot in slots] for ran in filled], dtype=np.bool_)
    samples = [common(example.sample) for example in examples]
    return Course(samples, present, described, site_stops(sites))


@dataclass(frozen=True)
class Stranger:
    """A model of other networks, for one that none of them is.

    Attributes:
        net: with this network's blocks.
    """

    net: SiteSequence

    kind = "sequence"

    def probabilities(self, sample: Sample) -> Floats:
        """Return P(the block runs) for each optional block, float32 ``[blocks]``."""
        return self.net.probabilities(common(sample))

    def rest(self, sample: Sample) -> Rest:
        """Return how the rest of a step is foretold."""
        return self.net.rest(common(sample))

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the net's."""
        return self.net.arrays()

    def document(self) -> dict[str, Any]:
        """Return the net's."""
        return self.net.document()


def transferred_pilot(shared: SiteSequence, pilot: Pilot) -> Pilot:
    """Return a pilot with another's skeleton whose choices a model of other networks foretells.

    Args:
        shared: what `train_shared` returned.
        pilot: of the network at hand.

    Raises:
        PilotError: the pilot has no optional slots.
    """
    described, sites = _questions(pilot)
    moved = shared.transferred(described, site_stops(sites))
    return replace(pilot, model=Stranger(moved), threshold=0.5, correction=None)


def _questions(pilot: Pilot) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Return the features of each bundle of optional slots, and its site.

    Beside what `block_features` has, they tell how many there are at the site, and at which place
    of them a block stands: of sixty-four experts fewer run than of two branches.
    """
    blocks, skeleton = pilot.vocabulary.blocks, pilot.skeleton
    if not skeleton.optional:
        raise PilotError(
            "there is nothing to transfer to: every block of this network runs always, or as a "
            "rule says"
        )
    firsts = np.unique(pilot.layout.bundles, return_index=True)[1]
    chosen = [skeleton.slots[skeleton.optional[first]][0] for first in firsts.tolist()]
    sites = sites_of(blocks, chosen)
    counts = np.bincount(sites)[sites]
    places = np.array([np.count_nonzero(sites[:i] == site) for i, site in enumerate(sites)])
    more = np.stack((np.log(counts), places / counts), axis=1).astype(np.float32)
    return np.concatenate((block_features(blocks, chosen), more), axis=1), sites


def train_shared(courses: Sequence[Course], *, seed: int) -> SiteSequence:
    """Fit one net on several networks, and return it for strangers (`SiteSequence.transferred`).

    Args:
        courses: what each network teaches, at least one.
        seed: for everything that is drawn.
    """
    samples = [sample for course in courses for sample in course.samples]
    fields, scaler = learn_fields(samples), learn_scaler(samples)
    generator = torch.Generator("cpu").manual_seed(seed)
    trainees = [
        Trainee(fields, scaler, one.described, one.stops, one.present, generator) for one in courses
    ]
    shared = {name: one for name, one in trainees[0].weights.items() if name not in OWN}
    share = np.mean([one.present.mean() for one in courses])
    anybody = torch.tensor(math.log(share / (1 - share)), dtype=torch.float32, device="cpu")
    anybody.requires_grad_()
    for trainee in trainees:
        trainee.weights.update(shared)
        trainee.stranger = anybody
    inputs = [Inputs(fields, scaler, one.samples) for one in courses]
    truths = [torch.from_numpy(one.present.astype(np.float32)) for one in courses]
    weights = [*shared.values(), anybody]
    weights += [trainee.weights[name] for trainee in trainees for name in sorted(OWN)]
    epochs = planned_epochs(len(samples))
    batches = sum(math.ceil(len(one.samples) / BATCH) for one in courses)
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, epochs * batches, pct_start=0.1
    )
    with torch.enable_grad():
        for _ in range(epochs):
            for number, chosen in _shuffled(courses, generator):
                optimizer.zero_grad()
                batch = inputs[number].batch(chosen)
                loss = trainees[number].loss(batch, truths[number][chosen], generator)
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(weights, 1.0)
                optimizer.step()
                schedule.step()
    net = trainees[0].finished()
    odds = np.full(len(courses[0].described), float(anybody.detach()), dtype=np.float32)
    return replace(net, weights={**net.weights, "odds": odds})


def _shuffled(
    courses: Sequence[Course], generator: torch.Generator
) -> list[tuple[int, torch.Tensor]]:
    """Return the batches of an epoch, each of one network: its number, and which steps."""
    batches = [
        (number, chosen)
        for number, course in enumerate(courses)
        for chosen in torch.randperm(len(course.samples), generator=generator, device="cpu").split(
            BATCH
        )  # type: ignore[no-untyped-call]
    ]
    order = torch.randperm(len(batches), generator=generator, device="cpu").tolist()
    return [batches[i] for i in order]


def transfer(key: str, recordings: Mapping[str, Recording], seed: int) -> dict[str, Any]:
    """Return how well a case is foretold by what all other networks taught.

    Cases of the same network teach nothing, whatever their samples' shape. All predictors know the
    blocks and their order from the case's first `FIRST` steps, and are scored on its held-out ones
    before the first operator.

    Args:
        key: of the case.
        recordings: of all cases, by key.
        seed: of all training.
    """
    own = recordings[key]
    first, scored, vocabulary = own.learned[:FIRST], own.scored, own.vocabulary
    local = fit_pilot(vocabulary, first, model=AUTO, seed=seed)
    found: dict[str, Any] = {"first": len(first), "own_kind": local.kind}
    if local.kind == RULE:
        return found | {"own": _start(local, scored), "why": "a rule: nothing is left to a model"}
    courses = []
    for other, recording in recordings.items():
        if CASES[other].network == CASES[key].network:
            continue
        learned = recording.learned
        part = np.linspace(0, len(learned) - 1, min(len(learned), TAUGHT)).astype(np.int64)
        steps = [learned[i] for i in part.tolist()]
        skeleton = fit_pilot(recording.vocabulary, steps, model=QUICK, seed=seed)
        if skeleton.kind != RULE:
            courses.append(course_of(skeleton, steps))
    if not courses:
        return found | {"own": _start(local, scored), "why": "no other network teaches anything"}
    ranked = fit_pilot(vocabulary, first, model="sequence", seed=seed)
    moved = transferred_pilot(train_shared(courses, seed=seed), local)
    frequent = local.most_frequent
    last = LastOrder(frequent)
    blocks, varying = vocabulary.blocks, local.varying
    return found | {
        "networks": len(courses),
        "transferred": _start(moved, scored),
        "own": _start(local, scored),
        "own_sequence": _start(ranked, scored),
        "last_order": _plain(score(last, scored, blocks, varying)),
        "most_frequent": _plain(score(lambda _: frequent, scored, blocks, varying)),
    }


def _start(pilot: Pilot, scored: Sequence[Example]) -> dict[str, Any]:
    def predict(example: Example) -> list[int]:
        return pilot.predict(example.sample).blocks

    return _plain(score(predict, scored, pilot.vocabulary.blocks, pilot.varying))


def _plain(scores: Scores) -> dict[str, Any]:
    return {name: finite(value) for name, value in scores.to_json().items()}
