"""A `RunLog` as numpy columns, with the reductions that the figures share.

Converted once per report; downsampling keeps extremes. Times are seconds, quantities are bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynoffload.telemetry import RunLog

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Spans:
    """Intervals of one kind, sorted by start: ``start``, ``end`` [n] seconds, ``nbytes`` [n]."""

    start: Floats
    end: Floats
    nbytes: Floats

    def within(self, begin: float, finish: float) -> Spans:
        """Return the intervals that overlap ``begin`` to ``finish``."""
        inside = (self.end >= begin) & (self.start <= finish)
        return Spans(self.start[inside], self.end[inside], self.nbytes[inside])

    def merged(self, gap: float) -> Spans:
        """Return the intervals, joining those less than ``gap`` seconds apart."""
        if len(self.start) == 0:
            return self
        reach = np.maximum.accumulate(self.end)
        first = np.concatenate(([True], self.start[1:] > reach[:-1] + gap))
        begins = np.flatnonzero(first)
        return Spans(
            self.start[first],
            np.maximum.reduceat(self.end, begins),
            np.add.reduceat(self.nbytes, begins),
        )

    def rate(self, edges: Floats) -> Floats:
        """Return bytes per second in each bin of ``edges`` [m + 1]; a span has a constant rate."""
        length = np.maximum(self.end - self.start, 1e-9)  # avoids division by zero
        total = [self.nbytes @ np.clip((at - self.start) / length, 0.0, 1.0) for at in edges]
        return np.diff(np.array(total)) / np.diff(edges)

    def share(self, edges: Floats) -> Floats:
        """Return the share of each bin of ``edges`` [m + 1] that the spans cover, 0 to 1."""
        return np.clip(np.diff(self.covered(edges)) / np.diff(edges), 0.0, 1.0)

    def covered(self, times: Floats) -> Floats:
        """Return the seconds covered by spans before each of ``times`` [n]; overlaps count once."""
        whole = self.merged(0.0)
        if len(whole.start) == 0:
            return np.zeros(len(times))
        at = np.stack([whole.start, whole.end], axis=1).reshape(-1)
        seconds = np.cumsum(whole.end - whole.start)
        before = np.concatenate(([0.0], seconds[:-1]))
        until: Floats = np.interp(times, at, np.stack([before, seconds], axis=1).reshape(-1))
        return until


@dataclass(frozen=True)
class Columns:
    """The columns of one log.

    Attributes:
        log: the log itself.
        begin: first second covered by single records: 0 unless older ones were dropped.
        duration: seconds from the beginning to the last record.
        stalls: spans in which the step stalled (``nbytes`` zero).
        memory_time, fast_bytes, rss_bytes: [n].
        steps: start and end in seconds of each step that has phases.
    """

    log: RunLog
    begin: float
    duration: float
    stalls: Spans
    memory_time: Floats
    fast_bytes: Floats
    rss_bytes: Floats
    steps: dict[int, tuple[float, float]]

    @classmethod
    def of(cls, log: RunLog) -> Columns:
        """Return the columns of ``log``."""
        steps: dict[int, tuple[float, float]] = {}
        for p in log.phases:
            begin, end = steps.get(p.step, (p.start, p.end))
            steps[p.step] = min(begin, p.start), max(end, p.end)
        memory = np.array(
            [(m.time, m.fast_bytes, m.rss_bytes) for m in log.memory], dtype=np.float64
        ).reshape(-1, 3)
        memory = memory[np.argsort(memory[:, 0], kind="stable")]
        timed: list[Any] = [*log.transfers, *log.stalls, *log.phases]
        times = [(one.start, one.end) for one in timed]
        times += [(one.time, one.time) for one in log.memory]
        return cls(
            log,
            begin=min((begin for begin, _ in times), default=0.0) if log.first_detailed else 0.0,
            duration=max((max(both) for both in times), default=0.0),
            stalls=spans((s.start, s.end, 0.0) for s in log.stalls),
            memory_time=memory[:, 0],
            fast_bytes=memory[:, 1],
            rss_bytes=memory[:, 2],
            steps=steps,
        )

    def kind(self, kind: str, *causes: str) -> Spans:
        """Return the transfers of ``kind`` with one of ``causes`` (all, if none is named)."""
        return spans(
            (t.start, t.end, float(t.nbytes))
            for t in self.log.transfers
            if t.kind == kind and (not causes or t.cause in causes)
        )


def spans(rows: Iterable[tuple[float, float, float]]) -> Spans:
    """Return rows of (start, end, bytes) as `Spans`, sorted."""
    table = np.array(sorted(rows), dtype=np.float64).reshape(-1, 3)
    return Spans(table[:, 0], np.maximum(table[:, 0], table[:, 1]), table[:, 2])


def envelope(time: Floats, value: Floats, points: int) -> tuple[Floats, Floats]:
    """Return at most ``2 * points`` samples of a series, keeping its extremes.

    Each of ``points`` bins of equal count keeps its least and its greatest value in their
    original order: a short peak is not averaged away.
    """
    if len(time) <= 2 * points:
        return time, value
    edges = np.linspace(0, len(time), points + 1).astype(np.int64)
    keep: list[int] = []
    for first, last in itertools.pairwise(edges):
        piece = value[first:last]
        keep += sorted({first + int(piece.argmin()), first + int(piece.argmax())})
    index = np.array(keep)
    return time[index], value[index]
