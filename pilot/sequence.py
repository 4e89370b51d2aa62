"""The sequence pilot: site after site, blocks ranked by their idiom-encoded vectors.

`SiteSequence` is a state that begins as what the sample shows, passes the network's sites in order,
and takes in at each the vectors of the blocks that ran there, or by their chance where that is not
known yet (mean field). A block's log-odds are the product of its vector with the state. The vector
is a linear function of its idiom counts, size and place, plus one of its own.

Torch trains it (`dynoffload.pilot.sequence_training`). A prediction is numpy's: a step waits for
it, and its arrays are too small to pay for torch's calls.

Source of the state's update: Cho et al., "Learning phrase representations using RNN
encoder-decoder", 2014 (gated recurrent unit), arXiv 1406.1078.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dynoffload.pilot.codes import Fields, stored_books
from dynoffload.pilot.features import MAX_SITES, Floats, Scaler
from dynoffload.profiler.input_features import InputFeatures
from dynoffload.profiler.safefile import checked_weights

WEIGHTS = (
    "embedding",
    "code_weight",
    "value_weight",
    "start_bias",
    "block_weight",
    "own",
    "odds_weight",
    "odds",
    "input_weight",
    "state_weight",
    "gate_bias",
    "new_bias",
)
"""The arrays of a net; see `SiteSequence`."""


class _Site(NamedTuple):
    """What one site does to the state, encoded once; n blocks, D the state's width.

    Attributes:
        begin: its first block.
        stop: after its last.
        vectors: times the state, its blocks' log-odds, ``[n, D]``.
        odds: are added to those, ``[n]``.
        entering: times the blocks' chances, what of them goes on, ``[n, 3 D]``.
    """

    begin: int
    stop: int
    vectors: Floats
    odds: Floats
    entering: Floats


@dataclass(frozen=True)
class SiteSequence:
    """The net and what turns a sample into its first state.

    Attributes:
        fields: how elements become embedding rows.
        scaler: how a sample's numbers become a vector.
        described: the blocks' features, float32 ``[blocks, features]``.
        stops: where each site ends among the blocks, ascending, the last one ``blocks``.
        weights: float32 arrays by the names in `WEIGHTS`, with D the state's width, B blocks, F
            block features, V values: embedding ``[rows, D]``, code ``[2 D, D]`` (of the elements'
            mean and maximum), value ``[V, D]``, start ``[D]``, block ``[F, D]``, own ``[B, D]``,
            odds_weight ``[F]``, odds ``[B]``, input and state ``[D, 3 D]`` (reset, update, new),
            gate_bias ``[3 D]``, new_bias ``[D]`` (of the state's part of the new state).
    """

    fields: Fields
    scaler: Scaler
    described: Floats
    stops: tuple[int, ...]
    weights: Mapping[str, Floats]
    _sites: tuple[_Site, ...] = field(init=False, repr=False, compare=False)

    kind = "sequence"

    def __post_init__(self) -> None:
        """Encode the sites, once: a prediction passes dozens of them."""
        import scipy.special  # noqa: F401 - as the pilot is made, and not in its first prediction

        w = self.weights
        vectors = self.described @ w["block_weight"] + w["own"]
        odds = self.described @ w["odds_weight"] + w["odds"]
        sites = []
        for begin, stop in zip((0, *self.stops), self.stops, strict=False):
            of_site = vectors[begin:stop]
            entering = of_site @ w["input_weight"] / np.sqrt(np.float32(stop - begin))
            sites.append(_Site(begin, stop, of_site, odds[begin:stop], entering))
        object.__setattr__(self, "_sites", tuple(sites))

    def probabilities(self, sample: InputFeatures) -> Floats:
        """Return P(the block runs) for each optional block, float32 ``[blocks]``."""
        return self.given(self.start(sample), ())

    def start(self, sample: InputFeatures) -> Floats:
        """Return the state before the first site, ``[D]``."""
        w = self.weights
        state = self.scaler(sample) @ w["value_weight"] + w["start_bias"]
        if len(sample.elements) and len(self.fields.columns):
            own = w["embedding"][self.fields.look_up(sample)].sum(axis=1)
            state = state + np.concatenate((own.mean(axis=0), own.max(axis=0))) @ w["code_weight"]
        return np.asarray(np.tanh(state), dtype=np.float32)

    def given(self, state: Floats, ran: Sequence[bool]) -> Floats:
        """Return the chances of all blocks once the first ones are known.

        Args:
            state: what `start` returned for the sample.
            ran: whether each of the first blocks ran.
        """
        from scipy.special import expit

        chances = np.empty(len(self.described), dtype=np.float32)
        known, width = len(ran), len(state)
        w = self.weights
        state_weight, new_bias = w["state_weight"], w["gate_bias"][2 * width :]
        # The gates' bias comes with the state's part; the new state's part is scaled by one first.
        kept_bias = np.concatenate((w["gate_bias"][: 2 * width], w["new_bias"]))
        for begin, stop, vectors, odds, entering in self._sites:
            chance = expit(vectors @ state + odds, out=chances[begin:stop])
            if begin < known:
                told = min(known, stop)
                chance[: told - begin] = ran[begin:told]
            entered = chance @ entering
            kept = state @ state_weight + kept_bias
            gates = expit(entered[: 2 * width] + kept[: 2 * width])
            new = np.tanh(entered[2 * width :] + new_bias + gates[:width] * kept[2 * width :])
            state = new + gates[width:] * (state - new)
        return chances

    def rest(self, sample: InputFeatures) -> Callable[[Sequence[bool]], Floats]:
        """Return how the rest of a step is foretold: `given`, from the sample's state."""
        return partial(self.given, self.start(sample))

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return what is stored: weights as float16, code books as int64."""
        stored = {name: self.weights[name].astype(np.float16) for name in WEIGHTS}
        return {**stored_books(self.fields.columns), **stored, "described": self.described}

    def document(self) -> dict[str, Any]:
        """Return what is stored beside the arrays, as plain JSON data."""
        return {
            "scaler": self.scaler.to_json(),
            "books": len(self.fields.columns),
            "grams": self.fields.grams,
            "stops": list(self.stops),
        }

    @classmethod
    def load(
        cls, document: Any, arrays: Mapping[str, npt.NDArray[Any]], blocks: int
    ) -> SiteSequence:
        """Build a net from what was stored.

        Raises:
            ValueError, KeyError, TypeError: if the parts are not those of a net for so many blocks.
        """
        fields = Fields.load(document, arrays)
        scaler = Scaler.from_json(document["scaler"])
        stops = tuple(int(stop) for stop in document["stops"])
        if list(stops) != sorted(set(stops)) or not stops or stops[0] < 1 or stops[-1] != blocks:
            raise ValueError("sites that are not of these blocks")
        if len(stops) > MAX_SITES:
            raise ValueError(f"more sites than the {MAX_SITES} that are told apart")
        described = checked_weights("described", arrays["described"])
        if described.ndim != 2 or len(described) != blocks:
            raise ValueError("block features of the wrong shape")
        weights = {name: checked_weights(name, arrays[name]) for name in WEIGHTS}
        if weights["embedding"].ndim != 2:
            raise ValueError("embedding is no matrix: of the wrong shape")
        width = weights["embedding"].shape[1]
        shapes = shapes_of(fields.rows, len(scaler), blocks, described.shape[1], width)
        for name, shape in shapes.items():
            if weights[name].shape != shape:
                raise ValueError(f"{name} is not of shape {shape}")
        return cls(fields, scaler, described, stops, weights)


def shapes_of(
    rows: int, values: int, blocks: int, features: int, width: int
) -> dict[str, tuple[int, ...]]:
    return {
        "embedding": (rows, width),
        "code_weight": (2 * width, width),
        "value_weight": (values, width),
        "start_bias": (width,),
        "block_weight": (features, width),
        "own": (blocks, width),
        "odds_weight": (features,),
        "odds": (blocks,),
        "input_weight": (width, 3 * width),
        "state_weight": (width, 3 * width),
        "gate_bias": (3 * width,),
        "new_bias": (width,),
    }
