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
from dynoffload.experiments.pilot_accuracy_views import page_of as pilot_accuracy_page
from dynoffload.experiments.pilot_benefit_views import write_page as write_pilot_benefit
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


def test_the_page_of_pilots_is_that_of_its_numbers() -> None:
    page = pilot_accuracy_page(result_of("pilot-accuracy"), "pilot-accuracy.svg")
    assert page == (RESULTS / "pilot-accuracy.md").read_text("utf-8")


def test_the_page_of_what_pilots_are_worth_is_that_of_its_numbers(tmp_path: Path) -> None:
    page = tmp_path / "pilot-benefit.md"
    write_pilot_benefit(result_of("pilot-benefit"), page, tmp_path / "pilot-benefit.json")
    assert page.read_text("utf-8") == (RESULTS / "pilot-benefit.md").read_text("utf-8")


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
