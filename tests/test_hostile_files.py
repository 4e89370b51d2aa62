"""Pilots and traces that are whole by every digest and still lie: each class that did harm once."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fuzz_pilots import pack
from fuzz_traces import repack, unpack
from synthetic_pilot import routed, trees
from torch import nn

import dynoffload
from dynoffload.errors import PilotError, TraceError
from dynoffload.pilot.artifact import read_artifact
from dynoffload.pilot.features import MAX_SITES, Example
from dynoffload.pilot.fit import fit_pilot
from dynoffload.pilot.models import KINDS
from dynoffload.pilot.pilot import MAX_ORDER, MAX_SLOTS, Pilot
from dynoffload.pilot.skeleton import MAX_SLOTS as MAX_PLACES
from dynoffload.pilot.skeleton import learn_skeleton
from dynoffload.planning.footprint import footprint
from dynoffload.profiler import ModuleCall, Recorder, Sample, Trace, load_trace, save_trace
from dynoffload.profiler.storage import MAX_ROWS, most_nesting

Change = Callable[[dict[str, Any], dict[str, Any]], None]


@pytest.fixture(scope="module")
def pilots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pilots")
    paths = {name: folder / f"{name}.pilot" for name in (*KINDS, "rule")}
    for name, path in paths.items():
        vocabulary, examples = trees(20) if name == "rule" else routed(40, experts=4, codes=9)
        fit_pilot(vocabulary, examples, model="auto" if name == "rule" else name).save(path)
    return paths


def _put(*keys: Any, value: Any) -> Change:
    def change(document: dict[str, Any], arrays: dict[str, Any]) -> None:
        holder: Any = document
        for key in keys[:-1]:
            holder = holder[key]
        holder[keys[-1]] = value

    return change


def _spoil(name: str, value: float) -> Change:
    """One number of an array, which may be wider than the one that is stored."""

    def change(document: dict[str, Any], arrays: dict[str, Any]) -> None:
        array = np.array(arrays[name], np.float32)
        array.reshape(-1)[0] = value
        arrays[name] = array

    return change


def _tree(name: str, place: int, value: float) -> Change:
    def change(document: dict[str, Any], arrays: dict[str, Any]) -> None:
        array = arrays[f"tree_{name}"].copy()
        array[place] = value
        arrays[f"tree_{name}"] = array

    return change


HOSTILE: dict[str, tuple[str, Change]] = {
    "a number that is infinite once it is read": (
        "lightgbm",
        _put("card", value={"x": float("inf")}),
    ),
    "half of a surrogate pair": ("lightgbm", _put("card", value={"x": "\ud800"})),
    "a segment as sure as infinity": ("rule", _put("segments", 0, "fidelity", value=7.0)),
    "a correction of no model": ("rule", _put("corrects", value=True)),
    "a correction that is neither": ("lightgbm", _put("corrects", value=1)),
    "families that share blocks": ("rule", _put("families", value=[[2, 3], [3]])),
    "a family of nothing": ("rule", _put("families", value=[[]])),
    "too many slots": ("lightgbm", _put("slots", value=[[0, i] for i in range(MAX_SLOTS + 1)])),
    "a scale that makes numbers overflow": (
        "lightgbm",
        _put("model", "scaler", "scale", value=[1e-38]),
    ),
    "a centre that does": ("sequence", _put("model", "scaler", "centre", value=[3e38])),
    "weights beyond half precision": ("sequence", _spoil("embedding", 3e38)),
    "chances above one": ("markov", _spoil("table", 3.0)),
    "a sequence's weights": ("sequence", _spoil("state_weight", 1e30)),
    "a blend that overflows": ("markov", _spoil("correction_blend", 3e38)),
    "a table of log-chances that does": ("lightgbm", _spoil("table", -3e38)),
    "a leaf that does": ("lightgbm", _tree("value", 0, 1e300)),
    "a leaf that is infinite": ("lightgbm", _tree("value", -1, np.inf)),
    "a leaf that is no number": ("lightgbm", _tree("value", 0, np.nan)),
    "a threshold that is no number": ("lightgbm", _tree("threshold", 0, np.nan)),
    "a split on a column that is not there": ("lightgbm", _tree("feature", 0, 999)),
    "a split on a column before the first": ("lightgbm", _tree("feature", 0, -1)),
    "a tree of too many leaves": ("lightgbm", _tree("splits", 0, 16)),
    "a tree of less than one leaf": ("lightgbm", _tree("splits", 0, -1)),
    "a tree that takes another's splits": ("lightgbm", _tree("splits", 0, 15)),
    "a split that is its own child": ("lightgbm", _tree("left", 0, 0)),
    "a child that is not there": ("lightgbm", _tree("right", 0, 2**62)),
    "a leaf that is not there": ("lightgbm", _tree("right", 0, -(2**62))),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_pilot_that_lies_is_refused(name: str, pilots: dict[str, Path], tmp_path: Path) -> None:
    kind, change = HOSTILE[name]
    document, arrays = read_artifact(pilots[kind])
    change(document, arrays)
    path = tmp_path / "hostile.pilot"
    path.write_bytes(pack(json.dumps(document).replace("Infinity", "1e999").encode(), arrays))
    with pytest.raises(PilotError, match=r"hostile\.pilot.*Train the pilot again"):
        Pilot.load(path)


def test_the_packing_used_above_is_itself_faithful(pilots: dict[str, Path], tmp_path: Path) -> None:
    for path in pilots.values():
        again = tmp_path / path.name
        document, arrays = read_artifact(path)
        again.write_bytes(pack(json.dumps(document).encode(), arrays))
        assert read_artifact(again)[0] == document
        Pilot.load(again)


def test_a_sequence_of_too_many_sites_is_refused(tmp_path: Path) -> None:
    vocabulary, examples = routed(60, experts=40, codes=40)
    path = tmp_path / "many.pilot"
    fit_pilot(vocabulary, examples, model="sequence").save(path)
    document, arrays = read_artifact(path)
    blocks = document["model"]["stops"][-1]
    assert blocks > MAX_SITES
    document["model"]["stops"] = list(range(1, blocks + 1))
    path.write_bytes(pack(json.dumps(document).encode(), arrays))
    with pytest.raises(PilotError, match="more sites than"):
        Pilot.load(path)


def test_a_rule_that_foretells_without_end_is_cut(pilots: dict[str, Path], tmp_path: Path) -> None:
    """A few bytes of rule for each of the most elements a sample has; then two such segments."""
    document, arrays = read_artifact(pilots["rule"])
    segment = document["segments"][0]
    for entry in segment["table"]:
        entry[1] = [2] * 500
    document["segments"] = [segment] * 3
    document["slots"] += [[-2, 1], [-2, 2]]
    path = tmp_path / "long.pilot"
    path.write_bytes(pack(json.dumps(document).encode(), arrays))
    sample = Sample({"nodes": 1.0}, np.zeros((65_536, 3), np.int64))
    prediction = Pilot.load(path).predict(sample)
    assert prediction.confidence is not None
    assert len(prediction.blocks) == len(prediction.confidence) == MAX_ORDER


def test_a_pilot_trained_without_elements_takes_samples_that_have_some(tmp_path: Path) -> None:
    vocabulary, examples = routed(40, experts=4, codes=9)
    bare = [
        Example(Sample({"x": float(step % 3)}), example.blocks, example.source)
        for step, example in enumerate(examples)
    ]
    pilot = fit_pilot(vocabulary, bare, model="lightgbm")
    blocks = pilot.predict(examples[0].sample).blocks
    assert all(0 <= block < len(vocabulary) for block in blocks)


@pytest.fixture(scope="module")
def trace() -> Trace:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    traces: list[Trace] = []
    with Recorder(model, optimizer, on_step=traces.append, source=lambda: "lib/a.py"):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return traces[0]


@pytest.fixture
def path(trace: Trace, tmp_path: Path) -> Path:
    where = tmp_path / "step-000000.trace"
    save_trace(trace, where)
    return where


def _rewrite(path: Path, change: Change) -> None:
    """Write a trace again with another document or other arrays."""
    document, arrays = unpack(path.read_bytes())
    change(document, arrays)
    path.write_bytes(repack(document, arrays))


def _chain(document: dict[str, Any], arrays: dict[str, Any]) -> None:
    zeros = np.zeros(20_000, np.int8)
    arrays |= {f"calls.{name}": zeros for name in ("path", "shape_key", "start", "stop")}
    arrays["calls.parent"] = np.arange(-1, 19_999)


def _huge(document: dict[str, Any], arrays: dict[str, Any]) -> None:
    arrays["sizes"] = np.array([*arrays["sizes"][:-1], 2**62 - 1])
    arrays["regions.nbytes"] = np.full_like(arrays["regions.nbytes"], len(arrays["sizes"]) - 1)


LIES: dict[str, Change] = {
    "half of a surrogate pair": _put("model", value="\ud800"),
    "such a name among the values": _put("values", value={"\udfff": 1.0}),
    "such a name among the texts": _put("texts", 0, value="\udfff"),
    "a step that no number holds": _put("step", value=10**100),
    "a number of too many digits": _put("step", value=10**4000),
    "regions whose sizes overflow": _huge,
    "calls within calls without end": _chain,
    "more lists than there can be": _put("other", value=[[]] * 200_001),
    "times whose sum is infinite": lambda document, arrays: arrays["operators.seconds"].fill(1e308),
    "uses of no operator": lambda document, arrays: arrays.update(
        {"operators.used": np.zeros(100_000, np.int8)}
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_a_trace_that_lies_is_refused(name: str, path: Path) -> None:
    _rewrite(path, LIES[name])
    with pytest.raises(TraceError, match=path.name):
        load_trace(path)


def test_a_trace_of_too_many_operators_is_refused(path: Path) -> None:
    def many(document: dict[str, Any], arrays: dict[str, Any]) -> None:
        for name, array in arrays.items():
            if name.startswith("operators."):
                arrays[name] = np.resize(array, MAX_ROWS + 1)

    _rewrite(path, many)
    with pytest.raises(TraceError, match=f"claims {MAX_ROWS + 1} operators"):
        load_trace(path)


def test_what_a_recorder_writes_keeps_within_the_limits(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = replace(trace, operators=trace.operators[:1] * 50_000)
    save_trace(many, tmp_path / "many.trace")
    assert len(load_trace(tmp_path / "many.trace").operators) == 50_000
    wide = trace.operators[0]._replace(reads=(0,) * 400_000)
    with pytest.raises(TraceError, match="20000000 uses of regions"):
        save_trace(replace(trace, operators=[wide] * 50), tmp_path / "wide.trace")
    deep = [ModuleCall("a", "", index - 1, 0, 1) for index in range(3000)]
    with pytest.raises(TraceError, match=str(most_nesting(3000))):
        save_trace(replace(trace, calls=deep), tmp_path / "deep.trace")
    for name in ("ROWS", "HEADER_BYTES", "FILE_BYTES"):
        monkeypatch.setattr(f"dynoffload.profiler.storage.MAX_{name}", 3)
        with pytest.raises(TraceError, match="record a smaller batch"):
            save_trace(trace, tmp_path / "large.trace")
        monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["many.trace"]


def test_a_region_that_dies_after_the_last_operator_has_a_footprint(
    trace: Trace, path: Path
) -> None:
    last = len(trace.operators)
    _rewrite(path, lambda document, arrays: arrays["regions.died"].fill(last))
    assert footprint(load_trace(path)).total == footprint(trace).total


def test_more_places_for_blocks_than_a_pilot_takes_are_refused() -> None:
    """One cell that a trace calls again and again: the table of who runs before whom is square."""
    orders = [[0] * (MAX_PLACES + 1)] * 2
    with pytest.raises(PilotError, match=f"have {MAX_PLACES + 1} places"):
        learn_skeleton(orders, trees(2)[0].blocks)


def test_a_trace_of_no_operators_has_no_footprint(trace: Trace) -> None:
    with pytest.raises(TraceError, match="has no operators"):
        footprint(replace(trace, operators=[]))


def test_a_source_that_is_no_text_is_written_as_text(trace: Trace, tmp_path: Path) -> None:
    """The name of a file in another encoding, as Python gives it."""
    save_trace(replace(trace, source="caf\udce9.py"), tmp_path / "t.trace")
    assert load_trace(tmp_path / "t.trace").source == "caf\\udce9.py"


OURS = ("dynoffload", "torch.")
CODE = {"eval", "exec", "compile", "__import__", "pickle", "marshal", "shelve", "dill"}
UNPICKLING = ("torch.load", "joblib.load", "np.load")


def test_nothing_that_reads_files_can_run_what_is_in_them() -> None:
    """No call or module by which data becomes code; what is imported by name is ours."""
    root = Path(dynoffload.__file__).parent
    files = [*root.glob("pilot/*.py"), *root.glob("profiler/*.py"), *root.glob("planning/*.py")]
    assert len(files) > 40
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            named: set[str] = set()
            if isinstance(node, ast.Import | ast.ImportFrom):
                named = {alias.name.partition(".")[0] for alias in node.names}
                named.add((getattr(node, "module", "") or "").partition(".")[0])
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                named = {node.func.id}
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr == "import_module":
                    assert ast.unparse(node.args[0])[:13].strip("f'").startswith(OURS), file
                assert ast.unparse(node.func) not in UNPICKLING, file
            assert not named & CODE, (file, named & CODE)
