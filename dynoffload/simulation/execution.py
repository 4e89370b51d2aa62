"""Running a reference string on a machine, operator by operator.

What was used counts as modified where its use says so. Which plan it follows is a policy's
(`dynoffload.simulation.policies`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from dynoffload.planning.cursor import PlanCursor
from dynoffload.planning.schedule import Schedule, Use, infeasible
from dynoffload.simulation.fast_memory import FastMemory, State, StepResult
from dynoffload.simulation.machine import Machine


@dataclass(frozen=True)
class Plan:
    """What a policy expects of a step, and what it does about it.

    Attributes:
        keys: what each expected use is known by; the step finds its place by them.
        uses: the expected uses.
        schedule: of those.
        strict: the first use that is not the one expected ends the plan.
    """

    keys: Sequence[Hashable]
    uses: Sequence[Use]
    schedule: Schedule
    strict: bool = False


_NO_PLAN = Plan((), (), Schedule(()))


class Execution(FastMemory):
    """Steps as strings of uses.

    Attributes:
        producer: region -> position of the use of this step that created it.
    """

    def __init__(self, sizes: list[int], machine: Machine, reserve: int = 0) -> None:
        super().__init__(sizes, machine, reserve)
        self._uses: Sequence[Use] = ()
        self._strict = False
        self._places: dict[Hashable, list[int]] = {}  # of the plan's uses, by their keys
        self.producer: dict[int, int] = {}

    def resize(self, sizes: Sequence[int]) -> None:
        """Between two steps: give regions that are not in fast memory their sizes in the next."""
        for region, nbytes in enumerate(sizes):
            if self.sizes[region] != nbytes:
                assert self.state[region] is State.ABSENT
                self.sizes[region] = nbytes

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
        self._expect(plan or _NO_PLAN)
        for position, use in enumerate(uses):
            self._anchor(None if keys is None else keys[position], position)
            self._make(position, use)
        self._end()
        result.seconds = self.now - began
        return result

    def _end(self) -> None:
        """The step is over: what it created is gone."""
        for region in self.producer:
            self._forget(region)

    def _expect(self, plan: Plan) -> None:
        self._strict, self._places = plan.strict, {}
        for position, key in enumerate(plan.keys):
            self._places.setdefault(key, []).append(position)
        self._follow(PlanCursor(plan.uses, plan.schedule.actions))

    def _anchor(self, key: Hashable, position: int) -> None:
        """Find the place in the plan; what it does not know leaves it where it is."""
        if key is not None:
            places = self._places.get(key, ())
            index = bisect_left(places, self._plan.position)
            found = places[index] if index < len(places) else -1
            if self._strict and found != position:
                self._result.broken = True
                self._expect(_NO_PLAN)
            if found < 0:
                return
            position = found
        for region in self._plan.advance(position):
            if self._may_leave(region):
                self._offer(region)

    def _make(self, position: int, use: Use) -> None:
        result = self._result
        regions = list(dict.fromkeys((*use.regions, *use.creates)))
        need = sum(self.sizes[region] for region in regions)
        if need > self.machine.fast_bytes:
            raise infeasible(position, need, self.machine.fast_bytes)
        self._create(position, use)
        self._get(position, regions)
        for region in regions:
            self._pins[region] += 1
        seconds = use.seconds / self.machine.compute
        self._compute(seconds)
        result.compute_s += seconds
        self._release(regions, {*use.writes, *use.creates})
        for region in use.frees:
            self._freed(region)

    def _create(self, position: int, use: Use) -> None:
        for region in use.creates:
            self.producer[region] = position
            self._copied[region] = False

    def _freed(self, region: int) -> None:
        self._forget(region)

    def _release(self, regions: Iterable[int], written: Iterable[int]) -> None:
        for region in written:
            self.dirty[region] = True
        for region in regions:
            self._pins[region] -= 1
            self._clock += 1
            self._stamp[region] = self._clock
            if self._may_leave(region):
                self._offer(region)

    def _get(self, position: int, regions: Sequence[int]) -> None:
        """Wait until all ``regions`` are here."""
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
