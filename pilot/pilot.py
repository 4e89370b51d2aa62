"""The pilot of one network, and its file: features of a sample in, predicted order of blocks out.

A pilot starts as the general one and knows nothing of its network but the blocks. `predict` gives
the order of a sample; `observe` learns from what ran: evidence, how far to trust each kind of it,
and how far the network's hints. `consolidate` learns the structure of the orders anew, when it is
`due`. All of it is online; a file holds what a pilot has learned so far.

[Note: adaptation]  The general pilot's log-odds of a slot are corrected by a linear mix of some of
its features, by a bias of the slot, and by its habit: the weight of what it did in the step before.
All are learned by gradient descent on the log-loss, as in logistic mixing (Mattern, "Mixing
strategies in data compression", 2012). With p the chance and y the outcome, a step adds RATE (y -
p) to the bias, of which FORGET decays, and HABIT_RATE (y - p) l to the habit, where l is 1 if the
slot ran in the step before, else -1.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dynoffload.errors import PilotError
from dynoffload.pilot.evidence import BIAS, HABIT, NAMES, Evidence, Shown
from dynoffload.pilot.features import BlockHint, Floats, sigmoid
from dynoffload.pilot.general import General, packaged
from dynoffload.pilot.loops import LoopModel
from dynoffload.pilot.structure import MAX_ORDER, Structure, learn_structure
from dynoffload.pilot.template import LOOP, OrderTemplate, tokens
from dynoffload.pilot.tracking import StepTracker
from dynoffload.planning.blocks import Vocabulary
from dynoffload.profiler.input_features import InputFeatures
from dynoffload.profiler.safefile import BadFileError, pack, read_file, write_whole

FORMAT = "dynoffload.pilot"
"""Key of the metadata of a pilot file's safetensors header."""
VERSION = 7
"""Version of its layout; any other is refused."""
MAX_SLOTS = 1 << 16
"""The most slots of a pilot's template."""
MAX_NAMED = 64
"""The most names of numbers that a card lists."""

RATE, FORGET = 0.3, 0.02
"""Learning rate of a slot's bias, and the share of it that decays each step."""
HABIT_RATE, MAX_HABIT = 0.03, 4.0
"""Learning rate of a slot's habit, and its limit in either direction."""
MIX_RATE, HINT_RATE = 0.005, 0.2
"""Learning rates of the mix of features, and of that with hints."""
MIXED = [
    NAMES.index(name)
    for name in (
        *("share", "lately 0.4", "lately 0.1", "lately 0.02", "given last", "codes"),
        *("likeliest code", "codes in site", "neighbours", "by best number"),
    )
]
"""The features that are mixed in; all are log-odds."""
KEPT = 64
"""The latest steps from which the structure is learned."""
LATER = 128
"""Steps between two consolidations, at most; the first come after 1, 2, 4, ... steps."""
_TRUST = np.array([[0.0, 0.7, 0.5, 0.2], [0.0, 0.2, 1.0, 3.0]], np.float32)  # ahead, at hand
_SURE = 0.02  # slots whose chance is as near to 0 or 1, and right, do not teach the mix


@dataclass(frozen=True)
class Prediction:
    """Prediction for one sample.

    Attributes:
        blocks: indices into the vocabulary, in forward order.
        seconds: how long the prediction took, in seconds.
        confidence: for each of ``blocks``, the estimated probability that it runs, ``[blocks]``.
    """

    blocks: list[int]
    seconds: float
    confidence: Floats | None = None


@dataclass(frozen=True)
class _Asked:
    """The latest prediction, until its step is observed."""

    sample: InputFeatures
    shown: Shown
    features: Floats
    mixed: Floats
    odds: Floats
    step: StepTracker


