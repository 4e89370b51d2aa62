"""The migrator: plans prefetches and evictions, and tracks the step's position in the plan.

At the start of a sample it plans forward, backward and the next forward from a predicted order of
units. At the start of backward it plans again from what actually ran, with what activation
checkpointing computes again. In between, hooks report uses
and the migrator finds them in the plan ("anchoring"). A use missing from the plan prefetches
nothing; the device fetches its regions when they are touched.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from enum import Enum
from typing import cast

from torch import nn

from dynoffload.errors import BudgetError
from dynoffload.memory.device import Device
from dynoffload.planning.lookahead import LookAhead
from dynoffload.planning.reference import Reference, Saved, Visit, visits_made
from dynoffload.planning.schedule import Schedule
from dynoffload.runtime.adoption.slots import Slot
from dynoffload.runtime.adoption.units import Unit
from dynoffload.runtime.migration.segments import Segments
from dynoffload.runtime.passes.activations import Activations
from dynoffload.runtime.passes.hooks import in_backward
from dynoffload.runtime.passes.saved import Chunk
from dynoffload.units import format_bytes

logger = logging.getLogger(__name__)


class Phase(Enum):
    """Phase of the step."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


class Migrator:
    """Plans one session's samples and tracks their progress.

    ``pending`` holds deferred slots; ``doubts`` says of a unit of the last order whether it is
    unlikely to run in the next forward; ``in_backward``, whether updates are made in backward.
    """

    def __init__(
        self,
        device: Device,
        activations: Activations,
        pending: Container[Slot],
        doubts: Callable[[Unit], bool] = lambda unit: False,
        in_backward: Callable[[], bool] = lambda: False,
        *,
        reserve_bytes: int,
    ) -> None:
        self._doubts, self._in_backward = doubts, in_backward
        self._device, self._activations, self._pending = device, activations, pending
        self._reserve = reserve_bytes
        self.policy = LookAhead()
        self.prefetch = False  # until `set_prefetch`, every use is on demand
        self.phase = Phase.IDLE
        self.position = 0
        self.anchored = 0
        self.missed = 0
        self.last_order: list[Unit] = []
        self._visits: list[tuple[Unit, list[int]]] = []  # of this sample's forward
        self._outstanding: list[Visit[Slot]] = []  # forwards whose backward is still to come
        self._saved = Saved(activations.chunk_bytes)
        self._segments = Segments()
        self._at_once: set[nn.Module] = set()  # whose operators read all experts of a call
        self._mark = 0
        self._reference: Reference[Slot] = Reference()
        self._unplanned = False  # whether the warning about unplanned steps was logged

    # Reports from hooks

    def begin_forward(self, predicted: Sequence[Unit] | None) -> None:
        """Begin a sample; ``predicted`` is the order of its units, or None: the last order."""
        self.phase = Phase.FORWARD
        self._segments.end_backward()
        self._visits = []
        self._mark = self._activations.taken_bytes
        order = self.last_order if predicted is None else list(predicted)
        if self.prefetch and order:
            visits = self._joined(self._with_chunks(order))
            reference: Reference[Slot] = Reference(in_backward=self._in_backward())
            reference.add_forward(visits, self._pending.__contains__)
            ahead = self._joined([Visit(unit) for unit in order])
            segments = self._segments.spans(visits)
            reference.add_return(visits, ahead, self._doubtful(order), segments)
            self._follow(reference)

    def revise(self, rest: Sequence[Unit]) -> None:
        """Replan the running forward, which will continue with ``rest``.

        This plan ends with the sample's backward. The plan made when backward begins covers the
        next forward.
        """
        if self.phase is Phase.FORWARD and self.prefetch:
            under_way = [Visit(unit) for unit, _ in self._visits[-1:]]
            coming = self._joined(self._with_chunks(rest))
            reference: Reference[Slot] = Reference(in_backward=self._in_backward())
            reference.add_forward([*under_way, *coming], self._pending.__contains__)
            whole = [*self._joined(visits_made(self._visits)), *coming]
            reference.add_backward(whole, self._segments.spans(whole))
            self._follow(reference)
            for visit in under_way:  # already visited: anchor later visits of this unit only
                del reference.forward[visit.unit.index][0]

    @property
    def site(self) -> str:
        """Path of the unit that forward visited last; "" before the first."""
        return self._visits[-1][0].path if self._visits else ""

    @property
    def recomputes(self) -> bool:
        """Whether the last backward computed activations again."""
        return bool(self._segments)

    def visit(self, unit: Unit) -> bool:
        """Record that a unit's forward begins, within a forward or as activations are computed
        again in a backward; return whether this begins the backward."""
        if self.phase is Phase.FORWARD:
            self._close_visit()
            self._visits.append((unit, []))
            self._anchor(self._reference.forward.get(unit.index))
            return False
        if not in_backward():
            return False
        begins = self.phase is not Phase.BACKWARD
        if begins:
            self._begin_backward()
        if not self._segments:
            self.end_plan()  # which knows of no segments
        self._segments.ran(unit)
        self._anchor(self._reference.again.get(unit.index))
        return begins

    def visit_at_once(self, units: Sequence[Unit]) -> None:
        """Record that a call has read these experts, parameter by parameter."""
        for unit in units:
            self._at_once.add(unit.module)
            self.visit(unit)

    def leave_backward(self, region: int) -> None:
        """Record that backward has used a parameter's region, or all at once with it."""
        if self.phase is Phase.BACKWARD:
            self._anchor(self._reference.backward.get(region), after=1)

    def open_chunk(self, chunk: Chunk) -> None:
        """Record that forward saves into another chunk."""
        if self._visits:
            self._visits[-1][1].append(chunk.region)

    def end_forward(self) -> None:
        """End the sample's forward."""
        self._close_visit()
        self.last_order = [unit for unit, _ in self._visits]
        self._outstanding += visits_made(self._visits)
        self.phase = Phase.IDLE

    def drop_forward(self) -> None:
        """Drop the running forward, if any."""
        if self.phase is Phase.FORWARD:
            self.phase, self._visits = Phase.IDLE, []

    def update(self, region: int, after: int = 0) -> None:
        """Record that a slice of a flat parameter is updated next, or has been."""
        if region in self._reference.updates:
            self._anchor(self._reference.updates[region], after)

    def backward_use(self, regions: Sequence[int]) -> bool:
        """Record that backward uses a parameter's regions next; return whether this begins it."""
        if self.phase is Phase.FORWARD:
            return False  # a backward inside forward, as for a gradient penalty
        begins = self.phase is not Phase.BACKWARD
        if begins:
            self._begin_backward()
        self._anchor(self._reference.backward.get(regions[0]))
        self._device.touch(regions)
        return begins

    def end_step(self) -> None:
        """End the step: outstanding forwards have had their backward."""
        self._outstanding.clear()
        self.phase = Phase.IDLE

    def end_plan(self) -> None:
        """Cancel the plan: every use is on demand until the next plan."""
        if self._reference.uses:
            self._follow(Reference())

    def forget(self) -> None:
        """Forget plans and orders, because the model's units change."""
        self._follow(Reference())
        self._segments.forget()
        self.last_order, self._visits = [], []
        self._saved.forget()

    def set_prefetch(self, prefetch: bool) -> None:
        """Switch planning on, or make every use on demand."""
        if self.prefetch and not prefetch:
            self._follow(Reference())
        self.prefetch = prefetch

    # Plans

    def _begin_backward(self) -> None:
        self.phase = Phase.BACKWARD
        visits, self._outstanding = self._outstanding, []
        self._segments.begin_backward([cast(Unit, visit.unit) for visit in visits])
        if self.prefetch and visits:
            visits = [replace(visit, chunks=self._alive(visit.chunks)) for visit in visits]
            reference: Reference[Slot] = Reference(in_backward=self._in_backward())
            joined = self._joined(visits)
            ahead = self._joined([Visit(unit) for unit in self.last_order])
            segments = self._segments.spans(joined)
            reference.add_return(joined, ahead, self._doubtful(self.last_order), segments)
            self._follow(reference)
            for visit in joined:
                for slot in visit.together[0].slots if visit.together else ():
                    assert slot.fused is not None  # saved whole, and found by its first region
                    positions = reference.backward[slot.region]
                    reference.backward.setdefault(slot.fused.row[0], positions)

    def _joined(self, visits: Sequence[Visit[Slot]]) -> list[Visit[Slot]]:
        """Return ``visits`` with one in place of all experts of a call that reads them at once."""
        found: list[Visit[Slot]] = []
        last: Unit | None = None
        for visit in visits:
            unit = visit.unit
            assert isinstance(unit, Unit)
            if unit.number is None or unit.module not in self._at_once:
                found.append(visit)
            elif last is None or last.module is not unit.module or unit in found[-1].together:
                found.append(replace(visit, together=(unit,)))
            else:
                chunks = tuple(dict.fromkeys((*found[-1].chunks, *visit.chunks)))
                together = (*found[-1].together, unit)
                found[-1] = replace(found[-1], chunks=chunks, together=together)
            last = unit if found[-1].together else None
        return found

    def _doubtful(self, order: Sequence[Unit]) -> set[int]:
        return {unit.index for unit in order if self._doubts(unit)}

    def _alive(self, chunks: Sequence[int]) -> tuple[int, ...]:
        """Return those of ``chunks`` still in use. Tensors saved after the last parameter use are
        freed before backward's first."""
        return tuple(chunk for chunk in chunks if self._device.size(chunk))

    def _follow(self, reference: Reference[Slot]) -> None:
        resident = self._device.resident()
        known = {r for use in reference.uses for r in (*use.regions, *use.creates)}.union(resident)
        sizes = [0] * (1 + max(known, default=0))
        for region in known:
            sizes[region] = self._device.size(region)
        capacity = self._device.capacity - self._reserve
        try:
            dirty = [region for region in resident if region not in reference.frozen]
            schedule = self.policy.plan(reference.uses, sizes, capacity, resident, dirty)
        except (BudgetError, ValueError) as error:
            # A module needs more than the budget at once, though no operator does, or the order is
            # impossible. Plans are optional, so the step runs on demand.
            if not self._unplanned:
                lacking = getattr(error, "lacking", 0)
                logger.warning(
                    "such steps are not planned, and run on demand: %s",
                    f"a module's parameters, gradients, state and activations take "
                    f"{format_bytes(lacking)} more than the budget has room for at once; raise it "
                    "by that for prefetch"
                    if lacking
                    else str(error),
                )
            self._unplanned = True
            schedule = Schedule(())
        self._device.follow(reference.uses, schedule)
        self._reference = reference
        self.position = 0

    def _anchor(self, positions: list[int] | None, after: int = 0) -> None:
        if positions is None:
            self.missed += 1
            return
        index = bisect_left(positions, self.position)
        if index == len(positions):
            self.missed += 1
            return
        self.anchored += 1
        if positions[index] + after != self.position:
            self.position = positions[index] + after
            self._device.advance(self.position)

    def _close_visit(self) -> None:
        saved, self._mark = (
            self._activations.taken_bytes - self._mark,
            self._activations.taken_bytes,
        )
        if self._visits:
            self._saved.note(self._visits[-1][0].index, saved)

    def _with_chunks(self, order: Sequence[Unit]) -> list[Visit[Slot]]:
        """Return the visits of ``order`` with the chunks that they are expected to fill."""
        needed = self._saved.chunks_needed(order)
        indices = self._activations.next_indices()
        while len(indices) < needed:
            self._activations.region(len(self._activations))
            indices = self._activations.next_indices()
        regions = [self._activations.region(index) for index in indices[:needed]]
        return self._saved.visits(order, regions)
