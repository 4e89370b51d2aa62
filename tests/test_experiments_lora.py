"""The experiment `lora`: one in earnest, small, and what its table makes of rows."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dynoffload.errors import ConfigError
from dynoffload.experiments import lora
from dynoffload.experiments.baselines.cgroup import LimitError, why_unavailable
from dynoffload.experiments.comparing import BEGIN, END
from dynoffload.experiments.harness import carry_out, rendered
from dynoffload.experiments.lora import LOADED, MAPPED, OURS, PLAIN, READ, WAYS, Lora, Params

needs_all = pytest.mark.skipif(
    bool(why_unavailable()) or find_spec("peft") is None, reason="needs memory cgroups and PEFT"
)


@pytest.mark.slow
@needs_all
def test_all_ways_make_the_same_steps(tmp_path: Path) -> None:
    """Table, page and figure come with them, and checkpoints are found again."""
    (tmp_path / "lora.md").write_text(f"# Adapters\n\n{BEGIN}\n{END}\n")
    sizes = {"layers": 3, "hidden": 512, "experts": 16, "tokens": 32, "steps": 1, "warmup": 1}
    params = Params(**sizes, budget="40MB", limit="900MB", path=tmp_path, spill_dir=tmp_path)
    result = carry_out(Lora, params, tmp_path / "lora.json")
    rows = {row["case"]: row for row in result["rows"]}
    assert rows.keys() == WAYS.keys()
    assert [row["why"] for row in rows.values()] == [""] * 5
    for way in (OURS, MAPPED, LOADED):
        assert rows[way]["losses"] == rows[PLAIN]["losses"], way
        assert rows[way]["group_peak_bytes"] <= 900_000_000
        assert rows[way]["memory"]
    assert len(set(rows[PLAIN]["losses"])) == 2
    assert rows[OURS]["checkpoint_bytes"] > 40_000_000
    assert rows[OURS]["spill_bytes"] > 0 == rows[MAPPED]["spill_bytes"]
    assert result["summary"]["losses_equal"] is True
    page = (tmp_path / "lora.md").read_text()
    assert "losses of all ways: equal, bit for bit" in page
    assert (tmp_path / "lora.svg").exists()
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    assert len(written) == 2 * 4
    carry_out(Lora, Params(**{**vars(params), "ways": (READ,)}))
    assert written == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    assert rendered(Lora, tmp_path / "lora.json") == result


@needs_all
def test_a_way_that_is_killed_says_so(tmp_path: Path) -> None:
    """And the others go on."""
    params = Params(
        ways=(MAPPED,), layers=1, hidden=64, experts=2, tokens=16, limit="100MB", path=tmp_path
    )
    (row,) = carry_out(Lora, params)["rows"]
    assert "for want of memory within 100000000 bytes" in row["why"]
    assert "seconds" not in row


def row(case: str, seconds: float, bytes_in: int, *losses: str) -> dict[str, Any]:
    return {
        "case": case,
        "checkpoint_bytes": 1000,
        "seconds": seconds,
        "bytes_in": bytes_in,
        "bytes_out": 10,
        "spill_bytes": 50,
        "start_s": 6.0,
        "losses": list(losses),
    }


def test_a_step_is_compared_with_what_bounds_it() -> None:
    """Compute, or the bytes at the bandwidth that was measured."""
    reading = {"case": READ, "checkpoint_bytes": 1000, "read_s": 5.0}
    rows = [reading, row(PLAIN, 8.0, 0, "a", "b"), row(OURS, 12.0, 2000, "a", "b")]
    found = Lora(Params()).summary([*rows, row(MAPPED, 30.0, 4000, "a")])
    assert found == {
        "over_bound": 1.2,  # of 2000 bytes at 200 a second
        "written_share": 0.005,
        "spill_share": 0.05,
        "start_over_reading": 1.2,
        "times_faster_than_mapped": 2.5,
        "losses_equal": True,
    }
    slow = [reading, row(PLAIN, 11.0, 0, "a"), row(OURS, 12.1, 2000, "b")]
    found = Lora(Params()).summary(slow)
    assert found["over_bound"] == pytest.approx(1.1)  # of plain compute
    assert found["times_faster_than_mapped"] is None
    assert found["losses_equal"] is False


def test_what_cannot_be_measured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="peft"):
        carry_out(Lora, Params())
    monkeypatch.setattr(lora, "why_unavailable", lambda: "no limits")
    with pytest.raises(LimitError, match="no limits"):
        carry_out(Lora, Params())
