"""The runtime's device, simulated: the verbs of `dynoffload.memory.device.Device`, and their time.

`SimulatedPager` is a `FastMemory` that is driven verb by verb, as the runtime drives its pager, and
keeps the pager's rules: what was only staged is clean and what was at its address is not; the stamp
of a region is renewed by verbs, not by accesses; whoever touches an absent region waits for it;
regions have twins.

[Note: places]  A region that is here either rests in slots ("staged") or lies at its address
("placed"), where anybody may write it. Only what is placed can be accessed. Putting it there, or
back, copies no byte, but the kernel moves page by page, and whoever asks for it waits: the step for
what it asks for itself, a transfer for what leaves by it. The real pager moves under its lock, so
that a step's moves and those of transfers wait for each other too; here they do not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dynoffload.planning.cursor import PlanCursor
from dynoffload.planning.extents import Extents
from dynoffload.planning.schedule import Schedule, Use
from dynoffload.simulation.fast_memory import FastMemory, State, StepResult
from dynoffload.simulation.machine import Machine
from dynoffload.simulation.traffic import Transfer

FAULT_LOOKAHEAD = 8
"""Uses of the plan that a fault may prove past."""
_REPEATS = 4  # times that one operator asks again for what has left while it waited for the rest


@dataclass
class _Region:
    content: int  # bytes, without what pads them
    page: int  # its first, in the file
    extra: bool
    placed: bool = False  # see [Note: places]
    locked: bool = False


class SimulatedPager(FastMemory):
    """A pool of pages and the regions that move in and out of it.

    Args:
        machine: what it runs on; its ``fast_bytes`` are the pool's.
        page_bytes: regions are padded to this.
        reserve: bytes of the pool that plans leave free.
        move_s: seconds of moving a page to its address, or back; see [Note: places].

    Attributes:
        most_extra: bytes of extra regions, at the most.
    """

    def __init__(
        self, machine: Machine, page_bytes: int, reserve: int, move_s: float = 0.0
    ) -> None:
        self._page, self._move_s = page_bytes, move_s
        self._arrived = 0  # pages that transfers have placed for who waits
        self._regions: list[_Region] = []
        self._free: list[int] = []  # numbers of regions that were released, the latest last
        self._extents = Extents(sys.maxsize)
        self._extra = self.most_extra = 0
        self._twins: dict[int, int] = {}
        # Only what an access waits for is a fault: whoever calls a verb pays its transfers alone.
        self._fault_s = machine.link.fault_s
        link = replace(machine.link, fault_s=0.0)
        super().__init__([], replace(machine, link=link), reserve=reserve)

    # Regions

    def padded(self, nbytes: int) -> int:
        """Return the bytes of the pool that a region of ``nbytes`` takes."""
        return max(1, -(-nbytes // self._page)) * self._page

    def allocate(self, nbytes: int, *, extra: bool = False) -> int:
        """Return a new region, without content; the number that was given back last comes first.
        One that is ``extra`` is not among those that the file is made for."""
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
        """End a region."""
        self.discard(region)
        its = self._regions[region]
        self._extents.give(its.page, self.sizes[region] // self._page)
        self._extra -= its.extra * self.sizes[region]
        self.sizes[region] = its.content = 0
        self._free.append(region)

    def twin(self, region: int) -> int:
        """Return the region that may trade contents with ``region``."""
        other = self._twins.get(region)
        if other is None:
            content = self._regions[region].content
            other = self._twins[region] = self.allocate(content)
        return other

    def size(self, region: int) -> int:
        """Return the bytes of the pool that a region takes; 0 if it does not exist."""
        return self.sizes[region]

    @property
    def file_bytes(self) -> int:
        """Return where the last region has ended in the file, gaps and all."""
        return self._extents.high * self._page

    def discard(self, region: int) -> None:
        """Forget a region's bytes; it stays, without content."""
        self.withdraw([region])
        self._regions[region].locked = False
        self._forget(region)

    # Time

    def begin_step(self) -> StepResult:
        """Return the numbers of the step that begins, to be filled."""
        self._result = StepResult(peak_bytes=self._taken)
        return self._result

    def work(self, seconds: float, *, own: bool = False) -> None:
        """Let the step work, beside transfers; ``own`` if it is the runtime's own work."""
        if seconds > 0:
            self._compute(seconds)
            if not own:
                self._result.compute_s += seconds

    # Residency

    def acquire(self, regions: Sequence[int], *, pin: bool = False) -> None:
        """Wait until all are at their addresses; hold them there if ``pin``."""
        for region in regions:
            self._pins[region] += 1
            self._renew(region)
            new = self.state[region] is State.ABSENT and not self._copied[region]
            if new and self._room() >= self.sizes[region]:
                self._bring(region, planned=False)
        self._bring_all(regions)
        if not pin:
            self.unpin(regions)

    def unpin(self, regions: Iterable[int]) -> None:
        """Let go of pinned regions."""
        for region in regions:
            self._pins[region] -= 1
            if self._may_leave(region):
                self._offer(region)
        self._dispatch()

    def touch(self, regions: Iterable[int]) -> None:
        """The regions are about to be used: place what is staged, wait for nothing."""
        for region in regions:
            self._renew(region)
            if self.state[region] is State.HERE:
                if not self._regions[region].placed and not self._regions[region].locked:
                    self._place(region)
                elif self._may_leave(region):
                    self._offer(region)

    def access(self, regions: Sequence[int]) -> None:
        """An operator reads or writes the regions: whatever is not placed is waited for."""
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
        self._pins[region] += 1  # whoever waits for it is woken before it may leave
        self._bring_all([region])
        self.unpin([region])

    def _bring_all(self, regions: Sequence[int]) -> None:
        """Wait until all are placed."""
        absent = [region for region in regions if self.state[region] is not State.HERE]
        began = self.now
        for region in absent:
            self._wanted[region] = True
            if self.state[region] is State.ABSENT:
                self._urgent.append(region)
        if absent:
            self._wait(lambda: all(self.state[r] is State.HERE for r in absent))
            self._result.stall_s += self.now - began
        arrived, self._arrived = self._arrived, 0
        self._move(arrived)
        for region in regions:
            if not self._regions[region].placed:
                self._place(region)

    def _place(self, region: int, *, beside: bool = False) -> None:
        """See [Note: places]; ``beside`` if a transfer does it."""
        self._regions[region].placed = self.dirty[region] = True
        self._wanted[region] = False
        self._renew(region)
        if beside:
            self._arrived += self._moves(region)
        else:
            self._pins[region] += 1
            self._move(self._moves(region))
            self._pins[region] -= 1
        if self._may_leave(region):
            self._offer(region)

    def _moves(self, region: int) -> int:
        return self.sizes[region] // self._page

    def _move(self, pages: int) -> None:
        self.work(pages * self._move_s, own=True)

    def _renew(self, region: int) -> None:
        self._clock += 1
        self._stamp[region] = self._clock

    def _settle(self, region: int) -> None:
        """Wait until it is not on its way."""
        self._wait(lambda: self.state[region] in (State.ABSENT, State.HERE))

    # Locks and twins

    def lock(self, regions: Iterable[int]) -> None:
        """Take regions from their addresses: an update of them is put off."""
        for region in regions:
            self.withdraw([region])
            self._regions[region].locked = True

    def unlock(self, regions: Iterable[int]) -> None:
        """The update is about to be made."""
        for region in regions:
            self._regions[region].locked = False

    def withdraw(self, regions: Iterable[int]) -> None:
        """Take regions from their addresses."""
        for region in regions:
            self._settle(region)
            if self._regions[region].placed:
                self._regions[region].placed = False
                self._pins[region] += 1
                self._move(self._moves(region))
                self._pins[region] -= 1
                if self._may_leave(region):
                    self._offer(region)

    def lend(self, regions: Sequence[int], twins: Sequence[int]) -> bool:
        """Give the pages of each region to its twin; False, and nothing is done, if one is not
        staged and unmodified."""
        pairs = list(zip(regions, twins, strict=True))
        if not all(self._may_lend(region, twin) for region, twin in pairs):
            return False
        for region, twin in pairs:
            self.state[region], self.state[twin] = State.ABSENT, State.HERE
            self.dirty[twin] = True
            self._renew(twin)
            self._offer(twin)
        return True

    def _may_lend(self, region: int, twin: int) -> bool:
        staged = self.state[region] is State.HERE and not self._regions[region].placed
        clean = self._copied[region] and not self.dirty[region]
        held = self._pins[region] or self._regions[region].locked
        empty = self.state[twin] is State.ABSENT and not self._copied[twin]
        return staged and clean and not held and empty

    def exchange(self, regions: Sequence[int], twins: Sequence[int]) -> None:
        """Let each region and its twin trade contents."""
        resting = (State.ABSENT, State.HERE)
        self.withdraw((*regions, *twins))
        self._wait(lambda: all(self.state[r] in resting for r in (*regions, *twins)))
        for one, other in zip(regions, twins, strict=True):
            for flags in (self.dirty, self._copied):
                flags[one], flags[other] = flags[other], flags[one]
            self.state[one], self.state[other] = self.state[other], self.state[one]
            self._stamp[one], self._stamp[other] = self._stamp[other], self._stamp[one]
            self._plan.trade(one, other)
            for region in (one, other):
                if self._may_leave(region):
                    self._offer(region)

    # The plan

    def follow(self, uses: Sequence[Use], schedule: Schedule) -> None:
        """Follow another plan, from its begin."""
        self._follow(PlanCursor(uses, schedule.actions))
        self._dispatch()

    def advance(self, position: int) -> None:
        """Progress in the plan has reached ``position``."""
        for region in self._plan.advance(position):
            if self._may_leave(region):
                self._offer(region)
        self._dispatch()

    # What differs from regions that are used operator by operator

    def _leave(self, region: int) -> None:
        super()._leave(region)
        self._regions[region].placed = False

    def _arrive(self, transfer: Transfer) -> None:
        region = transfer.region
        super()._arrive(transfer)
        padding = transfer.nbytes - self._regions[region].content
        if transfer.reading:
            self._result.bytes_in -= padding
            self._result.prefetched_bytes -= padding * transfer.planned
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
