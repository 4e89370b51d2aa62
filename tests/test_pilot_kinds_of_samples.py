"""A pilot says when the samples that it steers are not of the kind that it was trained on."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from exactness import Twin, footprint_of, needs_pager, small, small_loss, small_samples
from synthetic_pilot import routed
from torch.optim import AdamW

import dynoffload
from dynoffload.pilot.fit import fit_pilot
from dynoffload.pilot.pilot import Pilot
from dynoffload.pilot.train import train_pilot
from dynoffload.profiler.input_features import InputFeatures


def _pilot(values: dict[str, float]) -> Pilot:
    vocabulary, examples = routed(40)
    told = [replace(one, sample=InputFeatures(values, one.sample.elements)) for one in examples]
    return fit_pilot(vocabulary, told)


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
def test_what_is_not_as_in_training_is_told(sample: InputFeatures, said: str) -> None:
    assert _pilot({"rows": 1.0, "length": 2.0}).unlike(sample) == said


@pytest.mark.parametrize("seen", [None, 7, {}, {"values": 3}, {"values": [], "columns": [[1]]}])
def test_a_card_of_any_kind_is_lived_with(seen: Any) -> None:
    pilot = replace(_pilot({}), card={"seen": seen})
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
