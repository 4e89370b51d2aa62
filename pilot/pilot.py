"""The predictor and its file: input features of a sample in, predicted order of blocks out.

`Pilot` starts from the template of its network, predicts with its model which optional blocks run,
fills the loops from the sample's elements, and returns the resulting order. The session calls
`Pilot.check` once and `predict` before each step. A prediction takes well under a millisecond on
one core.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dynoffload.errors import PilotError
from dynoffload.pilot.boosting import BoostedTables
from dynoffload.pilot.correction import Correction, Posterior
from dynoffload.pilot.loops import LoopModel
from dynoffload.pilot.template import LOOP, OrderTemplate
from dynoffload.planning.blocks import Vocabulary
from dynoffload.profiler.input_features import InputFeatures
from dynoffload.profiler.safefile import BadFileError, pack, read_file, write_whole

Floats = npt.NDArray[np.float32]

FORMAT = "dynoffload.pilot"
"""Key of the metadata of a pilot file's safetensors header."""
VERSION = 6
"""Version of its layout; any other is refused."""
MAX_SLOTS = 1 << 16
"""The most slots of a pilot's template."""
MAX_ORDER = 1 << 20
"""The most blocks of one prediction; longer orders are cut off."""
MAX_NAMED = 64
"""The most names of numbers that a card lists."""


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
class Pilot:
    """A trained predictor of block orders for one network.

    Attributes:
        vocabulary: the network's blocks.
        template: the structure shared by all orders.
        model: predicts which optional blocks run; None if there are none.
        loops: a model for each of the template's loops, in its order.
        threshold: the probability from which an optional block is predicted.
        varying: the blocks whose presence or place varied in training, scored separately.
        most_frequent: the one order that fits the training samples best, a baseline for scores.
        card: how it was made, as plain JSON data; also the basis of `unlike`.
        correction: learned statistics of the model's errors; None if there is no model.
        bundles: the number of each optional slot's bundle, ascending from 0: slots that always run
            together are predicted as one.
    """

    vocabulary: Vocabulary
    template: OrderTemplate
    model: BoostedTables | None
    loops: tuple[LoopModel, ...]
    threshold: float
    varying: frozenset[int] = frozenset()
    most_frequent: tuple[int, ...] = ()
    card: dict[str, Any] = field(default_factory=dict)
    correction: Correction | None = None
    bundles: tuple[int, ...] = ()

    @cached_property
    def bundle_of(self) -> npt.NDArray[np.int64]:
        """The bundle of each optional slot; without ``bundles`` each slot is its own."""
        return np.array(self.bundles or range(len(self.template.optional)), dtype=np.int64)

    def predict(self, sample: InputFeatures) -> Prediction:
        """Return the predicted order of blocks of a sample.

        Args:
            sample: the result of `describe_input` for the forward call.
        """
        start = time.perf_counter()
        chances = self.chances(sample)
        blocks, confidence = self.decode(sample, chances, self.threshold)
        return Prediction(blocks, time.perf_counter() - start, confidence)

    def chances(self, sample: InputFeatures) -> Floats:
        """Return calibrated P(runs) for each optional slot; empty without a model."""
        posterior = self.start(sample)
        if posterior is None:
            return np.zeros(0, dtype=np.float32)
        return posterior.chances[self.bundle_of]

    def start(self, sample: InputFeatures) -> Posterior | None:
        """Return the model's posterior for a step, updated as it runs; None without a model."""
        if self.model is None or self.correction is None:
            return None
        return Posterior(self.correction, self.model.probabilities(sample))

    def decode(
        self, sample: InputFeatures, chances: Floats, threshold: float, start: int = 0
    ) -> tuple[list[int], Floats]:
        """Return the order given by probabilities and a threshold, and each block's confidence.

        Args:
            sample: the sample of the step.
            chances: P(runs) of the optional slots.
            threshold: the probability from which an optional slot is included.
            start: the slot to begin at.
        """
        template = self.template
        surety = np.ones(template.blocks.size, dtype=np.float32)
        surety[template.optional] = chances
        taken = surety >= threshold
        taken[:start] = False
        blocks: list[int] = []
        confidence: list[Floats] = []
        at = start
        ends = zip((*template.loops, len(taken)), (*self.loops, None), strict=True)
        for place, loop in ends:
            if place < start or len(blocks) >= MAX_ORDER:
                continue
            part = taken[at:place]
            blocks += template.blocks[at:place][part].tolist()
            confidence.append(surety[at:place][part])
            if loop is not None:
                run = loop.predict(sample)
                blocks += run
                confidence.append(np.full(len(run), loop.fidelity, dtype=np.float32))
            at = place + 1
        return blocks[:MAX_ORDER], np.concatenate(confidence)[:MAX_ORDER]

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
        """Write the pilot to one file.

        Raises:
            PilotError: if the file cannot be written.
        """
        document = {
            "vocabulary": self.vocabulary.to_json(),
            "slots": [list(slot) for slot in self.template.slots],
            "always": sorted(self.template.always),
            "families": [sorted(family) for family in self.template.families],
            "loops": [loop.to_json() for loop in self.loops],
            "model": self.model.document() if self.model is not None else None,
            "threshold": self.threshold,
            "varying": sorted(self.varying),
            "most_frequent": list(self.most_frequent),
            "card": self.card,
            "bundles": list(self.bundles),
        }
        arrays: dict[str, npt.NDArray[Any]] = {}
        if self.model is not None and self.correction is not None:
            arrays = {**self.model.arrays(), **self.correction.arrays()}
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
            vocabulary = Vocabulary.from_json(document["vocabulary"])
            size = len(vocabulary.blocks)
            template = _load_template(document, size)
            optional = len(template.optional)
            bundles = _load_bundles(document["bundles"], optional)
            model = correction = None
            if (document["model"] is None) != (not optional):
                raise ValueError("a model without optional blocks, or these without a model")
            if optional:
                model = BoostedTables.load(document["model"], arrays, bundles[-1] + 1)
                correction = Correction.load(arrays, model.sites)
            loops = tuple(LoopModel.from_json(s, size) for s in document["loops"])
            if len(loops) != len(template.loops):
                raise ValueError("another number of loops than models for them")
            threshold = float(document["threshold"])
            if not 0 < threshold <= 1 or not isinstance(document["card"], dict):
                raise ValueError("an impossible threshold or card")
            varying = frozenset(map(int, document["varying"]))
            most_frequent = tuple(map(int, document["most_frequent"]))
            if not all(0 <= block < size for block in (*varying, *most_frequent)):
                raise ValueError("a block outside the vocabulary")
            return cls(
                vocabulary,
                template,
                model,
                loops,
                threshold,
                varying,
                most_frequent,
                document["card"],
                correction,
                bundles,
            )
        except OSError as error:
            raise PilotError(f"{path}: cannot be read ({error.strerror or error})") from error
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise PilotError(
                f"{path}: cannot be used as a pilot: {error}. Train the pilot again: dynoffload "
                f"pilot train TRACES -o {path.name}"
            ) from error


