"""Pilots and traces whose digests are right and whose content is not: refused, in words."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz_files import pack
from synthetic_pilot import recorded_step, routed, trees

from dynoffload.errors import PilotError, TraceError
from dynoffload.pilot import pilot as pilot_file
from dynoffload.pilot.evidence import BIAS, MAX_NUMBERS
from dynoffload.pilot.features import Example
from dynoffload.pilot.pilot import MAX_SLOTS, Pilot
from dynoffload.pilot.structure import MAX_ORDER
from dynoffload.pilot.template import MAX_SLOTS as MAX_PLACES
from dynoffload.pilot.template import learn_template
from dynoffload.pilot.train import learn_pilot
from dynoffload.planning.footprint import footprint
from dynoffload.profiler import InputFeatures, ModuleCall, Trace, load_trace, save_trace, storage
from dynoffload.profiler.safefile import read_file
from dynoffload.profiler.storage import MAX_ROWS, most_nesting

PILOT = (pilot_file.FORMAT, pilot_file.VERSION)
TRACE = (storage.FORMAT, storage.SCHEMA_VERSION)
Change = Callable[[dict[str, Any], dict[str, Any]], Any]


def _rewrite(path: Path, change: Change, of: tuple[str, int], to: Path | None = None) -> Path:
    """Write a file again with another document or other arrays."""
    document, arrays = read_file(path, *of)
    change(document, arrays)
    (to or path).write_bytes(pack(document, arrays, of))
    return to or path


@pytest.fixture(scope="module")
def pilots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pilots")
    paths = {name: folder / f"{name}.pilot" for name in ("routed", "rule")}
    for name, path in paths.items():
        vocabulary, examples = trees(20) if name == "rule" else routed(40, experts=4, codes=9)
        learn_pilot(vocabulary, examples).save(path)
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


def _array(name: str, make: Callable[[Any], Any]) -> Change:
    return lambda document, arrays: arrays.update({name: make(arrays[name])})


HOSTILE: dict[str, tuple[str, Change]] = {
    "a number that is infinite once it is read": (
        "routed",
        _put("card", value={"x": float("inf")}),
    ),
    "half of a surrogate pair": ("routed", _put("card", value={"x": "\ud800"})),
    "a loop as sure as infinity": ("rule", _put("loops", 0, "fidelity", value=7.0)),
    "a rule of nothing": ("rule", _put("loops", 0, "table", value=[])),
    "a rule's block outside": ("rule", _put("loops", 0, "table", 0, 1, value=[99])),
    "a rule's key of another length": ("rule", _put("loops", 0, "table", 0, 0, value=[0] * 9)),
    "a rule of a column too many": ("rule", _put("loops", 0, "columns", value=[99])),
    "families that share blocks": ("rule", _put("families", value=[[2, 3], [3]])),
    "a family of nothing": ("rule", _put("families", value=[[]])),
    "a family outside the vocabulary": ("rule", _put("families", value=[[1, 99]])),
    "loops without models": ("rule", _put("loops", value=[])),
    "too many slots": ("routed", _put("slots", value=[[0, i] for i in range(MAX_SLOTS + 1)])),
    "a slot outside the vocabulary": ("routed", _put("slots", value=[[99, 0]])),
    "a slot twice": ("routed", _put("slots", 1, value=[0, 0])),
    "a run of a block that no step has": ("routed", _put("slots", 0, value=[0, 10**300])),
    "a document that is a list": ("routed", _put("vocabulary", value=[])),
    "no card": ("routed", _put("card", value=None)),
    "no evidence": ("routed", _put("evidence", value=None)),
    **{
        f"{name} that are {value!r:.9}": ("routed", _put("evidence", name, value=value))
        for name in ("steps", "usual", "latest")
        for value in ("nan", "inf", -1, 10**400, 1e300, None)
    },
    "more numbers than are used": (
        "routed",
        _put("evidence", "names", value=[f"{n}" for n in range(MAX_NUMBERS + 1)]),
    ),
    "a number twice": ("routed", _put("evidence", "names", value=["x", "x"])),
    "a code twice": ("routed", _array("book", lambda a: a * 0)),
    "codes of another type": ("routed", _array("book", lambda a: a.astype(np.float32))),
    "codes in rows": ("routed", _array("book", lambda a: a[None])),
    "an n-gram that is shorter than itself": (
        "routed",
        _array("shorter", lambda a: np.full_like(a, len(a) - 1)),
    ),
    "too many codes": ("routed", _array("book", lambda a: np.arange(5000))),
    "chances above one": ("routed", _spoil("table", 3.0)),
    "chances surer than are learned": ("routed", _spoil("table", -20.0)),
    "fewer runs than none": ("routed", _spoil("statistics", -1.0)),
    "shares above one": ("routed", _array("statistics", lambda a: a + 2)),
    "fewer elements than none": ("routed", _spoil("weights", -1.0)),
    "a mix that overflows": ("routed", _spoil("mix", 3e38)),
    "a trust of another type": ("routed", _array("trust", lambda a: a.astype(np.float64))),
    "signed presence": ("routed", _array("present", lambda a: a.astype(np.int8))),
    **{
        f"{name} that hold {value}": ("routed", _spoil(name, value))
        for name in ("table", "weights", "statistics", "numbers", "losses", "mix", "trust")
        for value in (np.nan, np.inf, -3e38)
    },
    **{
        f"{name} of another shape": ("routed", _array(name, lambda a: a.reshape(-1)[:-1]))
        for name in (
            *("statistics", "table", "weights", "book", "numbers", "present", "losses"),
            *("mix", "trust"),
        )
    },
    **{
        f"no {name}": ("routed", lambda document, arrays, name=name: arrays.pop(name))  # type: ignore[misc]
        for name in ("statistics", "table", "weights", "book", "numbers", "present", "mix")
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_pilot_that_lies_is_refused(name: str, pilots: dict[str, Path], tmp_path: Path) -> None:
    kind, change = HOSTILE[name]
    path = _rewrite(pilots[kind], change, PILOT, tmp_path / "hostile.pilot")
    with pytest.raises(PilotError, match=r"hostile\.pilot.*Train the pilot again"):
        Pilot.load(path)


def test_what_a_file_may_claim_stays_finite(pilots: dict[str, Path], tmp_path: Path) -> None:
    """The surest tables, the largest biases, habits, weights and counts, of the most steps."""

    def change(document: dict[str, Any], arrays: dict[str, Any]) -> None:
        document["evidence"] |= {"steps": 10**11, "usual": 1e11, "latest": 0}
        arrays["numbers"] = np.resize(arrays["numbers"], (256, arrays["numbers"].shape[1])) + 1e11
        arrays["present"] = np.resize(arrays["present"], (256, arrays["present"].shape[1]))
        for name, value in (("table", -8), ("weights", 1e11), ("losses", -1e11), ("mix", 900)):
            arrays[name] = np.full(arrays[name].shape, value, np.float32)
        for row, value in ((0, 1e11), (6, 1e11), (slice(7, BIAS), 0), (slice(BIAS, None), -1e12)):
            arrays["statistics"][row] = value
        arrays["trust"][:] = -900

    path = _rewrite(pilots["routed"], change, PILOT, tmp_path / "large.pilot")
    pilot, examples = Pilot.load(path), routed(40, experts=4, codes=9)[1]
    with np.errstate(all="raise", under="ignore"):
        for example in examples[:3]:
            prediction = pilot.predict(example.sample)
            assert np.isfinite(pilot.features).all()
            assert prediction.confidence is not None
            assert np.isfinite(prediction.confidence).all()
            pilot.observe(example.sample, example.blocks)
        pilot.consolidate()
        assert np.isfinite(pilot._ask(examples[0].sample).odds).all()
    pilot.save(path)
    Pilot.load(path)


def test_a_rule_that_predicts_without_end_is_cut(pilots: dict[str, Path], tmp_path: Path) -> None:
    """A few bytes of rule for each of the most elements a sample has; then two such loops."""

    def change(document: dict[str, Any], arrays: dict[str, Any]) -> None:
        loop = document["loops"][0]
        for entry in loop["table"]:
            entry[1] = [2] * 500
        document["loops"] = [loop] * 3
        document["slots"] += [[-2, 1], [-2, 2]]

    path = _rewrite(pilots["rule"], change, PILOT, tmp_path / "long.pilot")
    sample = InputFeatures({"nodes": 1.0}, np.zeros((65_536, 3), np.int64))
    prediction = Pilot.load(path).predict(sample)
    assert prediction.confidence is not None
    assert len(prediction.blocks) == len(prediction.confidence) == MAX_ORDER


def test_a_step_through_the_most_slots_takes_little_time(
    pilots: dict[str, Path], tmp_path: Path
) -> None:
    def change(document: dict[str, Any], arrays: dict[str, Any]) -> None:
        document["slots"] = [[0, number] for number in range(MAX_SLOTS)]
        arrays["book"] = arrays["book"][:1]
        for name in ("weights", "orders", "shorter"):
            arrays[name] = arrays[name][:2]
        for name in ("statistics", "present", "table"):
            rows = 2 if name == "table" else len(arrays[name])
            arrays[name] = np.zeros((rows, MAX_SLOTS), arrays[name].dtype)
        arrays["present"][:8] = 1  # one chain

    pilot = Pilot.load(_rewrite(pilots["routed"], change, PILOT, tmp_path / "long.pilot"))
    sample, begun = InputFeatures({}), time.process_time()
    pilot.predict(sample)
    assert pilot.tracker is not None
    for _ in range(300):
        pilot.tracker.observe([0])
    pilot.observe(sample, [0] * MAX_SLOTS)
    assert time.process_time() - begun < 3


def test_a_pilot_trained_without_elements_takes_samples_that_have_some(tmp_path: Path) -> None:
    vocabulary, examples = routed(40, experts=4, codes=9)
    bare = [
        Example(InputFeatures({"x": float(step % 3)}), example.blocks, example.source)
        for step, example in enumerate(examples)
    ]
    pilot = learn_pilot(vocabulary, bare)
    blocks = pilot.predict(examples[0].sample).blocks
    assert all(0 <= block < len(vocabulary) for block in blocks)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return recorded_step()


@pytest.fixture
def path(trace: Trace, tmp_path: Path) -> Path:
    where = tmp_path / "step-000000.trace"
    save_trace(trace, where)
    return where


def _chain(document: dict[str, Any], arrays: dict[str, Any]) -> None:
    zeros = np.zeros(20_000, np.int8)
    arrays |= {f"calls.{name}": zeros for name in ("path", "shape_key", "start", "stop")}
    arrays["calls.parent"] = np.arange(-1, 19_999)


def _huge(document: dict[str, Any], arrays: dict[str, Any]) -> None:
    arrays["sizes"] = np.array([*arrays["sizes"][:-1], 2**62 - 1])
    arrays["regions.nbytes"] = np.full_like(arrays["regions.nbytes"], len(arrays["sizes"]) - 1)


def _below_zero(column: str) -> Change:
    """Only FLOPs may be -1, which says that they are not known."""

    def change(document: dict[str, Any], arrays: dict[str, Any]) -> None:
        arrays["sizes"] = np.array([-1, *arrays["sizes"][1:]])
        arrays[column] = np.zeros_like(arrays[column])

    return change


def _column(name: str, value: Any) -> Change:
    def change(document: dict[str, Any], arrays: dict[str, Any]) -> None:
        array = arrays[f"operators.{name}"]
        arrays[f"operators.{name}"] = np.full(array.shape, value, np.asarray(value).dtype)

    return change


def _set(**columns: Any) -> Change:
    made = {name.replace("__", "."): np.array(column) for name, column in columns.items()}
    return lambda document, arrays: arrays.update(made)


def _table(table: str, **columns: Any) -> Change:
    return _set(**{f"{table}__{name}": [value] for name, value in columns.items()})


LIES: dict[str, Change] = {
    "half of a surrogate pair": _put("model", value="\ud800"),
    "such a name among the values": _put("values", value={"\udfff": 1.0}),
    "such a name among the texts": _put("texts", 0, value="\udfff"),
    "a step that no number holds": _put("step", value=10**100),
    "a number of too many digits": _put("step", value=10**4000),
    "regions whose sizes overflow": _huge,
    "calls within calls without end": _chain,
    "times whose sum is infinite": lambda document, arrays: arrays["operators.seconds"].fill(1e308),
    "uses of no operator": lambda document, arrays: arrays.update(
        {"operators.used": np.zeros(100_000, np.int8)}
    ),
}


LYING_PARTS: list[Change] = [
    *(_below_zero(f"operators.{name}") for name in ("bytes_read", "bytes_written", "memory")),
    *(
        _column(name, value)
        for name, value in (
            ("phase", 3),
            ("phase", -1),
            ("call", 10_000),
            ("call", -2),
            ("seconds", float("nan")),
            ("seconds", -1.0),
            ("seconds", 1.7e308),
            ("name", 1 << 20),
            ("site", -1),
            ("dtype", 1 << 20),
            ("idiom", 99),
            ("idiom", -1),
            ("memory", -1),
            ("bytes_read", 1 << 20),
            ("flops", -2),
            ("reads", -1),
            ("writes", 100),
            ("used", 1 << 20),
            ("used", -1),
        )
    ),
    _put("step", value="one"),
    _put("network", value=5),
    _put("values", value=[]),
    _put("values", value={"a": "text"}),
    _put("values", value={"a": [1]}),
    _put("texts", value={}),
    _put("texts", value=None),
    lambda document, arrays: document["texts"].__setitem__(0, 1),
    lambda document, arrays: document["texts"].pop(),
    lambda document, arrays: document.pop("source"),
    _set(elements=[1.5]),
    _set(elements=[1] * 70_000),
    _set(elements=1),
    _set(elements=[[]]),
    _set(elements=[[1] * 2000]),
    _table("regions", name=0, kind=6, nbytes=0, born=-1, died=-1),
    _table("regions", name=0, kind=0, nbytes=10**6, born=-1, died=-1),
    _table("regions", name=0, kind=0, nbytes=0, born=10**9, died=-1),
    _table("regions", name=0, kind=0, nbytes=0, born=-1, died=-2),
    _table("calls", path=0, shape_key=0, parent=0, start=0, stop=0),
    _table("calls", path=0, shape_key=0, parent=-1, start=5, stop=1),
    _table("calls", path=0, shape_key=0, parent=-1, start=0, stop=10**9),
    _set(hints=[[99, 0]]),
    _set(hints=[[0, 5]]),
    _set(hints=[0, 0]),
    _set(hint_values=[0.5]),
    _set(hint_values=[2.0]),
    _set(hint_values=[np.nan]),
    _set(other=[0, 1]),
]


@pytest.mark.parametrize("change", [*LIES.values(), *LYING_PARTS])
def test_a_trace_that_lies_is_refused(change: Change, path: Path) -> None:
    with pytest.raises(TraceError, match=r"step-000000\.trace.*record it again"):
        load_trace(_rewrite(path, change, TRACE))


def test_a_trace_that_lacks_an_array_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    for name in read_file(path, *TRACE)[1]:
        path.write_bytes(whole)
        with pytest.raises(TraceError, match="damaged"):
            load_trace(_rewrite(path, lambda _, arrays, name=name: arrays.pop(name), TRACE))  # type: ignore[misc]


def test_a_trace_of_too_many_operators_is_refused(path: Path) -> None:
    def many(document: dict[str, Any], arrays: dict[str, Any]) -> None:
        for name, array in arrays.items():
            if name.startswith("operators."):
                arrays[name] = np.resize(array, MAX_ROWS + 1)

    with pytest.raises(TraceError, match=f"claims {MAX_ROWS + 1} operators"):
        load_trace(_rewrite(path, many, TRACE))


def test_what_a_recorder_writes_keeps_within_the_limits(trace: Trace, tmp_path: Path) -> None:
    many = replace(trace, operators=list(trace.operators[:1]) * 50_000)
    save_trace(many, tmp_path / "many.trace")
    assert len(load_trace(tmp_path / "many.trace").operators) == 50_000
    wide = trace.operators[0]._replace(reads=(0,) * 400_000)
    with pytest.raises(TraceError, match="20000000 uses of regions"):
        save_trace(replace(trace, operators=[wide] * 50), tmp_path / "wide.trace")
    deep = [ModuleCall("a", "", index - 1, 0, 1) for index in range(3000)]
    with pytest.raises(TraceError, match=str(most_nesting(3000))):
        save_trace(replace(trace, calls=deep), tmp_path / "deep.trace")
    assert [path.name for path in tmp_path.iterdir()] == ["many.trace"]


def test_a_region_that_dies_after_the_last_operator_has_a_footprint(
    trace: Trace, path: Path
) -> None:
    last = len(trace.operators)
    _rewrite(path, lambda _, arrays: arrays["regions.died"].fill(last), TRACE)
    assert footprint(load_trace(path)) == footprint(trace)


def test_more_places_for_blocks_than_a_pilot_takes_are_refused() -> None:
    """One cell that a trace calls again and again: the table of who runs before whom is square."""
    orders = [[0] * (MAX_PLACES + 1)] * 2
    with pytest.raises(PilotError, match=f"have {MAX_PLACES + 1} places"):
        learn_template(orders, trees(2)[0].blocks)
