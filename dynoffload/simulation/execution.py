"""Running a reference string on a machine: who is where at which moment, event by event.

What it is: `Execution`, a clock, a fast memory of regions, and the traffic of a link. It
follows the rules that the runtime's pager follows: what somebody waits for goes before what is
planned; planned transfers run in order as there is room; room is made by dropping what is used
last; what was used counts as modified where its use says so. What it is not: a policy (see
`dynoffload.simulation.policies`), nor a measurement.

[Note: the three ways out]  A region leaves fast memory with a write if the copy below is stale,
without one if it is not, or by being *dropped*: then nothing is written, and at its next use the
use that created it is made again, with whatever that needs in turn.

[Note: recomputing]  Under a policy that drops, what a step frees is not forgotten either, as
something dropped may be made from it; it takes no memory, but may be made again. What has no
creator (inputs) stays to the end of the step. Results that a pending recomputation needs are
pinned until what needs them is made, so that it comes to an end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import heappop, heappush
from typing import Protocol

from dynoffload.errors import BudgetError
from dynoffload.planning.schedule import Kind, Use, infeasible
from dynoffload.simulation.following import NEVER, Following, Plan
from dynoffload.simulation.machine import Machine
from dynoffload.simulation.traffic import Traffic, Transfer

_MOST_RECOMPUTED = 1000  # times as many uses as a step has, after which a policy thrashes


class State(IntEnum):
    """Where a region's bytes are."""

    ABSENT = 0
    """Below, or nowhere."""
    READING = 1
    """On the way in; room is taken."""
    HERE = 2
    """In fast memory."""
    WRITING = 3
    """On the way out; room is still taken."""


class Victims(Protocol):
    """Chooses what leaves when room is wanted."""

    def choose(self, execution: Execution) -> tuple[int, bool] | None:
        """Return a region of ``execution.evictable()``, and whether to drop it rather than to
        write it; None if nothing may leave."""


@dataclass(frozen=True)
class Span:
    """A stretch of time in which something happened; seconds from the start of the first step."""

    start: float
    end: float
    what: str
    region: int
    nbytes: int


@dataclass
class StepResult:
    """What one step cost.

    Attributes:
        seconds: from its first use to the end of its last.
        compute_s: of the uses themselves, on this machine.
        recompute_s: of uses that were made again.
        stall_s: waited for regions or for room.
        beside_s: of work, its own and the uses', that was done while transfers were under way.
        bytes_in: read from the tier below.
        bytes_out: written to it.
        prefetched_bytes: of those read, by plan.
        wasted_bytes: of those prefetched, never used before they left.
        faults: regions that a use had to wait for, or to ask for.
        peak_bytes: most fast memory taken at one time.
        broken: the plan was strict, and ended before the step did.
    """

    seconds: float = 0.0
    compute_s: float = 0.0
    recompute_s: float = 0.0
    stall_s: float = 0.0
    beside_s: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    prefetched_bytes: int = 0
    wasted_bytes: int = 0
    faults: int = 0
    peak_bytes: int = 0
    broken: bool = False