def shown_by(samples: Sequence[InputFeatures]) -> dict[str, Any]:
    """Return the kinds of features in some samples: the distinct numbers of codes per element (0:
    no elements), and the names of their numbers."""
    shapes = [sample.elements.shape for sample in samples]
    columns = {(shape[1] if shape[1:] else 1) if shape[0] else 0 for shape in shapes}
    return {
        "columns": sorted(columns),
        "values": sorted({n for s in samples for n in s.values})[:MAX_NAMED],
    }


def _load_bundles(document: Any, optional: int) -> tuple[int, ...]:
    """Return the bundles of a stored pilot; ValueError if they are invalid."""
    bundles = tuple(int(number) for number in document)
    steps = [0, *(after - before for before, after in pairwise(bundles))]
    if len(bundles) != optional or bundles[:1] not in ((), (0,)) or not set(steps) <= {0, 1}:
        raise ValueError("bundles that are not of these slots")
    return bundles


def _load_template(document: Any, blocks: int) -> OrderTemplate:
    """Build a template from its stored form; ValueError if it is not one."""
    slots = tuple((int(block), int(occurrence)) for block, occurrence in document["slots"])
    families = tuple(frozenset(map(int, family)) for family in document["families"])
    always = frozenset(map(int, document["always"]))
    first = LOOP - len(families) + 1
    if len(slots) > MAX_SLOTS:
        raise ValueError(f"more slots than {MAX_SLOTS}")
    if sum(map(len, families)) != len(frozenset().union(*families)) or not all(families):
        raise ValueError("families that share blocks, or have none")
    if len(set(slots)) != len(slots) or not all(
        first <= block < blocks and block != -1 and occurrence >= 0 for block, occurrence in slots
    ):
        raise ValueError("slots that are not of this vocabulary")
    if not all(0 <= block < blocks for family in families for block in family):
        raise ValueError("looping blocks that are not of this vocabulary")
    if not all(0 <= slot < len(slots) for slot in always):
        raise ValueError("a slot that is not there")
    return OrderTemplate(slots, always, families)
