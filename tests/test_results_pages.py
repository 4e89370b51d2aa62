"""The committed pages of results say what the committed numbers say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynoffload.experiments.costs import Costs
from dynoffload.experiments.estimates import Estimates
from dynoffload.experiments.harness import Experiment, rendered
from dynoffload.experiments.largest import Capacity, MaxBatch, within
from dynoffload.experiments.memory_expansion import MemoryExpansion
from dynoffload.experiments.pilot_accuracy import PilotAccuracy
from dynoffload.experiments.pilot_benefit import PilotBenefit
from dynoffload.experiments.planner.optimality import Optimality
from dynoffload.experiments.simulation import Simulated
from dynoffload.experiments.step_time import StepTime
from dynoffload.experiments.whatif import WhatIf

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
HARNESSED: dict[str, type[Experiment[Any]]] = {
    "costs": Costs,
    "capacity": Capacity,
    "max-batch": MaxBatch,
    "estimates": Estimates,
    "whatif": WhatIf,
    "planner-optimality": Optimality,
    "simulation": Simulated,
    "step-time": StepTime,
    "pilot-accuracy": PilotAccuracy,
    "memory-expansion": MemoryExpansion,
    "pilot-benefit": PilotBenefit,
}


@pytest.mark.parametrize("name", HARNESSED)
def test_a_page_is_what_its_experiment_makes_of_its_numbers(name: str, tmp_path: Path) -> None:
    for suffix in (".json", ".md"):
        shutil.copy(RESULTS / f"{name}{suffix}", tmp_path)
    rendered(HARNESSED[name], tmp_path / f"{name}.json")
    page = (tmp_path / f"{name}.md").read_text("utf-8")
    assert page == (RESULTS / f"{name}.md").read_text("utf-8")


def result_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return found


def equalities(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield whatever a result says of losses being equal, with where it says it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "losses_equal":
                yield f"{path}/{key}", inner
            else:
                yield from equalities(inner, f"{path}/{key}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from equalities(inner, f"{path}/{number}")


@pytest.mark.parametrize("file", sorted(file.name for file in RESULTS.glob("*.json")))
def test_no_result_has_losses_that_are_not_those_of_plain_training(file: str) -> None:
    said = dict(equalities(json.loads((RESULTS / file).read_text("utf-8"))))
    assert [where for where, equal in said.items() if equal is False] == []


def test_results_say_whether_losses_are_equal() -> None:
    said = [
        where
        for file in RESULTS.glob("*.json")
        for where, _ in equalities(json.loads(file.read_text("utf-8")))
    ]
    assert len(said) > 100


@pytest.mark.parametrize("name", ["capacity", "max-batch"])
def test_paces_are_those_of_what_fits(name: str) -> None:
    rows = result_of(name)["rows"]
    assert len(rows) >= 5
    assert [within(row["tries"]) for row in rows] == [row["within"] for row in rows]
