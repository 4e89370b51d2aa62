"""A pilot predicts the same after its file. What else a file may hold: test_hostile_files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_pilot import routed, trees

from dynoffload.pilot.fit import fit_pilot
from dynoffload.pilot.pilot import Pilot


@pytest.mark.parametrize(
    "make", [lambda: routed(60, noise=0.1), lambda: trees(40)], ids=["model", "rule"]
)
def test_a_pilot_predicts_the_same_after_the_file(make: Callable[[], Any], tmp_path: Path) -> None:
    vocabulary, examples = make()
    pilot = fit_pilot(vocabulary, examples)
    path = tmp_path / "x.pilot"
    pilot.save(path)
    again = Pilot.load(path)
    assert again.vocabulary == vocabulary
    assert (again.template, again.threshold) == (pilot.template, pilot.threshold)
    assert (again.varying, again.most_frequent) == (pilot.varying, pilot.most_frequent)
    for example in examples:
        np.testing.assert_array_equal(pilot.chances(example.sample), again.chances(example.sample))
        assert pilot.predict(example.sample).blocks == again.predict(example.sample).blocks
    again.save(tmp_path / "y.pilot")
    assert (tmp_path / "y.pilot").read_bytes() == path.read_bytes()
    assert json.loads(json.dumps(again.card)) == pilot.card
