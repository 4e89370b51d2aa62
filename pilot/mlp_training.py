"""Training of the small neural pilot, in numpy.

What it is: `train_net`, which fits a `NoisyOrNet` by AdamW on the likelihood of which blocks ran,
with the gradients written out. What it is not: a use of torch. The pilot may learn in the middle of
somebody's training run; numpy leaves that run's random numbers, autograd, dispatch modes and thread
settings alone, and gives the same net for the same seed.

The gradient through the noisy-or: with s = -log P(no element runs it), the loss is s where the
block did not run and -log(1 - exp(-s)) where it did, so dloss/ds is 1 or -1/(exp(s) - 1), and each
element's logit z gets that times sigmoid(z).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynoffload.pilot.codes import Codes, columns_of, hash_prefixes, learn_code_book
from dynoffload.pilot.features import Floats, Scaler, learn_scaler
from dynoffload.pilot.mlp import (
    DECAYS,
    MAX_COLUMNS,
    POSITIONS,
    WEIGHTS,
    Fields,
    NoisyOrNet,
    running_means,
)
from dynoffload.profiler.sample import Sample

Bools = npt.NDArray[np.bool_]
Weights = dict[str, Floats]

WIDTH = 64
HIDDEN = 128
DROPOUT = 0.2
BATCH = 16
LEARNING_RATE = 4e-3
DECAY = 0.01
MOST_CODES = 4096
"""Codes kept per column and n-grams kept per order."""
MIN_EPOCHS, MAX_EPOCHS, EPOCH_SAMPLES = 8, 30, 15_000
"""Epochs: as many as show `EPOCH_SAMPLES` samples in all, within these limits."""


@dataclass(frozen=True)
class Trained:
    """A net and what its training saw.

    Attributes:
        net: the weights of the best epoch.
        epochs: how many epochs had been run by then.
        loss: mean negative log likelihood per block on the validation samples; NaN without any.
    """

    net: NoisyOrNet
    epochs: int
    loss: float


def train_net(
    samples: Sequence[Sample],
    present: Bools,
    described: Floats,
    *,
    seed: int,
    validation: tuple[Sequence[Sample], Bools] | None = None,
    epochs: int | None = None,
    on_epoch: Callable[[], None] | None = None,
) -> Trained:
    """Fit a net.

    Args:
        samples: one per step.
        present: which block ran in which step, ``[steps, blocks]``.
        described: the blocks' features, ``[blocks, features]``: each block's output weights are its
            own plus a linear function of these, so that rarely seen blocks borrow from their like.
        seed: for initial weights, dropout and the order of samples.
        validation: samples held out to choose the epoch by; without it the last one is kept.
        epochs: stop after so many epochs of the usual schedule.
        on_epoch: called after each epoch.
    """
    rng = np.random.default_rng(seed)
    fields, scaler = learn_fields(samples), learn_scaler(samples)
    weights = _initial(fields, scaler, samples, present, described, rng)
    batches = _Batches(fields, scaler, samples)
    planned = planned_epochs(len(samples))
    total = planned * math.ceil(len(samples) / BATCH)
    optimizer = _AdamW(weights)
    best = Trained(_net(fields, scaler, weights, described), 0, math.inf)
    step = 0
    for epoch in range(1, min(planned, epochs or planned) + 1):
        order = rng.permutation(len(samples))
        for start in range(0, len(order), BATCH):
            chosen = order[start : start + BATCH]
            batch = batches.make(chosen)
            _, gradients = loss_and_gradients(weights, batch, present[chosen], described, rng)
            optimizer.step(weights, gradients, _one_cycle(step / total))
            step += 1
        net = _net(fields, scaler, weights, described)
        loss = _mean_loss(net, *validation) if validation else math.nan
        if not validation or loss < best.loss:
            best = Trained(net, epoch, loss)
        if on_epoch:
            on_epoch()
    return best


def planned_epochs(samples: int) -> int:
    """Return the length of the schedule for so many samples."""
    return max(MIN_EPOCHS, min(MAX_EPOCHS, EPOCH_SAMPLES // max(samples, 1)))


def learn_fields(samples: Sequence[Sample]) -> Fields:
    """Number the codes and n-grams of the samples' elements."""
    codes = [columns_of(sample.elements) for sample in samples if len(sample.elements)]
    if not codes:
        return Fields((), 0)
    least = 2 if len(codes) > 8 else 1
    width = min(code.shape[1] for code in codes)
    books = [
        learn_code_book([code[:, column] for code in codes], least=least, most=MOST_CODES)
        for column in range(min(width, MAX_COLUMNS))
    ]
    hashes = [hash_prefixes(code, min(width, 3))[1:] for code in codes]
    grams = len(hashes[0])
    for gram in range(grams):
        of_order = [h[gram] for h in hashes]
        books.append(learn_code_book(of_order, least=least + 1, most=MOST_CODES))
    return Fields(tuple(books), grams)


