"""Each experiment runs, small, and its numbers are complete and consistent.

No figure of speed is judged here: what these networks take is mostly overhead.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dynoffload.errors import ConfigError
from dynoffload.experiments import (
    demo,
    paged,
    paged_rows,
    pilot_benefit,
    resident,
    write_json,
)
from dynoffload.experiments.baselines import cgroup
from dynoffload.experiments.harness import carry_out
from dynoffload.experiments.workers import WorkerError
from dynoffload.units import format_seconds

DISK = Path("/var/tmp")


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the tiers for a moment only."""
    monkeypatch.setattr(paged, "_TIER_SECONDS", 0.02)


ROW = {
    "in_memory_s",
    "offload_s",
    "paged_s",
    "offload_over_in_memory",
    "paged_over_offload",
    "budget_bytes",
    "headroom_bytes",
    "peak_fast_bytes",
    "cgroup_peak_bytes",
    "process_before_bytes",
    "stall_s",
    "wasted_bytes",
    "bound_s",
    "offload_over_bound",
    "losses_equal",
}


def check_row(row: dict[str, Any]) -> None:
    assert row.keys() >= ROW
    assert row["losses_equal"] is True
    assert 0 < row["peak_fast_bytes"] <= row["budget_bytes"]
    assert row["within_budget"] is True
    assert row["offload_over_bound"] == row["offload_s"] / row["bound_s"]
    phases = row["in_memory_phases_s"]
    assert row["bound_s"] >= 0.999 * sum(phases.values())
    parts = row["bound_phases"]
    assert parts["forward_and_optimizer"]["bytes_in"] > parts["backward"]["bytes_in"] > 0
    assert len(row["offload_steps_s"]) == len(row["in_memory_steps_s"])


@pytest.mark.skipif(not cgroup.why_unavailable(swap=True), reason="the same within limits is tried")
def test_paged_without_limits(tmp_path: Path) -> None:
    path = tmp_path / "paged.json"
    result = paged.run(
        path,
        rows=("main",),
        preset="tiny",
        tokens=64,
        budget="400KB",
        steps=2,
        warmup=1,
        profile_steps=1,
        limited=False,
        spill_dir=DISK,
    )
    check_row(result)
    assert result["paged_s"] is result["cgroup_peak_bytes"] is None
    assert result["tiers"]["read_bps"] > 0
    write_json(path, result)
    assert json.loads(path.read_text()) == result


@pytest.mark.skipif(
    bool(cgroup.why_unavailable(swap=True)), reason=cgroup.why_unavailable(swap=True)
)
def test_paged_within_real_limits(tmp_path: Path) -> None:
    result = paged.run(
        rows=("main",),
        preset="tiny",
        tokens=64,
        budget="400KB",
        limit="700MB",
        steps=1,
        warmup=1,
        profile_steps=1,
        paged_steps=1,
        spill_dir=DISK,
    )
    check_row(result)
    assert result["oom_kills"] == 0
    assert result["paged_losses_equal"] is True
    before, peak = result["process_before_bytes"], result["cgroup_peak_bytes"]
    assert before < peak <= result["limit_bytes"]
    assert "dynoffload" not in Path("/proc/swaps").read_text()


def test_paged_says_what_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "why_unavailable", lambda swap: "limits are set by root alone")
    with pytest.raises(cgroup.LimitError, match=r"root alone: neither .* --limited=false"):
        paged.run()


def test_paged_puts_each_variant_under_its_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[tuple[list[str], str, int]] = []

    def measured(plan: paged.Plan, variants: list[paged.Variant], tiers: Any, report: Any) -> Any:
        spec = plan.spec(variants[0])
        keys = [variant.key for variant in variants]
        told.append((keys, spec.optimizer, spec.shape["rows"] * spec.shape["length"]))
        yield from ((variant, {"key": variant.key}) for variant in variants)

    monkeypatch.setattr(paged, "find_spec", lambda name: name)
    monkeypatch.setattr(paged, "measure_group", measured)
    monkeypatch.setattr(paged, "_print", lambda result, variants: None)
    path = tmp_path / "paged.json"
    result = paged.run(path, limited=False, spill_dir=DISK)
    assert result["key"] == ""
    nested = {name for name in paged.ROWS if name != paged.MAIN}
    assert set(paged.VARIANTS) - set(paged.ROWS) == {"dtr"}
    assert {name for name in nested if result[name]["key"] == name} == nested
    assert told == [
        (["", "mapped", "repeat", "on_demand", "replay", "rollback"], "fused", 1024),
        (["foreach"], "foreach", 1024),
        (["tokens_512"], "fused", 512),
        (["fused"], "fused", 1024),
    ]
    assert json.loads(path.read_text()).keys() == nested | {"key"}


