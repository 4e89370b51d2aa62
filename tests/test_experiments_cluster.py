"""The simulated mixture of experts on a cluster: its steps add up."""

from __future__ import annotations

import pytest

from dynoffload.experiments.cluster import Clusters, Params, gathered
from dynoffload.experiments.harness import carry_out


def test_steps_add_up_and_parts_keep_their_work() -> None:
    found = carry_out(Clusters, Params((2,), ranks=8, experts=16, tokens=2048))
    for case in gathered(found["rows"], "steps"):
        assert [row["parts"] for row in case["rows"]] == [n for n in (1, 2, 4, 8) for _ in range(5)]
        for row in case["rows"]:
            sums = row["even_s"] + row["experts_s"] + row["exposed_s"]
            assert sums == pytest.approx(row["seconds"])
            assert row["expert_layers_s"] >= row["bound_s"] * (1 - 1e-9)
        assert (case["busiest"] > 1.5) is (case["routing"] == "skewed")
    for row in gathered(found["rows"], "layer"):
        assert row["speedup"]["none"]["1"] == 1
        most = max(n for table in row["speedup"].values() for n in table.values())
        assert most <= 1 / max(row["share"], 1 - row["share"]) * (1 + 1e-9)
    saved = found["summary"]["memory_range"]
    for parts, low, high in (("2", 0.13, 0.30), ("8", 0.34, 0.75)):
        assert low < saved[parts][0] < found["summary"]["memory"][parts] < saved[parts][1] < high