@dataclass
class Execution:
    """Fast memory over a run of steps.

    Args:
        sizes: bytes of each region; may grow between steps.
        machine: what it runs on.
        victims: chooses what leaves; None: what is used last by the plan, then longest ago.
        drops: whether regions may be dropped; see [Note: recomputing].
        record: keep `spans`.
        reserve: bytes that plans leave free, for what nobody predicted; idle workers make room for
            it of what is not used now.
    """

    sizes: list[int]
    machine: Machine
    victims: Victims | None = None
    drops: bool = False
    record: bool = False
    reserve: int = 0
    now: float = 0.0
    spans: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state: list[State] = []
        self.dirty: list[bool] = []
        self._copied: list[bool] = []  # whether the tier below has a copy, stale or not
        self._pins: list[int] = []
        self._wanted: list[bool] = []
        self._prefetched: list[bool] = []
        self._doomed: list[bool] = []  # freed while on its way out
        self.dropped: list[bool] = []
        self.last_used: list[float] = []
        self._stamp: list[int] = []
        self._version: list[int] = []
        self._heap: list[tuple[int, int, int, int]] = []
        self._clock = 0
        self._taken = self._leaving = 0
        self._traffic = Traffic(self.machine.link)
        self._urgent: list[int] = []
        self._plan = Following(None)
        self._uses: Sequence[Use] = ()
        self.producer: dict[int, int] = {}
        self._made_from: dict[int, list[int]] = {}
        self._kept: list[int] = []  # freed inputs, until the step ends
        self._result = StepResult()
        self.extend()

    # Regions

    def extend(self) -> None:
        """Take note of regions that were added to ``sizes``."""
        more = len(self.sizes) - len(self.state)
        self.state += [State.ABSENT] * more
        for flags in (self.dirty, self._copied, self._wanted, self._prefetched, self._doomed):
            flags += [False] * more
        self.dropped += [False] * more
        self._pins += [0] * more
        self.last_used += [-math.inf] * more
        self._stamp += [0] * more
        self._version += [0] * more

    def resize(self, sizes: Sequence[int]) -> None:
        """Between two steps: give regions that are not in fast memory their sizes in the next."""
        for region, nbytes in enumerate(sizes):
            if self.sizes[region] != nbytes:
                assert self.state[region] is State.ABSENT
                self.sizes[region] = nbytes

    def place(self, regions: Iterable[int], *, below: bool) -> None:
        """Say that regions exist from the start: in the tier below, or in fast memory, modified."""
        for region in regions:
            if below:
                self._copied[region] = True
            else:
                self.state[region] = State.HERE
                self.dirty[region] = True
                self._taken += self.sizes[region]
                self._offer(region)

    def resident(self) -> list[int]:
        """Return the regions in fast memory."""
        return [region for region, state in enumerate(self.state) if state is not State.ABSENT]

    def evictable(self) -> list[int]:
        """Return the regions that may leave now."""
        return [region for region in range(len(self.state)) if self._may_leave(region)]

    def cost(self, region: int) -> float:
        """Return the seconds of the use that created ``region`` in this step; inf without one."""
        use = self.producer.get(region)
        return math.inf if use is None else self._uses[use].seconds / self.machine.compute

    def sources(self, region: int) -> Sequence[int]:
        """Return the regions from which ``region`` was made in this step."""
        use = self.producer.get(region)
        if use is None:
            return ()
        made = self._uses[use]
        return [other for other in made.regions if other not in made.creates]

    def made_from(self, region: int) -> Sequence[int]:
        """Return the regions that this step has made from ``region`` so far."""
        return self._made_from.get(region, ())

    def _may_leave(self, region: int) -> bool:
        here = self.state[region] is State.HERE
        return here and not self._pins[region] and not self._wanted[region]

    def _offer(self, region: int) -> None:
        """The region may be chosen to leave, from now on at its present next use."""
        self._version[region] += 1
        entry = (-self._plan.next_use(region), self._stamp[region], region, self._version[region])
        heappush(self._heap, entry)

    # A step

    def step(
        self, uses: Sequence[Use], keys: Sequence[Hashable] | None = None, plan: Plan | None = None
    ) -> StepResult:
        """Make ``uses`` in order, following ``plan``.

        Args:
            uses: what really happens.
            keys: what each use is known by; needed where a plan has to be found one's way in.
            plan: what the policy expects; None: everything is on demand.

        Raises:
            BudgetError: a use cannot be made in ``machine.fast_bytes``.
        """
        began = self.now
        self._result = result = StepResult(peak_bytes=self._taken)
        self._uses = uses
        self.producer.clear()
        self._made_from.clear()
        self._follow(plan)
        for position, use in enumerate(uses):
            self._anchor(None if keys is None else keys[position], position)
            self._make(position, use)
        for region in (*self._kept, *self.producer):  # what was made again may be here still
            self._forget(region)
            self.dropped[region] = False
        self._kept.clear()
        result.seconds = self.now - began
        return result

    def finish(self) -> None:
        """Let what is under way come to its end."""
        self._wait(lambda: not self._traffic.under_way)

    def _follow(self, plan: Plan | None) -> None:
        self._plan = Following(plan)
        for region, state in enumerate(self.state):
            if state is State.HERE:
                self._offer(region)

    def _anchor(self, key: Hashable, position: int) -> None:
        """Find the place in the plan; what it does not know leaves it where it is."""
        if key is not None:
            found = self._plan.find(key)
            if self._plan.strict and found != position:
                self._result.broken = True
                self._follow(None)
            if found < 0:
                return
            position = found
        for region in self._plan.advance(position):
            if self._may_leave(region):
                self._offer(region)
        for region in self._plan.drops():
            if self._may_leave(region) and region in self.producer:
                self._drop(region)

    def _make(self, position: int, use: Use) -> None:
        result = self._result
        regions = list(dict.fromkeys((*use.regions, *use.creates)))
        need = sum(self.sizes[region] for region in regions)
        if need > self.machine.fast_bytes:
            raise infeasible(position, need, self.machine.fast_bytes)
        for region in use.creates:
            self.producer[region] = position
            self.dropped[region] = False
            self._copied[region] = False
            for source in use.regions:
                if source not in use.creates:
                    self._made_from.setdefault(source, []).append(region)
        self._ensure(position, regions)
        for region in regions:
            self._pins[region] += 1
        seconds = use.seconds / self.machine.compute
        self._compute(seconds, "compute", position)
        result.compute_s += seconds
        self._release(regions, {*use.writes, *use.creates})
        for region in use.frees:
            if self.drops and region in self.producer:
                if self.state[region] is not State.ABSENT:
                    self._drop(region)
            elif self.drops and self.state[region] is not State.ABSENT:
                self._kept.append(region)
            else:
                self._forget(region)

    def _release(self, regions: Iterable[int], written: Iterable[int]) -> None:
        for region in written:
            self.dirty[region] = True
        for region in regions:
            self._pins[region] -= 1
            self._clock += 1
            self._stamp[region] = self._clock
            self.last_used[region] = self.now
            if self._may_leave(region):
                self._offer(region)

    # Getting regions

    def _ensure(self, position: int, regions: Sequence[int]) -> None:
        """Wait until all ``regions`` are here; make those again that were dropped."""
        missing = [r for r in regions if self.dropped[r] and self.state[r] is State.ABSENT]
        if missing:
            self._recompute(position, missing, regions)
        self._fetch(position, regions)

    def _fetch(self, position: int, regions: Sequence[int]) -> None:
        absent = [region for region in regions if self.state[region] is not State.HERE]
        for region in regions:
            self._pins[region] += 1
        if absent:
            began = self.now
            for region in absent:
                self._wanted[region] = True
                if self.state[region] is State.ABSENT:
                    self._result.faults += self._copied[region]
                    self._urgent.append(region)
            self._wait(lambda: all(self.state[region] is State.HERE for region in absent), position)
            for region in absent:
                self._wanted[region] = False
            self._result.stall_s += self.now - began
        for region in regions:
            self._pins[region] -= 1
            self._prefetched[region] = False

    def _recompute(self, position: int, missing: Sequence[int], beside: Sequence[int]) -> None:
        """Make ``missing`` again, from what they were made of, and so on."""
        held = [region for region in beside if self.state[region] is State.HERE]
        for region in held:
            self._pins[region] += 1
        made = 0
        for wanted in missing:
            stack: list[tuple[int, list[int]]] = [(wanted, held)]  # with who holds the result
            waits: dict[int, list[int]] = {}  # region -> what was made for it
            while stack:
                region, holder = stack[-1]
                if self.state[region] is State.HERE:
                    stack.pop()
                    continue
                sources = self.sources(region)
                own = waits.setdefault(region, [])
                gone = [r for r in sources if self.dropped[r] and self.state[r] is State.ABSENT]
                if gone:  # the latest first: it needs most room on its way
                    gone.sort(key=lambda source: self.producer[source])
                    stack += [(source, own) for source in gone]
                    continue
                made += 1
                if made > _MOST_RECOMPUTED * len(self._uses):
                    raise BudgetError(
                        f"use {position} of the step does not come to an end: what it needs is "
                        "dropped again as fast as it is made; raise the budget"
                    )
                self._again(position, region, sources)
                self._release(waits.pop(region), ())
                self._pins[region] += 1
                holder.append(region)
                stack.pop()
        self._release(held, ())

    def _again(self, position: int, region: int, sources: Sequence[int]) -> None:
        """Make ``region`` from ``sources``, none of which is dropped."""
        self._copied[region] = False
        self.dropped[region] = False
        self._fetch(position, [*sources, region])
        for source in (*sources, region):
            self._pins[source] += 1
        seconds = self.cost(region)
        self._compute(seconds, "recompute", self.producer[region])
        self._result.recompute_s += seconds
        self._release((*sources, region), (region,))

    def _drop(self, region: int) -> None:
        """See [Note: the three ways out]."""
        self._forget(region)
        self.dropped[region] = True

    def _forget(self, region: int) -> None:
        """The region's bytes are wanted by nobody any more."""
        self.dirty[region] = False
        self._copied[region] = False
        if self.state[region] is State.WRITING or self.state[region] is State.READING:
            self._doomed[region] = True
        elif self.state[region] is State.HERE:
            self._leave(region)

    def _leave(self, region: int) -> None:
        if self._prefetched[region]:
            self._prefetched[region] = False
            self._result.wasted_bytes += self.sizes[region]
        self.state[region] = State.ABSENT
        self._taken -= self.sizes[region]

    # Time

    def _compute(self, seconds: float, what: str, position: int) -> None:
        """Let ``seconds`` of work pass, with transfers beside it where the machine can."""
        began, left = self.now, seconds
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
        if self.record and seconds:
            self.spans.append(Span(began, self.now, what, position, 0))

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
        if self.record:
            what = "read" if transfer.reading else "write"
            self.spans.append(Span(transfer.start, self.now, what, region, nbytes))
        self.state[region] = State.HERE
        if transfer.reading:
            self._result.bytes_in += nbytes
            if transfer.planned:
                self._prefetched[region] = True
                self._result.prefetched_bytes += nbytes
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
        elif self._may_leave(region):
            self._offer(region)

    # What the link does next

    def _dispatch(self) -> None:
        """Let idle workers begin what is due: first what somebody waits for, then what is planned.

        A machine without overlap begins planned transfers too, but only between uses: there nothing
        computes meanwhile.
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
        if self.victims is not None:
            chosen = self.victims.choose(self)
            if chosen is None:
                return False
            if chosen[1]:
                self._drop(chosen[0])
                return True
            self._evict(chosen[0])
            return True
        victim = self._last_used()
        if victim < 0:
            return False
        self._evict(victim)
        return True

    def _last_used(self, later_than: int = -1) -> int:
        """Return what is used last by the plan, then longest ago; -1 if nothing may leave."""
        while self._heap:
            following, _, region, version = self._heap[0]
            if version != self._version[region] or not self._may_leave(region):
                heappop(self._heap)  # it is offered again when that changes
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
                return False  # room is on its way, or there is time to wait for it
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
        self._traffic.begin(Transfer(region, size, True, delay, planned, self.now))

    def _evict(self, region: int) -> None:
        size = self.sizes[region]
        if not self.dirty[region]:
            self._leave(region)
            return
        self.state[region] = State.WRITING
        self._leaving += size
        delay = self.machine.link.latency_s + self._let_go(region)
        self._traffic.begin(Transfer(region, size, False, delay, False, self.now))

    def _let_go(self, region: int) -> float:
        """Ready a region that is here for its write; return the seconds that takes."""
        return 0.0