@dataclass
class Pilot:
    """Predicts block orders of one network, and adapts to it.

    Attributes:
        vocabulary: the network's blocks.
        general: where it starts from.
        structure: what the orders share, as far as known.
        evidence: what the steps so far say.
        card: how it was made, as plain JSON data; also the basis of `unlike`.
        trust: weights of a hint, given ahead and at hand: a constant, the pilot's own log-odds, the
            hint's, and their sign, ``[2, 4]``.
    """

    vocabulary: Vocabulary
    general: General = field(default_factory=packaged)
    card: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        blocks = self.vocabulary.blocks
        self.structure = learn_structure(blocks, [], [])
        self.evidence = Evidence(blocks)
        self.trust = _TRUST.copy()
        self._mix = np.zeros(1 + len(MIXED), np.float32)
        self._latest: deque[tuple[InputFeatures, list[int]]] = deque(maxlen=KEPT)
        self._next = 1
        self._asked: _Asked | None = None
        self._tracker: StepTracker | None = None
        self._place()

    def _place(self) -> None:
        template = self.structure.template
        slots = [template.slots[place] for place in template.single]
        new = self.evidence.place(slots)
        if new and self._latest:
            filled = [tokens(order, template.families) for _, order in self._latest]
            for number in new:
                self.evidence.recall(number, [slots[number] in one for one in filled])
        self._chain = self.evidence.nested()

    def predict(self, sample: InputFeatures) -> Prediction:
        """Return the predicted order of blocks of a sample.

        Args:
            sample: the result of `describe_input` for the forward call.
        """
        start = time.perf_counter()
        asked = self._ask(sample)
        blocks, confidence = asked.step.expect()
        self._asked, self._tracker = asked, asked.step
        return Prediction(blocks, time.perf_counter() - start, confidence)

    def glance(self, last: Sequence[int]) -> Prediction:
        """Predict by the last order alone, in a fifth of the time of `predict`; routing hints can
        correct it. Its step is not to be observed.

        Args:
            last: the order that ran last, negative for an unknown block.
        """
        start = time.perf_counter()
        chance = np.clip(self.evidence.after(self._filled(last)), 0.01, 0.99).astype(np.float32)
        odds = np.log(chance) - np.log1p(-chance)
        shape = self.structure, InputFeatures({}), odds, self._chain, self.trust
        self._asked, self._tracker = None, StepTracker(*shape, self.evidence.always)
        blocks, confidence = self._tracker.expect()
        return Prediction(blocks, time.perf_counter() - start, confidence)

    def _ask(self, sample: InputFeatures) -> _Asked:
        shown = self.evidence.show(sample)
        features = self.evidence.features(shown)
        mixed = np.ones((1 + len(MIXED), features.shape[1]), np.float32)
        mixed[1:] = np.clip(features[MIXED], -5, 5)
        of = self.evidence.statistics
        before = 2 * of[4] - 1 if self.evidence.steps else np.zeros(len(of[4]), np.float32)
        odds = self.general.odds(features) + self._mix @ mixed + of[BIAS] + of[HABIT] * before
        always = self.evidence.always
        step = StepTracker(self.structure, sample, odds, self._chain, self.trust, always)
        return _Asked(sample, shown, features, mixed, odds, step)

    @property
    def features(self) -> Floats:
        """What the general pilot looked at in the latest prediction, ``[NAMES, slots]``."""
        assert self._asked is not None
        return self._asked.features

    @property
    def tracker(self) -> StepTracker | None:
        """The tracker of the step predicted last; None once that step is observed."""
        return self._tracker

    def observe(
        self, sample: InputFeatures, blocks: Sequence[int], hints: Sequence[BlockHint] = ()
    ) -> None:
        """Learn from the order that a sample ran.

        Args:
            sample: the object passed to `predict`, if it was called.
            blocks: the order it ran, negative for a block unknown to the vocabulary.
            hints: the network's routing hints, if they were not passed to the `tracker`.
        """
        asked, self._asked, self._tracker = self._asked, None, None
        if asked is None or asked.sample is not sample:
            asked = self._ask(sample)
        order = [block for block in blocks if block >= 0]
        if hints:
            for _ in follow(asked.step, order, hints):
                pass
        ran = self._filled(order)
        self._adapt(asked, ran)
        self.evidence.observe(asked.shown, ran)
        self._latest.append((sample, order))

    def _filled(self, order: Sequence[int]) -> Any:
        """Return whether an order has each slot, ``[slots]``."""
        filled = tokens([block for block in order if block >= 0], self.structure.template.families)
        return np.array([slot in filled for slot in self.evidence.slots], np.bool_)

    def _adapt(self, asked: _Asked, ran: Any) -> None:
        """Learn from a step's outcome; see [Note: adaptation]."""
        residual = ran - sigmoid(asked.odds)
        of = self.evidence.statistics
        of[BIAS] = (1 - FORGET) * (of[BIAS] + RATE * residual)
        if self.evidence.steps:
            of[HABIT] += HABIT_RATE * residual * (2 * of[4] - 1)
            np.clip(of[HABIT], -MAX_HABIT, MAX_HABIT, out=of[HABIT])
        unsure = np.abs(residual) > _SURE
        count = max(5, int(unsure.sum()))
        self._mix += MIX_RATE * (asked.mixed @ np.where(unsure, residual, 0)) / count
        for kind, hinted in enumerate(asked.step.hinted):
            if hinted.any():
                rows = asked.step.mixed[kind, hinted]
                wrong = ran[hinted] - sigmoid(rows @ self.trust[kind])
                self.trust[kind] += HINT_RATE * (wrong @ rows) / max(5, len(rows))

    @property
    def due(self) -> bool:
        """Whether enough steps were seen since the last `consolidate`."""
        return self.evidence.steps >= self._next

    def consolidate(self) -> None:
        """Learn the structure and the tables anew from the latest steps.

        Raises:
            PilotError: the orders have too many places for blocks.
        """
        steps = self.evidence.steps
        self._next = steps + min(max(1, steps), LATER)
        if not self._latest:
            return
        samples, orders = zip(*self._latest, strict=True)
        self.structure = learn_structure(self.vocabulary.blocks, samples, orders)
        self._place()
        if steps >= 16:
            self.evidence.refit()

    def check(self, fingerprint: str) -> None:
        """Check that this pilot was trained for the given network.

        Args:
            fingerprint: the network's `dynoffload.profiler.network.fingerprint`.

        Raises:
            PilotError: if the fingerprints differ.
        """
        if fingerprint != self.vocabulary.network:
            raise PilotError(
                f"this pilot was trained for network {self.vocabulary.network[:12]}, and the one "
                f"at hand is {fingerprint[:12]}: their classes, modules, parameter names, shapes "
                "or dtypes differ. Train a pilot on traces of this network, or use pilot='auto'"
            )

    def unlike(self, sample: InputFeatures) -> str:
        """Return how a sample's features differ in kind from the training samples', "" if they do
        not or this is unknown. Missing numbers are no difference, unless all are missing."""
        known, found = self.card.get("seen"), shown_by([sample])
        if not isinstance(known, dict) or not isinstance(known.get("values"), list):
            return ""
        texts = []
        widths = known.get("columns")
        if isinstance(widths, list) and widths and found["columns"][0] not in widths:
            expected = " or ".join(map(str, widths))
            texts.append(f"{expected} codes to an element, not {found['columns'][0]}")
        strange = [name for name in found["values"] if name not in known["values"]]
        if strange and len(known["values"]) < MAX_NAMED:
            texts.append(f"numbers without {strange[0]!r}")
        elif known["values"] and not found["values"]:
            texts.append(f"numbers, such as {known['values'][0]!r}")
        return "; ".join(texts)[:1000]

    def save(self, path: str | Path) -> None:
        """Write the pilot to one file, and round it to what that holds.

        Raises:
            PilotError: if the file cannot be written.
        """
        self.evidence.round()
        document = {
            "general": self.general.digest,
            "vocabulary": self.vocabulary.to_json(),
            "slots": [list(slot) for slot in self.structure.template.slots],
            "families": [sorted(family) for family in self.structure.template.families],
            "loops": [loop.to_json() for loop in self.structure.loops],
            "evidence": self.evidence.document(),
            "card": self.card,
        }
        arrays = {**self.evidence.arrays(), "mix": self._mix, "trust": self.trust}
        try:
            write_whole(Path(path), pack(document, arrays, FORMAT, VERSION))
        except BadFileError as error:
            raise PilotError(f"{path}: {error}; train it on fewer kinds of block") from error
        except OSError as error:
            raise PilotError(
                f"{path}: cannot be written ({error.strerror or error}); name another place"
            ) from error

    @classmethod
    def load(cls, path: str | Path) -> Pilot:
        """Read a pilot from a file that `save` wrote. Nothing in the file is executed.

        Raises:
            PilotError: if the file is missing, not a pilot, damaged or of another version.
        """
        path = Path(path)
        if not path.is_file():
            raise PilotError(
                f"{path}: there is no such pilot file; train one with 'dynoffload pilot train', or "
                "let the session learn one: pilot='auto'"
            )
        try:
            document, arrays = read_file(path, FORMAT, VERSION)
            if not isinstance(document["card"], dict):
                raise ValueError("an impossible card")
            made = cls(Vocabulary.from_json(document["vocabulary"]), card=document["card"])
            if document["general"] != made.general.digest:
                raise ValueError("it starts from another general pilot than this release has")
            blocks = made.vocabulary.blocks
            template = _load_template(document, len(blocks))
            loops = tuple(LoopModel.from_json(s, len(blocks)) for s in document["loops"])
            if len(loops) != len(template.loops):
                raise ValueError("another number of loops than models for them")
            made.structure = Structure(template, loops)
            slots = [template.slots[place] for place in template.single]
            made.evidence = Evidence.load(blocks, slots, document["evidence"], arrays)
            made._chain = made.evidence.nested()
            made._mix = _weights("mix", arrays, made._mix.shape)
            made.trust = _weights("trust", arrays, made.trust.shape)
            made._next = made.evidence.steps + LATER  # the latest steps are not in the file
            return made
        except OSError as error:
            raise PilotError(f"{path}: cannot be read ({error.strerror or error})") from error
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise PilotError(
                f"{path}: cannot be used as a pilot: {error}. Train the pilot again: dynoffload "
                f"pilot train TRACES -o {path.name}"
            ) from error


