"""A `RunLog` by columns: numpy arrays, and the few reductions that every figure needs.

What it is: conversion once per report, and downsampling that keeps the extremes. What it is not:
drawing or words. Times are seconds, quantities are bytes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dynoffload.telemetry import PHASES, RunLog

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Spans:
    """Intervals of one kind, sorted by start: ``start``, ``end`` [n] seconds, ``nbytes`` [n]."""

    start: Floats
    end: Floats
    nbytes: Floats

    def within(self, begin: float, finish: float) -> Spans:
        """Return the intervals that touch ``begin`` to ``finish``."""
        inside = (self.end >= begin) & (self.start <= finish)
        return Spans(self.start[inside], self.end[inside], self.nbytes[inside])

    def merged(self, gap: float) -> Spans:
        """Return the intervals with those less than ``gap`` seconds apart joined."""
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
        """Return bytes per second in each bin of ``edges`` [m + 1], spread evenly over a span."""
        return _binned(self.start, self.end, self.nbytes, edges) / np.diff(edges)

    def share(self, edges: Floats) -> Floats:
        """Return the share of each bin of ``edges`` [m + 1] that the spans cover, 0 to 1."""
        return np.clip(np.diff(self.covered(edges)) / np.diff(edges), 0.0, 1.0)

    def covered(self, times: Floats) -> Floats:
        """Return how many seconds until each of ``times`` [n] the spans cover; overlaps once."""
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
        begin: the first second that the single records show: 0 unless older ones were dropped.
        duration: seconds from the beginning to the last thing recorded.
        transfers: spans by (kind, cause).
        stalls: spans in which the step waited (``nbytes`` zero).
        phases: for each phase name the spans and, parallel to them, ``phase_steps``.
        memory_time, fast_bytes, rss_bytes: [n].
        step_begin, step_end: first and last second of each step that has phases.
    """

    begin: float
    duration: float
    transfers: dict[tuple[str, str], Spans]
    stalls: Spans
    phases: dict[str, Spans]
    phase_steps: dict[str, Ints]
    memory_time: Floats
    fast_bytes: Floats
    rss_bytes: Floats
    step_begin: dict[int, float]
    step_end: dict[int, float]

    @classmethod
    def of(cls, log: RunLog) -> Columns:
        """Return the columns of ``log``."""
        grouped: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
        for t in log.transfers:
            grouped.setdefault((t.kind, t.cause), []).append((t.start, t.end, float(t.nbytes)))
        by_phase: dict[str, list[tuple[float, float, int]]] = {name: [] for name in PHASES}
        begin: dict[int, float] = {}
        end: dict[int, float] = {}
        for p in log.phases:
            by_phase[p.name].append((p.start, p.end, p.step))
            begin[p.step] = min(begin.get(p.step, p.start), p.start)
            end[p.step] = max(end.get(p.step, p.end), p.end)
        memory = np.array(
            [(m.time, m.fast_bytes, m.rss_bytes) for m in log.memory], dtype=np.float64
        ).reshape(-1, 3)
        memory = memory[np.argsort(memory[:, 0], kind="stable")]
        phases = {name: spans([(s, e, 0.0) for s, e, _ in rows]) for name, rows in by_phase.items()}
        steps = {
            name: np.array([step for *_, step in sorted(rows)], dtype=np.int64)
            for name, rows in by_phase.items()
        }
        stalls = spans([(s.start, s.end, 0.0) for s in log.stalls])
        transfers = {key: spans(rows) for key, rows in grouped.items()}
        present = [s for s in (*transfers.values(), *phases.values(), stalls) if s.end.size]
        begins = [float(s.start[0]) for s in present]
        ends = [float(s.end.max()) for s in present]
        begins += [float(memory[0, 0])] if len(memory) else []
        ends += [float(memory[-1, 0])] if len(memory) else []
        return cls(
            begin=min(begins, default=0.0) if log.first_detailed else 0.0,
            duration=max(ends, default=0.0),
            transfers=transfers,
            stalls=stalls,
            phases=phases,
            phase_steps=steps,
            memory_time=memory[:, 0],
            fast_bytes=memory[:, 1],
            rss_bytes=memory[:, 2],
            step_begin=begin,
            step_end=end,
        )

    def kind(self, kind: str, *causes: str) -> Spans:
        """Return the transfers of ``kind`` with one of ``causes`` (all, if none is named)."""
        found = [
            s
            for (k, cause), s in self.transfers.items()
            if k == kind and (not causes or cause in causes)
        ]
        if not found:
            return spans([])
        start = np.concatenate([s.start for s in found])
        order = np.argsort(start, kind="stable")
        return Spans(
            start[order],
            np.concatenate([s.end for s in found])[order],
            np.concatenate([s.nbytes for s in found])[order],
        )


def spans(rows: list[tuple[float, float, float]]) -> Spans:
    """Return rows of (start, end, bytes) as `Spans`, sorted."""
    table = np.array(sorted(rows), dtype=np.float64).reshape(-1, 3)
    return Spans(table[:, 0], np.maximum(table[:, 0], table[:, 1]), table[:, 2])


def envelope(time: Floats, value: Floats, points: int) -> tuple[Floats, Floats]:
    """Return at most ``2 * points`` samples of a series in which each extreme is still there.

    In each of ``points`` bins of equal count the least and the greatest value are kept, in the
    order in which they came: a peak that touches the budget once is not averaged away.
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


def _binned(start: Floats, end: Floats, weight: Floats, edges: Floats) -> Floats:
    """Return the ``weight`` of each span spread evenly over the bins it covers: [m]."""
    if len(start) == 0:
        return np.zeros(len(edges) - 1)
    length = np.maximum(end - start, 1e-9)  # one without length is a point
    total = [weight @ np.clip((edge - start) / length, 0.0, 1.0) for edge in edges]
    return np.diff(np.array(total))
