"""The experiment on costs: what it writes is what it measured; questions it cannot answer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from dynoffload.experiments import costs
from dynoffload.experiments.costs import Costs, Params
from dynoffload.experiments.harness import carry_out
from dynoffload.experiments.networks import texts, transformers_kind, zoo_kind
from dynoffload.profiler import CostModel, Trace
from dynoffload.profiler.cost_fitting import fit

FITTED: list[list[Trace]] = []
"""What each fit of the experiment was given."""


def _fit(traces: Iterable[Trace], **options: Any) -> CostModel:
    FITTED.append(list(traces))
    return fit(FITTED[-1], **options)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The experiment on two small networks, and where its figure lies."""
    folder = tmp_path_factory.mktemp("costs")
    small = {
        "tree": lambda: zoo_kind("tree", "tiny", {"max_nodes": 20}),
        "bert": lambda: transformers_kind("bert", texts(2, 12, 64), {}),
    }
    path = folder / "costs.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "COSTED", small)
        patch.setattr(costs, "fit", _fit)
        patch.setattr(costs, "_EDGE", 64)
        patch.setattr(costs, "_LONG", 4096)
        return carry_out(Costs, Params(samples=1, model=folder / "model.json"), path), path


def test_every_held_out_step_is_compared_in_each_regime(
    found: tuple[dict[str, Any], Path],
) -> None:
    result = found[0]["summary"]
    assert [row["network"] for row in found[0]["rows"]] == ["tree", "bert"]
    assert result["fitted_steps"] == result["held_steps"] == len(result["steps"]) == 2
    measured = sum(step[1] for step in result["steps"])
    for told in result["residuals"].values():
        assert told["steps"]["seconds"] == pytest.approx(measured)
        assert told["operators"]["seconds"] == pytest.approx(measured, rel=1e-3)
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
    held = {step[1] for step in found[0]["summary"]["steps"]}
    assert not held & {sum(op.seconds for op in trace.operators) for trace in whole}
    assert [{trace.model for trace in fitted} for fitted in (whole, *without)] == [
        {"TreeLSTM", "BertForMaskedLM"},
        {"BertForMaskedLM"},
        {"TreeLSTM"},
    ]


def test_the_fitted_model_is_written(found: tuple[dict[str, Any], Path]) -> None:
    result, path = found
    model = CostModel.load(path.with_name("model.json"))
    assert model.bandwidth == result["summary"]["model"]["bandwidth"]
    assert "aten.embedding.default" in model.operators


def test_tables_and_figure_show_the_numbers(found: tuple[dict[str, Any], Path]) -> None:
    result, path = found
    (errors, *_), counted = Costs(Params()).parts(result)[:-1], Costs(Params()).parts(result)[-1]
    own = result["summary"]["residuals"]["samples"]["steps"]
    assert not isinstance(errors, str)
    assert errors.rows[0][:2] == ["steps, held-out samples", f"{own['median']:.1%}"]
    assert counted == "2 networks, 2 steps to fit to, 2 held-out steps"
    drawn = path.with_suffix(".svg").read_text()
    assert all(text in drawn for text in ("held-out networks", "predicted, s"))
