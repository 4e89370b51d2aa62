"""The small neural pilot: an embedding bag whose elements vote by a noisy-or.

What it is: `NoisyOrNet`. Each element's codes and n-grams are embedded and summed, two running
means of what came before are mixed in, one hidden layer follows, and each block gets a logit per
element; a block runs unless no element runs it: P = 1 - prod(1 - sigmoid(logit)). The sample's own
numbers vote as one more element. Inference is numpy alone. What it is not: the training, which is
in `dynoffload.pilot.mlp_training`.

The noisy-or is what makes it learn from whole steps: with 64 tokens in a step, most experts run,
and only the product over elements tells which token is to blame. Source: multiple-instance networks
(Ramon and De Raedt 2000); Wang et al., "Revisiting multiple instance neural networks", 2018.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dynoffload.pilot.artifact import checked_weights
from dynoffload.pilot.codes import CodeBook, Codes, columns_of, hash_prefixes
from dynoffload.pilot.features import Floats, Scaler
from dynoffload.profiler.sample import Sample

MAX_ELEMENTS = 192
"""Elements looked at; of a larger sample every so many-th, each voting for those left out."""
MAX_COLUMNS = 4
"""Columns of an element that are embedded on their own."""
DECAYS = (1.0, 0.6)
"""The running means over earlier elements: of all of them, and of the last few."""
POSITIONS = 64
"""Positions told apart; later ones count as the last."""

WEIGHTS = (
    "embedding",
    "position",
    "context",
    "hidden_weight",
    "hidden_bias",
    "out_weight",
    "out_bias",
    "value_weight",
    "value_bias",
    "value_out_weight",
    "value_out_bias",
)
"""The arrays of a net, in the order they are applied."""


@dataclass(frozen=True)
class Fields:
    """How an element becomes rows of the embedding.

    Attributes:
        columns: the code book of each column of its own, then of the bigrams and trigrams.
        grams: how many of the books, at the end, are of n-grams (of two columns, three, ...).
    """

    columns: tuple[CodeBook, ...]
    grams: int

    @property
    def rows(self) -> int:
        """Rows of the embedding that these fields need."""
        return sum(map(len, self.columns))

    def look_up(self, sample: Sample) -> tuple[Codes, float]:
        """Return embedding rows ``[elements, fields]`` and how many elements each stands for."""
        count = len(sample.elements)
        codes = columns_of(sample.elements)
        weight = 1.0
        if count > MAX_ELEMENTS:
            codes = codes[np.linspace(0, count - 1, MAX_ELEMENTS).astype(np.int64)]
            weight = count / MAX_ELEMENTS
        own = len(self.columns) - self.grams
        keys = [codes[:, min(c, codes.shape[1] - 1)] for c in range(own)]
        if self.grams:
            hashes = hash_prefixes(codes, self.grams + 1)[1:]
            keys += [hashes[min(g, len(hashes) - 1)] for g in range(self.grams)] if hashes else []
        rows = np.empty((len(codes), len(self.columns)), dtype=np.int64)
        offset = 0
        for field, book in enumerate(self.columns):
            rows[:, field] = offset
            if field < len(keys):
                rows[:, field] += book.look_up(keys[field])
            offset += len(book)
        return rows, weight

    @classmethod
    def load(cls, document: Any, arrays: Mapping[str, npt.NDArray[Any]]) -> Fields:
        """Return the fields of a stored net; ValueError, KeyError or TypeError if they are none."""
        count, grams = int(document["books"]), int(document["grams"])
        if not 0 <= grams <= 2 or not grams <= count <= MAX_COLUMNS + 2:
            raise ValueError("the wrong number of code books")
        return cls(tuple(load_book(arrays[f"book{i}"]) for i in range(count)), grams)


@dataclass(frozen=True)
class NoisyOrNet:
    """The net and what turns a sample into its input.

    Attributes:
        fields: how elements become embedding rows.
        scaler: how a sample's numbers become a vector.
        weights: float32 arrays by the names in `WEIGHTS`, with D embedding width, H hidden width, V
            values, B blocks: embedding ``[rows, D]``, position ``[POSITIONS, D]``, context
            ``[len(DECAYS) * D, D]``, hidden ``[D, H]``, ``[H]``, out ``[H, B]``, ``[B]``, value
            ``[V, D]``, ``[D]``, value_out ``[D, B]``, ``[B]``.
    """

    fields: Fields
    scaler: Scaler
    weights: Mapping[str, Floats]

    kind = "mlp"

    def probabilities(self, sample: Sample) -> Floats:
        """Return P(the block runs) for each optional block, ``[blocks]``."""
        w = self.weights
        values = _relu(self.scaler(sample) @ w["value_weight"] + w["value_bias"])
        silent = -_softplus(values @ w["value_out_weight"] + w["value_out_bias"])
        if len(sample.elements):
            rows, weight = self.fields.look_up(sample)
            count = len(rows)
            own = w["embedding"][rows].sum(axis=1)
            own += w["position"][np.minimum(np.arange(count), POSITIONS - 1)]
            means = running_means(count) @ own
            seen = np.concatenate(np.split(means, len(DECAYS)), axis=1)
            hidden = _relu((own + seen @ w["context"]) @ w["hidden_weight"] + w["hidden_bias"])
            logits = hidden @ w["out_weight"]
            logits += w["out_bias"]
            silent -= weight * _softplus(logits).sum(axis=0)
        return np.asarray(-np.expm1(silent), dtype=np.float32)

    def rest(self, sample: Sample) -> None:
        """Return None: what has run tells this model nothing."""

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return what is stored: weights as float16, code books as int64."""
        books = {f"book{i}": book.keys for i, book in enumerate(self.fields.columns)}
        return {**books, **{name: self.weights[name].astype(np.float16) for name in WEIGHTS}}

    def document(self) -> dict[str, Any]:
        """Return what is stored beside the arrays, as plain JSON data."""
        return {
            "scaler": self.scaler.to_json(),
            "books": len(self.fields.columns),
            "grams": self.fields.grams,
        }

    @classmethod
    def load(cls, document: Any, arrays: Mapping[str, npt.NDArray[Any]], blocks: int) -> NoisyOrNet:
        """Build a net from what was stored.

        Raises:
            ValueError, KeyError, TypeError: if the parts are not those of a net for so many blocks.
        """
        fields = Fields.load(document, arrays)
        scaler = Scaler.from_json(document["scaler"])
        weights = {name: checked_weights(name, arrays[name]) for name in WEIGHTS}
        width, hidden = weights["hidden_weight"].shape
        shapes = {
            "embedding": (fields.rows, width),
            "position": (POSITIONS, width),
            "context": (len(DECAYS) * width, width),
            "hidden_weight": (width, hidden),
            "hidden_bias": (hidden,),
            "out_weight": (hidden, blocks),
            "out_bias": (blocks,),
            "value_weight": (len(scaler), width),
            "value_bias": (width,),
            "value_out_weight": (width, blocks),
            "value_out_bias": (blocks,),
        }
        for name, shape in shapes.items():
            if weights[name].shape != shape:
                raise ValueError(f"{name} is not of shape {shape}")
        return cls(fields, scaler, weights)


