"""The experiment for machines with a GPU: its rows over an emulated one, its searches, verdicts and
pages over numbers that are made up here and published nowhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import DEVICE, accelerated, emulated

from dynoffload.errors import BackendError, ConfigError
from dynoffload.experiments import gpu, gpu_rows
from dynoffload.experiments.gpu import Gpu, Params, at_caps, largest, shares_of
from dynoffload.experiments.gpu_link import Link, measure_link
from dynoffload.experiments.gpu_rows import MEASURED, NO_ROOM, NOT_MEASURED, measure
from dynoffload.experiments.gpu_verdicts import copy_seconds, judge, link_share, overlap
from dynoffload.experiments.gpu_ways import FILES, OURS, PLAIN, WAYS, Task, blocks_of
from dynoffload.experiments.harness import carry_out
from dynoffload.experiments.processes import WorkerError, fresh
from dynoffload.experiments.zoo import build
from dynoffload.memory.accelerator import torch_streams
from dynoffload.units import KiB, MiB

CPU = torch.device("cpu")
SIZES = {"hidden": 32, "heads": 2, "layers": 2, "experts": 2, "width": 32}
SMALL = Task(
    PLAIN,
    "moe",
    "tiny",
    sizes=SIZES,
    shape={"rows": 1, "length": 8},
    device="cpu",
    steps=2,
    warmup=1,
    budget_bytes=256 * KiB,
    config={"page_bytes": 4096, "min_paged_bytes": 1024, "step_aside": False},
)


@pytest.fixture
def without_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_rows, "_warm_up", lambda task, device: None)


def row_of(task: Task) -> dict[str, Any]:
    """Return what a task's process would tell."""
    with gpu_rows.NEVER_LEFT:
        row = measure(task)
    json.dumps(row, allow_nan=False)
    return row


# Rows


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """Return plain training's row."""
    return row_of(SMALL)


def test_plain_training_is_a_row(plain: dict[str, Any]) -> None:
    assert plain["state"] == MEASURED, plain["why"]
    assert len(plain["losses"]) == 3
    assert len(plain["steps_s"]) == 2
    assert min(plain["steps_s"]) <= plain["seconds"] <= max(plain["steps_s"])
    assert plain["parameters"] == sum(p.numel() for p in build("moe", "tiny", **SIZES).parameters())


@pytest.mark.usefixtures("without_warm_up")
@pytest.mark.parametrize("way", ["save-on-cpu", "checkpoint", "fsdp2", "host-optimizer"])
def test_each_peer_trains_the_same(way: str, plain: dict[str, Any]) -> None:
    """On the CPU all have the same bits, those that update on the CPU too."""
    row = row_of(replace(SMALL, way=way))
    assert row["state"] == MEASURED, row["why"]
    assert row["losses"] == plain["losses"]
    assert row["parameters"] == plain["parameters"]


@pytest.mark.usefixtures("without_warm_up")
@pytest.mark.parametrize(("way", "host", "meta"), [(OURS, 0, False), (FILES, 512 * KiB, True)])
def test_ours_pages_on_the_accelerator(
    way: str, host: int, meta: bool, plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_rows, "place_of", lambda task: CPU)
    task = replace(SMALL, way=way, device=DEVICE, host_bytes=host, meta=meta)
    with accelerated():
        row = row_of(task)
    assert row["state"] == MEASURED, row["why"]
    assert row["backend"] == "accelerator emulated"
    assert meta or row["losses"] == plain["losses"]
    assert row["bytes_in"] > 0
    assert row["bytes_out"] > 0
    assert row["peak_fast_bytes"] <= task.budget_bytes
    assert 0 < row["first_allocated"] <= task.budget_bytes
    assert 0 < row["peak_allocated"] <= task.budget_bytes
    assert row["pinned_bytes"] >= (host or row["parameters"] * 14)  # all but what is small


