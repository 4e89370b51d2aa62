"""Estimates beside real trainings: what is compared, and what counts as a miss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import needs_pager

from dynoffload.experiments.comparing import Table
from dynoffload.experiments.estimates import (
    KINDS_FITTED,
    Estimates,
    Params,
    compared,
    said,
)
from dynoffload.experiments.estimates import NETWORKS as ESTIMATED
from dynoffload.experiments.harness import carry_out
from dynoffload.experiments.networks import FIT, NETWORKS, SETTINGS, Subject

OURS = {
    "budget": 100,
    "feasible": True,
    "step_s": 1.1,
    "fast_peak": 105 << 20,
    "file_peak": 64 << 20,
    "resident": False,
    "bound": "reads",
    "assumptions": ("round",),
}
REAL = {
    "refused": "",
    "step_s": 1.0,
    "fast_peak": 100 << 20,
    "file_peak": 80 << 20,
    "bytes_in": 1,
    "bytes_out": 2,
}


def test_errors_are_relative_to_what_was_real() -> None:
    found = compared(
        "moe", 0.5, OURS, [REAL, {**REAL, "step_s": 1.2}, {**REAL, "step_s": 1.1}], 3.0
    )
    assert found["step_error"] == pytest.approx(0.0)
    assert found["fast_error"] == pytest.approx(0.05)
    assert found["file_error"] == pytest.approx(-0.2)
    assert [cell for cell in cells([found])[0] if "miss" in cell] == ["-20.0% miss"]
    assert ["holds" in line for line in said([found])] == [True, True, False]


def cells(rows: list[dict[str, Any]]) -> Sequence[Sequence[str]]:
    shown = Estimates(Params()).parts({"rows": rows, "summary": {}})[0]
    assert isinstance(shown, Table)
    return shown.rows


@pytest.mark.parametrize(("feasible", "refused"), [(True, "too small"), (False, "")])
def test_a_budget_that_only_one_side_refuses_is_a_miss(feasible: bool, refused: str) -> None:
    ours, real = {**OURS, "feasible": feasible}, {**REAL, "refused": refused}
    found = compared("moe", 0.5, ours, [real], 3.0)
    assert not found["agrees"]
    assert found["step_error"] == 1.0
    assert "missed" in said([found])[0]
    both = compared("moe", 0.5, {**OURS, "feasible": False}, [{**REAL, "refused": "no"}], 3.0)
    assert both["agrees"]
    assert "worst 0.0%" in said([both])[1]


def test_nothing_that_is_compared_is_fitted_to() -> None:
    """By the shapes of parameters, as names say little."""
    fitted = {_shapes(NETWORKS[one.network]()) for one in FIT}
    compared = {_shapes(NETWORKS[name]()) for name in (*ESTIMATED, *(s.network for s in SETTINGS))}
    assert len(fitted) == len({one.network for one in FIT})
    assert not fitted & compared
    assert set(ESTIMATED) - KINDS_FITTED == {"esmfold", "bert", "llama"}


def _shapes(kind: Subject) -> tuple[torch.Size, ...]:
    with torch.device("meta"):
        return tuple(parameter.shape for parameter in kind.build().parameters())


@needs_pager
@pytest.mark.slow
def test_a_network_is_estimated_and_trained(tmp_path: Path) -> None:
    params = Params(only=("vit",), shares=(0.5,), steps=3, warmup=1, runs=1)
    found = carry_out(Estimates, params, tmp_path / "estimates.json")
    (only,) = found["rows"]
    assert only["agrees"]
    assert only["real"]["step_s"] > 0
    assert abs(only["fast_error"]) < 0.1
    assert only["estimated"]["bytes_in"] > 0
    assert "within 20%" in (tmp_path / "estimates.svg").read_text(encoding="utf-8")
