"""Simulated pager: the methods of `dynoffload.memory.device.Device`, with simulated time.

`SimulatedPager` is a `FastMemory` with the runtime's pager interface and rules. What `acquire`
takes is written, so that it is dirty then; accesses and `touch` only read. Methods renew a region's
LRU stamp, accesses do not. An access to an absent region waits for it.

[Note: places]  A resident region is either stored in slots ("staged") or mapped at its address
("placed"), where the program may write it. Only a placed region can be accessed. Placing a region
or moving it back copies no bytes, but the kernel moves it page by page. A step waits for the moves
it asks for; a transfer waits for those of the region it evicts. The real pager moves pages under
its lock, so that moves of steps and of transfers also wait for each other; here they do not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dynoffload.planning.cursor import PlanCursor
from dynoffload.planning.extents import Extents
from dynoffload.planning.schedule import Schedule, Use
from dynoffload.simulation.fast_memory import FastMemory, State
from dynoffload.simulation.machine import Machine
from dynoffload.simulation.traffic import Transfer

FAULT_LOOKAHEAD = 8
"""The most uses of the plan that a fault may skip."""
_REPEATS = 4  # tries of one operator to have all its regions placed at once


@dataclass
class _Region:
    content: int  # bytes, without padding
    page: int  # its first page in the file
    extra: bool
    placed: bool = False  # see [Note: places]
    locked: bool = False


class SimulatedPager(FastMemory):
    """A pool of pages and the regions that move in and out of it.

    Args:
        machine: the simulated machine; its ``fast_bytes`` are the size of the pool.
        page_bytes: regions are padded to this.
        reserve: bytes of the pool that plans leave free.
        move_s: seconds of moving a page to its address, or back; see [Note: places].

    Attributes:
        most_extra: peak bytes of extra regions.
    """

    def __init__(
        self, machine: Machine, page_bytes: int, reserve: int, move_s: float = 0.0
    ) -> None:
        self._page, self._move_s = page_bytes, move_s
        self._arrived = 0  # pages that transfers placed for a waiting access
        self._regions: list[_Region] = []
        self._free: list[int] = []  # indices of released regions, the latest last
        self._extents = Extents(sys.maxsize)
        self._extra = self.most_extra = 0
        # Only accesses pay the fault latency; methods wait for their transfers without it.
        self._fault_s = machine.link.fault_s
        link = replace(machine.link, fault_s=0.0)
        super().__init__([], replace(machine, link=link), reserve=reserve)

    # Regions

    def padded(self, nbytes: int) -> int:
        """Return the bytes of the pool that a region with ``nbytes`` of content takes."""
        return max(1, -(-nbytes // self._page)) * self._page

    def allocate(self, nbytes: int, *, extra: bool = False) -> int:
        """Return a new region without content; reuses the most recently released index. An
        ``extra`` region is not included in the initial size of the file."""
        padded = self.padded(nbytes)
        page = self._extents.take(padded // self._page)
        assert page is not None
        if extra:
            self._extra += padded
            self.most_extra = max(self.most_extra, self._extra)
        made = _Region(nbytes, page, extra)
        if self._free:
            region = self._free.pop()
            self.sizes[region], self._regions[region] = padded, made
            return region
        self._regions.append(made)
        self.sizes.append(padded)
        self.extend()
        return len(self.sizes) - 1

    def release(self, region: int) -> None:
        """Free a region and its index."""
        self.discard(region)
        its = self._regions[region]
        self._extents.give(its.page, self.sizes[region] // self._page)
        self._extra -= its.extra * self.sizes[region]
        self.sizes[region] = its.content = 0
        self._free.append(region)

    def size(self, region: int) -> int:
        """Return the bytes of the pool that a region takes; 0 if it does not exist."""
        return self.sizes[region]

    @property
    def file_bytes(self) -> int:
        """Return the highest end of a region in the file so far, including gaps."""
        return self._extents.high * self._page

    def discard(self, region: int) -> None:
        """Discard a region's content; the region stays allocated."""
        self.withdraw([region])
        self._regions[region].locked = False
        self._forget(region)

    # Time

    def work(self, seconds: float, *, own: bool = False) -> None:
        """Simulate work that overlaps with transfers; ``own``: the runtime's own work."""
        if seconds > 0:
            self._compute(seconds)
            if not own:
                self._result.compute_s += seconds

    # Residency

    def acquire(self, regions: Sequence[int], *, pin: bool = False) -> None:
        """Wait until all regions are placed, to be written; keep them placed if ``pin``."""
        for region in regions:
            self._pins[region] += 1
            self._renew(region)
            new = self.state[region] is State.ABSENT and not self._copied[region]
            if new and self._room() >= self.sizes[region]:
                self._bring(region, planned=False)
        self._bring_all(regions)
        for region in regions:
            self.dirty[region] = True
        if not pin:
            self.unpin(regions)

    def unpin(self, regions: Iterable[int]) -> None:
        """Unpin regions."""
        self._pin(regions, -1)
        self._dispatch()

    def touch(self, regions: Iterable[int]) -> None:
        """Announce that the regions will be used: place staged ones, without waiting."""
        for region in regions:
            self._renew(region)
            if self.state[region] is State.HERE:
                if not self._regions[region].placed and not self._regions[region].locked:
                    self._place(region)
                else:
                    self._offer(region)

    def access(self, regions: Sequence[int]) -> None:
        """Simulate an operator's access to the regions: wait for those that are not placed."""
        for _ in range(_REPEATS):
            away = [region for region in regions if not self._regions[region].placed]
            if not away:
                return
            for region in away:
                self._fault(region)

    def _fault(self, region: int) -> None:
        if self._regions[region].placed:
            return
        plan, self._result.faults = self._plan, self._result.faults + 1
        following = plan.next_use(region)
        if plan.position < following <= plan.position + FAULT_LOOKAHEAD:
            self.advance(following)
        self.work(self._fault_s, own=True)
        self._pins[region] += 1  # the waiting access runs before it may be evicted
        self._bring_all([region])
        self.unpin([region])

    def _bring_all(self, regions: Sequence[int]) -> None:
        """Wait until all are placed."""
        self._fetch(regions)
        arrived, self._arrived = self._arrived, 0
        self._move(arrived)
        for region in regions:
            if not self._regions[region].placed:
                self._place(region)

    def _place(self, region: int, *, beside: bool = False) -> None:
        """Place a region; see [Note: places]. ``beside``: a transfer does it."""
        self._regions[region].placed = True
        self._wanted[region] = False
        self._renew(region)
        if beside:
            self._arrived += self._moves(region)
        else:
            self._pins[region] += 1
            self._move(self._moves(region))
            self._pins[region] -= 1
        self._offer(region)

    def _moves(self, region: int) -> int:
        return self.sizes[region] // self._page

    def _move(self, pages: int) -> None:
        self.work(pages * self._move_s, own=True)

    def _settle(self, region: int) -> None:
        """Wait until the region is not in transfer."""
        self._wait(lambda: self.state[region] in (State.ABSENT, State.HERE))

    # Locks

    def lock(self, regions: Iterable[int]) -> None:
        """Withdraw and lock regions, because an update of them is deferred."""
        for region in regions:
            self.withdraw([region])
            self._regions[region].locked = True

    def unlock(self, regions: Iterable[int]) -> None:
        """Unlock regions, because their update is about to be applied."""
        for region in regions:
            self._regions[region].locked = False

    def withdraw(self, regions: Iterable[int]) -> None:
        """Move placed regions back to staged."""
        for region in regions:
            self._settle(region)
            if self._regions[region].placed:
                self._regions[region].placed = False
                self._pins[region] += 1
                self._move(self._moves(region))
                self._pin([region], -1)

    # The plan

    def follow(self, uses: Sequence[Use], schedule: Schedule) -> None:
        """Follow another plan, from its start."""
        self._follow(PlanCursor(uses, schedule.actions))
        self._dispatch()

    def advance(self, position: int) -> None:
        """Advance the plan to ``position``."""
        self._advance(position)
        self._dispatch()

    # Overrides of `FastMemory`

    def _leave(self, region: int) -> None:
        super()._leave(region)
        self._regions[region].placed = False

    def _arrive(self, transfer: Transfer) -> None:
        region = transfer.region
        super()._arrive(transfer)
        padding = transfer.nbytes - self._regions[region].content
        if transfer.reading:
            self._result.bytes_in -= padding
            self._renew(region)
        else:
            self._result.bytes_out -= padding
        if (
            self.state[region] is State.HERE
            and self._wanted[region]
            and not self._regions[region].locked
        ):
            self._place(region, beside=True)

    def _let_go(self, region: int) -> float:
        if not self._regions[region].placed:
            return 0.0
        self._regions[region].placed = False
        return self._moves(region) * self._move_s
