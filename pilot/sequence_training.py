"""Training of the sequence pilot.

`train_sequence` fits a `SiteSequence` on the likelihood of which blocks ran. Of each sample the
first sites, as many as chance says, are known and the rest goes in by its own chances: what a
prediction meets, at the start of a step and within it. Random numbers come from a generator of its
own, so that a training run beside it keeps its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from dynoffload.pilot.codes import Fields, learn_fields
from dynoffload.pilot.features import Floats, Scaler, learn_scaler, site_stops
from dynoffload.pilot.sequence import WEIGHTS, SiteSequence, shapes_of
from dynoffload.profiler.input_features import InputFeatures

WIDTH = 48
BATCH = 16
LEARNING_RATE = 4e-3
DECAY = 0.02
DROPOUT = 0.1
MIN_EPOCHS, MAX_EPOCHS, EPOCH_SAMPLES = 8, 30, 15_000
"""Epochs: as many as show `EPOCH_SAMPLES` samples in all, within these limits."""


def train_sequence(
    samples: Sequence[InputFeatures],
    present: npt.NDArray[np.bool_],
    described: Floats,
    sites: npt.NDArray[np.int64],
    *,
    seed: int,
    validation: tuple[Sequence[InputFeatures], npt.NDArray[np.bool_]] | None = None,
    epochs: int | None = None,
) -> tuple[SiteSequence, int]:
    """Fit a net.

    Args:
        samples: one per step.
        present: which block ran in which step, ``[steps, blocks]``.
        described: the blocks' features, ``[blocks, features]``.
        sites: the number of each block's site, ``[blocks]``.
        seed: for everything that is drawn.
        validation: samples held out to choose the epoch by; without it the last one is kept.
        epochs: stop after so many epochs of the usual schedule.

    Returns:
        the net of the best epoch, and how many epochs had been run by then.
    """
    fields, scaler, stops = learn_fields(samples), learn_scaler(samples), site_stops(sites)
    generator = torch.Generator("cpu").manual_seed(seed)
    net = Trainee(fields, scaler, described, stops, present, generator)
    inputs = Inputs(fields, scaler, samples)
    ran = torch.from_numpy(present.astype(np.float32))
    planned = planned_epochs(len(samples))
    total = planned * math.ceil(len(samples) / BATCH)
    optimizer = torch.optim.AdamW(net.weights.values(), lr=LEARNING_RATE, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total, pct_start=0.1)
    best: tuple[float, SiteSequence, int] | None = None
    with torch.enable_grad():
        for epoch in range(1, min(planned, epochs or planned) + 1):
            order = torch.randperm(len(samples), generator=generator, device="cpu")
            for chosen in order.split(BATCH):  # type: ignore[no-untyped-call]
                optimizer.zero_grad()
                loss = net.loss(inputs.batch(chosen), ran[chosen], generator)
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(net.weights.values(), 1.0)
                optimizer.step()
                schedule.step()
            made = net.finished()
            aside = _loss(made, *validation) if validation else math.nan
            if best is None or not validation or aside < best[0]:
                best = (aside, made, epoch)
    assert best is not None
    return best[1], best[2]


def planned_epochs(samples: int) -> int:
    """Return the length of the schedule for so many samples."""
    return max(MIN_EPOCHS, min(MAX_EPOCHS, EPOCH_SAMPLES // max(samples, 1)))


class Inputs:
    """The samples as tensors, looked up once."""

    def __init__(self, fields: Fields, scaler: Scaler, samples: Sequence[InputFeatures]) -> None:
        self._values = torch.from_numpy(np.stack([scaler(sample) for sample in samples]))
        coded = bool(fields.columns)
        self._rows = [
            torch.from_numpy(fields.look_up(s) if coded and len(s.elements) else _NO_ROWS)
            for s in samples
        ]

    def batch(self, chosen: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return values ``[samples, V]`` and each sample's embedding rows ``[n, fields]``."""
        return self._values[chosen], [self._rows[i] for i in chosen.tolist()]


_NO_ROWS = np.zeros((0, 0), dtype=np.int64)


