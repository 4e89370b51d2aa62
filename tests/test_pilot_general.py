"""The general pilot: its file, its arithmetic, and its training on some networks for others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fuzz_files import pack
from synthetic_pilot import routed
from torch import nn

from dynoffload.errors import PilotError
from dynoffload.pilot.evaluate import LastOrder, score
from dynoffload.pilot.evidence import NAMES
from dynoffload.pilot.features import Example
from dynoffload.pilot.general import CLIP, FORMAT, VERSION, General, packaged
from dynoffload.pilot.general_training import rows_of, train
from dynoffload.pilot.pilot import Pilot
from dynoffload.planning.blocks import Vocabulary
from dynoffload.profiler.safefile import read_file


def test_it_computes_what_torch_does() -> None:
    general = packaged()
    features = np.random.default_rng(0).normal(0, 4, size=(len(NAMES), 200)).astype(np.float32)
    inputs = torch.from_numpy(((features.T - general.mean) * general.scale).clip(-CLIP, CLIP))
    hidden = inputs
    for number, (weights, bias) in enumerate(general.layers):
        hidden = nn.functional.linear(
            hidden, torch.from_numpy(weights), torch.from_numpy(bias[:, 0])
        )
        if number + 1 < len(general.layers):
            hidden = torch.relu(hidden)
    expected = hidden + nn.functional.linear(inputs, torch.from_numpy(general.direct))
    assert general.odds(features) == pytest.approx(expected[:, 0].numpy(), abs=1e-4)


def test_a_file_gives_the_same_weights(tmp_path: Path) -> None:
    general = packaged()
    assert general.card["networks"]
    general.save(tmp_path / "a")
    again = General.load(tmp_path / "a")
    features = np.zeros((len(NAMES), 3), np.float32)
    assert np.array_equal(again.odds(features), general.odds(features))
    assert again.card == general.card


def _array(name: str, make: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda document, arrays: arrays.update({name: make(arrays[name])})


@pytest.mark.parametrize(
    "change",
    [
        lambda document, arrays: document.update(names=["x"]),
        lambda document, arrays: document.update(card=7),
        lambda document, arrays: document.pop("card"),
        lambda document, arrays: arrays.pop("mean"),
        lambda document, arrays: arrays.pop("weights0"),
        lambda document, arrays: arrays.update(
            {f"{name}{n}": np.zeros((1, 1)) for n in range(3, 9) for name in ("weights", "bias")}
        ),
        _array("mean", lambda a: a[:-1]),
        _array("scale", lambda a: a[None]),
        _array("scale", lambda a: a * np.inf),
        _array("direct", lambda a: a * np.nan),
        _array("direct", lambda a: a[:, :1]),
        _array("bias1", lambda a: a[:, 0]),
        _array("bias1", lambda a: np.repeat(a, 9, axis=1)),
        _array("weights1", lambda a: a.T),
        _array("weights1", lambda a: a * 1e9),
    ],
)
def test_a_file_that_is_no_general_pilot_is_refused(
    change: Callable[[Any, Any], Any], tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    packaged().save(path)
    document, arrays = read_file(path, FORMAT, VERSION)
    with np.errstate(all="ignore"):
        change(document, arrays)
    path.write_bytes(pack(document, arrays, (FORMAT, VERSION)))
    with pytest.raises(PilotError, match=r"a\.safetensors: .*Install the package anew"):
        General.load(path)


def test_a_file_that_is_missing_or_a_networks_pilot_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pilot"
    with pytest.raises(PilotError, match="Install the package anew"):
        General.load(path)
    Pilot(routed(1)[0]).save(path)
    with pytest.raises(PilotError, match="Install the package anew"):
        General.load(path)


def _network(number: int) -> tuple[Vocabulary, list[Example]]:
    """Return the steps of one of some routed networks, of which experts run on for a while."""
    known, examples = routed(100, experts=6 + 2 * number, codes=12, route=number, seed=number)
    return known, [replace(one, source=str(number)) for one in examples]


def test_training_on_two_networks_predicts_a_third() -> None:
    sets = [rows_of(*_network(number), seed=number) for number in range(2)]
    features, labels, weights = sets[0]
    assert features.shape == (len(labels), len(NAMES))
    assert weights.sum() == pytest.approx(1, abs=1e-4)
    general = train(sets, 0, {"networks": ["a", "b"]})
    assert general.card == {"networks": ["a", "b"]}
    known, examples = _network(2)
    pilot = Pilot(known, general)

    def predict(example: Example) -> list[int]:
        prediction = pilot.predict(example.sample)
        pilot.observe(example.sample, example.blocks)
        if pilot.due:
            pilot.consolidate()
        return prediction.blocks

    found = score(predict, examples).block_order_accuracy
    assert found > score(LastOrder(), examples).block_order_accuracy + 0.1
