"""A pilot learns which blocks run, from whole steps, and leaves the host program alone."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from exactness import Twin, footprint_of, needs_pager, small, small_loss, small_samples
from reference_work import times_reference
from synthetic_pilot import routed, trees, vocabulary
from torch.optim import AdamW

import dynoffload
from dynoffload.errors import PilotError
from dynoffload.pilot.evaluate import score
from dynoffload.pilot.features import Example
from dynoffload.pilot.general import packaged
from dynoffload.pilot.pilot import Pilot
from dynoffload.pilot.train import learn_pilot, train_pilot
from dynoffload.profiler.input_features import InputFeatures


def chances(pilot: Pilot, example: Example) -> np.ndarray:
    """Return the chance that each slot runs, before the step."""
    pilot.predict(example.sample)
    assert pilot.tracker is not None
    return pilot.tracker.chances


def test_a_pilot_learns_from_the_numbers_of_samples_without_elements() -> None:
    # An early exit: as many stages run as the number says.
    vocabulary, _ = routed(1)
    rng = np.random.default_rng(0)
    examples = []
    for step in range(300):
        depth = int(rng.integers(1, 8))
        values = {"depth": float(depth), "noise": float(rng.random())}
        examples.append(Example(InputFeatures(values), list(range(depth + 1)), f"f{step % 9}"))
    pilot = learn_pilot(vocabulary, examples[:200])
    found = score(lambda e: pilot.predict(e.sample).blocks, examples[200:])
    assert found.block_order_accuracy > 0.97


def test_learning_leaves_the_random_numbers_of_the_program_alone() -> None:
    vocabulary, examples = routed(40)
    before = (torch.get_rng_state().clone(), np.random.get_state()[1].copy(), random.getstate())
    threads = torch.get_num_threads()
    learn_pilot(vocabulary, examples)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]
    assert torch.get_num_threads() == threads


def test_confidence_is_given_for_each_block_and_tells_sure_from_unsure() -> None:
    vocabulary, examples = routed(200, noise=0.15)
    pilot = learn_pilot(vocabulary, examples[:150])
    hits, misses = [], []
    for example in examples[150:]:
        prediction = pilot.predict(example.sample)
        assert prediction.confidence is not None
        assert len(prediction.confidence) == len(prediction.blocks)
        for block, chance in zip(prediction.blocks, prediction.confidence, strict=True):
            (hits if block in example.blocks else misses).append(float(chance))
    assert np.mean(hits) > np.mean(misses) + 0.1


def test_blocks_of_another_vocabulary_are_refused() -> None:
    vocabulary, _ = routed(1)
    _, wide = routed(10, experts=99)
    with pytest.raises(PilotError, match="do not fit the vocabulary"):
        learn_pilot(vocabulary, wide)


@pytest.mark.parametrize(
    "make", [lambda: routed(60, noise=0.1), lambda: trees(40)], ids=["model", "rule"]
)
def test_a_pilot_predicts_the_same_after_the_file(make: Callable[[], Any], tmp_path: Path) -> None:
    """Bit for bit, as they learn on, too."""
    vocabulary, examples = make()
    pilot = learn_pilot(vocabulary, examples)
    path, other = tmp_path / "x.pilot", tmp_path / "y.pilot"
    pilot.save(path)
    loaded = Pilot.load(path)
    loaded.save(other)
    assert other.read_bytes() == path.read_bytes()
    again = Pilot.load(other)
    assert (again.vocabulary, again.structure) == (vocabulary, pilot.structure)
    for example in examples:
        known = chances(loaded, example)
        assert np.array_equal(chances(again, example), known)
        assert np.array_equal(chances(pilot, example), known)
    for example in examples:  # also as they learn on
        assert np.array_equal(chances(again, example), chances(loaded, example))
        for one in (loaded, again):
            one.observe(example.sample, example.blocks, example.hints)
            if one.due:
                one.consolidate()
    assert json.loads(json.dumps(again.card)) == pilot.card


# Samples of another kind than those of the training


@pytest.fixture(scope="module")
def shown() -> Pilot:
    vocabulary, examples = routed(40)
    values = {"rows": 1.0, "length": 2.0}
    told = [replace(one, sample=InputFeatures(values, one.sample.elements)) for one in examples]
    return learn_pilot(vocabulary, told)


def test_a_pilot_over_another_general_one_is_refused(tmp_path: Path) -> None:
    own = packaged()
    other = Pilot(vocabulary([("a", "")]), replace(own, direct=own.direct + 1))
    other.save(tmp_path / "other.pilot")
    with pytest.raises(PilotError, match="it starts from another general pilot than this release"):
        Pilot.load(tmp_path / "other.pilot")


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        (InputFeatures({"rows": 2.0}, np.array([1, 2])), ""),
        (InputFeatures({"rows": 2.0, "length": 3.0}, np.array([1, 2])), ""),
        (InputFeatures({"rows": 2.0}, np.array([[1, 2]])), "1 codes to an element, not 2"),
        (InputFeatures({"rows": 2.0}), "1 codes to an element, not 0"),
        (InputFeatures({"rows": 2.0, "depth": 1.0}, np.array([1])), "numbers without 'depth'"),
        (InputFeatures({}, np.array([1])), "numbers, such as 'length'"),
    ],
)
def test_what_is_not_as_in_training_is_told(sample: InputFeatures, said: str, shown: Pilot) -> None:
    assert shown.unlike(sample) == said


@pytest.mark.parametrize("seen", [None, 7, {}, {"values": 3}, {"values": [], "columns": [[1]]}])
def test_a_card_of_any_kind_is_lived_with(seen: Any, shown: Pilot) -> None:
    pilot = Pilot(shown.vocabulary, card={"seen": seen})
    assert isinstance(pilot.unlike(InputFeatures({"rows": 1.0})), str)


@needs_pager
@pytest.mark.parametrize("same", [True, False])
def test_a_session_says_it_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, same: bool
) -> None:
    twin = Twin(small(), lambda p: AdamW(p, lr=1e-2))
    samples = small_samples(8, seed=1)

    def features(x: Any) -> dict[str, float]:
        return {"first": float(x.sum())}

    dynoffload.profile(
        twin.reference,
        [SimpleNamespace(args=(tokens,)) for tokens, _ in samples],
        out=tmp_path,
        loss=lambda output, _: output.float().mean(),
        features=features,
        progress=False,
    )
    pilot = train_pilot(tmp_path, progress=False).pilot
    config = {"features": features} if same else {}
    with caplog.at_level(logging.WARNING):
        with twin.paged(footprint_of(twin.model) // 3, pilot=pilot, config=config):
            for sample in samples[:3]:
                small_loss(twin.model, sample).backward()
                twin.optimizer.step()
                twin.optimizer.zero_grad()
    assert caplog.text.count("trained on samples that show something else") == (not same)


@pytest.mark.alone
def test_384_experts_at_64_tokens(tmp_path: Path) -> None:
    """A prediction takes about as long as a fixed piece of numpy work, which took a millisecond
    where the limit was set; learning from a step that was not predicted, three times that."""
    rounds = 48  # twice all samples
    vocabulary, examples = routed(24, tokens=64, experts=64, layers=6, codes=256)
    learn_pilot(vocabulary, examples).save(tmp_path / "x.pilot")
    pilot = Pilot.load(tmp_path / "x.pilot")
    stream: Iterator[Example] = cycle(examples)
    assert times_reference(lambda: pilot.predict(next(stream).sample), rounds) < 2

    def watch() -> None:
        example = next(stream)
        pilot.observe(example.sample, example.blocks)

    assert times_reference(watch, rounds) < 6