def _initial(
    fields: Fields,
    scaler: Scaler,
    samples: Sequence[Sample],
    present: Bools,
    described: Floats,
    rng: np.random.Generator,
) -> Weights:
    """Return weights that predict each block's share of the samples, whatever the sample."""
    blocks = present.shape[1]
    elements = float(np.mean([len(sample.elements) for sample in samples]))
    share = np.clip((present.sum(axis=0) + 0.5) / (len(samples) + 1.0), 1e-3, 1 - 1e-3)
    silence = np.log1p(-share)
    by_values = 0.1 if elements else 1.0

    def logit(log_silence: npt.NDArray[np.float64]) -> Floats:
        chance = np.clip(-np.expm1(log_silence), 1e-5, 1 - 1e-5)
        return np.asarray(np.log(chance / (1 - chance)), dtype=np.float32)

    def normal(*shape: int, scale: float) -> Floats:
        return np.asarray(rng.normal(size=shape) * scale, dtype=np.float32)

    def zeros(*shape: int) -> Floats:
        return np.zeros(shape, dtype=np.float32)

    embedding = normal(fields.rows, WIDTH, scale=0.15)
    if fields.columns:
        embedding[: len(fields.columns[0])] *= 3
    return {
        "embedding": embedding,
        "position": zeros(POSITIONS, WIDTH),
        "context": zeros(len(DECAYS) * WIDTH, WIDTH),
        "hidden_weight": normal(WIDTH, HIDDEN, scale=WIDTH**-0.5),
        "hidden_bias": zeros(HIDDEN),
        "out_weight": normal(HIDDEN, blocks, scale=0.05),
        "out_bias": logit(silence * (1 - by_values) / max(elements, 1.0)),
        "value_weight": normal(len(scaler), WIDTH, scale=len(scaler) ** -0.5),
        "value_bias": zeros(WIDTH),
        "value_out_weight": normal(WIDTH, blocks, scale=0.02),
        "value_out_bias": logit(silence * by_values),
        "shared": zeros(HIDDEN, described.shape[1]),
    }


@dataclass(frozen=True)
class Batch:
    """Samples padded to one length.

    Attributes:
        rows: rows of the embedding, ``[samples, elements, fields]``.
        weight: how many elements each stands for, 0 for padding, ``[samples, elements]``.
        values: scaled numbers, ``[samples, values]``.
    """

    rows: Codes
    weight: Floats
    values: Floats


class _Batches:
    """The samples as arrays, looked up once."""

    def __init__(self, fields: Fields, scaler: Scaler, samples: Sequence[Sample]) -> None:
        self._values = np.stack([scaler(sample) for sample in samples])
        self._found = [fields.look_up(sample) for sample in samples]

    def make(self, chosen: npt.NDArray[np.int64]) -> Batch:
        """Return the batch of the chosen samples."""
        found = [self._found[i] for i in chosen]
        longest = max(len(rows) for rows, _ in found)
        rows = np.zeros((len(found), longest, found[0][0].shape[1]), dtype=np.int64)
        weight = np.zeros((len(found), longest), dtype=np.float32)
        for i, (own, stands_for) in enumerate(found):
            rows[i, : len(own)] = own
            weight[i, : len(own)] = stands_for
        return Batch(rows, weight, self._values[chosen])


def loss_and_gradients(
    weights: Weights,
    batch: Batch,
    present: Bools,
    described: Floats,
    rng: np.random.Generator | None,
) -> tuple[float, Weights]:
    """Return the mean negative log likelihood per block and its gradient by every weight.

    Args:
        weights: as in `NoisyOrNet`, and ``shared`` ``[H, features]``.
        batch: the samples.
        present: which block ran, ``[samples, blocks]``.
        described: the blocks' features, ``[blocks, features]``.
        rng: source of dropout; None for none.
    """
    w = weights
    gradients: Weights = {}
    count, longest, _ = batch.rows.shape
    scale = np.float32(1 / present.size)

    value_hidden = np.maximum(batch.values @ w["value_weight"] + w["value_bias"], 0)
    value_logits = value_hidden @ w["value_out_weight"] + w["value_out_bias"]
    noise = _softplus(value_logits)
    if longest:
        own = w["embedding"][batch.rows].sum(axis=2)
        places = np.minimum(np.arange(longest), POSITIONS - 1)
        own += w["position"][places]
        own_mask = _dropout(own.shape, rng)
        own *= own_mask
        averages = running_means(longest).reshape(len(DECAYS), 1, longest, longest)
        seen = np.concatenate(list(averages @ own), axis=-1)
        mixed = own + seen @ w["context"]
        hidden = np.maximum(mixed @ w["hidden_weight"] + w["hidden_bias"], 0)
        hidden_mask = _dropout(hidden.shape, rng)
        hidden *= hidden_mask
        out_weight = w["out_weight"] + w["shared"] @ described.T
        logits = hidden @ out_weight + w["out_bias"]
        noise = noise + (_softplus(logits) * batch.weight[..., None]).sum(axis=1)

    noise = np.clip(noise, 1e-6, 60)
    loss = float(np.where(present, -np.log(-np.expm1(-noise)), noise).mean())
    to_noise = np.where(present, -1 / np.expm1(noise), 1).astype(np.float32) * scale

    d_value = to_noise * _sigmoid(value_logits)
    gradients["value_out_weight"] = value_hidden.T @ d_value
    gradients["value_out_bias"] = d_value.sum(axis=0)
    d_value_hidden = (d_value @ w["value_out_weight"].T) * (value_hidden > 0)
    gradients["value_weight"] = batch.values.T @ d_value_hidden
    gradients["value_bias"] = d_value_hidden.sum(axis=0)
    if not longest:
        return loss, gradients

    d_logits = to_noise[:, None] * _sigmoid(logits) * batch.weight[..., None]
    flat_hidden = hidden.reshape(-1, hidden.shape[-1])
    flat = d_logits.reshape(-1, d_logits.shape[-1])
    gradients["out_weight"] = flat_hidden.T @ flat
    gradients["out_bias"] = flat.sum(axis=0)
    gradients["shared"] = gradients["out_weight"] @ described
    d_hidden = (d_logits @ out_weight.T) * (hidden > 0) * hidden_mask
    flat = d_hidden.reshape(-1, d_hidden.shape[-1])
    gradients["hidden_weight"] = mixed.reshape(-1, mixed.shape[-1]).T @ flat
    gradients["hidden_bias"] = flat.sum(axis=0)
    d_mixed = d_hidden @ w["hidden_weight"].T
    flat = d_mixed.reshape(-1, d_mixed.shape[-1])
    gradients["context"] = seen.reshape(-1, seen.shape[-1]).T @ flat
    d_seen = np.split(d_mixed @ w["context"].T, len(DECAYS), axis=-1)
    d_own = d_mixed.copy()
    for average, part in zip(averages, d_seen, strict=True):
        d_own += average.swapaxes(-1, -2) @ part
    d_own *= own_mask
    gradients["position"] = _scatter(np.tile(places, count), d_own, POSITIONS)
    fields = batch.rows.shape[2]
    repeated = np.repeat(d_own.reshape(-1, d_own.shape[-1]), fields, axis=0)
    gradients["embedding"] = _scatter(batch.rows.reshape(-1), repeated, len(w["embedding"]))
    return loss, gradients


