"""The experiment on costs: what it writes is what it measured; questions it cannot answer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from dynoffload.errors import ConfigError
from dynoffload.experiments import costs, costs_networks
from dynoffload.experiments.costs import run
from dynoffload.experiments.costs_networks import NETWORKS
from dynoffload.experiments.costs_views import told_of_machine
from dynoffload.profiler import CostModel, Trace
from dynoffload.profiler.cost_fitting import fit

FITTED: list[list[Trace]] = []
"""What each fit of the experiment was given."""


def _fit(traces: Iterable[Trace], **options: Any) -> CostModel:
    FITTED.append(list(traces))
    return fit(FITTED[-1], **options)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The experiment on two small networks, and where its page lies."""
    folder = tmp_path_factory.mktemp("costs")
    small = {
        "tree": costs_networks._of_zoo("tree", "tiny", max_nodes=20),
        "bert": costs_networks._of_transformers("bert"),
    }
    path = folder / "costs.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "NETWORKS", small)
        patch.setattr(costs, "fit", _fit)
        patch.setattr(costs, "_EDGE", 64)
        patch.setattr(costs, "_LONG", 4096)
        return run(path, samples=1, model=folder / "model.json"), path


def test_every_held_out_step_is_compared_in_each_regime(
    found: tuple[dict[str, Any], Path],
) -> None:
    result = found[0]
    assert [row["network"] for row in result["rows"]] == ["tree", "bert"]
    assert result["fitted_steps"] == result["held_steps"] == len(result["steps"]) == 2
    measured = sum(step[1] for step in result["steps"])
    for told in result["residuals"].values():
        assert told["steps"]["seconds"] == pytest.approx(measured)
        assert sum(kind["seconds"] for kind in told["kinds"].values()) == pytest.approx(
            measured, rel=1e-3
        )
    biases = {
        column: sum(step[column] for step in result["steps"]) / measured - 1 for column in (2, 3)
    }
    assert result["residuals"]["samples"]["steps"]["bias"] == pytest.approx(biases[2])
    assert result["residuals"]["networks"]["steps"]["bias"] == pytest.approx(biases[3])
    json.dumps(result, allow_nan=False)


def test_no_model_was_fitted_to_what_it_is_compared_with(
    found: tuple[dict[str, Any], Path],
) -> None:
    """Neither to a held-out step nor to any step of a network that is held out."""
    whole, *without = FITTED
    held = {step[1] for step in found[0]["steps"]}
    assert not held & {sum(op.seconds for op in trace.operators) for trace in whole}
    assert [{trace.model for trace in fitted} for fitted in (whole, *without)] == [
        {"TreeLSTM", "BertForMaskedLM"},
        {"BertForMaskedLM"},
        {"TreeLSTM"},
    ]


def test_the_fitted_model_is_written(found: tuple[dict[str, Any], Path]) -> None:
    result, path = found
    model = CostModel.load(path.with_name("model.json"))
    assert model.bandwidth == result["model"]["bandwidth"]
    assert "aten.embedding.default" in model.operators


def test_page_and_figure_show_the_numbers(found: tuple[dict[str, Any], Path]) -> None:
    result, path = found
    text = path.with_suffix(".md").read_text()
    errors = result["residuals"]["samples"]["steps"]
    assert f"| steps, held-out samples | {errors['median']:.1%} | {errors['p90']:.1%} |" in text
    assert "(costs.svg)" in text
    drawn = path.with_suffix(".svg").read_text()
    assert all(text in drawn for text in ("held-out networks", "product", "predicted, ms"))


def test_a_busy_machine_is_said_to_be_one(found: tuple[dict[str, Any], Path]) -> None:
    busy = {**found[0], "core_share": 0.5, "quiet": False, "clock": "wall"}
    assert "had a core for 50% of their time: the machine was busy" in told_of_machine(busy)
    assert "busy" not in told_of_machine({**busy, "core_share": 0.99, "quiet": True})
    assert "times are of the processor" in told_of_machine({**busy, "clock": "processor"})


def test_there_are_the_zoo_and_more_than_six_architectures() -> None:
    assert {"moe", "tree", "evoformer"} < NETWORKS.keys()
    assert len(NETWORKS) >= 3 + 6


def test_wrong_questions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no network is named 'nothing'"):
        run(networks=["nothing", "tree"])
    with pytest.raises(ConfigError, match="takes two networks"):
        run(networks=["tree"])
    with pytest.raises(ConfigError, match="no clock is named 'sun'"):
        run(clock="sun")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(ConfigError, match="set OMP_NUM_THREADS=1"):
        run(clock="processor")
