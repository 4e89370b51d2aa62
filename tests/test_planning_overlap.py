"""What a schedule is for: transfers hidden behind work.

`timeline` carries a schedule out on a machine with one channel for reads and one for writes, each
of a fixed speed, which transfer in order and wait for room. The bound of the string stands beside
it: what the planner leaves on the table is the difference.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise

import pytest

from dynoffload.experiments.bound import phase_bound
from dynoffload.planning.lookahead import LookAhead
from dynoffload.planning.schedule import Kind, Schedule, Use

MIB = 1 << 20
READ, WRITE = 3.7e9, 6e9


def timeline(uses: Sequence[Use], sizes: Sequence[int], capacity: int, schedule: Schedule) -> float:
    """Return the seconds that ``uses`` take, starting with empty fast memory."""
    ready: dict[int, float] = {}
    dirty: set[int] = set()
    free, releases = capacity, list[tuple[float, int]]()
    now = read_end = write_end = 0.0
    actions = list(schedule.actions)
    queue: list[tuple[int, float]] = []

    def take(size: int, start: float) -> float | None:
        nonlocal free
        while free < size:
            if not releases:
                return None
            moment, released = heappop(releases)
            free += released
            start = max(start, moment)
        free -= size
        return start

    for position, use in enumerate(uses):
        while actions and actions[0].position <= position:
            action = actions.pop(0)
            if action.kind is Kind.FETCH:
                queue.append((action.region, now))
                continue
            moment = max(now, ready.pop(action.region))
            if action.region in dirty:
                dirty.remove(action.region)
                write_end = moment = max(write_end, moment) + sizes[action.region] / WRITE
            heappush(releases, (moment, sizes[action.region]))
        while queue:
            region, issued = queue[0]
            start = take(sizes[region], max(read_end, issued))
            if start is None:
                break
            queue.pop(0)
            ready[region] = read_end = start + sizes[region] / READ
        for region in set(use.creates) - ready.keys():
            start = take(sizes[region], now)
            assert start is not None
            ready[region] = start
        now = max(now, *(ready[region] for region in (*use.regions, *use.creates))) + use.seconds
        dirty.update(use.writes, use.creates)
        for region in use.frees:
            del ready[region]
            dirty.discard(region)
            heappush(releases, (now, sizes[region]))
    return now


def training(
    hit: int, seconds: float, steps: int = 3, layers: int = 6, experts: int = 8
) -> tuple[list[Use], list[int], list[tuple[int, int]], int]:
    """Return steps of a mixture of experts whose updates wait for the next use of each weight.

    Four regions a module (weight, gradient, two of the optimizer) and one activation a use.

    Returns:
        uses, sizes, the phases (forward, backward, ...) and the bytes of all modules.
    """
    chance = random.Random(0)
    sizes: list[int] = []

    def module(size: int) -> tuple[int, ...]:
        sizes.extend([size] * 4)
        return tuple(range(len(sizes) - 4, len(sizes)))

    network = [
        (module(16 * MIB), [module(24 * MIB) for _ in range(experts)]) for _ in range(layers)
    ]
    everything = sum(sizes)
    uses: list[Use] = []
    cuts = [0]
    pending: set[int] = set()
    for _ in range(steps):
        order = []
        for attention, expert in network:
            order += [attention, *(expert[i] for i in sorted(chance.sample(range(experts), hit)))]
        each = seconds / sum(sizes[weight] for weight, *_ in order)
        saved = []
        for weight, gradient, *state in order:
            saved.append(len(sizes))
            sizes.append(4 * MIB)
            if gradient in pending:
                touched = (weight, gradient, *state)
                uses.append(Use(touched, (), (gradient,), 0.01, (weight, *state)))
                pending.remove(gradient)
            uses.append(Use((weight,), (saved[-1],), (), each * sizes[weight] / 4))
        cuts.append(len(uses))
        for (weight, gradient, *_), activation in zip(
            reversed(order), reversed(saved), strict=True
        ):
            work = each * sizes[weight] / 2
            made = () if gradient in pending else (gradient,)
            uses.append(Use((weight, gradient, activation), made, (activation,), work, (gradient,)))
            pending.add(gradient)
        cuts.append(len(uses))
    return uses, sizes, list(pairwise(cuts)), everything


@pytest.mark.parametrize("share", [5, 8, 16])
@pytest.mark.parametrize(
    ("hit", "seconds", "slack"), [(8, 4.0, 1.02), (8, 0.8, 1.10), (2, 4.0, 1.02), (2, 0.8, 1.05)]
)
def test_step_time_stays_near_the_bound(hit: int, seconds: float, slack: float, share: int) -> None:
    """Compute-bound strings cost what the work costs; where I/O is the limit, little more."""
    uses, sizes, phases, everything = training(hit, seconds)
    capacity = everything // share
    schedule = LookAhead().plan(uses, sizes, capacity, [])
    least = sum(
        phase_bound(uses[start:stop], sizes, capacity).seconds(READ, WRITE)
        for start, stop in phases
    )
    taken = timeline(uses, sizes, capacity, schedule)
    assert least <= taken <= slack * least
    serial = sum(use.seconds for use in uses)
    serial += schedule.bytes_in / READ + schedule.bytes_out / WRITE
    assert taken < 0.95 * serial