def test_paged_has_a_row_for_what_refuses_the_budget(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If that is DTR; a budget that paging refuses is an error of the experiment."""

    def refuse(plan: paged.Plan, variant: paged.Variant, report: Any) -> int:
        raise WorkerError(f"{variant.key} ended with code 1: warned\nit needs 4.77 MiB")

    monkeypatch.setattr(paged_rows, "_headroom", refuse)
    options: dict[str, Any] = {"preset": "tiny", "budget": "400KB", "limited": False}
    result = paged.run(rows=("dtr",), **options, spill_dir=DISK)
    assert result["dtr"] == {"infeasible": "it needs 4.77 MiB", "budget_bytes": 400_000}
    assert "cannot run" in capsys.readouterr().out
    with pytest.raises(WorkerError, match="replay ended"):
        paged.run(rows=("replay",), **options, spill_dir=DISK)


def test_paged_refuses_rows_it_does_not_have() -> None:
    with pytest.raises(ConfigError, match="mapped"):
        paged.run(rows=("maped",))


def test_paged_says_what_the_fused_row_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="not installed: install it, or measure --rows main,"):
        paged.run(limited=False)


def test_resident() -> None:
    params = resident.Params(
        preset="tiny",
        moe_tokens=32,
        moe_steps=2,
        tree_steps=3,
        warmup=4,
        moe_budget="64MiB",
        tree_budget="64MiB",
        spill_dir=DISK,
    )
    rows = carry_out(resident.Resident, params)["rows"]
    for row, steps in zip(rows, (2, 3), strict=True):
        assert row["losses_equal"] is True
        assert row["stepped_aside"] is True
        assert len(row["pairs"]) == steps
        assert min(row["pairs"]) <= row["ratio"]
        assert row["control_ratio"] > 0
        assert 0 < row["peak_fast_bytes"] <= row["budget_bytes"]


def test_pilot_benefit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "benefit.json"
    params = pilot_benefit.Params(
        only=("moe_8",),
        size="tiny",
        samples=12,
        steps=2,
        warmup=1,
        per_turn=2,
        share=0.5,
        spill_dir=DISK,
    )
    result = carry_out(pilot_benefit.PilotBenefit, params, path)
    (found,) = result["rows"]
    assert found["budget_bytes"] == found["footprint_bytes"] // 2
    runs = found["runs"]
    for policy in pilot_benefit.POLICIES:
        numbers = runs[policy]
        assert numbers["losses_equal"] is True
        assert numbers["steps"] == 2
        assert numbers["steps_on_demand"] <= 2
        assert 0 < numbers["peak_fast_bytes"] <= found["budget_bytes"]
    assert runs["on_demand"]["accuracy"] is None
    assert runs["on_demand"]["prefetched_bytes"] == 0
    assert runs["on_demand"]["steps_on_demand"] == 2
    assert runs["clairvoyant"]["steps_on_demand"] == 0
    assert 0 <= runs["repeat"]["accuracy"] <= 1
    assert 0 <= runs["pilot"]["accuracy"] <= 1
    assert runs["clairvoyant"]["accuracy"] == 1
    assert found["repeatable"] is True
    assert found["largest_update_bytes"] % 16 == 0
    assert 0 < found["largest_update_bytes"] < found["budget_bytes"]
    ratios = result["summary"]["moe_8"]
    assert ratios["wasted"] < 1
    low, high = ratios["step_over_clairvoyant_range"]
    assert low <= ratios["step_over_clairvoyant"] <= high
    assert ratios["step_over_plain"] == runs["pilot"]["step_s"] / runs["plain"]["step_s"]
    assert "top-2 of 64, 8 tokens" in capsys.readouterr().out
    assert path.with_suffix(".svg").stat().st_size > 4000
    strange = pilot_benefit.Params(only=("moe_63",))
    with pytest.raises(ConfigError, match="moe_64"):
        pilot_benefit.PilotBenefit(strange).cases()


def test_steps_are_compared_on_the_same_sample() -> None:
    own = {"each_step_s": [2.0, 30.0, 1.0, 9.0], "each_prefetched": [1, 1, 1, 0]}
    other = {"each_step_s": [1.0, 20.0, 1.0, 1.0], "each_prefetched": [1, 1, 1, 1]}
    assert pilot_benefit.paired(own, other, both=True) == (1.5, 1.0, 2.0)  # of 2, 1.5 and 1
    all_of_them = pilot_benefit.paired(own, other)
    assert all_of_them is not None
    assert all_of_them[0] == 1.75
    assert pilot_benefit.paired(own, {**other, "each_prefetched": [0] * 4}, both=True) is None


def test_demo(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "out" / "demo.html"
    options: dict[str, Any] = {"tokens": 32, "profiled": 12, "steps": 6}
    params = demo.Params(preset="tiny", out=page, spill_dir=DISK, **options)
    (result,) = carry_out(demo.Demo, params)["rows"]
    assert result["losses_equal"] is True
    assert result["budget_bytes"] == result["footprint_bytes"] // demo.SHARE
    runs = result["runs"]
    assert list(runs) == ["plain", "on_demand", "repeat_last", "pilot"]
    for name in list(runs)[1:]:
        assert runs[name]["losses_equal"] is True
        assert 0 < runs[name]["peak_fast_bytes"] <= result["budget_bytes"]
        assert runs[name]["bytes_in"] > 0
    text = page.read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert page.with_suffix(".perfetto.json.gz").exists()
    json.dumps(result, allow_nan=False)
    shown = capfd.readouterr()
    assert "same losses" in shown.out
    for name in ("plain", "on-demand", "repeat-last", "pilot"):
        assert name in shown.out
    lines = shown.err.splitlines()
    phases = [line for line in lines if re.match(r"\d/6 ", line)]
    assert [line[0] for line in phases] == list("123456")
    trained, price, look = (
        next(line for line in lines if line.startswith(word))
        for word in ("Trained: ", "Price: ", "Look at ")
    )
    assert "6 steps of a MoELM" in trained
    assert "every loss bit for bit the same" in trained
    for name in ("plain", "on_demand", "repeat_last", "pilot"):
        assert format_seconds(runs[name]["step_s"]) in price
    assert str(page) in look
