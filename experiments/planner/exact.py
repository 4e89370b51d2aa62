"""The exact optimum of a timed plan, as a mixed-integer program that HiGHS solves.

[Note: why it is exact]  For each life of a region and each slot there is one binary variable that
says whether the region is wholly there, and one for each later touch that says whether it is on its
way in for it; room is the sum of both. Only at a touch need a fetch be over: ending it earlier
frees no room. Which part of a transfer is hidden in which slot is a continuous variable, limited by
the slots in which the region is there (a write, since the content was made) or on its way in
(fetch). The rest is exposed, and where it lies does not matter: a write's rest fits in the pause in
which its region is released, a fetch's in the one before its first slot of room, and a pause needs
no more room than the slots beside it. So each feasible plan of [Note: the model] of `problem` is a
solution with its own seconds as value, and each solution is such a plan. A call that is recomputed
is one binary variable: it gives its slot seconds and needs, and cuts what it makes into two
contents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import optimize, sparse

from dynoffload.experiments.planner.problem import Life, Problem


@dataclass(frozen=True)
class Optimum:
    """What the solver found.

    Attributes:
        seconds: of the best plan it found; None if it found none.
        bound: seconds below which no plan is.
        proven: whether they are the same, to within `TOLERANCE`.
    """

    seconds: float | None
    bound: float
    proven: bool


TOLERANCE = 1e-5
"""Relative distance of plan and bound at which a plan counts as proven optimal."""


def optimum(problem: Problem, time_limit: float = 60.0) -> Optimum:
    """Return the optimum of ``problem``, or as much as is known of it after ``time_limit`` s."""
    return _Program(problem).solved(time_limit)


class _Program:
    """Variables, each with bounds and cost, and rows ``low <= sum <= high``."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.unit = max(problem.compute_s / max(1, len(problem.uses)), 1e-30)
        self.low: list[float] = []
        self.high: list[float] = []
        self.cost: list[float] = []
        self.whole: list[bool] = []
        self.rows: list[tuple[dict[int, float], float, float]] = []
        self.seconds = [0.0] * problem.slots
        for use, slot in zip(problem.uses, problem.slot_of_use, strict=True):
            self.seconds[slot] = use.seconds / self.unit
        self.again = []
        self.call_at: dict[int, int] = {}
        for number, call in enumerate(problem.again):
            self.again.append(self.variable(1, call.seconds / self.unit, whole=True))
            slot = problem.slot_of_again[number]
            self.seconds[slot] = call.seconds / self.unit
            self.call_at[slot] = number
        for one, call in enumerate(problem.again):
            for other in range(one):
                if call.overlaps(problem.again[other]):
                    self.row({self.again[one]: 1, self.again[other]: 1}, high=1)
        self.room: list[dict[int, float]] = [{} for _ in range(problem.slots)]
        self.link: list[dict[int, float]] = [{} for _ in range(problem.slots)]
        for life in problem.lives:
            if problem.sizes[life.region]:
                _Life(self, life)
        for slot in range(problem.slots):
            number = self.call_at.get(slot, -1)
            if number >= 0:
                self.room[slot][self.again[number]] = problem.again[number].scratch
                self.link[slot][self.again[number]] = -self.seconds[slot]
            capacity = float(problem.capacity)
            scaled = {v: share / capacity for v, share in self.room[slot].items()}
            self.row(scaled, high=1.0)
            self.row(self.link[slot], high=0.0 if number >= 0 else self.seconds[slot])

    def variable(
        self, high: float, cost: float = 0.0, *, low: float = 0.0, whole: bool = False
    ) -> int:
        """Add a variable and return its number."""
        self.low.append(low)
        self.high.append(high)
        self.cost.append(cost)
        self.whole.append(whole)
        return len(self.cost) - 1

    def row(self, shares: Mapping[int, float], *, low: float | None = None, high: float) -> None:
        """Add a row; without ``low`` there is none."""
        if shares:
            self.rows.append((dict(shares), float("-inf") if low is None else low, high))

    def solved(self, time_limit: float) -> Optimum:
        """Solve it."""
        data, columns, starts = [], [], [0]
        for shares, _, _ in self.rows:
            columns += list(shares)
            data += list(shares.values())
            starts.append(len(columns))
        matrix = sparse.csr_array(
            (np.array(data, dtype=float), np.array(columns), np.array(starts)),
            shape=(len(self.rows), len(self.cost)),
        )
        rows = optimize.LinearConstraint(
            matrix, [low for _, low, _ in self.rows], [high for _, _, high in self.rows]
        )
        result: Any = optimize.milp(
            np.array(self.cost),
            integrality=np.array(self.whole, dtype=int),
            bounds=optimize.Bounds(self.low, self.high),
            constraints=rows,
            options={"time_limit": time_limit, "mip_rel_gap": TOLERANCE / 10},
        )
        compute = self.problem.compute_s
        dual = getattr(result, "mip_dual_bound", None)
        bound = compute if dual is None else compute + max(0.0, dual) * self.unit
        if result.x is None:
            return Optimum(None, bound, proven=False)
        seconds = compute + result.fun * self.unit
        return Optimum(seconds, bound, seconds <= bound * (1 + TOLERANCE))


