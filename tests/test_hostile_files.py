"""Pilots and traces that are whole by every digest and still lie: each class that did harm once."""

from __future__ import annotations

import ast
import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fuzz_pilots import pack
from fuzz_thrift import encode, parse
from hypothesis import given, settings
from hypothesis import strategies as st
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
from dynoffload.profiler import ModuleCall, Recorder, Sample, Trace
from dynoffload.profiler.plain_parquet import ParquetFile
from dynoffload.profiler.storage import most_operators, seal
from dynoffload.profiler.storage_header import most_nesting

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
    where = tmp_path / "step-000000.parquet"
    trace.save(where)
    return where


def _plain(path: Path) -> bytes:
    """A trace's file without its seal."""
    data = path.read_bytes()
    stop = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    return data[: stop - 48] + data[stop:]


def _rewrite(path: Path, change: Callable[[dict[str, Any]], None], **columns: Any) -> None:
    """Write a trace again with another header, and with other values in whole columns."""
    table = pq.read_table(path)
    metadata = dict(table.schema.metadata)
    header = json.loads(metadata[b"dynoffload.trace"])
    change(header)
    metadata[b"dynoffload.trace"] = json.dumps(header).encode()
    for name, value in columns.items():
        field = table.schema.field(name)
        made = pa.array([value] * table.num_rows, field.type)
        table = table.set_column(table.schema.get_field_index(name), field, made)
    written = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(metadata), written, compression="NONE")
    path.write_bytes(seal(written.getvalue()))


def _chain(count: int) -> list[list[Any]]:
    return [["a"] * count, ["k"] * count, list(range(-1, count - 1)), [0] * count, [1] * count]


LIES: dict[str, tuple[Callable[[dict[str, Any]], None], dict[str, Any]]] = {
    "half of a surrogate pair": (lambda h: h.update(model="\ud800"), {}),
    "such a name among the values": (lambda h: h["values"].update({"\udfff": 1.0}), {}),
    "a step that no number holds": (lambda h: h.update(step=10**100), {}),
    "regions whose sizes overflow": (lambda h: h["regions"][2].__setitem__(0, 2**62 - 1), {}),
    "calls within calls without end": (lambda h: h.update(calls=_chain(20_000)), {"call": 0}),
    "more lists than there can be": (lambda h: h.update(other=[[]] * 1_000_001), {}),
    "times whose sum is infinite": (lambda h: None, {"seconds": 1.7e308}),
    "each operator uses all": (lambda h: None, {"reads": bytes(4 * 100_000)}),
}


@pytest.mark.parametrize("name", LIES)
def test_a_trace_that_lies_is_refused(name: str, path: Path) -> None:
    change, columns = LIES[name]
    _rewrite(path, change, **columns)
    with pytest.raises(TraceError, match=path.name):
        Trace.load(path)


def test_repetition_that_takes_no_bytes_is_refused(path: Path) -> None:
    """A million equal operators are some bytes of Parquet, and a gigabyte of Python."""
    table = pq.read_table(path)
    many = table.take(pa.array(np.zeros(500_000, np.int64)))
    written = io.BytesIO()
    pq.write_table(many, written, compression="NONE")
    data = seal(written.getvalue())
    assert len(data) < 50_000
    path.write_bytes(data)
    with pytest.raises(TraceError, match="claims 500000 operators; a trace of"):
        Trace.load(path)


def test_what_a_recorder_writes_keeps_within_the_limits(trace: Trace, tmp_path: Path) -> None:
    """Operators alike in all but time, as many as the rule allows or more, are read again."""
    many = replace(trace, operators=trace.operators[:1] * 50_000)
    many.save(tmp_path / "many.parquet")
    assert len(Trace.load(tmp_path / "many.parquet").operators) == 50_000
    size = (tmp_path / "many.parquet").stat().st_size
    assert most_operators(size) >= 50_000
    wide = replace(trace.operators[0], reads=(0,) * 100_000)
    with pytest.raises(TraceError, match="use regions 5000000 times"):
        replace(trace, operators=[wide] * 50).save(tmp_path / "wide.parquet")
    deep = [ModuleCall("a", "", index - 1, 0, 1) for index in range(3000)]
    with pytest.raises(TraceError, match=str(most_nesting(3000))):
        replace(trace, calls=deep).save(tmp_path / "deep.parquet")


def test_a_region_that_dies_after_the_last_operator_has_a_footprint(
    trace: Trace, path: Path
) -> None:
    last = len(trace.operators)
    _rewrite(path, lambda h: h["regions"].__setitem__(4, [last] * len(h["regions"][4])))
    assert footprint(Trace.load(path)).total == footprint(trace).total


def test_more_places_for_blocks_than_a_pilot_takes_are_refused() -> None:
    """One cell that a trace calls again and again: the table of who runs before whom is square."""
    orders = [[0] * (MAX_PLACES + 1)] * 2
    with pytest.raises(PilotError, match=f"have {MAX_PLACES + 1} places"):
        learn_skeleton(orders, trees(2)[0].blocks)