class Trainee:
    """The weights while they are trained, and the loss they are trained by.

    Attributes:
        weights: by the names in `WEIGHTS`.
    """

    def __init__(
        self,
        fields: Fields,
        scaler: Scaler,
        described: Floats,
        stops: tuple[int, ...],
        present: npt.NDArray[np.bool_],
        generator: torch.Generator,
    ) -> None:
        self._fields, self._scaler, self._stops = fields, scaler, stops
        self._described = torch.from_numpy(np.ascontiguousarray(described))
        blocks = present.shape[1]
        shapes = shapes_of(fields.rows, len(scaler), blocks, described.shape[1], WIDTH)
        share = (present.sum(axis=0) + 0.5) / (len(present) + 1.0)
        self.weights: dict[str, torch.Tensor] = {}
        for name in WEIGHTS:
            shape = shapes[name]
            scale = {"embedding": 0.1, "own": 0.1}.get(name, max(shape[0], 1) ** -0.5)
            weight = (
                torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * scale
            )
            if len(shape) == 1:
                weight.zero_()
            self.weights[name] = weight.requires_grad_()
        with torch.no_grad():
            self.weights["odds"].copy_(
                torch.from_numpy(np.log(share / (1 - share)).astype(np.float32))
            )

    def loss(
        self,
        batch: tuple[torch.Tensor, list[torch.Tensor]],
        ran: torch.Tensor,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """Return the mean negative log likelihood of what is not known, per block."""
        w = self.weights
        state = self._start(*batch)
        keep = torch.rand(state.shape, generator=generator, device="cpu") >= DROPOUT
        state = state * keep / (1 - DROPOUT)
        # Half of the batches know blocks only by what describes them: rare blocks lean on that.
        known_by_itself = torch.rand((), generator=generator, device="cpu") < 0.5
        vectors = self._described @ w["block_weight"] + w["own"] * known_by_itself
        odds = self._described @ w["odds_weight"] + w["odds"]
        # Half of the samples begin with nothing known, as every step does.
        known = torch.randint(0, len(self._stops), (len(ran),), generator=generator, device="cpu")
        known = known * (torch.rand(len(ran), generator=generator, device="cpu") < 0.5)
        losses = []
        begin = 0
        for site, stop in enumerate(self._stops):
            of_site, truth = vectors[begin:stop], ran[:, begin:stop]
            logits = state @ of_site.T + odds[begin:stop]
            unknown = (known <= site)[:, None]
            each = torch.nn.functional.binary_cross_entropy_with_logits(
                logits, truth, reduction="none"
            )
            losses.append((each * unknown).sum())
            entered = torch.where(unknown, torch.sigmoid(logits), truth) @ of_site
            state = self._pass(state, entered / math.sqrt(stop - begin))
            begin = stop
        return torch.stack(losses).sum() / ran.numel()

    def finished(self) -> SiteSequence:
        """Return the net, in the precision that weights are stored in."""
        weights = {
            name: weight.detach().numpy().astype(np.float16).astype(np.float32)
            for name, weight in self.weights.items()
        }
        described = self._described.numpy()
        return SiteSequence(self._fields, self._scaler, described, self._stops, weights)

    def _start(self, values: torch.Tensor, rows: list[torch.Tensor]) -> torch.Tensor:
        w = self.weights
        state = values @ w["value_weight"] + w["start_bias"]
        if any(len(own) for own in rows):
            pooled = []
            for own in rows:
                if not len(own):
                    pooled.append(torch.zeros(2 * WIDTH, dtype=torch.float32, device="cpu"))
                    continue
                found = torch.nn.functional.embedding(own, w["embedding"]).sum(dim=1)
                pooled.append(torch.cat((found.mean(dim=0), found.amax(dim=0))))
            state = state + torch.stack(pooled) @ w["code_weight"]
        return torch.tanh(state)

    def _pass(self, state: torch.Tensor, entered: torch.Tensor) -> torch.Tensor:
        w = self.weights
        given = entered @ w["input_weight"] + w["gate_bias"]
        kept = state @ w["state_weight"]
        gates = torch.sigmoid(given[:, : 2 * WIDTH] + kept[:, : 2 * WIDTH])
        reset, update = gates[:, :WIDTH], gates[:, WIDTH:]
        new = torch.tanh(given[:, 2 * WIDTH :] + reset * (kept[:, 2 * WIDTH :] + w["new_bias"]))
        return update * state + (1 - update) * new


def _loss(
    net: SiteSequence, samples: Sequence[InputFeatures], present: npt.NDArray[np.bool_]
) -> float:
    """Return the mean negative log likelihood per block, with nothing known."""
    chance = np.stack([net.probabilities(sample) for sample in samples])
    chance = np.clip(chance, 1e-6, 1 - 1e-6)
    return float(-np.where(present, np.log(chance), np.log1p(-chance)).mean())
