"""The numbers and words at the head of a report."""

from __future__ import annotations

import dataclasses
import math

import pytest

from dynoffload.reporting.columns import Columns
from dynoffload.reporting.report import align
from dynoffload.reporting.summary import (
    Tone,
    headlines,
    phase_costs,
    region_costs,
    summarize,
    verdict,
)
from dynoffload.telemetry import PhaseSpan, RunLog, Stall, StepStats, Transfer


def step(number: int, **changed: float) -> StepStats:
    plain = StepStats(number, 1.0, 0, 0.0, 100, 50, 80, 60, 20, math.nan, 900)
    return dataclasses.replace(plain, **changed)


def log_of(*steps: StepStats, budget: int = 1000) -> RunLog:
    return RunLog("Net", "pager", "pilot", budget, 0, steps=list(steps))


def test_medians_leave_out_the_warm_up_but_the_peak_does_not() -> None:
    log = log_of(
        step(0, seconds=9.0, peak_fast_bytes=990), step(1, seconds=9.0), *map(step, range(2, 7))
    )
    summary = summarize(log)
    assert summary.steps == 5
    assert summary.step_s == 1.0
    assert summary.peak_fast_bytes == 990
    assert summary.wasted_share == pytest.approx(0.25)
    assert math.isnan(summary.accuracy)


def test_the_verdict_says_when_a_budget_was_passed() -> None:
    assert "900 B of the budget of 1000 B" in verdict(log_of(step(0)))
    assert "1001 B PASSED the budget" in verdict(log_of(step(0, peak_fast_bytes=1001)))
    tones = {card.label: card.tone for card in headlines(log_of(step(0, peak_fast_bytes=1001)))}
    assert tones["Peak fast memory"] is Tone.BAD


def test_the_verdict_of_a_run_without_steps() -> None:
    assert "before its first step" in verdict(log_of())
    assert headlines(log_of()) == []


def test_waits_count_where_they_begin_and_their_time_where_it_passes_once() -> None:
    log = log_of(step(0))
    log.phases += [PhaseSpan(0, 1, 0, "forward"), PhaseSpan(1, 3, 0, "backward")]
    log.stalls += [Stall(0.5, 1.5, "a"), Stall(1.0, 1.25, "b"), Stall(5.0, 6.0, "outside")]
    costs = {cost.name: cost for cost in phase_costs(Columns.of(log))}
    assert (costs["forward"].stall_s, costs["forward"].stalls) == (0.5, 1)
    assert (costs["backward"].stall_s, costs["backward"].stalls) == (0.5, 1)
    assert costs["optimizer"].seconds == 0.0


def test_regions_are_ranked_by_the_time_they_cost() -> None:
    log = log_of(step(0))
    log.stalls += [Stall(0, 1, "often"), Stall(2, 3, "often"), Stall(4, 5.5, "once")]
    log.transfers += [Transfer(0, 1, "fetch", "often", 10, "fault")] * 2
    log.transfers += [Transfer(0, 1, "evict", "often", 10, "room")]
    often, once = region_costs(log)
    assert (often.name, often.stalls, often.fetches, often.bytes_in) == ("often", 2, 2, 20)
    assert (once.name, once.stall_s) == ("once", 1.5)
    assert [cost.name for cost in region_costs(log, most=1)] == ["often"]


def test_an_order_is_aligned_with_the_fewest_changes() -> None:
    assert align("abdx", "abcdyz") == [
        ("match", "a", "a"),
        ("match", "b", "b"),
        ("missing", None, "c"),
        ("match", "d", "d"),
        ("missing", None, "y"),
        ("swap", "x", "z"),
    ]
    assert align("ab", "b") == [("extra", "a", None), ("match", "b", "b")]


def test_a_trial_on_demand_is_told() -> None:
    """Steps that fetch nothing ahead between others, or until the end."""

    def run(ahead: str) -> str:
        rows = [
            step(number, prefetched_bytes=10 * int(sign), bytes_in=10)
            for number, sign in enumerate(ahead)
        ]
        return verdict(log_of(*rows))

    assert "Steps" not in run("0011111")
    assert run("0111000001").endswith(
        "Steps 4 to 8 fetched on demand only: a trial whether fetching ahead pays, which it did."
    )
    assert "Steps 3 to 6 fetched on demand only: fetching ahead lost" in run("1110000")
    assert "Steps" not in run("0000")
