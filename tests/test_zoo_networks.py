"""The zoo's networks that have no file of tests of their own: they learn, and their paths vary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from exactness import Loop, Twin, compare_runs, footprint_of
from torch import nn

from dynoffload.experiments import zoo
from dynoffload.experiments.zoo.building import ZooSample
from dynoffload.experiments.zoo.unrolled_gan import GANOutput
from dynoffload.profiler.input_features import InputFeatures


@dataclass(frozen=True)
class Case:
    """How a network is tried.

    Attributes:
        steps: of training.
        begins: the least loss of the first five steps, in nats (of the GAN: how far the mean of
            what it makes is from that of what it is shown).
        ends: the most of the last thirty: well below what knowing the classes' shares gives, which
            is 3.26 for bytes of text, 2.30 for digits and 1.60 for statements; of hidden bytes not
            yet (3.45), which takes thousands of steps.
        paths: the least number of different ones in sixty samples; 1: there is only one.
        many: the same of a thousand.
        shape: of its samples.
        rate: of learning.
    """

    steps: int
    begins: float
    ends: float
    paths: int
    many: int
    shape: dict[str, Any]
    rate: float = 1e-3


CASES = {
    "switch": Case(120, 4.5, 3.0, 40, 500, {"rows": 2, "length": 32}, 3e-3),
    "tree-cnn": Case(120, 3.5, 2.4, 50, 500, {"max_nodes": 48}, 3e-3),
    "early-lstm": Case(300, 1.5, 1.4, 5, 50, {}, 3e-3),
    "masked": Case(150, 4.5, 3.8, 1, 1, {"min_bytes": 32}),
    "exits": Case(200, 2.0, 1.0, 2, 2, {"rows": 4}, 3e-3),
    "skips": Case(150, 2.0, 1.8, 2, 4, {"rows": 4}),
    "depths": Case(120, 4.5, 3.0, 10, 50, {"rows": 2, "length": 64}, 3e-3),
    "slim": Case(150, 2.0, 1.3, 4, 4, {"rows": 8}),
    "gan": Case(200, 0.25, 0.18, 6, 6, {}),
}


def _samples(name: str, count: int, **more: Any) -> list[ZooSample]:
    return list(islice(zoo.samples(name, **{**CASES[name].shape, **more}), count))


def _trained(name: str, steps: int) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(0)
    case, model = CASES[name], zoo.build(name, "tiny")
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.rate)
    losses = []
    for sample in islice(zoo.samples(name, **case.shape), steps):
        out = model(*sample.args)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.loss.item() if name != "gan" else _apart(out, sample))
    return model, losses


def _apart(out: GANOutput, sample: ZooSample) -> float:
    """Return how far the mean of the images made is from that of the images shown."""
    shown = sample.args[0].images.flatten(1).mean(dim=0)
    return (out.images.mean(dim=0) - shown).square().mean().sqrt().item()


def _paths(model: nn.Module, samples: Sequence[ZooSample]) -> list[tuple[str, ...]]:
    """Return the modules with weights of their own that each sample ran, in order."""
    ran: list[str] = []
    handles = [
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
        for name, module in model.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    ]
    paths = []
    for sample in samples:
        ran.clear()
        model(*sample.args)
        paths.append(tuple(ran))
    for handle in handles:
        handle.remove()
    return paths


LONG = {"early-lstm", "tree-cnn"}  # to train


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in LONG else []) for n in CASES]
)
def test_it_learns_and_takes_different_paths(name: str) -> None:
    case = CASES[name]
    model, losses = _trained(name, case.steps)
    assert sum(losses[:5]) / 5 > case.begins
    assert sum(losses[-30:]) / 30 < case.ends
    paths = _paths(model, _samples(name, 60, seed=7))
    assert len(set(paths)) >= case.paths
    assert all(paths)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_thousand_samples_take_many_paths(name: str) -> None:
    model, _ = _trained(name, 4 * CASES[name].steps)
    found = len(set(_paths(model, _samples(name, 1000, seed=7))))
    assert found == 1 if CASES[name].many == 1 else found >= CASES[name].many


@pytest.mark.slow
def test_what_is_hidden_is_named_better_than_by_how_often_bytes_come() -> None:
    torch.manual_seed(0)
    model = zoo.build("masked", "tiny")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    losses = []
    for sample in islice(zoo.samples("masked", min_bytes=32), 4000):
        loss = model(*sample.args).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-1000:]) / 1000 < 3.35


@pytest.mark.parametrize("name", CASES)
def test_a_sample_says_what_it_shows(name: str) -> None:
    model = zoo.build(name, "tiny")
    seen = [model.sample_features(*one.args) for one in _samples(name, 20)]
    assert all(isinstance(one, InputFeatures) for one in seen)
    assert len({name for one in seen for name in one.values}) == len(seen[0].values) > 0
    assert len({str(one) for one in seen}) >= 15
    for one in seen:
        assert all(np.isfinite(value) for value in one.values.values())
        assert one.elements.dtype == np.int64
        assert len(one.elements)


@pytest.mark.parametrize("count", [10, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_samples_are_the_same_for_the_same_seed_and_apart_by_split(name: str, count: int) -> None:
    def sources(**options: Any) -> list[str]:
        return [one.source for one in _samples(name, count, **options)]

    assert sources(seed=3) == sources(seed=3)
    assert sources(seed=3) != sources(seed=4)
    inside, aside = (
        {part for one in sources(split=split) for part in one.split("+")}
        for split in ("train", "held-out")
    )
    assert not inside & aside


@pytest.mark.parametrize("name", CASES)
def test_a_part_of_its_memory_is_enough_and_changes_no_bit(name: str) -> None:
    model = zoo.build(name, "tiny")
    twin = Twin(model, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    batches = [one.args for one in _samples(name, 4, seed=5)]
    budget = max(footprint_of(model) // 3, 3 * 4 * max(p.nbytes for p in model.parameters()))
    session = compare_runs(twin, Loop(steps=4), batches, lambda net, s: net(*s).loss, budget)
    assert session.log.steps


@pytest.mark.parametrize("name", CASES)
def test_presets_and_bad_sizes(name: str) -> None:
    sizes = [
        sum(p.numel() for p in zoo.build(name, preset, device="meta").parameters())
        for preset in ("tiny", "small", "base")
    ]
    assert sizes == sorted(sizes)
    assert sizes[2] > 20 * sizes[0]
    with pytest.raises(ValueError, match="'huge'"):
        zoo.build(name, "huge")
    first, second = (zoo.build(name, "tiny", seed=n).state_dict() for n in (1, 1))
    assert all(torch.equal(first[key], second[key]) for key in first)
