"""Downsampling keeps what matters: extremes of a curve, bytes moved, time waited."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_runlog import synthetic_log

from dynoffload.reporting.columns import Columns, envelope, spans

rows = st.lists(
    st.tuples(
        st.floats(0, 90),
        st.floats(0, 10),
        st.integers(0, 10**9).map(float),
    ).map(lambda r: (r[0], r[0] + r[1], r[2])),
    max_size=30,
)


@settings(deadline=None)
@given(rows, st.integers(1, 40))
def test_rates_conserve_bytes(given_rows: list[tuple[float, float, float]], bins: int) -> None:
    edges = np.linspace(0, 101, bins + 1)
    moved = (spans(given_rows).rate(edges) * np.diff(edges)).sum()
    assert moved == pytest.approx(sum(row[2] for row in given_rows), abs=1, rel=1e-6)


@settings(deadline=None)
@given(rows, st.integers(1, 40))
def test_share_is_the_covered_time(given_rows: list[tuple[float, float, float]], bins: int) -> None:
    edges = np.linspace(0, 101, bins + 1)
    covered, reach = 0.0, 0.0
    for start, end, _ in sorted(given_rows):
        covered += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    share = spans(given_rows).share(edges)
    assert (share >= 0).all()
    assert (share <= 1).all()
    assert (share * np.diff(edges)).sum() == pytest.approx(covered, abs=1e-6)


@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=500), st.integers(1, 20))
def test_the_envelope_keeps_both_extremes(values: list[int], points: int) -> None:
    series = np.array(values, dtype=np.float64)
    time, kept = envelope(np.arange(len(series), dtype=np.float64), series, points)
    assert len(kept) <= max(2 * points, 1) or len(series) <= 2 * points
    assert kept.max() == series.max()
    assert kept.min() == series.min()
    assert (np.diff(time) > 0).all()
    assert all(series[int(t)] == v for t, v in zip(time, kept, strict=True))


def test_columns_hold_all_bytes_and_waits_of_a_log() -> None:
    log = synthetic_log(5)
    columns = Columns.of(log)
    for kind in ("fetch", "evict"):
        expected = sum(t.nbytes for t in log.transfers if t.kind == kind)
        assert columns.kind(kind).nbytes.sum() == expected
        assert expected > 0
    waited = (columns.stalls.end - columns.stalls.start).sum()
    assert waited == pytest.approx(sum(s.stall_s for s in log.steps))
    assert sorted(columns.steps) == list(range(5))
    assert columns.duration >= log.phases[-1].end
