"""What a session did, step by step: counters become `StepStats`, events become a `RunLog`."""

from __future__ import annotations

import math
import time

from dynoffload.memory import heap
from dynoffload.memory.device import Counters, Device, EventKind
from dynoffload.memory.limits import resident_bytes
from dynoffload.runtime.store import Store
from dynoffload.runtime.telemetry import (
    MemorySample,
    PhaseSpan,
    RunLog,
    Stall,
    StepBlocks,
    StepStats,
    Transfer,
)

_SAMPLE_EVERY_S = 0.02
_KINDS = {EventKind.FETCH: "fetch", EventKind.EVICT: "evict"}
_MOST_RECORDS = 2_000_000


class Recording:
    """Fills one `RunLog`.

    Args:
        log: an empty log.
        baseline: bytes the process would take without what is managed: its resident set when the
            session began, less the tensors that are paged.
        slack: bytes beyond what is counted above which freed heap is handed back.
        events: keep transfers, stalls and memory samples too.
    """

    def __init__(self, log: RunLog, baseline: int, slack: int, *, events: bool) -> None:
        self.log = log
        self._slack = slack
        self._baseline = baseline
        self._events = events
        self._origin = self._step_began = time.perf_counter()
        self._phase: tuple[str, float] | None = None
        self._last = Counters()
        self._sampled = 0.0
        self._peak = 0

    def now(self) -> float:
        """Return seconds since the session began."""
        return time.perf_counter() - self._origin

    def phase(self, name: str) -> None:
        """A phase begins; the one before ends."""
        now = self.now()
        if self._phase is not None and self._phase[0] == name:
            return
        if self._phase is not None and self._events:
            before, start = self._phase
            self.log.phases.append(PhaseSpan(start, now, len(self.log.steps), before))
        self._phase = (name, now)

    def sample(self, device: Device | None, small: int) -> None:
        """Take a sample of memory, at most one in a fiftieth of a second."""
        now = self.now()
        if now - self._sampled < _SAMPLE_EVERY_S:
            return
        self._sampled = now
        fast = small + (device.resident_bytes() if device is not None else 0)
        taken = resident_bytes()
        if taken - self._baseline - fast > self._slack and heap.give_back():
            # The peak before is recorded too: it was there.
            self.log.headroom = max(self.log.headroom, taken - self._baseline - fast)
            taken = resident_bytes()
        self.log.headroom = max(self.log.headroom, taken - self._baseline - fast)
        if self._events and len(self.log.memory) < _MOST_RECORDS:
            self.log.memory.append(MemorySample(now, fast, taken))

    def restart(self) -> None:
        """Another device begins to count from zero."""
        self._last = Counters()

    def end_step(
        self,
        device: Device | None,
        store: Store | None,
        small: int,
        predicted: tuple[str, ...] | None,
        actual: tuple[str, ...],
        accuracy: float,
    ) -> StepStats:
        """Close a step and return its numbers."""
        now = time.perf_counter()
        self.phase("optimizer")
        counters = self._last if device is None else device.counters()
        last = self._last
        self._last = counters
        number = len(self.log.steps)
        stats = StepStats(
            step=number,
            seconds=now - self._step_began,
            stalls=counters.stalls - last.stalls,
            stall_s=counters.stall_s - last.stall_s,
            bytes_in=counters.bytes_in - last.bytes_in,
            bytes_out=counters.bytes_out - last.bytes_out,
            prefetched_bytes=counters.prefetched_bytes - last.prefetched_bytes,
            used_bytes=counters.used_bytes - last.used_bytes,
            wasted_bytes=counters.wasted_bytes - last.wasted_bytes,
            accuracy=accuracy,
            peak_fast_bytes=small + (counters.peak_bytes if device is not None else 0),
        )
        self._step_began = now
        self.log.steps.append(stats)
        if self._events:
            if actual and len(self.log.blocks) < _MOST_RECORDS // 100:
                self.log.blocks.append(StepBlocks(number, predicted, actual))
            if device is not None and store is not None:
                self._drain(device, store)
        return stats

    def _drain(self, device: Device, store: Store) -> None:
        log, origin = self.log, self._origin
        for event in device.events():
            start, end = event.start - origin, event.end - origin
            name = store.name_of(event.region)
            if event.kind is EventKind.STALL:
                if len(log.stalls) < _MOST_RECORDS:
                    log.stalls.append(Stall(start, end, name))
            elif len(log.transfers) < _MOST_RECORDS:
                cause = event.cause.name.lower()
                log.transfers.append(
                    Transfer(start, end, _KINDS[event.kind], name, event.nbytes, cause)
                )


def mean_accuracy(steps: list[StepStats]) -> float:
    """Return the mean of the accuracies there are, or NaN."""
    known = [step.accuracy for step in steps if not math.isnan(step.accuracy)]
    return sum(known) / len(known) if known else math.nan
