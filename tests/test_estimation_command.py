"""``dynoffload estimate``: trainings named by a function, and what is said of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from exactness import needs_pager
from typer.testing import CliRunner

from dynoffload.cli import app
from dynoffload.errors import ConfigError
from dynoffload.estimation.factory import job_of
from dynoffload.simulation.overhead import COSTS

FACTORY = """
from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import get_type_hints

import torch
from torch import nn


def build():
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, [torch.randn(4, 256)], lambda output, batch: output.square().mean()


@dataclass
class Options:
    sizes: list[int]


def of_options():
    assert get_type_hints(Options) == {"sizes": list[int]}
    assert pickle.loads(pickle.dumps(Options([2]))) == Options([2])
    return build()


def only_a_model():
    return nn.Linear(2, 2)


def no_model():
    return 1, None, []


def one_batch():
    return nn.Linear(2, 2), None, torch.ones(4, 2)


def pair():
    return nn.Linear(2, 2), []


def exits():
    raise SystemExit(3)


def fails():
    raise ValueError("no weights here")


number = 3
"""


@pytest.fixture
def factory(tmp_path: Path) -> Path:
    path = tmp_path / "factory_of_tests.py"
    path.write_text(FACTORY, "utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("only_a_model", "returned Linear"),
        ("no_model", "returned int as the model"),
        ("one_batch", "returned Tensor as the batches: return"),
        ("pair", "returned tuple:"),
        ("exits", "SystemExit: 3"),
        ("fails", "ValueError: no weights here"),
        ("number", "no function 'number'"),
        ("missing", "no function 'missing'"),
    ],
)
def test_what_a_factory_must_return_is_said(factory: Path, name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        job_of(f"{factory}:{name}")


def test_what_names_no_function_is_said(tmp_path: Path) -> None:
    for name, told in (
        ("build", "names no function"),
        (f"{tmp_path}/none.py:build", "importing .* failed"),
        ("no.such.module:build", "importing .* failed"),
    ):
        with pytest.raises(ConfigError, match=told):
            job_of(name)


def test_classes_of_a_file_are_found_by_their_module(factory: Path) -> None:
    """By pickle, and by what reads annotations, such as a parser of dataclasses."""
    assert len(list(job_of(f"{factory}:of_options").batches)) == 1


@needs_pager
def test_the_command_says_it(factory: Path, tmp_path: Path) -> None:
    calibration = tmp_path / "simulation.json"
    link = {"latency_s": 1e-4, "fault_s": 0.0}
    work = dict.fromkeys(COSTS, 1e-5)
    work["copy_s"] = 1e-10
    known = {"link": link, "work": work, "interference": 0.0, "pace_s": 0.02}
    calibration.write_text(json.dumps(known), "utf-8")
    command = ["estimate", f"{factory}:build", "--calibration", str(calibration), "--budget"]
    shown = CliRunner().invoke(app, [*command, "1500KiB", "--budget", "1GiB"])
    assert shown.exit_code == 0, shown.output
    for words in ("Sequential", "1500KiB", "1GiB", "nothing, it fits", "overhead of dynoffload"):
        assert words in " ".join(shown.output.split()), words
    number = r"[0-9.]+ (ms|µs|s)"
    assert re.search(rf"a step +{number} \({number} to {number}\)", shown.output)
    numbers = CliRunner().invoke(app, [*command, "1500KiB", "--json"])
    (found,) = json.loads(numbers.stdout)
    assert found["feasible"]
    assert found["budget"] == 1500 * 1024
    assert found["parameters"] == 2 * (256 * 256 + 256) * 4
    refused = CliRunner().invoke(app, [*command, "10KiB"])
    assert refused.exit_code == 1
    assert "raise the budget to at least" in " ".join(refused.output.split())
