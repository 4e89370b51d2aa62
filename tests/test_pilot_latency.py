"""A prediction takes about as long as a fixed piece of numpy work, for the largest steps promised.

The product's limit is a millisecond; the piece takes that long where the limit was set. `dynoffload
experiment pilot-accuracy` measures seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import pytest
from reference_work import times_reference
from synthetic_pilot import routed

from dynoffload.pilot.features import Example
from dynoffload.pilot.fit import fit_pilot
from dynoffload.pilot.online import OnlineLearner
from dynoffload.pilot.pilot import Pilot

pytestmark = pytest.mark.alone

ROUNDS = 48  # twice all samples


def test_384_experts_at_64_tokens(tmp_path: Path) -> None:
    """Alone, following the steps, and learning from one, however well it was taught."""
    vocabulary, examples = routed(24, tokens=64, experts=64, layers=6, codes=256)
    fit_pilot(vocabulary, examples).save(tmp_path / "x.pilot")
    pilot = Pilot.load(tmp_path / "x.pilot")
    learner = OnlineLearner(vocabulary, pilot=pilot, grow=False)
    stream: Iterator[Example] = cycle(examples)
    assert times_reference(lambda: pilot.predict(next(stream).sample), ROUNDS) < 1
    assert times_reference(lambda: learner.predict(next(stream).sample), ROUNDS) < 1

    def watch() -> None:
        example = next(stream)
        learner.observe(example.sample, example.blocks)

    assert times_reference(watch, ROUNDS) < 2
    assert learner.predict(examples[0].sample) is not None
