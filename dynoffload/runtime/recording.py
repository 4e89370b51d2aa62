"""Records a session step by step: counters become `StepStats`, events become a `RunLog`.

[Note: what is counted]  The fast memory of a step is a sum of three: the device's peak, the model's
tensors outside it, and small activations that stay in place. Those tensors are counted at the
step's end, when all gradients exist. In resident mode all tensors are counted, and what
activations took beside all gradients in paged steps: see `overlap`.

[Note: what is kept]  Totals are kept for every step. Single records (transfers, stalls, phases,
memory samples, block names) are kept for the latest steps only, and the oldest are dropped. So a
log takes some 20 MB, and a third of a kilobyte for each step. Dropped records are counted.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from dynoffload.errors import BudgetError, CorruptionError, SpillError
from dynoffload.memory import heap
from dynoffload.memory.device import Counters, Device, EventKind
from dynoffload.memory.limits import resident_bytes
from dynoffload.runtime.host import Headroom
from dynoffload.runtime.passes.finalization import Keeping
from dynoffload.telemetry import (
    MemorySample,
    PhaseSpan,
    RunLog,
    Stall,
    StepBlocks,
    StepStats,
    Transfer,
)
from dynoffload.units import KiB

logger = logging.getLogger(__name__)

MOST_RECORDS = 100_000
"""The most single records that a log keeps, over all tables."""

_NAMES_OF_A_RECORD = 16  # block names that take as much memory as one record
_GROWN, _GROWN_BYTES = 1.25, 256 * KiB  # tolerance for other uses of the heap
_SAMPLE_EVERY_S = 0.05
_LOOK_EVERY_S = 0.002
_TOTALS = (
    *("stalls", "stall_s", "bytes_in", "bytes_out"),
    *("prefetched_bytes", "used_bytes", "wasted_bytes"),
)
_KINDS = {EventKind.FETCH: "fetch", EventKind.EVICT: "evict"}
_Record = TypeVar("_Record")


class Recording:
    """Fills one `RunLog`.

    Args:
        log: an empty log.
        slack: bytes beyond what is counted above which freed heap is given back.
        headroom: lowers the device's capacity where that is not enough.
        outside: returns the bytes of the model's tensors outside a device; for None, of all of
            them; called once in a step.
        allocated: returns an accelerator's peak allocated bytes since the last call. None: fast
            memory is the process's, and its resident set shows what it takes beyond that.

    Attributes:
        baseline: bytes that the process takes without managed tensors: its resident set when the
            session began, less the paged tensors.
        progress: number of events so far.
    """

    def __init__(
        self,
        log: RunLog,
        slack: int,
        headroom: Headroom,
        *,
        outside: Callable[[Device | None], int],
        allocated: Callable[[], int] | None = None,
    ) -> None:
        self.log = log
        self._slack, self.headroom = slack, headroom
        self.baseline = self.progress = 0
        self._count_outside = outside
        self._allocated, self._of_process = allocated, allocated is None
        self._device: Device | None
        self._outside: int | None  # as last counted
        self.page(None, Keeping())
        self._origin = self._step_began = time.perf_counter()
        self._phase: tuple[str, float] | None = None
        self._sampled = self._looked = 0.0
        self._in_use = 0  # bytes beyond the counted ones that the last attempt did not give back
        self._tables: tuple[list[Any], ...] = (
            log.transfers,
            log.stalls,
            log.phases,
            log.memory,
            log.blocks,
        )
        self._lengths = [0] * len(self._tables)  # at the last step's end
        self._open = 0  # records since then
        self._kept = 0  # records of the steps in `_detailed`
        self._detailed: deque[tuple[int, list[int]]] = deque()  # per step: its records, by table

    def now(self) -> float:
        """Return seconds since the session began."""
        return time.perf_counter() - self._origin

    def phase(self, name: str) -> None:
        """Begin a phase and end the one before."""
        now = self.now()
        if self._phase is not None and self._phase[0] == name:
            return
        if self._phase is not None:
            before, start = self._phase
            self._add(self.log.phases, PhaseSpan(start, now, len(self.log.steps), before))
        self._phase = (name, now)

    @property
    def phase_name(self) -> str:
        """The current phase; "" before the first."""
        return "" if self._phase is None else self._phase[0]

    def sample(self) -> None:
        """Sample the memory, at most twenty times a second, or look at it while it is short.

        Raises:
            BudgetError: it is too short for the least pool.
        """
        self.progress += 1
        if self.now() - self._sampled >= _SAMPLE_EVERY_S:
            self._look(*self._count())
        elif self.headroom.is_near():
            self._taken_beyond(self._count()[1])
        self._check()

    def look_at_heap(self) -> None:
        """Give freed heap back if it exceeds the slack, at most once in two milliseconds: for code
        that allocates and frees much in a short time. Raise as `sample` does."""
        if (now := self.now()) - self._looked >= _LOOK_EVERY_S:
            self._looked = now
            self._taken_beyond(self._count()[1])
        self._check()

    def _check(self) -> None:
        if self.headroom.lacks:
            raise BudgetError(self.headroom.lacks)

    def _count(self) -> tuple[int, int]:
        """Return the bytes of fast memory in use, and the bytes the process has taken for them."""
        device = self._device
        assert device is not None
        if self._outside is None:
            self._outside = self._count_outside(device)
        outside = self._outside + self._in_place.nbytes
        if not self._of_process:
            return outside + device.resident_bytes(), device.taken_bytes()
        return outside + device.resident_bytes(), outside + device.taken_bytes()

    def _look(self, fast: int, taken: int) -> None:
        now = self._sampled = self.now()
        beyond = self._taken_beyond(taken)
        self._add(self.log.memory, MemorySample(now, fast, self.baseline + taken + beyond))

    def _taken_beyond(self, taken: int) -> int:
        """Return the bytes that the process takes beyond ``taken``, once freed heap is returned."""
        beyond = resident_bytes() - self.baseline - taken
        self._in_use = min(self._in_use, beyond)
        # Memory in use cannot be given back: retry only when there is more than that.
        most, device = self._in_use + self._slack // 8, self._device
        excess = 0 if device is None else self.headroom.excess(device, beyond)
        if beyond > (most if excess else max(self._slack, most)) and heap.give_back():
            # Also record the peak before giving back.
            self._note_headroom(beyond)
            beyond = self._in_use = resident_bytes() - self.baseline - taken
            if device is not None and excess:
                excess = self.headroom.excess(device, beyond)
        self._note_headroom(beyond)
        if device is not None:
            self.headroom.shrink(device, excess)
        return beyond

    def _note_headroom(self, beyond: int) -> None:
        if self._of_process:
            self.log.headroom = max(self.log.headroom, beyond)

    def page(self, device: Device | None, kept: Keeping) -> None:
        """Record steps paged with a new ``device``, whose counters begin at zero; ``kept`` counts
        the saved activations that stay in place."""
        self._device, self._in_place = device, kept
        self._last = Counters()
        self._outside = None
        self._alive = self._activations = 0  # see `stay`

    def stay(self, alive: int = 0, beside: int = 0) -> None:
        """Record steps in resident mode from now on, whose activations take at most ``alive``
        bytes, ``beside`` of them beside all gradients."""
        self._device = None
        self._alive, self._activations = alive, beside

    def grew(self, nbytes: int) -> int:
        """Record what a forward left in memory in resident mode; return the bytes of activations
        beside all gradients."""
        if nbytes > _GROWN * self._alive + _GROWN_BYTES:
            self._activations += nbytes - self._alive
            self._alive = nbytes
        return self._activations

    def end_step(
        self,
        predicted: tuple[str, ...] | None,
        actual: tuple[str, ...],
        accuracy: float,
        predicting_s: float = 0.0,
        replanning_s: float = 0.0,
    ) -> StepStats:
        """Close a step and return its statistics."""
        now, device = time.perf_counter(), self._device
        self.progress += 1
        self.headroom.end_step()
        self.phase("optimizer")
        if device is not None:
            allocated = device.allocated_bytes()
        else:
            allocated = 0 if self._allocated is None else self._allocated()
        counters = self._last if device is None else _counters(device)
        last, self._last = self._last, counters
        number = len(self.log.steps)
        moved = {name: getattr(counters, name) - getattr(last, name) for name in _TOTALS}
        peak = self._peak(counters)
        if allocated:
            self.log.headroom = max(self.log.headroom, allocated - peak)
        stats = StepStats(
            step=number,
            seconds=now - self._step_began,
            accuracy=accuracy,
            peak_fast_bytes=peak,
            peak_allocated_bytes=allocated,
            predicting_s=predicting_s,
            replanning_s=replanning_s,
            **moved,
        )
        self._step_began = now
        self.log.steps.append(stats)
        if actual:
            self._add(self.log.blocks, StepBlocks(number, predicted, actual))
            self._open += (len(predicted or ()) + len(actual)) // _NAMES_OF_A_RECORD
        if device is not None:
            self._drain(device)
        self.log.dropped += counters.events_lost - last.events_lost
        self._end_detail()
        return stats

    def _peak(self, counters: Counters) -> int:
        """Count the tensors outside the device, and return the step's peak of fast memory."""
        device = self._device
        outside = self._outside = self._count_outside(device)
        if device is None:
            peak = outside + self._activations
            if self.now() - self._sampled >= _SAMPLE_EVERY_S:
                self._look(peak, peak)
            return peak
        return outside + self._in_place.take_peak() + counters.peak_bytes

    def _drain(self, device: Device) -> None:
        log, origin = self.log, self._origin
        for event in device.events():
            start, end = event.start - origin, event.end - origin
            name = device.names.get(event.region, f"region {event.region}")
            if event.kind is EventKind.STALL:
                self._add(log.stalls, Stall(start, end, name))
            else:
                kind, cause = _KINDS[event.kind], event.cause.name.lower()
                self._add(log.transfers, Transfer(start, end, kind, name, event.nbytes, cause))

    def _add(self, table: list[_Record], record: _Record) -> None:
        if self._open < MOST_RECORDS:
            table.append(record)
            self._open += 1
        else:
            self.log.dropped += 1

    def _end_detail(self) -> None:
        """Close the step's records, and drop those of the oldest steps if there are too many.

        A step's share of a table is what was added since the previous step.
        """
        added = [len(t) - n for t, n in zip(self._tables, self._lengths, strict=True)]
        self._detailed.append((self._open, added))
        self._kept += self._open
        self._open = 0
        while self._kept > MOST_RECORDS and len(self._detailed) > 1:
            weight, counts = self._detailed.popleft()
            self._kept -= weight
            for table, count in zip(self._tables, counts, strict=True):
                del table[:count]
            self.log.dropped += sum(counts)
            self.log.first_detailed += 1
        self._lengths = [len(table) for table in self._tables]


def mean_accuracy(steps: list[StepStats]) -> float:
    """Return the mean of the known accuracies, or NaN."""
    known = [step.accuracy for step in steps if not math.isnan(step.accuracy)]
    return sum(known) / len(known) if known else math.nan


def _counters(device: Device) -> Counters:
    """Return the totals. Log a warning for a failed transfer that no thread waited for. Data not
    written is still in memory, and data not read is read again when it is used."""
    try:
        return device.counters()
    except CorruptionError:
        raise
    except SpillError as error:
        logger.warning("a transfer failed, by which nothing is lost so far: %s", error.strerror)
        return _counters(device)  # each failure is reported once
