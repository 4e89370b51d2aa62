"""Reference strings: the uses of regions that a sample is expected to make, in order.

Made from an order of units (predicted, or what ran) by the rules every training step follows:
forward uses parameters and makes pending updates; backward meets the units in reverse, uses their
parameters and saved activations, makes their gradients and drafts of some updates; then the next
forward begins. Each use carries a key by which the runtime finds where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dynoffload.planning.schedule import Use
from dynoffload.runtime.adoption.store import Slot
from dynoffload.runtime.adoption.units import Unit

Chosen = Mapping[Slot, Mapping[int, int]]
"""The slots whose updates are drafted in backward, with the twins of their regions."""

NONE: Chosen = {}


@dataclass(frozen=True)
class Visit:
    """One forward call of a unit, with the regions of the activations saved until the next."""

    unit: Unit
    chunks: tuple[int, ...] = ()


@dataclass
class Reference:
    """A reference string under construction, and where its uses are.

    Attributes:
        uses: the string.
        forward: positions of each unit's forward use, by unit index, in this sample.
        backward: positions of the use of each parameter's region in backward.
        ahead: positions of each unit's use in the forward after this one.
    """

    uses: list[Use] = field(default_factory=list)
    forward: dict[int, list[int]] = field(default_factory=dict)
    backward: dict[int, list[int]] = field(default_factory=dict)
    ahead: dict[int, list[int]] = field(default_factory=dict)

    def add_forward(
        self,
        visits: Sequence[Visit],
        pending: Callable[[Slot], bool],
        *,
        ahead: bool = False,
        drafted: Chosen = NONE,
    ) -> None:
        """Add a forward over ``visits``; updates of ``pending`` slots are made at first use.

        Args:
            visits: in order.
            pending: whether a slot's update waits.
            ahead: it follows after the backward of this sample.
            drafted: the slots whose updates that backward has made, on twins.
        """
        index = self.ahead if ahead else self.forward
        done: set[Slot] = set()
        born: set[int] = set()
        for visit in visits:
            regions: list[int] = []
            frees: list[int] = []
            for slot in visit.unit.slots:
                if slot in drafted:
                    regions.append(drafted[slot][slot.region])
                    continue
                regions.append(slot.region)
                if slot not in done and pending(slot):
                    regions += slot.states.values()
                    gradient = slot.gradient if ahead or slot.fused is None else slot.owed
                    if gradient is not None:
                        regions.append(gradient)
                        if ahead or slot.parameter.grad is None:
                            frees.append(gradient)  # else backward adds to it
                done.add(slot)
            creates = tuple(chunk for chunk in visit.chunks if chunk not in born)
            born.update(creates)
            use = tuple(regions)
            index.setdefault(visit.unit.index, []).append(len(self.uses))
            self.uses.append(Use(use, creates=creates, frees=tuple(frees), writes=use))

    def add_backward(
        self,
        visits: Sequence[Visit],
        accumulates: Callable[[Slot], bool],
        drafted: Chosen = NONE,
    ) -> None:
        """Add the backward of a forward over ``visits``, with the updates of ``drafted`` slots."""
        last: dict[int, int] = {}  # chunk -> the visit, in reverse, that uses it last
        final: dict[Slot, int] = {}  # slot -> the visit after which its gradient is complete
        for number, visit in enumerate(reversed(visits)):
            for chunk in visit.chunks:
                last[chunk] = number
            for slot in visit.unit.slots:
                final[slot] = number
        for number, visit in enumerate(reversed(visits)):
            regions = list(visit.chunks)
            creates: list[int] = []
            frees: list[int] = []
            for slot in visit.unit.slots:
                regions.append(slot.region)
                self.backward.setdefault(slot.region, []).append(len(self.uses))
                # Autograd sums the contributions of all visits before it hands the gradient over.
                if slot.gradient is None or final[slot] != number:
                    continue
                if accumulates(slot):
                    regions.append(slot.gradient)
                else:
                    creates.append(slot.gradient)
                if slot in drafted:  # the state's pages become its twins'
                    regions += slot.states.values()
                    frees += slot.states.values()
                    creates += drafted[slot].values()
            frees += [chunk for chunk in visit.chunks if last[chunk] == number]
            use = tuple(dict.fromkeys(regions))
            self.uses.append(Use(use, creates=tuple(creates), frees=tuple(frees), writes=use))