@pytest.mark.usefixtures("without_warm_up")
def test_what_is_refused_or_missing_is_a_row_with_its_reason() -> None:
    row = row_of(replace(SMALL, way="dtr", budget_bytes=4096))
    assert row["state"] == NO_ROOM
    assert row["why"].startswith("BudgetError")
    row = row_of(replace(SMALL, way="zero-offload"))
    assert row["state"] == NOT_MEASURED
    assert "DeepSpeed is not installed" in row["why"]


def test_blocks_are_those_of_the_longest_list() -> None:
    model = build("moe", "tiny")
    assert blocks_of(model) == list(model.layers)  # type: ignore[arg-type]
    alone = torch.nn.Linear(2, 2)
    assert blocks_of(alone) == [alone]


def test_the_link_is_measured_through_the_queues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder whose file tier is not measured: that has tests of its own."""
    tiers = type("Tiers", (), {"read_bps": 1.0, "write_bps": 2.0, "mixed_bps": 3.0, "direct": True})
    monkeypatch.setattr("dynoffload.doctor.measure_tiers", lambda *args: tiers)
    link = Link("cpu", str(tmp_path), seconds_each=0.01, chunk=64 * KiB, pinned=MiB)
    with emulated(delay_s=0.0005) as queues:
        monkeypatch.setattr(torch_streams, "open_streams", lambda device: queues)
        found = measure_link(link)
        assert queues.host_bytes == queues.given == 0
    rates = [found[key] for key in found if key.endswith("_bps")]
    assert len(rates) == 10
    assert min(rates) > 0
    assert found["both_in_bps"] == found["both_out_bps"]
    assert found["pinned"] is True


# Caps and sizes, over a machine that is made up


MACHINE_BPS = 50e9


class Machine:
    """Answers as a machine might on which the link is half as fast as it would have to be.

    Plain training keeps 16 bytes a parameter; this library needs a tenth of the budget of that,
    and moves all of it in and out.
    """

    def __init__(self) -> None:
        self.asked: list[Task | Link] = []
        self.slow = 1.0  # times what a row of ours takes
        self.wrong = False  # the losses of ours

    def __call__(self, what: str, function: Any, task: Any, **limits: Any) -> dict[str, Any]:
        assert function is (measure_link if isinstance(task, Link) else measure)
        self.asked.append(task)
        if isinstance(task, Link):
            names = ("in", "out", "both_in", "both_out", "pageable_in", "pageable_out", "pin")
            files = ("file_read", "file_write", "file_mixed")
            rates = {f"{name}_bps": MACHINE_BPS for name in (*names, *files)}
            return {**rates, "pinned": True, "chunk_bytes": 32 * MiB}
        if task.way == "zero-offload":
            raise WorkerError("it ended with code 1")
        layers = task.sizes.get("layers", 6)
        parameters = 1_000_000 * layers
        whole = 16 * parameters
        compute = 1e-3 * layers * task.shape.get("length", 1024) / 1024
        row: dict[str, Any] = {
            "state": MEASURED,
            "why": "",
            "parameters": parameters,
            "peak_allocated": whole,
            "peak_reserved": whole,
            "losses": ["0x1.0p+0"],
            "seconds": compute,
        }
        needs = {OURS: whole / 20, FILES: whole / 40, "dtr": 2 * whole}.get(task.way, whole)
        if WAYS[task.way].counts and task.budget_bytes > 0.8 * task.cap_bytes:
            needs = 10 * whole  # too little is left beside the budget
        if task.cap_bytes and needs > task.cap_bytes:
            return {"state": NO_ROOM, "why": "OutOfMemoryError: it is full"}
        if task.way in (OURS, FILES):
            copies = whole / MACHINE_BPS
            row |= {
                "seconds": max(compute, copies) * 1.01 * self.slow,
                "bytes_in": whole,
                "bytes_out": whole // 2,
                "stall_s": 0.0,
                "peak_allocated": task.budget_bytes,
                "pinned_bytes": whole,
                "charged_bytes": int(1.01 * whole),
            }
            row["losses"] = ["0x1.8p+0"] if self.wrong else row["losses"]
        elif task.way != PLAIN:
            row["seconds"] = 2 * compute
        return row | {"steps_s": [row["seconds"]] * task.steps}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(gpu, "fresh", made)
    monkeypatch.setattr(gpu, "accelerator", lambda: CPU)
    return made


train = Gpu(Params()).train


def test_every_way_is_tried_until_it_has_no_room(machine: Machine) -> None:
    ways = (PLAIN, OURS, FILES, "checkpoint", "zero-offload")
    task = replace(SMALL, shape={"length": 1024})
    rows = list(at_caps(task, shares_of(["1/2", "1/8"]), ways, train))
    seen = [(row["way"], row["share"], row["state"]) for row in rows]
    assert seen == [
        (PLAIN, "1", MEASURED),
        (OURS, "1", MEASURED),
        ("checkpoint", "1", MEASURED),
        ("zero-offload", "1", NOT_MEASURED),
        (OURS, "1/2", MEASURED),
        ("checkpoint", "1/2", NO_ROOM),
        ("zero-offload", "1/2", NOT_MEASURED),
        (OURS, "1/8", MEASURED),
        (FILES, "1/8", MEASURED),
        ("checkpoint", "1/8", NO_ROOM),
        ("zero-offload", "1/8", NOT_MEASURED),
    ]
    whole = rows[0]["peak_reserved"]
    assert all(row["cap_bytes"] == int(Fraction(row["share"]) * whole) for row in rows)
    ours = next(row for row in rows if (row["way"], row["share"]) == (OURS, "1/8"))
    assert ours["budget_share"] == 0.75  # nine tenths had no room
    assert ours["task"]["budget_bytes"] == int(0.75 * ours["cap_bytes"])
    files = next(row for row in rows if row["way"] == FILES)
    assert files["task"]["host_bytes"] == 4 * files["parameters"]
    assert [row["losses_equal"] for row in rows if row["way"] == OURS] == [True] * 3
    last = next(row for row in rows if (row["way"], row["share"]) == ("checkpoint", "1/8"))
    assert last["why"] == "it has no room under 1/2"
    asked = [task.way for task in machine.asked if isinstance(task, Task)]
    assert asked.count("checkpoint") == 2


def test_the_largest_is_found_to_a_layer_and_others_by_halves(machine: Machine) -> None:
    unit = replace(SMALL, shape={"length": 1024}, cap_bytes=11 * 16_000_000, meta=True)
    rows = list(largest(unit, (PLAIN, OURS, FILES, "checkpoint"), 16, MiB, train))

    def best(way: str) -> int:
        return max(r["layers"] for r in rows if r["way"] == way and r["state"] == MEASURED)

    def tried(way: str) -> list[int]:
        return [row["layers"] for row in rows if row["way"] == way]

    assert best(PLAIN) == 11
    assert tried(PLAIN) == [1, 2, 4, 8, 16, 12, 10, 11]
    assert (best(OURS), tried(OURS)) == (11 * 16, [11 * 8, 11 * 16])
    assert (best("checkpoint"), tried("checkpoint")) == (11, [11 * 8, 11 * 4, 11 * 2, 11])
    built = {task.way: task.meta for task in machine.asked if isinstance(task, Task)}
    assert built == {PLAIN: False, OURS: True, FILES: True, "checkpoint": False}


# Verdicts


def row(way: str, seconds: float, share: str = "1/8", **more: Any) -> dict[str, Any]:
    """Return a row of times."""
    found = {"part": "steps", "network": "moe", "way": way, "share": share, "seconds": seconds}
    return {**found, "state": MEASURED, "losses_equal": True, "task": {"meta": False}, **more}


LINK = {"both_in_bps": 10e9, "both_out_bps": 5e9}


def test_copies_take_what_the_busier_direction_takes() -> None:
    ours = row(OURS, 2.0, bytes_in=10e9, bytes_out=6e9)
    assert copy_seconds(ours, LINK) == 1.2
    assert link_share(ours, LINK) == 0.6
    assert overlap(ours, row(PLAIN, 1.0, "1"), LINK) == pytest.approx(0.2)
    assert overlap(ours, row(PLAIN, 2.0, "1"), LINK) == pytest.approx(1.0)
    assert overlap(ours, None, LINK) is None
    assert copy_seconds(ours, None) is None
    assert copy_seconds(row(PLAIN, 1.0), LINK) is None


def states(rows: list[dict[str, Any]], link: Mapping[str, Any] | None = LINK) -> dict[str, str]:
    """Return verdicts by the first words of what is asked."""
    verdicts = judge({"rows": rows, "link": link})
    return {" ".join(one["what"].split()[:4]): one["state"] for one in verdicts}


def test_nothing_is_reached_that_was_not_measured() -> None:
    assert set(states([]).values()) == {NOT_MEASURED}
    assert len(states([])) == 10


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({}, None),
        ({"seconds": 1.2}, "moe: step at 1/8"),
        ({"seconds": 1.12, "bytes_in": 5e9}, "moe: step at 1/8"),
        ({"losses_equal": False}, "rows whose losses are"),
        ({"peak_allocated": 101}, "the allocator's peak over"),
        ({"charged_bytes": 103}, "host memory charged over"),
        ({"charged_bytes": 97}, "host memory charged over"),
    ],
)
def test_each_number_is_judged(change: dict[str, Any], missed: str | None) -> None:
    ours = row(OURS, 1.05, bytes_in=10e9, bytes_out=1e9, peak_allocated=100)
    ours |= {"pinned_bytes": 100, "charged_bytes": 101, **change}
    ours["task"] = {"meta": True, "budget_bytes": 100}
    found = states([row(PLAIN, 0.5 if ours["bytes_in"] > 6e9 else 1.0, "1"), ours])
    judged = {"moe: step at 1/8", "rows whose losses are", "the allocator's peak over"}
    judged |= {"host memory charged over"}
    for what in judged:
        assert found[what] == ("MISSED" if what == missed else "reached"), what


def test_the_link_is_judged_where_it_is_the_bound() -> None:
    what = "share of the link's"
    fast = row(OURS, 1.1, bytes_in=10e9, bytes_out=0)
    slow = row(OURS, 1.2, "1/4", bytes_in=10e9, bytes_out=0)
    free = row(OURS, 9.0, "1/2", bytes_in=1e9, bytes_out=0)
    plain = row(PLAIN, 0.5, "1")
    assert states([plain, fast])[what] == "reached"
    assert states([plain, fast, free])[what] == "reached"
    assert states([plain, fast, slow])[what] == "MISSED"
    assert states([plain, free])[what] == NOT_MEASURED
    assert states([plain, fast], None)[what] == NOT_MEASURED


def test_the_longest_batch_is_judged_of_which_computing_is_the_bound() -> None:
    what = "step over plain's in"

    def batch(tokens: int, way: str, seconds: float, nbytes: float = 0.0) -> dict[str, Any]:
        share = "1" if way == PLAIN else "1/8"
        more = {"bytes_in": nbytes, "bytes_out": 0.0} if way == OURS else {}
        return row(way, seconds, share, part="tokens", tokens=tokens, **more)

    short = [batch(1, PLAIN, 0.5), batch(1, OURS, 2.0, 10e9)]
    assert states(short)[what] == NOT_MEASURED
    long = [batch(9, PLAIN, 2.0), batch(9, OURS, 2.08, 10e9)]
    assert states(short + long)[what] == "reached"
    long[1]["seconds"] = 2.2
    assert states(long + short)[what] == "MISSED"


def test_peers_are_judged_at_the_same_cap() -> None:
    what = "step over that of"
    ours = row(OURS, 1.01, bytes_in=1.0, bytes_out=1.0)
    assert states([ours, row("fsdp2", 1.0)])[what] == "reached"
    assert states([ours, row("fsdp2", 0.9)])[what] == "MISSED"
    assert states([ours, row("fsdp2", 0.9, "1/4")])[what] == NOT_MEASURED


def test_capacity_is_judged_by_parameters() -> None:
    def size(way: str, parameters: int) -> dict[str, Any]:
        about = {"part": "capacity", "way": way, "parameters": parameters, "layers": 1}
        return {**about, "state": MEASURED, "task": {"meta": True}}

    rows = [size(PLAIN, 10), size(PLAIN, 5), size(OURS, 80), size(OURS, 40), size(FILES, 159)]
    found = judge({"rows": rows, "link": None})[:2]
    assert [one["state"] for one in found] == ["reached", "MISSED"]
    assert [one["found"] for one in found] == [8.0, 15.9]


# The experiment


def test_it_runs_and_writes_tables_and_a_figure(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpu.json"
    result = carry_out(Gpu, Params(cap="2GiB", tokens=(64, 131072)), path)
    assert json.loads(path.read_text()) == result
    states = {one["what"]: one["state"] for one in result["summary"]["verdicts"]}
    assert set(states.values()) == {"reached"}, states
    said = " ".join(capsys.readouterr().out.split())
    for text in ("moe: time per step", "131072 tokens: time per step", "the largest network under"):
        assert text in said
    assert "DeepSpeed ZeRO-Offload: not measured: it ended with code 1" in said
    assert (tmp_path / "gpu.svg").read_text().count("<path") > 50
    assert "reached: parameters of dynoffload over plain's" in said
    assert "MISSED" not in said


def test_what_falls_short_is_said(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.slow, machine.wrong = 2.5, True
    params = Params(parts=("link", "steps"), networks=("moe",), budgets=("1/8",))
    verdicts = carry_out(Gpu, params)["summary"]["verdicts"]
    found = {one["what"]: one["state"] for one in verdicts}
    assert found["rows whose losses are plain training's, bit by bit"] == "MISSED"
    assert found["moe: step at 1/8 over the larger of computing and copying"] == "MISSED"
    assert found["evoformer: step at 1/8 over the larger of computing and copying"] == NOT_MEASURED
    assert "NO" in capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"parts": ("all",)}, "parts names 'all'"),
        ({"preset": "huge"}, "no preset 'huge'"),
        ({"networks": ()}, "networks names nothing"),
        ({"ways": ("ours",)}, "ways lacks plain"),
        ({"steps": 4}, "steps=4 is too few"),
        ({"warmup": 0}, "warmup=0 is too few"),
        ({"most": 0}, "most=0"),
        ({"budgets": ("2",)}, "no share above 0 and at most 1"),
        ({"budgets": ("x",)}, "'x' in budgets"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Params(**options)


def test_without_an_accelerator_it_says_so() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    with pytest.raises(BackendError, match="needs an accelerator"):
        carry_out(Gpu, Params())


@pytest.mark.slow
@pytest.mark.parametrize("way", [PLAIN, OURS, "fsdp2", "dtr"])
def test_a_process_answers_a_task(way: str) -> None:
    """On the CPU, where all ways have room."""
    task = replace(SMALL, way=way, budget_bytes=4 * MiB, config={})
    row = fresh(way, measure, task, patience=120.0)
    assert row["state"] == MEASURED, row["why"]
    assert len(row["losses"]) == 3


@pytest.mark.slow
def test_a_process_says_why_it_has_no_answer(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="finds no accelerator here"):
        fresh("the link", measure_link, Link("cpu", str(tmp_path)))
    row = fresh("it", measure, replace(SMALL, way="zero-offload"))
    assert row["state"] == NOT_MEASURED
