"""The experiment on the optimizer on the host: the same training up to the delay."""

from __future__ import annotations

from dynoffload.experiments.harness import carry_out
from dynoffload.experiments.host_optimizer import DelayedUpdates, Params


def test_kinds_of_updates_part_where_they_are_delayed() -> None:
    """The first loss after an update shows the delay: the second step's, or the warm-up's."""
    result = carry_out(DelayedUpdates, Params(steps=11, warmup=3, seeds=1, length=8))
    normal, delayed, later = (row["losses"] for row in result["rows"])
    assert normal[0] == delayed[0]
    assert normal[1] != delayed[1]
    assert later[:4] == normal[:4]
    assert later[4] != normal[4]
    assert result["summary"]["normal"]["loss"] == result["rows"][0]["loss"]
