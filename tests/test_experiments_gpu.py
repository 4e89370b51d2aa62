"""The experiment for machines with a GPU: its rows over an emulated one, its searches and tables
over a machine that is made up here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import DEVICE, accelerated, emulated
from torch import nn

from dynoffload.errors import BackendError, ConfigError
from dynoffload.experiments import gpu, gpu_rows, trainer, ways
from dynoffload.experiments.gpu import COUNTED, FILES, OURS, PLAIN, WAYS, Gpu, Params
from dynoffload.experiments.gpu_rows import MEASURED, NO_ROOM, NOT_MEASURED, measure, measure_link
from dynoffload.experiments.harness import carry_out
from dynoffload.experiments.processes import WorkerError
from dynoffload.experiments.ways import BUDGETED, Spec
from dynoffload.experiments.zoo import build
from dynoffload.memory.accelerator import torch_streams
from dynoffload.units import KiB, MiB

CPU = torch.device("cpu")
SIZES = {"hidden": 32, "heads": 2, "layers": 2, "experts": 2, "width": 32}
CONFIG = {"page_bytes": 4096, "min_paged_bytes": 1024, "step_aside": False}
SMALL = Spec("moe", "tiny", sizes=SIZES, shape={"length": 8}, budget=256 * KiB, config=CONFIG)


def row_of(spec: Spec) -> dict[str, Any]:
    """Return what a training's process would tell."""
    with gpu_rows.NEVER_LEFT:
        row = measure(spec, 0, steps=2, warmup=3)
    json.dumps(row, allow_nan=False)
    return row


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """Return plain training's row."""
    row = row_of(SMALL)
    assert row["state"] == MEASURED, row["why"]
    return row


@pytest.mark.parametrize("way", [way for way in WAYS if WAYS[way] not in (BUDGETED, "torchao")])
def test_each_peer_trains_the_same(way: str, plain: dict[str, Any]) -> None:
    """On the CPU all have the same bits, those that update on the CPU too."""
    row = row_of(replace(SMALL, mode=WAYS[way], budget=4 * MiB))
    assert row["state"] == MEASURED, row["why"]
    assert row["losses"] == plain["losses"]
    assert (len(row["losses"]), len(row["steps_s"])) == (3, 2)
    assert row["parameters"] == sum(p.numel() for p in build("moe", "tiny", **SIZES).parameters())


