"""The two networks of the zoo on real data: bitwise equal to plain PyTorch over twenty steps.

At a quarter, an eighth and a sixteenth of the footprint (parameters, gradients, optimizer state and
saved activations of a recorded step), with a trained pilot, with one that lies, without one,
learning, repeating and on demand, in float32 and under bfloat16 autocast. The Tree-LSTM is the
untied one, of which a sixteenth holds every update; the tied one, whose matrices are large shares
of it, trains at the least budget that the refusal itself names.
"""

from __future__ import annotations

import random
import tempfile
from functools import cache, partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import Loop, LyingPilot, Twin, compare_runs, least_budget
from torch import Tensor, nn
from torch.optim import AdamW

from dynoffload.experiments import zoo
from dynoffload.pilot.pilot import Pilot
from dynoffload.pilot.train import train_pilot
from dynoffload.planning.footprint import footprint
from dynoffload.profiler import load_trace, profile

STEPS, FEW = 20, 10
PRESETS = {"moe": "tiny", "tree": "tiny-untied"}
PAGES: dict[str, Any] = {"page_bytes": 4096, "min_paged_bytes": None}
SHAPES: dict[str, dict[str, int]] = {
    "moe": {"rows": 1, "length": 24},
    "tree": {"min_nodes": 8, "max_nodes": 48},
}
SHARES = (4, 8, 16)


@cache
def samples(network: str, count: int, seed: int = 0) -> list[Any]:
    """Return samples of real source text."""
    return list(islice(zoo.samples(network, seed=seed, **SHAPES[network]), count))


def loss_of(model: nn.Module, sample: Any) -> Tensor:
    """Return the loss of one sample."""
    loss: Tensor = model(*sample.args).loss
    return loss


@cache
def profiled(network: str) -> tuple[int, tempfile.TemporaryDirectory[str]]:
    """Profile a network on other samples than it is tested on; return its footprint in bytes, and
    the folder of its traces."""
    model = zoo.build(network, PRESETS[network])
    optimizer = AdamW(model.parameters(), lr=1e-3)
    folder = tempfile.TemporaryDirectory()
    paths = profile(
        model, samples(network, 8, seed=5), out=folder.name, optimizer=optimizer, progress=False
    )
    return max(footprint(load_trace(path)) for path in paths), folder


@cache
def trained(network: str) -> Pilot:
    """Return a pilot that was trained on the traces, and saved."""
    pilot = train_pilot(profiled(network)[1].name, progress=False).pilot
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.pilot"
        pilot.save(path)
        return Pilot.load(path)


def lies(seed: int, count: int = 7) -> list[list[int]]:
    """Return orders of any length, with repetitions and blocks that do not exist."""
    chance = random.Random(seed)
    lengths = [chance.randrange(80) for _ in range(count)]
    return [[chance.randrange(-3, 80) for _ in range(length)] for length in lengths]


def pilot_of(network: str, steering: str, model: nn.Module) -> tuple[Any, str]:
    """Return the pilot and the policy of a way to steer."""
    if steering == "trained":
        return trained(network), "pilot"
    return {
        "lying": (LyingPilot(model, lies(seed=len(network))), "pilot"),
        "none": (None, "pilot"),
        "auto": ("auto", "pilot"),
        "repeat": (None, "repeat"),
        "on-demand": (None, "on-demand"),
    }[steering]


WAYS = ("trained", "lying", "none", "auto", "repeat", "on-demand")


def check_float32(network: str, share: int, steering: str, steps: int) -> None:
    """Compare losses, parameters, optimizer state and the ledger, under a share of the footprint.

    Args:
        network: one of the two.
        share: how many times the budget the footprint is.
        steering: a way to steer.
        steps: to train.
    """
    model = zoo.build(network, PRESETS[network])
    pilot, policy = pilot_of(network, steering, model)
    stats = compare_runs(
        Twin(model, partial(AdamW, lr=1e-3)),
        Loop(steps=steps),
        samples(network, steps),
        loss_of,
        profiled(network)[0] // share,
        pilot=pilot,
        config={**PAGES, "policy": policy},
    ).stats
    assert len(stats) == steps
    assert stats["bytes_in"].sum() > 0, "nothing was paged"
    if steering == "lying":
        assert pilot.asked >= steps, "the pilot was not asked"
    if steering == "trained":
        assert stats["accuracy"].notna().all(), "the pilot did not predict"


@pytest.mark.parametrize(
    ("network", "steering"), [("moe", "auto"), ("tree", "lying"), ("tree", "repeat")]
)
def test_float32_in_few_steps(network: str, steering: str) -> None:
    """At an eighth."""
    check_float32(network, 8, steering, FEW)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "share", "steering"), list(product(zoo.NETWORKS, SHARES, WAYS))
)
def test_float32(network: str, share: int, steering: str) -> None:
    """Every budget and every way to steer."""
    check_float32(network, share, steering, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("network", zoo.NETWORKS)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_two_hundred_steps(network: str, autocast: torch.dtype | None) -> None:
    """At length, learning on the way."""
    model = zoo.build(network, PRESETS[network])
    twin = Twin(model, partial(AdamW, lr=1e-3, fused=True))
    budget, _ = least_budget(model, twin.optimizer, profiled(network)[0] // 4, PAGES)
    compare_runs(
        twin,
        Loop(steps=200, clip=1.0, autocast=autocast),
        samples(network, 200),
        loss_of,
        budget,
        pilot="auto",
        config=PAGES,
    )
