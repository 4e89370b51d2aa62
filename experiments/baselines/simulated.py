"""Policies of other systems that move what is there, to be simulated beside the runtime.

Strict replay of the last order (`Replay`) and paging in hardware (`UnifiedMemory`); by intervals
and with recomputation stand in `intervals` and `recomputing`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dynoffload.planning.schedule import Use
from dynoffload.simulation.execution import Execution, Plan
from dynoffload.simulation.fast_memory import StepResult
from dynoffload.simulation.machine import Machine
from dynoffload.simulation.policies import Shaped, Strategy, planned
from dynoffload.simulation.workload import Step, Workload
from dynoffload.units import MiB


@dataclass
class Replay(Strategy):
    """Prefetch by the order that the last step recorded, as ZeRO-Infinity's engine does.

    The first operator out of order ends the prefetch of the step; the next step runs without one
    and is recorded anew (Rajbhandari et al., SC 2021, and its implementation in DeepSpeed).
    """

    name: str = "replay"
    _last: Step | None = None

    def plan(self, number: int, execution: Execution) -> Plan | None:
        """See `Strategy.plan`."""
        return None if self._last is None else planned(self._last, execution, strict=True)

    def observe(self, step: Step, result: StepResult) -> None:
        """See `Strategy.observe`."""
        self._last = None if result.broken else step


@dataclass
class UnifiedMemory(Strategy):
    """Paging in hardware, as by unified virtual memory: by pages, on demand, the oldest leaves.

    Each page that an operator waits for costs the link's ``fault_s``. Read-ahead is the page: a
    fault on 4 KiB brings all ``page_bytes`` around it.

    Attributes:
        page_bytes: what moves at a time.
    """

    name: str = "unified memory"
    page_bytes: int = 2 * MiB

    def shaped(self, workload: Workload, machine: Machine) -> Shaped:
        """See `Strategy.shaped`."""
        # Pages are numbered by the largest size of each region: they are the same in all steps.
        split = [paged(step, workload.sizes, self.page_bytes) for step in workload.steps]
        persistent, first, there = set(workload.persistent), 0, list[int]()
        for region, nbytes in enumerate(workload.sizes):
            count = max(1, -(-nbytes // self.page_bytes))
            if region in persistent:
                there += range(first, first + count)
            first += count
        return Shaped([step for step, _ in split], [pages for _, pages in split], there)


def paged(step: Step, sizes: Sequence[int], page: int) -> tuple[Step, list[int]]:
    """Return ``step`` with every region split into pages, each a region itself, and their sizes.

    An operator touches the pages of its regions side by side, one after the other, and works on
    each for its share of the time. So it runs however little fast memory there is, as under a
    system that pages in hardware.

    Args:
        step: to be split.
        sizes: bytes of each region in this step.
        page: bytes of a page.
    """
    first: list[int] = []
    split: list[int] = []
    for size in sizes:
        first.append(len(split))
        count = max(1, -(-size // page))
        split += [min(page, size - page * number) for number in range(count)]
    counts = [max(1, -(-size // page)) for size in sizes]
    uses: list[Use] = []
    keys: list[Hashable] = []
    for use, key in zip(step.uses, step.keys, strict=True):
        regions = list(dict.fromkeys((*use.regions, *use.creates)))
        most = max((counts[region] for region in regions), default=1)
        for number in range(most):
            # A region with fewer pages is met again and again, as an operand that is broadcast.
            at = {r: first[r] + number * counts[r] // most for r in regions}
            ends = number == most - 1
            uses.append(
                Use(
                    regions=tuple(at[region] for region in regions),
                    creates=tuple(_begun(at, use.creates, uses, number)),
                    frees=tuple(
                        first[region] + k
                        for region in (use.frees if ends else ())
                        for k in range(counts[region])
                    ),
                    seconds=use.seconds / most,
                    writes=tuple(at[region] for region in use.writes),
                )
            )
            keys.append((key, number))
    given = tuple(first[r] + k for r in step.given for k in range(counts[r]))
    return Step(tuple(uses), tuple(keys), dict(enumerate(split)), {}, given), split


def _begun(
    at: Mapping[int, int], creates: Iterable[int], uses: Sequence[Use], number: int
) -> Iterable[int]:
    """Return the pages of ``creates`` that this part of an operator is the first to touch."""
    before = set(uses[-1].regions) if number else set()
    return (at[region] for region in creates if at[region] not in before)
