"""A pilot file comes back as it was, and anything else is refused in words, never by a crash."""

from __future__ import annotations

import json
import os
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from dynoffload.errors import PilotError
from dynoffload.pilot import artifact
from dynoffload.pilot.artifact import read_artifact, write_artifact
from dynoffload.pilot.fit import fit_pilot
from dynoffload.pilot.models import KINDS
from dynoffload.pilot.pilot import Pilot

_synthetic = runpy.run_path(str(Path(__file__).with_name("synthetic_pilot.py")))
routed, trees = _synthetic["routed"], _synthetic["trees"]

FILES = (*KINDS, "rule")


@pytest.fixture(scope="module")
def pilots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One saved pilot of each kind."""
    folder = tmp_path_factory.mktemp("pilots")
    paths = {}
    for kind in FILES:
        vocabulary, examples = trees(20) if kind == "rule" else routed(40, experts=4, codes=9)
        paths[kind] = folder / f"{kind}.pilot"
        model = "auto" if kind == "rule" else kind
        fit_pilot(vocabulary, examples, model=model).save(paths[kind])
    return paths


@pytest.mark.parametrize("kind", FILES)
def test_a_pilot_predicts_the_same_after_the_file(kind: str, tmp_path: Path) -> None:
    vocabulary, examples = trees(40) if kind == "rule" else routed(60, noise=0.1)
    model = "auto" if kind == "rule" else kind
    pilot = fit_pilot(vocabulary, examples, model=model)
    path = tmp_path / "x.pilot"
    pilot.save(path)
    again = Pilot.load(path)
    assert again.kind == kind
    assert again.vocabulary == vocabulary
    assert (again.skeleton, again.threshold) == (pilot.skeleton, pilot.threshold)
    assert (again.varying, again.most_frequent) == (pilot.varying, pilot.most_frequent)
    for example in examples:
        np.testing.assert_array_equal(pilot.chances(example.sample), again.chances(example.sample))
        assert pilot.predict(example.sample).blocks == again.predict(example.sample).blocks
    again.save(tmp_path / "y.pilot")
    assert (tmp_path / "y.pilot").read_bytes() == path.read_bytes()


def test_no_other_file_is_left_and_a_file_in_the_way_is_replaced_whole(tmp_path: Path) -> None:
    vocabulary, examples = trees(10)
    path = tmp_path / "x.pilot"
    path.write_bytes(b"what was there before")
    fit_pilot(vocabulary, examples).save(path)
    Pilot.load(path)
    assert os.listdir(tmp_path) == ["x.pilot"]


def test_a_pilot_refuses_a_network_it_was_not_trained_for(pilots: dict[str, Path]) -> None:
    pilot = Pilot.load(pilots["rule"])
    pilot.check("n" * 64)
    with pytest.raises(PilotError, match=r"trained for network nnnnnnnnnnnn.*Train a pilot"):
        pilot.check("m" * 64)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    vocabulary, examples = trees(10)
    missing = tmp_path / "missing" / "x.pilot"
    with pytest.raises(PilotError, match=r"missing.*cannot be written"):
        fit_pilot(vocabulary, examples).save(missing)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a file of this kind"),
        (b"PK\x03\x04" + bytes(100), "not a file of this kind"),
        (b"\x80\x04\x95" + bytes(100), "not a file of this kind"),
        ((2**62).to_bytes(8, "little") + b"{}" * 50, "not a file of this kind"),
        ((900).to_bytes(8, "little") + b"{}" * 50, "cut short"),
        ((100).to_bytes(8, "little") + b"[" * 100, "nested too deeply"),
        ((2).to_bytes(8, "little") + b"{}", "other safetensors"),
    ],
)
def test_foreign_files_are_refused_by_name(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "foreign.pilot"
    path.write_bytes(content)
    with pytest.raises(PilotError, match=rf"foreign\.pilot.*{reason}.*Train the pilot again"):
        Pilot.load(path)


def test_a_missing_file_a_directory_and_another_safetensors_file(tmp_path: Path) -> None:
    with pytest.raises(PilotError, match="no such pilot file"):
        Pilot.load(tmp_path / "nowhere.pilot")
    with pytest.raises(PilotError, match="no such pilot file"):
        Pilot.load(tmp_path)
    save_file({"weight": np.zeros(3, np.float32)}, tmp_path / "w.safetensors")
    with pytest.raises(PilotError, match="other safetensors"):
        Pilot.load(tmp_path / "w.safetensors")


@pytest.mark.parametrize("version", [2, 4])
def test_a_file_of_another_version_is_refused_with_the_command_that_makes_a_new_one(
    version: int, pilots: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document, arrays = read_artifact(pilots["sequence"])
    monkeypatch.setattr(artifact, "VERSION", version)
    write_artifact(tmp_path / "other.pilot", document, arrays)
    monkeypatch.undo()
    with pytest.raises(
        PilotError,
        match=rf"version {version}, and this release reads 3\. Train the pilot again: "
        r"dynoffload pilot train TRACES -o other\.pilot",
    ):
        Pilot.load(tmp_path / "other.pilot")


def test_a_file_too_large_is_not_read(
    pilots: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifact, "MAX_FILE", 1000)
    with pytest.raises(PilotError, match="larger than"):
        Pilot.load(pilots["sequence"])


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_damaged_files_are_refused(
    pilots: dict[str, Path], tmp_path: Path, data: st.DataObject
) -> None:
    content = bytearray(pilots[data.draw(st.sampled_from(FILES))].read_bytes())
    whole = bytes(content)
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        for _ in range(data.draw(st.integers(1, 4))):
            # Half of the damage in the header, where it is read for meaning.
            last = data.draw(st.sampled_from([min(700, len(content) - 1), len(content) - 1]))
            content[data.draw(st.integers(0, last))] = data.draw(st.integers(0, 255))
    if bytes(content) == whole:
        return
    path = tmp_path / "damaged.pilot"
    path.write_bytes(content)
    try:
        Pilot.load(path)
    except PilotError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert "damaged.pilot" in refusal
        return
    # What loads in spite of changed bytes differs in nothing that is believed.
    assert read_artifact(path)[0] in [read_artifact(p)[0] for p in pilots.values()]


def _set(name: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(document: dict[str, Any], arrays: dict[str, Any]) -> None:
        assert name in document
        document[name] = value

    return change


def _array(name: str, make: Callable[[Any], Any]) -> Callable[[Any, Any], None]:
    def change(document: dict[str, Any], arrays: dict[str, Any]) -> None:
        arrays[name] = make(arrays[name])

    return change


HOSTILE = {
    "a slot outside the vocabulary": ("lightgbm", _set("slots", [[99, 0]])),
    "a family outside the vocabulary": ("rule", _set("families", [[1, 99]])),
    "segments without models": ("rule", _set("segments", [])),
    "an unknown kind": ("lightgbm", _set("kind", "oracle")),
    "optional blocks without a model": ("lightgbm", _set("kind", "rule")),
    "a threshold of nothing": ("lightgbm", _set("threshold", 0)),
    "a document that is a list": ("lightgbm", _set("vocabulary", [])),
    "a block outside in the baseline": ("lightgbm", _set("most_frequent", [99])),
    "no card": ("lightgbm", _set("card", None)),
    "weights of another shape": ("sequence", _array("own", lambda a: a[:, :-1])),
    "weights that are not numbers": ("sequence", _array("odds", lambda a: a * np.float16("nan"))),
    "a code book out of order": ("sequence", _array("book0", lambda a: a[::-1].copy())),
    "a code book of another type": ("sequence", _array("book0", lambda a: a.astype(np.float32))),
    "a table of another size": ("lightgbm", _array("table", lambda a: a[:-1])),
    "a site that is not there": ("lightgbm", _array("sites", lambda a: a + 1000)),
    "sites of another type": ("lightgbm", _array("sites", lambda a: a.astype(np.float32))),
    "trees with splits missing": ("lightgbm", _array("tree_left", lambda a: a[:-1])),
    "trees with leaves missing": ("lightgbm", _array("tree_value", lambda a: a[:-1])),
    "leaves of another type": ("lightgbm", _array("tree_value", lambda a: a.astype(np.float32))),
    "splits in another order": ("lightgbm", _array("tree_right", lambda a: a[::-1].copy())),
    "no trees": ("lightgbm", _array("tree_splits", lambda a: a[:0])),
    "too many trees": ("lightgbm", _array("tree_splits", lambda a: np.zeros(65, np.int64))),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_well_sealed_files_with_hostile_contents_are_refused(
    name: str, pilots: dict[str, Path], tmp_path: Path
) -> None:
    kind, change = HOSTILE[name]
    document, arrays = read_artifact(pilots[kind])
    change(document, arrays)
    path = tmp_path / "hostile.pilot"
    write_artifact(path, document, arrays)
    with pytest.raises(PilotError, match=r"hostile\.pilot.*Train the pilot again"):
        Pilot.load(path)


def test_a_card_is_plain_json(pilots: dict[str, Path]) -> None:
    for path in pilots.values():
        assert json.loads(json.dumps(Pilot.load(path).card)) == Pilot.load(path).card


@pytest.mark.parametrize(
    ("kind", "name", "made"),
    [
        ("sequence", "embedding", np.zeros(3, np.float16)),
        ("sequence", "own", np.zeros(3, np.float16)),
        ("markov", "table", np.zeros((2, 2), np.float32)),
        ("lightgbm", "correction_factor", np.zeros((2, 2), np.float16)),
        ("lightgbm", "correction_blend", np.zeros(4, np.float32)),
        ("sequence", "correction_sites", np.full(1, 9, np.int64)),
    ],
)
def test_arrays_of_another_shape_are_refused(
    kind: str, name: str, made: Any, pilots: dict[str, Path], tmp_path: Path
) -> None:
    document, arrays = read_artifact(pilots[kind])
    assert name in arrays
    write_artifact(tmp_path / "x.pilot", document, {**arrays, name: made})
    with pytest.raises(PilotError, match=r"damaged|cannot be used"):
        Pilot.load(tmp_path / "x.pilot")


@pytest.mark.parametrize("bundles", [[], [1], [0, 2], ["x"], [0] * 999, None])
def test_bundles_that_are_none_are_refused(
    bundles: Any, pilots: dict[str, Path], tmp_path: Path
) -> None:
    document, arrays = read_artifact(pilots["markov"])
    write_artifact(tmp_path / "x.pilot", {**document, "bundles": bundles}, arrays)
    with pytest.raises(PilotError, match="cannot be used as a pilot"):
        Pilot.load(tmp_path / "x.pilot")
