"""What a described machine would do with recorded steps: answers that can be checked by running
the simulation at what they name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from dynoffload.errors import ConfigError, TraceError
from dynoffload.experiments import whatif, zoo
from dynoffload.experiments.comparing import BEGIN, END
from dynoffload.experiments.harness import carry_out
from dynoffload.experiments.whatif import Params, WhatIf
from dynoffload.profiler import load_trace, profile
from dynoffload.simulation import load_costs, workload

SHARES = (1.0, 0.5, 0.125)
MACHINE = """
fast_bytes = "2MiB"
compute = 2.0

[links.near]
read_bps = 4e9
write_bps = 4e9

[links.far]
read_bps = 2e8
write_bps = 2e8
slow_bytes = "1MiB"
"""


@pytest.fixture(scope="module", autouse=True)
def _roughly() -> Iterator[None]:
    """Search for budgets and links by a tenth."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whatif, "_PRECISION", 0.1)
        yield


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The experiment on two tiers, and where its figure lies."""
    folder = tmp_path_factory.mktemp("whatif")
    (folder / "machine.toml").write_text(MACHINE)
    path = folder / "whatif.json"
    path.with_suffix(".md").write_text(f"{BEGIN}\n{END}\n", encoding="utf-8")
    options: dict[str, Any] = {"preset": "tiny", "tokens": 16, "steps": 1, "tolerance": 0.05}
    params = Params(machine=folder / "machine.toml", **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whatif, "SHARES", SHARES)
        return carry_out(WhatIf, params, path), folder / "whatif.svg"


def tiers_of(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["case"]: row for row in result["rows"]}


def test_a_nearer_tier_needs_less_memory(asked: tuple[dict[str, Any], Path]) -> None:
    """And each row says what was simulated under it."""
    tiers = tiers_of(asked[0])
    assert list(tiers) == ["near", "far"]
    near, far = tiers["near"], tiers["far"]
    assert near["least_budget_bytes"] < far["least_budget_bytes"]
    for tier in tiers.values():
        assert [row["share"] for row in tier["budgets"]] == list(SHARES)
        full = tier["budgets"][0]["planned"]
        assert full["exposed"] < 0.05
        for row in tier["budgets"]:
            if "seconds" in row["planned"] and "seconds" in row["on demand"]:
                assert row["planned"]["seconds"] <= 1.02 * row["on demand"]["seconds"]
    assert near["budget_bytes"] == far["budget_bytes"] == 2 << 20
    assert near["fits_below"]
    assert not far["fits_below"]
    json.dumps(asked[0], allow_nan=False)


def test_the_last_steps_are_run_and_one_is_enough(tmp_path: Path) -> None:
    model = zoo.build("moe", "tiny")
    batches = list(islice(zoo.samples("moe", rows=1, length=16), 3))
    paths = sorted(profile(model, batches, out=tmp_path, progress=False))
    last = sum(op.seconds for op in load_trace(paths[-1]).operators)
    result = carry_out(WhatIf, Params(traces=tmp_path, steps=1))
    found = result["summary"]
    assert (found["steps"], found["recorded_s"]) == (1, pytest.approx(last))
    assert all(row["budgets"][0]["planned"]["seconds"] > 0 for row in result["rows"])


SHEET = """
fast_bytes = "64MiB"
[link]
read_bps = 1e12
write_bps = 1e12
[compute]
"""


def test_a_machine_computes_as_its_data_sheet_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a table [compute] a step takes what the cost model says, not what was recorded."""
    path = tmp_path / "machine.toml"
    peak = "peak = { float32 = 1e9 }\nbandwidth = '1GB'\n"
    path.write_text(SHEET + peak + "overhead = 1e-3\n")
    model = zoo.build("moe", "tiny")
    samples = list(islice(zoo.samples("moe", rows=1, length=16), 2))
    files = profile(model, samples, out=tmp_path / "traces", progress=False)
    traces = [load_trace(file) for file in files]
    costs = load_costs(path)
    assert costs is not None
    wanted = sum(costs.time(trace).seconds for trace in traces)
    assert workload(traces, costs).seconds == pytest.approx(wanted, rel=1e-3)
    found = carry_out(WhatIf, Params(machine=path, traces=tmp_path / "traces"))
    assert "by [compute]" in capsys.readouterr().out
    assert found["summary"]["modelled_s"] == pytest.approx(wanted, rel=1e-3)
    planned = tiers_of(found)["link"]["budgets"][0]["planned"]["seconds"]
    assert planned == pytest.approx(wanted / 2, rel=0.01)
    assert planned > 1e-3 * 0.9 * len(traces[1].operators)
    lacking = [op._replace(flops=None) for op in traces[0].operators]
    with pytest.raises(TraceError, match=r"step 0 of .*: FLOPs of .* are not known"):
        workload([replace(traces[0], operators=lacking)], costs)


def test_the_table_may_name_a_model_that_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(SHEET + "peak = { float32 = 1e9 }\nbandwidth = 2e9\noverhead = 1e-6\n")
    costs = load_costs(path)
    assert costs is not None
    costs.save(tmp_path / "fitted.json")
    path.write_text(SHEET + 'model = "fitted.json"\n')
    assert load_costs(path) == costs
    path.write_text(SHEET + 'model = "fitted.json"\nbandwidth = 1e9\n')
    with pytest.raises(ConfigError, match="give either model, the path of a file, or the keys"):
        load_costs(path)
    path.write_text(SHEET + "bandwidth = 1e9\n")
    with pytest.raises(ConfigError, match=r"machine\.toml \[compute\]: it lacks peak"):
        carry_out(WhatIf, Params(machine=path))


def test_wrong_questions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"holds no trace .*record some with .dynoffload profile"):
        carry_out(WhatIf, Params(traces=tmp_path))