@pytest.mark.parametrize(("host", "meta"), [(0, False), (512 * KiB, True)])
def test_ours_pages_on_the_accelerator(
    host: int, meta: bool, plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (gpu_rows, trainer, ways):
        monkeypatch.setattr(module, "place_of", lambda spec: CPU)
    spec = replace(SMALL, mode=BUDGETED, device=DEVICE, host_budget=host, meta=meta)
    with accelerated():
        row = row_of(spec)
    assert row["state"] == MEASURED, row["why"]
    assert row["backend"] == "accelerator emulated"
    assert meta or row["losses"] == plain["losses"]
    assert row["bytes_in"] > 0
    assert row["bytes_out"] > 0
    assert row["peak_fast_bytes"] <= spec.budget
    assert 0 < row["peak_allocated"] <= spec.budget
    assert row["pinned_bytes"] >= (host or row["parameters"] * 14)  # all but what is small
    assert "charged_bytes" in row


def test_what_is_refused_is_a_row_with_its_reason() -> None:
    row = row_of(replace(SMALL, mode=BUDGETED, budget=4096))
    assert (row["state"], row["why"].partition(":")[0]) == (NO_ROOM, "BudgetError")
    row = row_of(replace(SMALL, mode=BUDGETED, config={"page_bytes": 3}))
    assert (row["state"], row["why"].partition(":")[0]) == (NOT_MEASURED, "ConfigError")


def test_the_link_is_measured_through_the_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated(delay_s=0.0005) as streams:
        monkeypatch.setattr(torch_streams, "open_streams", lambda device: streams)
        found = measure_link("cpu", 0.01, chunk=64 * KiB, memory_bytes=MiB)
        assert streams.host_bytes == streams.given == 0
    assert found.pop("pinned") is True
    assert len(found) == 4
    assert min(found.values()) > 0


MACHINE_BPS = 50e9


class Machine:
    """Answers as a machine might on which the link is half as fast as it would have to be.

    Plain training keeps 16 bytes a parameter; this library needs a twentieth of that, and moves all
    of it in and half of it out.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, Spec, int]] = []

    def __call__(self, what: str, function: Any, *given: Any, **limits: Any) -> dict[str, Any]:
        if function is measure_link:
            names = ("in", "out", "both_in", "both_out")
            return {**{f"{name}_bps": MACHINE_BPS for name in names}, "pinned": True}
        assert function is measure
        spec, cap, *_ = given
        way = what.partition(",")[0]
        self.asked.append((way, spec, cap))
        if way == "fsdp2":
            raise WorkerError("it ended with code 1")
        layers = spec.sizes.get("layers", 6)
        whole = 16_000_000 * layers
        compute = 1e-3 * layers * spec.shape.get("length", 1024) / 1024
        row: dict[str, Any] = {
            "state": MEASURED,
            "why": "",
            "parameters": 1_000_000 * layers,
            "peak_allocated": whole,
            "peak_reserved": whole,
            "losses": ["0x1.0p+0"],
            "seconds": compute,
            "steps_s": [compute],
        }
        needs = {OURS: whole / 20, FILES: whole / 40}.get(way, whole)
        if way in COUNTED and spec.budget > 0.8 * cap:
            needs = 10 * whole  # too little is left beside the budget
        if cap and needs > cap:
            return {"state": NO_ROOM, "why": "OutOfMemoryError: it is full"}
        if way in COUNTED:
            row |= {"seconds": max(compute, whole / MACHINE_BPS) * 1.01, "stall_s": 0.0}
            row |= {"bytes_in": whole, "bytes_out": whole // 2, "losses": ["0x1.8p+0"]}
        return row


def test_torchao_is_named_where_it_cannot_run() -> None:
    with (
        pytest.raises(ConfigError, match=r"not installed|optimizers on cuda and xpu"),
        ways.WAYS["torchao"](Spec("moe", "tiny"), nn.Linear(2, 2), None),
    ):
        pytest.fail("it must not begin")


def test_every_way_is_tried_until_it_has_no_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine()
    monkeypatch.setattr(gpu, "fresh", machine)
    monkeypatch.setattr(gpu, "accelerator", lambda: CPU)
    chosen = (OURS, FILES, "checkpoint", "fsdp2")
    params = Params(("moe", "moe:64"), budgets=("1/2", "1", "1/8"), ways=chosen, cap="170MiB")
    path = tmp_path / "gpu.json"
    result = carry_out(Gpu, params, path)
    assert json.loads(path.read_text()) == result
    rows = [row for row in result["rows"] if row["part"] == "moe"]
    assert [(row["way"], row["share"], row["state"]) for row in rows] == [
        (PLAIN, "", MEASURED),
        (OURS, "1", MEASURED),
        ("checkpoint", "1", MEASURED),
        ("fsdp2", "1", NOT_MEASURED),
        (OURS, "1/2", MEASURED),
        ("checkpoint", "1/2", NO_ROOM),
        ("fsdp2", "1/2", NOT_MEASURED),
        (OURS, "1/8", MEASURED),
        (FILES, "1/8", MEASURED),
        ("checkpoint", "1/8", NO_ROOM),
        ("fsdp2", "1/8", NOT_MEASURED),
    ]
    whole = rows[0]["peak_reserved"]
    files = rows[8]
    assert files["cap_bytes"] == whole // 8
    assert files["spec"]["budget"] == int(0.75 * files["cap_bytes"])  # nine tenths had no room
    assert files["spec"]["host_budget"] == 4 * rows[0]["parameters"]
    assert rows[9]["why"] == "it has no room under 1/2"
    sizes = {row["way"]: row.get("layers") for row in result["rows"] if row["part"] == "capacity"}
    assert sizes == {PLAIN: 8, OURS: 128, FILES: 256, "checkpoint": 8, "fsdp2": None}
    built = {way: spec.meta for way, spec, cap in machine.asked if cap == 170 * MiB}
    assert built == {PLAIN: False, OURS: True, FILES: True, "checkpoint": False, "fsdp2": False}
    said = " ".join(capsys.readouterr().out.split())
    for text in (
        "moe:64",
        "128 million",
        "16.0",
        "NO",
        "yes",
        "it ended with code 1",
        "50.00 GB/s",
    ):
        assert text in said
    assert "1.01" in said  # of ours over the bound, which is copying


def test_without_an_accelerator_it_says_so() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    with pytest.raises(BackendError, match="needs an accelerator"):
        carry_out(Gpu, Params())