def follow(
    step: StepTracker, order: Sequence[int], hints: Sequence[BlockHint]
) -> Iterator[tuple[int, int]]:
    """Pass a recorded step's hints and blocks to a tracker; yield each block and its place, before
    it is observed."""
    at = 0
    for place, block in enumerate(order):
        while at < len(hints) and hints[at].place <= place:
            step.hint(hints[at].blocks, hints[at].values)
            at += 1
        yield place, block
        step.observe([block])


def shown_by(samples: Sequence[InputFeatures]) -> dict[str, Any]:
    """Return the kinds of features in some samples: the distinct numbers of codes per element (0:
    no elements), and the names of their numbers."""
    shapes = [sample.elements.shape for sample in samples]
    columns = {(shape[1] if shape[1:] else 1) if shape[0] else 0 for shape in shapes}
    return {
        "columns": sorted(columns),
        "values": sorted({n for s in samples for n in s.values})[:MAX_NAMED],
    }


def _weights(name: str, arrays: Any, shape: tuple[int, ...]) -> Floats:
    found = np.asarray(arrays[name])
    if found.shape != shape or found.dtype != np.float32 or not (np.abs(found) <= 1e3).all():
        raise ValueError(f"{name} that are no weights")
    return found.copy()


def _load_template(document: Any, blocks: int) -> OrderTemplate:
    """Build a template from its stored form; ValueError if it is not one."""
    slots = tuple((int(block), int(occurrence)) for block, occurrence in document["slots"])
    families = tuple(frozenset(map(int, family)) for family in document["families"])
    first = LOOP - len(families) + 1
    if len(slots) > MAX_SLOTS:
        raise ValueError(f"more slots than {MAX_SLOTS}")
    if sum(map(len, families)) != len(frozenset().union(*families)) or not all(families):
        raise ValueError("families that share blocks, or have none")
    if len(set(slots)) != len(slots) or not all(
        first <= block < blocks and block != -1 and 0 <= occurrence <= MAX_ORDER
        for block, occurrence in slots
    ):
        raise ValueError("slots that are not of this vocabulary")
    if not all(0 <= block < blocks for family in families for block in family):
        raise ValueError("looping blocks that are not of this vocabulary")
    return OrderTemplate(slots, families)
