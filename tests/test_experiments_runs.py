"""Each experiment runs, small, and its numbers are complete and consistent.

No figure of speed is judged here: what these networks take is mostly overhead.
"""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynoffload.errors import ConfigError
from dynoffload.experiments import (
    demo,
    paged,
)
from dynoffload.experiments.baselines import cgroup
from dynoffload.experiments.contest import Contestant, Step, Way
from dynoffload.experiments.harness import carry_out
from dynoffload.experiments.processes import WorkerError
from dynoffload.experiments.ways import Spec
from dynoffload.units import format_seconds

DISK = Path("/var/tmp")


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the tiers for a moment only."""
    monkeypatch.setattr(paged, "_TIER_SECONDS", 0.02)


def tiny(**options: Any) -> paged.Params:
    sizes = {"preset": "tiny", "tokens": 64, "budget": "400KB", "steps": 2, "warmup": 1}
    return paged.Params(**{"spill_dir": DISK, **sizes, **options})


def check_paged(result: dict[str, Any]) -> dict[str, Any]:
    (row,) = result["rows"]
    own = row["ways"]["main"]
    assert own["losses_equal"] is True
    assert 0 < own["peak_fast_bytes"] <= row["budget_bytes"] == 400_000
    assert len(own["steps_s"]) == len(row["plain_steps_s"]) == 2
    assert own["bytes_in"] > 0
    bound = row["bound"]
    assert bound["seconds"] >= bound["spread_s"] > 0
    assert bound["forward"]["bytes_in"] > bound["backward"]["bytes_in"] > 0
    assert row["tiers"]["read_bps"] > 0
    found: dict[str, Any] = row["ways"]
    return found


NO_GROUPS = cgroup.why_unavailable(swap=True)


def test_paged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Within real limits, where groups can be made. A way that refuses has its reason in the table,
    and the others go on."""
    params = tiny(rows=("main", "dtr"), limited=not NO_GROUPS, limit="700MB", paged_steps=1)
    ways = check_paged(carry_out(paged.Paged, params, tmp_path / "paged.json"))
    assert "dtr moves nothing" in ways["dtr"]["why"]
    assert "dtr cannot run: " in capsys.readouterr().out
    own = ways["main"]
    if NO_GROUPS:
        assert own["group_peak_bytes"] is None
        assert paged.SYSTEM not in ways
        return
    assert ways[paged.SYSTEM]["losses_equal"] is True
    assert own["group_before_bytes"] < own["group_peak_bytes"] <= 700_000_000
    assert "dynoffload" not in Path("/proc/swaps").read_text()


def test_other_libraries_train_or_say_why_not(tmp_path: Path) -> None:
    """They are no dependencies; accelerate's offload leaves no gradients."""
    params = tiny(rows=("main", *paged.PEERS), limited=False, spill_dir=tmp_path)
    ways = check_paged(carry_out(paged.Paged, params))
    assert ways["checkpoint"]["losses_equal"] is True
    assert ways["checkpoint"]["seconds"] > 0
    reasons = {"accelerate": "does not train: backward() leaves no gradients", "deepspeed": ""}
    for name, why in reasons.items():
        assert ways[name]["why"] == (why if find_spec(name) else "not installed")
    assert list(tmp_path.iterdir()) == []


def test_what_killed_a_process_is_the_reason() -> None:
    """And not what it printed last."""
    one, why = Contestant("one", Way(Spec("moe", "tiny"))), "'one' was killed by signal 9, for want"
    one._drop_out(WorkerError(f"{why}: a warning\nand its last line"))
    assert one.why == why


def test_the_bound_of_a_step_is_counted_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two weights of 10 bytes, one of which is visited twice, in 25 bytes of memory."""
    visits = {"visits": [[["a"], 4], [["b"], 4], [["a"], 2]], "parameters": {"a": 10, "b": 10}}
    plain = [Step(4.0, 1.0, 2.0, 1.0, "")]
    for both_bps, forward in ((2.0, 55.0), (1.0, 100.0)):  # of a link with duplex, and without
        tiers = SimpleNamespace(read_bps=1.0, write_bps=1.0, mixed_bps=both_bps, memory_bps=1.0)
        monkeypatch.setattr(paged, "measure_tiers", lambda *_, tiers=tiers: tiers)
        bound = paged._bound(visits, plain, 25, DISK)["bound"]
        assert bound["forward"] == {"compute_s": 2.0, "bytes_in": 55, "bytes_out": 45}
        assert bound["backward"] == {"compute_s": 2.0, "bytes_in": 5, "bytes_out": 0}
        assert bound["seconds"] == forward + 5
        assert bound["spread_s"] == (60.0 if both_bps == 2.0 else 105.0)


def test_paged_says_what_it_cannot_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "why_unavailable", lambda swap: "limits are set by root alone")
    with pytest.raises(cgroup.LimitError, match=r"root alone: neither .* --no-limited"):
        paged.Paged(tiny(rows=("main",))).cases()
    monkeypatch.setattr(paged, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="not installed: install it, or measure --rows main,"):
        paged.Paged(tiny()).cases()


def test_demo(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "out" / "demo.html"
    options: dict[str, Any] = {"tokens": 32, "profiled": 8, "steps": 4}
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
    assert "4 steps of a MoELM" in trained
    assert "every loss bit for bit the same" in trained
    for name in ("plain", "on_demand", "repeat_last", "pilot"):
        assert format_seconds(runs[name]["step_s"]) in price
    assert str(page) in look
