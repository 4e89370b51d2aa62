"""Time per step over budgets: who is fastest, and what cannot run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from dynoffload.experiments.contest import Contestant, Side, Way
from dynoffload.experiments.harness import carry_out, rendered
from dynoffload.experiments.processes import WorkerError
from dynoffload.experiments.step_time import (
    POLICIES,
    Params,
    StepTime,
    reasons,
    standing,
)
from dynoffload.experiments.ways import Spec


@pytest.mark.slow
def test_every_policy_has_a_time_or_says_why_not(tmp_path: Path) -> None:
    """Under two budgets, the second of which is too small for the largest update."""
    path = tmp_path / "found.json"
    params = Params(
        network=("moe",),
        preset="tiny",
        budgets=("1/2", "0.0625"),
        policies=("pilot", "on-demand"),
        steps=5,
        spill_dir=Path("/var/tmp"),
    )
    result = carry_out(StepTime, params, path)
    assert json.loads(path.read_text()) == json.loads(json.dumps(result))
    half, small = result["rows"]
    assert (half["case"], small["case"]) == ("moe, 1/2", "moe, 1/16")
    assert list(half["policies"]) == ["pilot", "on-demand"]
    for key, own in half["policies"].items():
        assert own["losses_equal"] is True
        assert own["measured"]["why"] == ""
        assert len(own["measured"]["steps_s"]) >= 5
        assert own["measured"]["seconds"] == median(own["measured"]["steps_s"])
        assert small["policies"][key]["measured"]["seconds"] is None
        assert "bytes" in small["policies"][key]["measured"]["why"]
    assert any(line.startswith("moe, 1/16: on demand: ") for line in reasons(result["rows"]))


def made(budget: str = "1/4", **times: float | str) -> dict[str, Any]:
    """Return a row of given times over plain training's, or reasons."""

    def side(value: float | str) -> dict[str, Any]:
        if isinstance(value, str):
            return {"seconds": None, "why": value, "note": ""}
        moved = {"bytes_in": 2e6, "bytes_out": 1e6}
        return {"seconds": 0.1 * value, "why": "", "note": "", **moved}

    return {
        "case": f"net, {budget}",
        "network": "net",
        "budget": budget,
        "footprint_bytes": 4 << 20,
        "policies": {
            name.replace("_", "-"): {"measured": side(value), "losses_equal": True}
            for name, value in times.items()
        },
        "plain_s": {"measured": 0.1},
    }


def test_the_pilot_stands_against_the_best_of_the_others() -> None:
    fastest, against = standing(made(pilot=2.0, repeat=3.0, dtr=1.9, os_paging=8.0))
    assert fastest == ["dtr", "pilot"]  # a tie
    assert against == pytest.approx(1.9 / 2)
    assert standing(made(pilot="too little", dtr="too little")) == ([], None)


def test_reasons_that_differ_in_their_numbers_share_a_line() -> None:
    why = {"1/4": "it needs 3 MiB of 2", "1/8": "it needs 3 MiB of 1", "1/16": "it was killed"}
    rows = [made(budget, pilot=told, dtr=1.0) for budget, told in why.items()]
    assert reasons(rows) == [
        "net, 1/4, 1/8: pilot: it needs 3 MiB of 2",
        "net, 1/16: pilot: it was killed",
    ]


def test_table_and_figure_name_every_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times: Mapping[str, Any] = {key.replace("-", "_"): 1.5 + n for n, key in enumerate(POLICIES)}
    rows = [made("1", **times), made("1/16", **{**times, "dtr": "it needs 3 of 2"})]
    rows[1]["policies"]["repeat"]["losses_equal"] = False
    rows[1]["policies"]["intervals"] = rows[0]["policies"]["pilot"]  # of an older run
    made_by = {"command": "dynoffload", "commit": "0123"}
    path = tmp_path / "small.json"
    path.write_text(json.dumps({"params": {}, "made_by": made_by, "summary": {}, "rows": rows}))
    rendered(StepTime, path)
    printed, drawn = capsys.readouterr().out, path.with_suffix(".svg").read_text()
    for title, *_ in POLICIES.values():
        assert title in printed
        assert title in drawn
    for told in ("1/16", "cannot run", "NO"):
        assert told in printed


def test_who_fails_in_the_middle_leaves_the_turns() -> None:
    class Dies:
        patience = 0.0

        def call(self, *_: Any) -> None:
            raise WorkerError("'x' failed: needs 3, has 2")

    one = Contestant("x", Way(Spec("moe", "tiny")), lambda: 12.0)
    dying: Any = Dies()
    one._process = dying
    one.step()
    one.step()
    assert (one.why, dying.patience) == ("needs 3, has 2", 12.0)
    assert one.result(["0x1p+0"]) == Side("needs 3, has 2")
    plain = Contestant("x", Way(Spec("moe", "tiny")), required=True)
    plain._process = dying
    with pytest.raises(WorkerError, match="needs 3"):
        plain.step()
