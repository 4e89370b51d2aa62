"""Simulates the runtime's training under a budget, from recorded plain steps.

`Training` runs the steps of a `Network` on a `SimulatedPager`. Parameters, gradients and optimizer
state are in regions of whole pages; saved activations are in chunks filled in order. Updates are
deferred to their parameter's next use. Plans are made when forward and backward begin, from
reference strings built by the runtime's own code (`dynoffload.planning.reference`). Not simulated:
loops with more than forward, backward, step and dropping gradients; parameters that are paged by
slices or have external references.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from dynoffload.errors import BudgetError, ConfigError
from dynoffload.planning.lookahead import LookAhead
from dynoffload.planning.reference import (
    Reference,
    Saved,
    Visit,
    visits_made,
)
from dynoffload.planning.schedule import Schedule
from dynoffload.planning.small_modules import SHARE
from dynoffload.simulation.chunks import Chunks
from dynoffload.simulation.fast_memory import StepResult
from dynoffload.simulation.machine import Machine
from dynoffload.simulation.overhead import Division, Phase, RuntimeOverhead
from dynoffload.simulation.pager import SimulatedPager
from dynoffload.simulation.recorded import Network, Piece, Recorded


@dataclass(eq=False)
class Slot:
    """One paged parameter with its regions; a `dynoffload.planning.reference.Held`.

    Attributes:
        number: number of the parameter.
        region: region of its bytes.
        nbytes: its bytes.
        gradient: region of its gradient, None if it is not trained.
        states: regions of its optimizer state.
        has_gradient: whether a gradient exists now.
    """

    number: int
    region: int
    nbytes: int
    gradient: int | None = None
    states: dict[str, int] = field(default_factory=dict)
    has_gradient: bool = False
    is_slice: bool = False
    is_flat: bool = False
    owed: int | None = None

    def update_regions(self) -> list[int]:
        """Return the regions that an update reads or writes."""
        gradient = [] if self.gradient is None else [self.gradient]
        return [self.region, *gradient, *self.states.values()]


@dataclass(frozen=True, eq=False)
class Unit:
    """A module that owns paged parameters."""

    index: int
    path: str
    slots: tuple[Slot, ...]
    beside: tuple[Slot, ...] = ()
    members: tuple[str, ...] = ()


class Training:
    """A simulated training run under a budget.

    Args:
        network: the network's parameters and owners.
        division: division of the budget.
        machine: its link, workers and interference; the pool's size is from ``division``.
        prefetch: whether to plan ahead; otherwise everything is on demand.
        work: the runtime's own costs.

    Attributes:
        pager: the simulated pager.
        units: modules that own paged parameters, by path.
        reference: the current reference string.
        phases: phases of the last step: forward, backward, and the optimizer.
        chunks: chunks of saved activations.

    Raises:
        ConfigError: no parameter is large enough to be paged.
    """

    def __init__(
        self,
        network: Network,
        division: Division,
        machine: Machine,
        *,
        prefetch: bool,
        work: RuntimeOverhead | None = None,
    ) -> None:
        self.division, self.work = division, work or RuntimeOverhead()
        self._prefetch = prefetch
        self._capacity = division.pool_bytes - division.reserve_bytes
        machine = machine.with_fast(division.pool_bytes)
        self.pager = SimulatedPager(
            machine,
            division.page_bytes,
            division.reserve_bytes,
            self.work.move_s(division.page_bytes),
        )
        self._slots: dict[int, Slot] = {}
        for number, one in enumerate(network.parameters):
            least = division.min_trained_bytes if one.trained else 0
            if one.nbytes >= max(least, division.min_paged_bytes):
                self._adopt(number, one.nbytes, trained=one.trained)
        if not self._slots:
            raise ConfigError(
                f"no parameter has {division.min_paged_bytes} bytes, so none is paged: there is "
                "nothing to simulate; lower min_paged_bytes"
            )
        self.units: dict[str, Unit] = {}
        inside: set[str] = set()  # owners in units begun above them
        for path, owners in _in_order(network).items():
            if inside.issuperset(owners):
                continue
            own = {owner: self._paged(network.owners[owner]) for owner in owners}
            members = tuple(owner for owner, slots in own.items() if slots)
            together = tuple(dict.fromkeys(slot for owner in members for slot in own[owner]))
            small = sum(slot.nbytes for slot in together) <= division.pool_bytes // SHARE
            if len(members) > 1 and small:
                self.units[path] = Unit(len(self.units), path, together, members=members)
                inside.update(owners)
            elif slots := self._paged(network.owners.get(path, ())):
                self.units[path] = Unit(len(self.units), path, tuple(slots), members=(path,))
        self._unit_at = {p: unit for unit in self.units.values() for p in unit.members} | self.units
        self.chunks = Chunks(self.pager, division, self._open_chunk)
        self._saved = Saved(division.chunk_bytes)
        self.reference: Reference[Slot] = Reference()
        self._position = 0
        self._pending: dict[Slot, Recorded] = {}
        self._begun: set[Slot] = set()  # slots that had an update
        self._visits: list[tuple[Unit, list[int]]] = []
        self._order: list[Unit] = []
        self._outstanding: list[Visit[Slot]] = []
        self._in_backward = False
        self._update_rate = 0.0  # seconds per byte of a parameter
        self.phases: list[Phase] = []
        self._counts = Counter[str]()

    def _adopt(self, number: int, nbytes: int, *, trained: bool) -> None:
        region = self.pager.allocate(nbytes)
        self.pager.acquire([region])
        slot = self._slots[number] = Slot(number, region, nbytes)
        if trained:
            slot.gradient = self.pager.allocate(nbytes)

    def _paged(self, numbers: Sequence[int]) -> list[Slot]:
        return [self._slots[number] for number in numbers if number in self._slots]

    # A step

    def step(self, step: Recorded, predicted: Sequence[str] | None = None) -> StepResult:
        """Simulate a step and return its result.

        Args:
            step: the recorded step.
            predicted: paths of the units forward is predicted to visit; None: those of the last.
        """
        began, result = self.pager.now, self.pager.begin_step()
        self._counts, self.phases = Counter(), []
        completed = step.completed
        updated = sum(slot.nbytes for number, slot in self._slots.items() if number in completed)
        self._update_rate = step.update_s / max(1, updated)
        self._begin_forward(predicted)
        for piece in step.forward:
            self._forward(step, piece)
        self._end_forward()
        self._end_phase("forward", began, result)
        for piece in step.backward:
            self._backward(step, piece)
        self._end_phase("backward", began, result)
        self._end_backward(step)
        self._end_phase("optimizer", began, result)
        result.seconds = self.pager.now - began
        return result

    def _end_phase(self, name: str, began: float, result: StepResult) -> None:
        before = self.phases
        phase = Phase(
            name,
            self.pager.now - began - sum(one.seconds for one in before),
            self._counts,
            result.faults - sum(one.faults for one in before),
            result.beside_s - sum(one.beside_s for one in before),
        )
        self._counts = Counter()
        self.phases.append(phase)

    def _begin_forward(self, predicted: Sequence[str] | None) -> None:
        self._visits, self._in_backward = [], False
        order = self._order
        if predicted is not None:
            order = self._units_of(predicted)
        if self._prefetch and order:
            regions = self.chunks.next_regions(self._saved.chunks_needed(order))
            visits = self._saved.visits(order, regions)
            reference: Reference[Slot] = Reference()
            reference.add_forward(visits, lambda slot: slot in self._pending)
            reference.add_return(visits, [Visit(unit) for unit in order])
            self._follow(reference)

    def _units_of(self, paths: Sequence[str]) -> list[Unit]:
        """Return the units of modules in order, each once for all members that it runs."""
        found: list[Unit] = []
        within: set[str] = set()  # members of the last that were found
        for path in paths:
            if found and path in found[-1].members and path not in within:
                within.add(path)
            elif (unit := self._unit_at.get(path)) is not None:
                found.append(unit)
                within = {path}
        return found

    def _forward(self, step: Recorded, piece: Piece) -> None:
        for path in piece.visits:
            unit = self.units.get(path)
            if unit is not None:
                self._visit(unit)
        for storage in piece.saves:
            owner = step.owned.get(storage)
            if owner in self._slots:
                continue  # a paged parameter is saved by reference
            nbytes = step.saved[storage]
            whole = step.whole.get(storage, nbytes)
            copied = self.chunks.save(storage, nbytes, whole, own=owner is not None)
            self._work(save_s=1, copy_s=copied)
        self._access(piece.parameters, ())
        self.pager.work(piece.seconds)

    def _visit(self, unit: Unit) -> None:
        self._close_visit()
        self._visits.append((unit, []))
        self._anchor(self.reference.forward.get(unit.index))
        self._work(visit_s=1)
        for slot in unit.slots:
            if slot in self._pending:
                self._update(slot)
        self.pager.touch([slot.region for slot in unit.slots])

    def _close_visit(self) -> None:
        saved = self.chunks.take_saved()
        if self._visits:
            self._saved.note(self._visits[-1][0].index, saved)

    def _open_chunk(self, region: int) -> None:
        if self._visits:
            self._visits[-1][1].append(region)

    def _end_forward(self) -> None:
        self.chunks.end_forward()
        self._close_visit()
        self._order = [unit for unit, _ in self._visits]
        self._outstanding += visits_made(self._visits)

    def _backward(self, step: Recorded, piece: Piece) -> None:
        for number in piece.borrows:
            slot = self._slots.get(number)
            if slot is not None:
                self._borrow(slot)
        chunks = []
        for storage in piece.reads:
            region = self.chunks.ask(storage)
            self._work(ask_s=1)
            if region is not None:
                chunks.append(region)
        self._access(piece.parameters, tuple(dict.fromkeys(chunks)))
        self.pager.work(piece.seconds)
        for storage in piece.ends:
            self.chunks.end(storage)
        for number in piece.completes:
            slot = self._slots.get(number)
            if slot is not None:
                self._collect(slot)

    def _borrow(self, slot: Slot) -> None:
        if not self._in_backward:
            self._in_backward = True
            visits, self._outstanding = self._outstanding, []
            if self._prefetch and visits:
                reference: Reference[Slot] = Reference()
                reference.add_return(visits, [Visit(unit) for unit in self._order])
                self._follow(reference)
        self._anchor(self.reference.backward.get(slot.region))
        self.pager.touch([slot.region])
        self._work(ask_s=1)

    def _collect(self, slot: Slot) -> None:
        """Move a complete gradient into its region."""
        assert slot.gradient is not None
        self.chunks.settle()
        self.pager.acquire([slot.gradient])
        slot.has_gradient = True
        self._work(copy_s=slot.nbytes)

    def _end_backward(self, step: Recorded) -> None:
        for slot in self._slots.values():
            if not slot.has_gradient:
                continue
            slot.has_gradient = False
            self._work(settle_s=1)
            self._pending[slot] = step
            if slot not in self._begun and step.states.get(slot.number):
                self._update(slot)  # the first update, which creates the state, is not deferred
            else:
                self.pager.lock(slot.update_regions())
            self._begun.add(slot)
        self.chunks.settle()
        self._outstanding.clear()

    # Updates

    def _update(self, slot: Slot) -> None:
        """Apply the pending update."""
        step, pager = self._pending.pop(slot), self.pager
        regions = slot.update_regions()
        pager.unlock(regions)
        pager.acquire(regions, pin=True)
        self._work(update_s=1)
        pager.work(slot.nbytes * self._update_rate)
        pager.unpin(regions)
        for key, nbytes in step.states.get(slot.number, {}).items():
            if key not in slot.states and nbytes >= min(self.division.min_paged_bytes, slot.nbytes):
                slot.states[key] = pager.allocate(nbytes)
                pager.acquire([slot.states[key]])
                self._work(copy_s=nbytes)
        assert slot.gradient is not None
        pager.discard(slot.gradient)

    def _work(self, **done: int) -> None:
        """Simulate the runtime's own work: counts of operations by the names in `COSTS`."""
        self._counts.update(done)
        self.pager.work(self.work.seconds(done), own=True)

    # Plans

    def _follow(self, reference: Reference[Slot]) -> None:
        resident = self.pager.resident()
        used = (r for use in reference.uses for r in (*use.regions, *use.creates))
        count = 1 + max(max(used, default=0), max(resident, default=0))
        sizes = [self.pager.size(region) for region in range(count)]
        try:
            dirty = [region for region in resident if region not in reference.frozen]
            schedule = LookAhead().plan(reference.uses, sizes, self._capacity, resident, dirty)
        except (BudgetError, ValueError):  # plans are optional: the step runs on demand
            schedule = Schedule(())
        self._work(plan_s=len(reference.uses))
        self.pager.follow(reference.uses, schedule)
        self.reference, self._position = reference, 0

    def _anchor(self, positions: Sequence[int] | None) -> None:
        following = [p for p in positions or () if p >= self._position][:1]
        if following and following[0] != self._position:
            self._position = following[0]
            self.pager.advance(self._position)

    def _access(self, parameters: Sequence[int], chunks: Sequence[int]) -> None:
        slots = [self._slots[number] for number in parameters if number in self._slots]
        self.pager.access([*chunks, *(slot.region for slot in slots)])


def _in_order(network: Network) -> dict[str, tuple[str, ...]]:
    """Return the modules that may be units in the order of the network, with the owners in each."""
    around: dict[str, list[str]] = {}
    for nest, owners in network.nests.items():
        for owner in owners:
            around.setdefault(owner, []).append(nest)
    found: dict[str, tuple[str, ...]] = {}
    for owner in network.owners:
        for nest in around.get(owner, ()):
            found.setdefault(nest, network.nests[nest])
        found.setdefault(owner, (owner,))
    return found