def _scatter(rows: Codes, values: Floats, size: int) -> Floats:
    """Return ``[size, width]`` with ``values[i]`` added to row ``rows[i]``."""
    values = values.reshape(len(rows), -1)
    order = np.argsort(rows, kind="stable")
    ids, starts = np.unique(rows[order], return_index=True)
    result = np.zeros((size, values.shape[1]), dtype=np.float32)
    result[ids] = np.add.reduceat(values[order], starts, axis=0)
    return result


class _AdamW:
    """AdamW; the decay applies to matrices only. Source: Loshchilov and Hutter, ICLR 2019."""

    def __init__(self, weights: Weights) -> None:
        self._mean = {name: np.zeros_like(w) for name, w in weights.items()}
        self._square = {name: np.zeros_like(w) for name, w in weights.items()}
        self._steps = 0

    def step(self, weights: Weights, gradients: Weights, rate: float) -> None:
        """Update ``weights`` in place."""
        self._steps += 1
        first = 1 - 0.9**self._steps
        second = 1 - 0.999**self._steps
        for name, gradient in gradients.items():
            mean, square, weight = self._mean[name], self._square[name], weights[name]
            mean += np.float32(0.1) * (gradient - mean)
            square += np.float32(0.001) * (gradient * gradient - square)
            if weight.ndim == 2:
                weight *= np.float32(1 - rate * DECAY)
            root = np.sqrt(square * np.float32(1 / second))
            root += np.float32(1e-8)
            weight -= np.float32(rate / first) * mean / root


def _one_cycle(progress: float) -> float:
    """Return the learning rate: up over the first tenth, then down along a cosine."""
    if progress < 0.1:
        return LEARNING_RATE * (0.05 + 0.95 * progress / 0.1)
    return LEARNING_RATE * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (progress - 0.1) / 0.9)))


def _dropout(shape: tuple[int, ...], rng: np.random.Generator | None) -> Floats:
    if rng is None:
        return np.ones(shape, dtype=np.float32)
    kept = rng.random(shape, dtype=np.float32) >= DROPOUT
    return kept.astype(np.float32) / np.float32(1 - DROPOUT)


def _softplus(x: Floats) -> Floats:
    return np.asarray(np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))), dtype=np.float32)


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-np.clip(x, -30, 30))), dtype=np.float32)


def _net(fields: Fields, scaler: Scaler, weights: Weights, described: Floats) -> NoisyOrNet:
    """Return the net with what blocks share folded into their output weights.

    In the precision that weights are stored in, so that a file predicts as the net it was made of.
    """
    folded = {name: weights[name].copy() for name in WEIGHTS}
    folded["out_weight"] += weights["shared"] @ described.T
    return NoisyOrNet(
        fields, scaler, {n: w.astype(np.float16).astype(np.float32) for n, w in folded.items()}
    )


def _mean_loss(net: NoisyOrNet, samples: Sequence[Sample], present: Bools) -> float:
    chance = np.stack([net.probabilities(sample) for sample in samples])
    chance = np.clip(chance, 1e-6, 1 - 1e-6)
    return float(-np.where(present, np.log(chance), np.log1p(-chance)).mean())
