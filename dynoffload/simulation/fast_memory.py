"""Event-by-event simulation of fast memory: the state of each region over time.

`FastMemory` is a clock, regions, and the traffic of a link. It follows the rules of the runtime's
pager: demand fetches go before planned transfers; planned transfers run in order, as there is room;
eviction takes the region with the farthest next use. It is driven by an `Execution`, operator by
operator, or as a `SimulatedPager`, call by call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from heapq import heappop, heappush

from dynoffload.planning.cursor import NEVER, PlanCursor
from dynoffload.planning.schedule import Kind, infeasible
from dynoffload.simulation.machine import Machine
from dynoffload.simulation.traffic import Traffic, Transfer


class State(IntEnum):
    """Where a region's bytes are."""

    ABSENT = 0
    """In the tier below, or without content."""
    READING = 1
    """Being read; its memory is taken."""
    HERE = 2
    """In fast memory."""
    WRITING = 3
    """Being written; its memory is still taken."""


@dataclass
class StepResult:
    """Result of one simulated step.

    Attributes:
        seconds: from the start of its first use to the end of its last.
        compute_s: seconds of the uses themselves, on this machine.
        stall_s: seconds of waiting for regions or for room.
        beside_s: seconds of work, the runtime's and the uses', that overlapped with transfers.
        bytes_in: bytes read from the tier below.
        bytes_out: bytes written to it.
        faults: demand fetches of regions, or accesses that had to wait.
        peak_bytes: most fast memory taken at one time.
    """

    seconds: float = 0.0
    compute_s: float = 0.0
    stall_s: float = 0.0
    beside_s: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    faults: int = 0
    peak_bytes: int = 0


