"""Offline training of the general pilot, on the recorded steps of many networks.

Each network is gone through as a session would: before each step the evidence so far gives the
features of each slot, then the step says which ran. `train` fits `dynoffload.pilot.general` to the
rows of all networks, which count alike; early steps count twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dynoffload.pilot.evidence import CODE, NAMES
from dynoffload.pilot.features import Example, Floats
from dynoffload.pilot.general import CLIP, General
from dynoffload.pilot.pilot import Pilot
from dynoffload.pilot.template import tokens
from dynoffload.planning.blocks import Vocabulary

WIDTHS = (32, 16)
"""Units of the two hidden layers."""
EPOCHS, UPDATES = 12, 150
"""How often all rows are learned from, and the least number of updates."""
BATCH = 2048
LEARNING_RATE = 6e-3
"""The largest of the schedule."""
PER_STEP = 48
"""The most slots of a step that are learned from."""
EARLY, EVERY = 64, 3
"""Steps that are all learned from; of those later, one of so many."""
_FIRST = 50  # steps that count twice
_HIDDEN = 0.3  # share of the rows whose block is hidden, so that evidence alone suffices

Rows = tuple[Floats, npt.NDArray[np.bool_], Floats]
"""Features ``[rows, NAMES]``, whether the slot ran, and the weight of each row."""


def rows_of(vocabulary: Vocabulary, examples: Sequence[Example], seed: int) -> Rows:
    """Return the rows of one network's steps.

    Args:
        vocabulary: its blocks.
        examples: its steps, in order.
        seed: of the choice of slots.
    """
    rng = np.random.default_rng(seed)
    nothing = np.zeros(len(NAMES), np.float32)
    blank = General(nothing, nothing, ((nothing[None], nothing[:1, None]),), nothing[None], {})
    pilot = Pilot(vocabulary, blank)  # the package's may be of other features
    features, labels, weights = [], [], []
    for step, example in enumerate(examples):
        pilot.predict(example.sample)
        slots = pilot.evidence.slots
        if slots and (step < EARLY or step % EVERY == 0):
            filled = tokens(example.blocks, pilot.structure.template.families)
            chosen = rng.choice(len(slots), min(len(slots), PER_STEP), replace=False)
            features.append(pilot.features[:, chosen].T)
            labels.append(np.array([slots[n] in filled for n in chosen.tolist()], np.bool_))
            weight = (2.0 if step < _FIRST else 1.0) / len(chosen)
            weights.append(np.full(len(chosen), weight, np.float32))
        pilot.observe(example.sample, example.blocks)
        if pilot.due:
            pilot.consolidate()
    every = np.concatenate(weights)
    return np.concatenate(features), np.concatenate(labels), every / every.sum()


def train(sets: Sequence[Rows], seed: int, card: Mapping[str, Any]) -> General:
    """Fit the general pilot.

    Args:
        sets: the rows of each network; networks count alike.
        seed: of the weights and of the order of the rows.
        card: what is stored about the training.
    """
    import torch
    from torch import nn

    torch.manual_seed(seed)
    inputs = np.concatenate([one[0] for one in sets])
    known = np.isfinite(inputs)
    count = np.maximum(known.sum(axis=0), 1)
    mean = np.where(known, inputs, 0).sum(axis=0) / count
    variance = (np.where(known, inputs - mean, 0) ** 2).sum(axis=0) / count
    scale = known.any(axis=0) / (np.sqrt(variance) + 1e-2)  # 0: what it never sees, it ignores
    clipped = np.clip((inputs - mean) * scale, -CLIP, CLIP)
    x = torch.from_numpy(np.nan_to_num(clipped, nan=0.0).astype(np.float32))
    y = torch.from_numpy(np.concatenate([one[1] for one in sets]).astype(np.float32))
    w = torch.from_numpy(np.concatenate([one[2] for one in sets])) * (len(x) / len(sets))
    widths = (len(NAMES), *WIDTHS)
    stack: list[nn.Module] = []
    for before, after in zip(widths, WIDTHS, strict=False):
        stack += [nn.Linear(before, after), nn.ReLU()]
    deep, direct = nn.Sequential(*stack, nn.Linear(WIDTHS[-1], 1)), nn.Linear(len(NAMES), 1, False)
    parameters = [*deep.parameters(), *direct.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=1e-3)
    batches = -(-len(x) // BATCH)
    epochs = max(EPOCHS, -(-UPDATES // batches))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=epochs * batches
    )
    code = torch.arange(len(NAMES)) >= CODE.start
    for _ in range(epochs):
        for chosen in torch.split(torch.randperm(len(x)), BATCH):
            hidden = code & (torch.rand(len(chosen), 1) < _HIDDEN)
            batch = x[chosen].masked_fill(hidden, 0)
            odds = (deep(batch) + direct(batch))[:, 0]
            loss = nn.functional.binary_cross_entropy_with_logits(odds, y[chosen], w[chosen])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    linear = [layer for layer in deep if isinstance(layer, nn.Linear)]

    def array(of: Any) -> Floats:
        return np.ascontiguousarray(of.detach().numpy(), np.float32)

    return General(
        mean.astype(np.float32),
        scale.astype(np.float32),
        tuple((array(layer.weight), array(layer.bias)[:, None]) for layer in linear),
        array(direct.weight),
        dict(card),
    )
