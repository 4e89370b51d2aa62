"""The experiment ``moe-pipeline``: its rows, its links, and what it counts."""

from __future__ import annotations

import time

import pytest
import torch

from dynoffload.experiments.allocations import Allocations
from dynoffload.experiments.harness import carry_out
from dynoffload.experiments.moe_pipeline import Params, Pipeline
from dynoffload.experiments.processes import WorkerError
from dynoffload.experiments.slow_exchange import SlowExchange


def test_it_measures_and_chooses(capsys: pytest.CaptureFixture[str]) -> None:
    params = Params(
        ("GPT-S",), 24, (2,), (40.0,), tokens=512, experts=4, steps=1,
        seconds=0.0, limit_share=0.5, timeout=60.0,
    )  # fmt: skip
    peaks, row = carry_out(Pipeline, params)["rows"]
    assert len(row["seconds"]) >= 21  # all numbers of parts, with 16
    # 4 trips of 256 rows of 32 numbers to another rank, at 40 Mbit/s, and no less.
    one_part = next(
        one["seconds"] for one in row["seconds"] if (one["parts"], one["strategy"]) == (1, "none")
    )
    assert one_part > 3 * 256 * 32 * 4 * 8 / 40e6
    assert 0.3 < row["communication_share"] < 2  # of two measurements
    for name in ("free", "bound"):
        assert row[name]["behind"] >= 0
        same = row[name]["chosen"] == row[name]["best"]
        assert row[name]["behind_again"] > -0.9
        assert (row[name]["behind_again"] == 0) is same
    assert row["bound"]["chosen"][1] != "none"  # no number of parts makes that fit
    at = {(one["parts"], one["strategy"]): one["bytes"] for one in peaks["peaks"]}
    assert at[4, "S4"] < at[1, "none"]
    told = capsys.readouterr().out
    assert "GPT-S" in told
    assert "n = 8" in told


def test_a_slow_exchange_takes_the_time_of_its_bytes_one_after_the_other() -> None:
    exchange = SlowExchange()
    exchange.rate = 1e5
    exchange.rank = 1  # rows to rank 0 are another's
    rows = torch.zeros(50, 500)
    start = time.monotonic()
    first = exchange.start(torch.empty_like(rows), rows, [50], [50], "rows")
    second = exchange.start(torch.empty_like(rows), rows, [50], [50], "rows")
    assert time.monotonic() - start < 1
    first.wait()
    assert time.monotonic() - start >= 1
    second.wait()
    assert time.monotonic() - start >= 2
    assert exchange.waited_s >= 1.5


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


def test_a_rank_that_fails_is_told_with_what_it_said() -> None:
    params = Params(("GPT-S",), 96, (2,), (40.0,), tokens=16, experts=3)
    with pytest.raises(WorkerError, match=r"rank [01] of GPT-S by 2' failed: .*cannot be spread"):
        carry_out(Pipeline, params)
