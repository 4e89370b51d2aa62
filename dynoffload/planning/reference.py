"""Reference strings: the ordered uses of regions that a step is expected to make.

A string is built from an order of units (predicted or recorded), by the rules of every training
step. Forward uses parameters and applies pending updates. Backward visits the units in reverse,
uses their parameters and saved activations, and creates their gradients. Then the next forward
begins. The runtime and the simulated runtime both use this code: their slots and
units satisfy `Held` and `Visited`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar, cast

from dynoffload.planning.schedule import Use


class Held(Protocol):
    """One paged parameter, or one slice of it, with its regions."""

    @property
    def region(self) -> int:
        """Region of its bytes."""

    @property
    def gradient(self) -> int | None:
        """Region of its gradient; None if it is not trained."""

    @property
    def states(self) -> Mapping[str, int]:
        """Regions of its optimizer state, by the optimizer's keys."""

    @property
    def is_slice(self) -> bool:
        """Whether it is a slice; a pending update then reads its gradient from `owed`."""

    @property
    def is_flat(self) -> bool:
        """Whether it is a slice of a parameter that operators read whole, and that is updated slice
        by slice."""

    @property
    def owed(self) -> int | None:
        """Region of the gradient that a slice's pending update will read; None if that is zero."""

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient exists now, to which backward will add."""


HeldT = TypeVar("HeldT", bound=Held)
HeldT_co = TypeVar("HeldT_co", bound=Held, covariant=True)


class Visited(Protocol[HeldT_co]):
    """A module that owns paged parameters."""

    @property
    def index(self) -> int:
        """Its index among all units."""

    @property
    def slots(self) -> Sequence[HeldT_co]:
        """The parameters, or slices, that it owns."""

    @property
    def beside(self) -> Sequence[HeldT_co]:
        """What its module pages whole beside slices, which a visit of these uses too."""


@dataclass(frozen=True)
class Visit(Generic[HeldT]):
    """One forward call of a unit, with the chunks of activations saved until the next call.

    Attributes:
        unit: the unit, or the first of ``together``.
        chunks: the chunks.
        together: the experts of one call whose operators read all of them, parameter by parameter;
            empty if the unit is visited alone.
    """

    unit: Visited[HeldT]
    chunks: tuple[int, ...] = ()
    together: tuple[Visited[HeldT], ...] = ()

    @property
    def units(self) -> tuple[Visited[HeldT], ...]:
        """What is visited."""
        return self.together or (self.unit,)

    @property
    def slots(self) -> list[HeldT]:
        """The parameters, or slices, that are read."""
        return [slot for unit in self.units for slot in unit.slots]

    def parts(self, *, backward: bool = False) -> list[tuple[Visited[HeldT], Sequence[HeldT]]]:
        """Return what is read at one time, in order: a unit, and those of its slots. Operators go
        through the experts in ascending order in both directions."""
        if not self.together:
            return [(self.unit, self.unit.slots)]
        parameters = range(len(self.unit.slots))
        ordered = reversed(parameters) if backward else parameters
        return [(unit, (unit.slots[number],)) for number in ordered for unit in self.together]


@dataclass
class Reference(Generic[HeldT]):
    """A reference string under construction, with the positions of its uses.

    Attributes:
        uses: the string.
        forward: positions of each unit's forward uses, by unit index, in this sample.
        again: positions of the uses by which checkpointed activations are computed again, likewise.
        backward: positions of the backward uses of each parameter, by its region.
        ahead: positions of each unit's uses in the next forward, by unit index.
        updates: positions of the updates of flat parameters' slices, by region.
        frozen: regions of parameters that are not trained, which nobody is expected to write.
        in_backward: whether backward makes the updates, of gradients that never move.
    """

    uses: list[Use] = field(default_factory=list)
    forward: dict[int, list[int]] = field(default_factory=dict)
    again: dict[int, list[int]] = field(default_factory=dict)
    backward: dict[int, list[int]] = field(default_factory=dict)
    ahead: dict[int, list[int]] = field(default_factory=dict)
    updates: dict[int, list[int]] = field(default_factory=dict)
    frozen: set[int] = field(default_factory=set)
    in_backward: bool = False

    def _note(self, slot: HeldT) -> None:
        if slot.gradient is None:
            self.frozen.add(slot.region)

    def _add(
        self,
        use: tuple[int, ...],
        creates: Sequence[int],
        frees: Sequence[int],
        *,
        doubtful: bool = False,
    ) -> None:
        frozen = self.frozen
        writes = tuple([region for region in use if region not in frozen]) if frozen else use
        self.uses.append(Use(use, tuple(creates), tuple(frees), writes=writes, doubtful=doubtful))

    def add_forward(
        self,
        visits: Sequence[Visit[HeldT]],
        pending: Callable[[HeldT], bool],
        *,
        ahead: bool = False,
        doubtful: Container[int] = (),
    ) -> None:
        """Add a forward over ``visits``; updates of ``pending`` slots are applied at first use.

        Args:
            visits: the visits, in order.
            pending: whether a slot's update is pending.
            ahead: whether it is the forward after the backward of this sample.
            doubtful: indices of units for which nothing is fetched ahead.
        """
        index = self.ahead if ahead else self.forward
        done: set[HeldT] = set()
        frees: list[int]

        def update(slot: HeldT) -> list[int]:
            """Return what the update of ``slot`` uses beside its parameter."""
            gradient = slot.owed if slot.is_slice and not ahead else slot.gradient
            if gradient is None:
                return [*slot.states.values()]
            if ahead or not slot.has_gradient:
                frees.append(gradient)  # otherwise backward adds to it
            return [*slot.states.values(), gradient]

        born: set[int] = set()
        for visit in visits:
            creates = [chunk for chunk in visit.chunks if chunk not in born]
            born.update(creates)
            begin = len(self.uses)
            for unit, slots in visit.parts():
                for slot in slots:
                    if slot.is_flat and slot not in done and pending(slot):
                        done.add(slot)
                        frees = []
                        use = (slot.region, *update(slot))
                        self.updates.setdefault(slot.region, []).append(len(self.uses))
                        self._add(use, (), frees, doubtful=unit.index in doubtful)
                regions: list[int] = []
                frees = []
                for slot in slots:
                    regions.append(slot.region)
                    self._note(slot)
                    if slot not in done and pending(slot):
                        regions += update(slot)
                    done.add(slot)
                for slot in unit.beside:
                    regions.append(slot.region)
                    self._note(slot)
                self._add(tuple(regions), creates, frees, doubtful=unit.index in doubtful)
                creates = []
            at = len(self.uses) - 1 if visit.together else begin
            for unit in visit.units:
                index.setdefault(unit.index, []).append(at)

    def _add_again(self, visits: Sequence[Visit[HeldT]]) -> None:
        """Compute a segment again, from its input, which is saved."""
        regions = [chunk for visit in visits[:1] for chunk in visit.chunks[:1]]
        for visit in visits:
            for unit, slots in visit.parts():
                for slot in (*slots, *unit.beside):
                    regions.append(slot.region)
                    self._note(slot)
                self._add(tuple(regions), (), ())
                regions = []
            for unit in visit.units:
                self.again.setdefault(unit.index, []).append(len(self.uses) - 1)

    def add_backward(self, visits: Sequence[Visit[HeldT]], segments: Sequence[range] = ()) -> None:
        """Add the backward of a forward over ``visits``; those in each of ``segments`` are computed
        again before it goes back through them."""
        ends = {segment.stop: segment for segment in segments}
        last: dict[int, int] = {}  # chunk -> the visit, in reverse, that uses it last
        final: dict[HeldT, int] = {}  # slot -> the visit after which its gradient is complete
        for number, visit in enumerate(reversed(visits)):
            for chunk in visit.chunks:
                last[chunk] = number
            for slot in visit.slots:
                final[slot] = number
        for number, visit in enumerate(reversed(visits)):
            segment = ends.get(len(visits) - number, range(0))
            self._add_again(visits[segment.start : segment.stop])
            frees = [chunk for chunk in visit.chunks if last[chunk] == number]
            parts = visit.parts(backward=True)
            for left, (unit, slots) in enumerate(parts, 1 - len(parts)):
                regions = list(visit.chunks)
                creates: list[int] = []
                flat: list[HeldT] = []
                for slot in (*slots, *unit.beside):
                    regions.append(slot.region)
                    self._note(slot)
                    self.backward.setdefault(slot.region, []).append(len(self.uses))
                for slot in slots:
                    # Autograd sums the contributions of all visits before it accumulates the
                    # gradient.
                    if slot.gradient is None or final[slot] != number:
                        continue
                    if slot.is_flat:
                        flat.append(slot)
                        continue
                    if self.in_backward:
                        regions += slot.states.values()
                    if self.in_backward and not slot.is_slice:
                        continue
                    if slot.has_gradient:
                        regions.append(slot.gradient)
                    else:
                        creates.append(slot.gradient)
                self._add(tuple(dict.fromkeys(regions)), creates, () if left else frees)
                for slot in flat:
                    update = (slot.region, *slot.states.values()) if self.in_backward else ()
                    gradient = (cast(int, slot.gradient),)
                    if slot.has_gradient:
                        self._add((*update, *gradient), (), ())
                    else:
                        self._add(update, gradient, ())

    def add_return(
        self,
        visits: Sequence[Visit[HeldT]],
        ahead: Sequence[Visit[HeldT]],
        doubtful: Container[int] = (),
        segments: Sequence[range] = (),
    ) -> None:
        """Add the backward over ``visits`` and the next forward, over ``ahead``; for units with
        indices in ``doubtful`` nothing is fetched ahead. See `add_backward`."""
        self.add_backward(visits, segments)
        self.add_forward(ahead, self._will_pend, ahead=True, doubtful=doubtful)

    def _will_pend(self, slot: HeldT) -> bool:
        return slot.gradient is not None and not self.in_backward


class Saved:
    """Estimates the bytes that each unit's visit saves for backward, and the chunks they fill.

    Args:
        chunk_bytes: size of a chunk.
    """

    def __init__(self, chunk_bytes: int) -> None:
        self._size = chunk_bytes
        self._bytes: dict[int, float] = {}  # unit index -> bytes per visit, smoothed

    def note(self, unit: int, nbytes: int) -> None:
        """Record that a visit of the unit with this index saved ``nbytes``."""
        known = self._bytes.get(unit)
        self._bytes[unit] = nbytes if known is None else 0.5 * (known + nbytes)

    def forget(self) -> None:
        """Drop the estimates, after the units changed."""
        self._bytes.clear()

    def chunks_needed(self, order: Sequence[Visited[HeldT]]) -> int:
        """Return the estimated number of chunks that a forward over ``order`` fills."""
        return int(sum(self._bytes.get(unit.index, 0.0) for unit in order) // self._size) + 1

    def visits(self, order: Sequence[Visited[HeldT]], regions: Sequence[int]) -> list[Visit[HeldT]]:
        """Return visits of ``order``, each with the ``regions`` of the chunks it will fill."""
        visits, filled = [], 0.0
        for unit in order:
            before, filled = filled, filled + self._bytes.get(unit.index, 0.0)
            first, last = int(before // self._size), int(filled // self._size)
            visits.append(Visit(unit, tuple(regions[first : last + 1] if filled else ())))
        return visits


def visits_made(
    visited: Iterable[tuple[Visited[HeldT], Sequence[int]]],
) -> list[Visit[HeldT]]:
    """Return the visits of a forward, given each unit with the chunks opened in its visit."""
    made: list[Visit[HeldT]] = []
    reach: tuple[int, ...] = ()
    for unit, opened in visited:
        # A visit also fills the chunk that was open when it began.
        reach = (*reach[-1:], *opened)
        made.append(Visit(unit, reach))
    return made
