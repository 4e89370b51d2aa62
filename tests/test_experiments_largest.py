"""The search for the largest that fits: what it tries, what it says, and one in earnest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dynoffload.errors import ConfigError
from dynoffload.experiments import largest
from dynoffload.experiments.baselines.cgroup import why_unavailable
from dynoffload.experiments.harness import carry_out
from dynoffload.experiments.largest import Capacity, MaxBatch
from dynoffload.experiments.tries import WAYS, Params, Subject, Try, Way


def _measured(
    monkeypatch: pytest.MonkeyPatch, tried: Callable[[Way, int], Try], **options: Any
) -> dict[str, Any]:
    """Return the rows of a search in which every try has the outcome given, by way."""

    def attempt(params: Params, subject: Subject, way: Way, size: int, room: Any) -> Try:
        return tried(way, size)

    monkeypatch.setattr(largest, "attempt", attempt)
    monkeypatch.setattr(largest, "charged_before", lambda spec: 7)
    rows = carry_out(Capacity, Params(**{"slowest": 4.0, **options}))["rows"]
    return {row["way"]: row for row in rows}


def _holding(limits: dict[str, int], tried: list[tuple[str, int]] | None = None) -> Any:
    """Have each way hold so much."""

    def outcome(way: Way, size: int) -> Try:
        if tried is not None:
            tried.append((way.title, size))
        key = next(key for key, one in WAYS.items() if one is way)
        return (
            Try(size, "", 0.5 * size, ("0x1p+0",)) if size <= limits[key] else Try(size, "killed")
        )

    return outcome


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 11, 15, 16])
def test_the_largest_is_found(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    tried: list[tuple[str, int]] = []
    outcome = _holding({"plain": 2, "repeat": limit}, tried)
    rows = _measured(monkeypatch, outcome, ways=("repeat",))
    assert rows["plain"]["largest"] == 2  # measured though nobody asked: the others stand beside it
    assert rows["repeat"]["largest"] == limit
    assert rows["repeat"]["over_plain"] == limit / 2
    assert rows["repeat"]["ended_by"] == "killed"
    assert rows["repeat"]["seconds_over_plain"] == pytest.approx(1.0)
    assert len(tried) == len(set(tried))  # nothing is tried twice


def test_what_is_too_slow_when_small_is_tried_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rematerialisation pays for every operator, which weighs most in the smallest steps."""

    def outcome(way: Way, size: int) -> Try:
        slow = way is WAYS["repeat"] and not 4 <= size <= 11
        return Try(size, "a step of so much" if slow or size > 40 else "", 0.5 * size)

    row = _measured(monkeypatch, outcome, ways=("repeat",))["repeat"]
    assert (row["largest"], row["ended_by"]) == (11, "a step of so much")
    assert [one["size"] for one in row["tries"]] == [1, 2, 4, 8, 10, 11, 12, 16]


def test_what_has_no_end_ends_at_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = _holding({"plain": 3, "repeat": 10**9})
    row = _measured(monkeypatch, outcome, ways=("repeat",), most=32)["repeat"]
    assert (row["largest"], row["ended_by"]) == (32, "nothing: 32 is the largest that was tried")


def test_what_cannot_be_searched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="plain training does not fit 512MiB at size 1: killed"):
        _measured(monkeypatch, _holding({"plain": 0}), ways=())


def test_the_figure_and_the_tables_have_every_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limits = {key: 2 * (number + 1) for number, key in enumerate(WAYS)}
    outcome = _holding(limits)
    monkeypatch.setattr(largest, "attempt", lambda p, s, way, size, room: outcome(way, size))
    monkeypatch.setattr(largest, "charged_before", lambda spec: 7)
    result = carry_out(MaxBatch, MaxBatch.parameters(), tmp_path / "max-batch.json")
    assert {row["subject"] for row in result["rows"]} == {"evoformer", "esmfold"}
    text = (tmp_path / "max-batch.svg").read_text()
    for way in WAYS.values():
        assert text.count(f">{way.title}</text>") == 4  # beside its bars, and in the legends
    first, equal, *_ = MaxBatch(MaxBatch.parameters()).parts(result)
    assert not isinstance(first, str)
    assert first.rows[-1][:3] == ["dynoffload, last order", "14", "7.00"]
    assert str(equal).endswith("equal, bit for bit")


@pytest.mark.slow
@pytest.mark.skipif(bool(why_unavailable()), reason=f"no memory groups: {why_unavailable()}")
def test_ten_times_the_layers_of_plain_training(tmp_path: Path) -> None:
    """In earnest: plain training is killed where dynoffload goes on, with the same losses."""
    params = Params(
        memory="192MiB",
        tokens=16,
        steps=1,
        slowest=1e6,
        most=24,
        ways=("on-demand",),
        spill_dir=tmp_path,
    )
    result = carry_out(Capacity, params, tmp_path / "capacity.json")
    plain, ours = result["rows"]
    assert 1 <= plain["largest"] <= 3
    assert "for want of memory" in plain["ended_by"]
    assert ours["largest"] == 24
    assert result["summary"]["moe"]["losses_equal"]
    assert (tmp_path / "capacity.svg").stat().st_size > 1000