def load_book(keys: npt.NDArray[Any]) -> CodeBook:
    """Return a code book of stored keys.

    Raises:
        ValueError: if they are not ascending int64.
    """
    if keys.dtype != np.int64 or keys.ndim != 1 or not (keys[1:] > keys[:-1]).all():
        raise ValueError("a code book that is not ascending")
    return CodeBook(keys)


@lru_cache(maxsize=32)
def running_means(count: int) -> Floats:
    """Return the matrices that take elements to the running means, ``[len(DECAYS)*count, count]``.

    Row i of the d-th matrix weighs element j <= i by ``DECAYS[d] ** (i - j)``; rows sum to 1.
    """
    lag = np.arange(count)[:, None] - np.arange(count)[None, :]
    result = []
    for decay in DECAYS:
        weights = np.where(lag >= 0, decay ** np.maximum(lag, 0).astype(np.float64), 0.0)
        result.append(weights / weights.sum(axis=1, keepdims=True))
    return np.concatenate(result).astype(np.float32)


def _relu(x: Floats) -> Floats:
    return np.maximum(x, 0, out=x)


def _softplus(x: Floats) -> Floats:
    """Return log(1 + exp(x)); works in place on the large arrays it is given."""
    np.clip(x, -30, 30, out=x)
    np.exp(x, out=x)
    x += 1
    return np.log(x, out=x)