def test_a_trace_of_no_operators_has_no_footprint(trace: Trace) -> None:
    with pytest.raises(TraceError, match="has no operators"):
        footprint(replace(trace, operators=[]))


def test_a_footer_that_lies_is_refused(path: Path) -> None:
    """Each number in the footer and in each list of it, one after the other, made impossible."""
    plain = _plain(path)
    start = len(plain) - 8 - int.from_bytes(plain[-8:-4], "little")
    numbers = _numbers(parse(plain, start)[0])
    assert len(numbers) > 200
    good = Trace.load(path)
    refusals: list[str] = []
    for place in range(0, len(numbers), 3):
        fields, _ = parse(plain, start)
        holder, key = _numbers(fields)[place]
        holder[key] = 2**62 + 1
        footer = encode(fields)
        path.write_bytes(seal(plain[:start] + footer + len(footer).to_bytes(4, "little") + b"PAR1"))
        try:
            found = Trace.load(path)
        except TraceError as error:
            refusals.append(str(error))
        else:
            assert found == good
    assert len(refusals) > 50
    assert all(path.name in refusal for refusal in refusals)


def test_a_footer_that_ends_the_process_of_who_asks_pyarrow_is_read(
    trace: Trace, path: Path
) -> None:
    """Sizes of texts in a column of numbers: pyarrow 26 throws where nobody catches."""
    plain = _plain(path)
    start = len(plain) - 8 - int.from_bytes(plain[-8:-4], "little")
    fields, _ = parse(plain, start)
    of = {number: value for number, _, value in fields}
    group = {number: value for number, _, value in of[4][1][0]}
    phase = {number: value for number, _, value in group[1][1][1]}
    phase[3][:] = [field for field in phase[3] if field[0] != 16]
    phase[3].append([16, 12, [[1, 6, 100]]])
    footer = encode(fields)
    path.write_bytes(seal(plain[:start] + footer + len(footer).to_bytes(4, "little") + b"PAR1"))
    assert Trace.load(path) == trace


def test_a_source_that_is_no_text_is_written_as_text(trace: Trace, tmp_path: Path) -> None:
    """The name of a file in another encoding, as Python gives it."""
    replace(trace, source="caf\udce9.py").save(tmp_path / "t.parquet")
    assert Trace.load(tmp_path / "t.parquet").source == "caf\\udce9.py"


def _numbers(fields: list[Any]) -> list[tuple[Any, int]]:
    """Where the numbers of a struct are, those of structs within it too."""
    found: list[tuple[Any, int]] = []
    for field in fields:
        _, kind, value = field
        if kind in (4, 5, 6):
            found.append((field, 2))
        elif kind == 12:
            found += _numbers(value)
        elif kind == 9 and value[0] == 12:
            found += [place for item in value[1] for place in _numbers(item)]
        elif kind == 9 and value[0] in (4, 5, 6):
            found += [(value[1], i) for i in range(len(value[1]))]
    return found


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_columns_are_read_as_pyarrow_reads_them(data: st.DataObject) -> None:
    """However it cuts them into pages, dictionaries and groups of rows."""
    rows = data.draw(st.integers(0, 300))
    distinct = data.draw(st.sampled_from((1, 2, 3, 17, 300)))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    codes = (
        np.sort(rng.integers(0, distinct, rows))
        if distinct == 3
        else rng.integers(0, distinct, rows)
    )
    columns = {
        "n": pa.array(codes.astype(np.int64) * 7 - 3),
        "i": pa.array(codes.astype(np.int32)),
        "x": pa.array(rng.random(rows)),
        "b": pa.array([bytes([c % 256]) * int(c % 9) for c in codes], pa.binary()),
        "s": pa.array([f"é{c}" for c in codes], pa.string()),
    }
    schema = pa.schema([pa.field(n, c.type, nullable=False) for n, c in columns.items()])
    options = data.draw(
        st.fixed_dictionaries(
            {
                "use_dictionary": st.booleans(),
                "row_group_size": st.sampled_from((7, 64, 1000)),
                "data_page_size": st.sampled_from((16, 1 << 20)),
                "dictionary_pagesize_limit": st.sampled_from((32, 1 << 20)),
                "write_batch_size": st.sampled_from((4, 1024)),
                "version": st.sampled_from(("1.0", "2.6")),
                "write_statistics": st.booleans(),
            }
        )
    )
    written = io.BytesIO()
    pq.write_table(pa.table(columns, schema=schema), written, compression="NONE", **options)
    file = ParquetFile(written.getvalue())
    assert (file.rows, file.names) == (rows, list(columns))
    for name in ("n", "i", "x"):
        assert file.numbers(name).tolist() == columns[name].to_pylist()
    for name in ("b", "s"):
        found = file.words(name)
        words = [found.words[i] for i in found.indices.tolist()]
        assert words == columns[name].cast(pa.binary()).to_pylist()


def test_pyarrow_never_sees_a_trace_that_is_read(path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from dynoffload.profiler import Trace;"
        "Trace.load(Path(sys.argv[1])); print('pyarrow' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False", done.stderr


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