class FastMemory:
    """Fast memory over a run of steps, and the link below it.

    Args:
        sizes: bytes of each region; may grow between steps.
        machine: the simulated machine.
        reserve: bytes that plans leave free for unpredicted regions; idle workers evict regions
            not in use to restore it.

    Attributes:
        now: seconds since the first step began.
        state: of each region.
        dirty: of each region, whether the copy below is stale.
    """

    def __init__(self, sizes: list[int], machine: Machine, reserve: int = 0) -> None:
        self.sizes, self.machine, self.reserve = sizes, machine, reserve
        self.now = 0.0
        self.state: list[State] = []
        self.dirty: list[bool] = []
        self._copied: list[bool] = []  # whether the tier below has a copy, stale or not
        self._pins: list[int] = []
        self._wanted: list[bool] = []
        self._doomed: list[bool] = []  # freed during its transfer
        self._stamp: list[int] = []
        self._version: list[int] = []
        self._heap: list[tuple[int, int, int, int]] = []
        self._clock = 0
        self._taken = self._leaving = 0
        self._traffic = Traffic(machine.link)
        self._urgent: list[int] = []
        self._plan = PlanCursor()
        self._result = StepResult()
        self.extend()

    # Regions

    def extend(self) -> None:
        """Add state for regions that were added to ``sizes``."""
        more = len(self.sizes) - len(self.state)
        self.state += [State.ABSENT] * more
        for flags in (self.dirty, self._copied, self._wanted, self._doomed):
            flags += [False] * more
        self._pins += [0] * more
        self._stamp += [0] * more
        self._version += [0] * more

    def place(self, regions: Iterable[int]) -> None:
        """Mark regions as having content in the tier below."""
        for region in regions:
            self._copied[region] = True

    def resident(self) -> list[int]:
        """Return the regions in fast memory."""
        return [region for region, state in enumerate(self.state) if state is not State.ABSENT]

    def _may_leave(self, region: int) -> bool:
        here = self.state[region] is State.HERE
        return here and not self._pins[region] and not self._wanted[region]

    def _offer(self, region: int) -> None:
        """Make the region a candidate for eviction if it may leave, ranked by its next use."""
        if not self._may_leave(region):
            return
        self._version[region] += 1
        entry = (-self._plan.next_use(region), self._stamp[region], region, self._version[region])
        heappush(self._heap, entry)

    def begin_step(self) -> StepResult:
        """Begin a step; return its result, which is filled as the step runs."""
        self._result = StepResult(peak_bytes=self._taken)
        return self._result

    def _pin(self, regions: Iterable[int], count: int = 1) -> None:
        """Keep regions where they are; with ``count`` -1, no longer."""
        for region in regions:
            self._pins[region] += count
            self._offer(region)

    def _renew(self, region: int) -> None:
        """Make the region the latest used."""
        self._clock += 1
        self._stamp[region] = self._clock

    def _fetch(self, regions: Iterable[int], position: int = -1) -> None:
        """Wait until all regions are resident."""
        absent = [region for region in regions if self.state[region] is not State.HERE]
        began = self.now
        for region in absent:
            self._wanted[region] = True
            if self.state[region] is State.ABSENT:
                self._urgent.append(region)
        if absent:
            self._wait(lambda: all(self.state[region] is State.HERE for region in absent), position)
            self._result.stall_s += self.now - began

    def finish(self) -> None:
        """Wait until all transfers have ended."""
        self._wait(lambda: not self._traffic.under_way)

    def _follow(self, plan: PlanCursor) -> None:
        self._plan = plan
        for region in range(len(self.state)):
            self._offer(region)

    def _advance(self, position: int) -> None:
        for region in self._plan.advance(position):
            self._offer(region)

    def _forget(self, region: int) -> None:
        """Discard the region's content, without a write."""
        self.dirty[region] = False
        self._copied[region] = False
        if self.state[region] is State.WRITING or self.state[region] is State.READING:
            self._doomed[region] = True
        elif self.state[region] is State.HERE:
            self._leave(region)

    def _leave(self, region: int) -> None:
        self.state[region] = State.ABSENT
        self._taken -= self.sizes[region]

    # Time

    def _compute(self, seconds: float) -> None:
        """Advance by ``seconds`` of work, overlapping transfers if the machine can."""
        left = seconds
        if not self.machine.overlap:
            self._wait(lambda: not self._traffic.under_way)
            self.now += left
            left = 0.0
        while left > 0:
            self._dispatch()
            beside = bool(self._traffic.under_way)
            rate = 1.0 - self.machine.interference if beside else 1.0
            passed = min(left / rate, self._traffic.soonest())
            self._result.beside_s += passed * rate if beside else 0.0
            self._pass(passed)
            left -= passed * rate
            if left < 1e-12:
                break

    def _wait(self, until: Callable[[], bool], position: int = -1) -> None:
        while True:
            self._dispatch()
            if until():
                return
            passed = self._traffic.soonest()
            if math.isinf(passed):
                self._stuck(position)
            self._pass(passed)

    def _stuck(self, position: int) -> None:
        first = self._urgent[0]
        pinned = sum(s for s, pins in zip(self.sizes, self._pins, strict=False) if pins)
        held = sum(self.sizes[r] for r in self._urgent)
        raise infeasible(position, max(pinned, held), self.machine.fast_bytes) from RuntimeError(
            f"region {first} finds no room"
        )

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        for transfer in self._traffic.pass_time(seconds):
            self._arrive(transfer)

    def _arrive(self, transfer: Transfer) -> None:
        region, nbytes = transfer.region, transfer.nbytes
        self.state[region] = State.HERE
        if transfer.reading:
            self._result.bytes_in += nbytes
            self.dirty[region] = False
        else:
            self._leaving -= nbytes
            self._result.bytes_out += nbytes
            self.dirty[region] = False
            self._copied[region] = not self._doomed[region]
        if self._doomed[region]:
            self._doomed[region] = False
            self._copied[region] = False
            self._leave(region)
        elif not transfer.reading and not self._wanted[region] and not self._pins[region]:
            self._leave(region)
        else:
            self._offer(region)

    # What the link does next

    def _dispatch(self) -> None:
        """Let idle workers begin due transfers: first demand fetches, then planned transfers.

        A machine without overlap begins planned transfers too, but only between uses, when nothing
        computes.
        """
        while len(self._traffic.under_way) < self.machine.workers:
            if self._urgent:
                if self._serve_urgent():
                    continue
            elif self._serve_plan():
                continue
            if not self._serve_reserve():
                return

    def _room(self) -> int:
        return self.machine.fast_bytes - self._taken

    def _serve_urgent(self) -> bool:
        region = self._urgent[0]
        if self.state[region] is not State.ABSENT:
            self._urgent.pop(0)
            return True
        size = self.sizes[region]
        if self._room() >= size:
            self._urgent.pop(0)
            self._bring(region, planned=False)
            return True
        if self._room() + self._leaving >= size:
            return False
        return self._make_room()

    def _make_room(self) -> bool:
        victim = self._last_used()
        if victim < 0:
            return False
        self._evict(victim)
        return True

    def _last_used(self, later_than: int = -1) -> int:
        """Return the region to evict: farthest next use, after ``later_than``, then LRU; or -1."""
        while self._heap:
            following, _, region, version = self._heap[0]
            if version != self._version[region] or not self._may_leave(region):
                heappop(self._heap)  # it is offered again when it may leave
                continue
            return region if -following > later_than else -1
        return -1

    def _serve_plan(self) -> bool:
        plan = self._plan
        while (action := plan.due()) is not None:
            region, following = action.region, plan.next_use(action.region)
            if action.kind is Kind.EVICT:
                plan.done()
                if self._may_leave(region) and following > plan.position:
                    self._evict(region)
                    return True
                continue
            useless = following == NEVER or not self._copied[region]
            if self.state[region] is not State.ABSENT or useless:
                plan.done()
                continue
            wanted = self.sizes[region] + self.reserve
            if self._room() >= wanted:
                plan.done()
                self._bring(region, planned=True)
                return True
            coming = self._room() + self._leaving >= wanted
            if coming or following > plan.position + 1:
                return False  # memory is being freed, or there is time to wait for it
            victim = self._last_used(following)
            if victim < 0:
                return False
            self._evict(victim)
            return True
        return False

    def _serve_reserve(self) -> bool:
        if self._room() + self._leaving >= self.reserve:
            return False
        victim = self._last_used(self._plan.position)
        if victim < 0:
            return False
        self._evict(victim)
        return True

    def _bring(self, region: int, *, planned: bool) -> None:
        size = self.sizes[region]
        self._taken += size
        self._result.peak_bytes = max(self._result.peak_bytes, self._taken)
        if not self._copied[region]:  # created, so there is nothing to read
            self.state[region] = State.HERE
            self.dirty[region] = True
            return
        link = self.machine.link
        delay = link.latency_s if planned else link.latency_s + link.fault_s
        self.state[region] = State.READING
        self._traffic.begin(Transfer(region, size, True, delay))

    def _evict(self, region: int) -> None:
        size = self.sizes[region]
        if not self.dirty[region]:
            self._leave(region)
            return
        self.state[region] = State.WRITING
        self._leaving += size
        delay = self.machine.link.latency_s + self._let_go(region)
        self._traffic.begin(Transfer(region, size, False, delay))

    def _let_go(self, region: int) -> float:
        """Prepare a resident region for its write; return the seconds that takes."""
        return 0.0