class _Life:
    """Adds the variables and rows of one life."""

    def __init__(self, program: _Program, life: Life) -> None:
        self.program, self.life = program, life
        problem = program.problem
        size = problem.sizes[life.region]
        self.read = size / problem.read_bps / program.unit
        self.write = size / problem.write_bps / program.unit
        self.inputs = {slot: number for number, slot, makes in life.again if not makes}
        self.made = {slot: number for number, slot, makes in life.again if makes}
        resident = life.region in problem.resident
        static = set(life.slots)
        touches = sorted(static | self.inputs.keys() | self.made.keys())
        self.first = life.slots[0] if life.born else 0
        self.last = problem.slots - 1 if life.survives else max(touches, default=-1)
        self.here: dict[int, int] = {}  # slot -> whether it is wholly there
        arrivals: dict[int, int] = {}
        for slot in range(self.first, self.last + 1):
            fixed = float(slot in static)
            self.here[slot] = program.variable(1, low=fixed, whole=not fixed)
            program.room[slot][self.here[slot]] = size
        for slot in range(self.first, self.last + 1):
            if slot == self.first and life.born:
                continue
            row = {self.here[slot]: 1.0}
            high = 0.0
            if slot > self.first:
                row[self.here[slot - 1]] = -1.0
            else:
                high = float(resident)
            if slot in static or slot in self.inputs or slot in self.made:
                arrivals[slot] = program.variable(1, self.read)
                row[arrivals[slot]] = -1.0
            if slot in self.made:
                row[program.again[self.made[slot]]] = -1.0
            program.row(row, high=high)
            for where in (self.inputs, self.made):
                if slot in where:
                    program.row({self.here[slot]: -1, program.again[where[slot]]: 1}, high=0)
        self._fetches(arrivals, static)
        self._contents(arrivals, resident)

    def _fetches(self, arrivals: Mapping[int, int], static: set[int]) -> None:
        program = self.program
        coming: dict[int, dict[int, float]] = {slot: {} for slot in self.here}
        size = program.problem.sizes[self.life.region]
        for due, arrival in arrivals.items():
            later = arrival
            hidden: dict[int, float] = {}
            for slot in range(due - 1, self.first - 1, -1):
                if slot in static:
                    break
                on_its_way = program.variable(1, whole=True)
                program.row({on_its_way: 1, later: -1}, high=0)
                later = on_its_way
                coming[slot][on_its_way] = 1.0
                program.room[slot][on_its_way] = size
                most = min(self.read, program.seconds[slot])
                part = program.variable(most, -1.0)
                program.row({part: 1, on_its_way: -most}, high=0)
                program.link[slot][part] = 1.0
                hidden[part] = 1.0
            if hidden:
                program.row({**hidden, arrival: -self.read}, high=0)
        for slot, on_their_way in coming.items():
            if on_their_way:
                program.row({self.here[slot]: 1.0, **on_their_way}, high=1)

    def _contents(self, arrivals: Mapping[int, int], resident: bool) -> None:
        life, program = self.life, self.program
        begins = [
            slot for slot, modifies in zip(life.slots, life.modifies, strict=True) if modifies
        ]
        if not life.born and resident and life.region in program.problem.dirty:
            begins.insert(0, -1)
        for place, begin in enumerate(begins):
            final = place + 1 == len(begins)
            end = self.last + 1 if final else begins[place + 1]
            anew = {slot: n for slot, n in self.made.items() if begin < slot < end}
            self._content(begin, end, final, arrivals, None, anew)
            for slot, number in anew.items():
                self._content(slot, end, final, arrivals, number, {})

    def _content(
        self,
        begin: int,
        end: int,
        final: bool,
        arrivals: Mapping[int, int],
        maker: int | None,
        anew: Mapping[int, int],
    ) -> None:
        """Add the write of a content that is made in ``begin`` and modified in ``end``.

        ``maker`` is the call that makes it, if it is recomputed; ``anew`` has, by slot, the
        calls that make it anew if they are.
        """
        program = self.program
        made = {} if maker is None else {program.again[maker]: -1.0}
        sure = 1.0 if maker is None else 0.0
        needed = program.variable(1, self.write)
        wanted = [slot for slot in arrivals if begin < slot <= end]
        for slot in wanted:
            others = {program.again[n]: -1.0 for at, n in anew.items() if at <= slot}
            row = {arrivals[slot]: 1.0, needed: -1.0, **others}
            if maker is None:
                program.row(row, high=0)
            else:
                program.row({**row, program.again[maker]: 1.0}, high=1)
        if final and self.life.survives and self.last > begin:
            others = {program.again[n]: -1.0 for n in anew.values()}
            row = {self.here[self.last]: -1.0, needed: -1.0, **others}
            if maker is None:
                program.row(row, high=-1)
            else:
                program.row({**row, program.again[maker]: 1.0}, high=0)
        hidden: dict[int, float] = {}
        still: int | None = None
        for slot in range(begin + 1, min(end, self.last + 1)):
            held = program.variable(1)
            program.row({held: 1, self.here[slot]: -1}, high=0)
            if still is not None:
                program.row({held: 1, still: -1}, high=0)
            else:
                program.row({held: 1, **made}, high=sure)
            still = held
            most = min(self.write, program.seconds[slot])
            part = program.variable(most, -1.0)
            program.row({part: 1, held: -most}, high=0)
            program.link[slot][part] = 1.0
            hidden[part] = 1.0
        if hidden:
            program.row({**hidden, needed: -self.write}, high=0)
