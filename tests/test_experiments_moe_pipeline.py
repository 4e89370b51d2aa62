"""The experiment ``moe-pipeline``: its rows, its links, and what it counts."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from dynoffload.errors import ConfigError
from dynoffload.experiments import moe_pipeline, networks
from dynoffload.experiments.allocations import Allocations
from dynoffload.experiments.networks import SlowExchange


def test_it_measures_and_chooses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pipeline.json"
    result = moe_pipeline.run(
        path, sizes="GPT-S", factor=24, ranks="2", mbit="40", tokens=512, experts=4, steps=1,
        limit_share=0.5, links="delays", timeout=60.0,
    )  # fmt: skip
    assert result["links"] == "delays"
    assert json.loads(path.read_text(encoding="utf-8"))["rows"] == result["rows"]
    (row,) = result["rows"]
    assert len(row["seconds"]) >= 16
    # 4 trips of 256 rows of 32 numbers to another rank, at 40 Mbit/s, and no less.
    one_part = next(
        one["seconds"] for one in row["seconds"] if (one["parts"], one["strategy"]) == (1, "none")
    )
    assert one_part > 3 * 256 * 32 * 4 * 8 / 40e6
    assert 0.3 < row["communication_share"] < 2  # of two measurements
    for name in ("free", "bound"):
        assert row[name]["behind"] >= 0
        assert row[name]["trials"] >= 2
    assert row["bound"]["chosen"][1] != "none"  # no number of parts makes that fit
    (memory,) = result["memory"]
    at = {(one["parts"], one["strategy"]): one["bytes"] for one in memory["rows"]}
    assert at[4, "S4"] < at[1, "none"]
    told = capsys.readouterr().out
    assert "GPT-S" in told
    assert "n = 8" in told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": "GPT-9"}, "'GPT-9' is not one of GPT-S"),
        ({"links": "radio"}, "links='radio' is not one of"),
        ({"steps": 0}, "must be at least 1"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        moe_pipeline.run(**options)  # type: ignore[arg-type]


def test_without_the_tools_namespaces_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks.shutil, "which", lambda _: None)
    with (
        pytest.raises(ConfigError, match="ip is missing: install iproute2, or pass links='delays'"),
        networks.namespaces(2),
    ):
        pass


def test_a_slow_exchange_takes_the_time_of_its_bytes_one_after_the_other() -> None:
    exchange = SlowExchange()
    exchange.rate = 1e6
    exchange.rank = 1  # rows to rank 0 are another's
    rows = torch.zeros(50, 500)
    start = time.monotonic()
    first = exchange.start(torch.empty_like(rows), rows, [50], [50], "rows")
    second = exchange.start(torch.empty_like(rows), rows, [50], [50], "rows")
    assert time.monotonic() - start < 0.1
    first.wait()
    assert time.monotonic() - start >= 0.1
    second.wait()
    assert time.monotonic() - start >= 0.2
    assert exchange.waited_s >= 0.15


def test_allocations_are_counted_while_they_live() -> None:
    outside = torch.zeros(1000)
    with Allocations() as watch:
        made = outside + 1
        view = made[:10]
        assert watch.bytes == 4000
        del made
        assert watch.bytes == 4000
        del view
        assert watch.bytes == 0
        outside.add_(1)
        assert (watch.bytes, watch.peak) == (0, 4000)
