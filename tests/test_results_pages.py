"""The committed pages of results say what the committed numbers say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dynoffload.experiments import capacity, max_batch, whatif
from dynoffload.experiments.estimates_views import write_table as write_estimates
from dynoffload.experiments.largest import _within
from dynoffload.experiments.pilot_accuracy_views import page_of as pilot_accuracy_page
from dynoffload.experiments.pilot_benefit_views import write_page as write_pilot_benefit
from dynoffload.experiments.simulation_views import write_table as write_simulation
from dynoffload.experiments.step_time_views import page_of as step_time_page

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
WRITERS: dict[str, Callable[[Mapping[str, Any], Path], None]] = {
    "capacity": capacity.write_table,
    "max-batch": max_batch.write_table,
    "whatif": whatif.write_table,
    "simulation": write_simulation,
    "estimates": write_estimates,
}


def result_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return found


@pytest.mark.parametrize("name", WRITERS)
def test_the_table_of_a_page_is_that_of_its_numbers(name: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    shutil.copy(RESULTS / f"{name}.md", page)
    WRITERS[name](result_of(name), page)
    assert page.read_text("utf-8") == (RESULTS / f"{name}.md").read_text("utf-8")


def test_the_page_of_step_times_is_that_of_its_numbers() -> None:
    page = step_time_page(result_of("step-time"), "step-time.svg")
    assert page == (RESULTS / "step-time.md").read_text("utf-8")


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
    result = result_of(name)
    networks = result.get("networks", {name: result}).values()
    ways = [way for network in networks for way in network["ways"].values()]
    assert len(ways) >= 5
    assert [_within(way["tries"]) for way in ways] == [way["within"] for way in ways]
