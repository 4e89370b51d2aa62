"""How gradients of fused parameters arrive: in rows, slice by slice, and only where there are any.

Autograd hands a fused parameter's gradient over whole, mostly zeros where few experts were hit. A
slice of zeros is *clear*: it takes no memory and moves no byte. Where a gradient is added to one
that is there, a hook before autograd's own addition makes it slice by slice, and passes over what
is clear on both sides.

[Note: signed zeros]  Autograd sums what several experts contribute, each a tensor of the
parameter's form with zeros for all others. A sum with +0 turns -0 into +0, so a slice that one of
several experts contributed holds no -0, and one that the only expert contributed may. So it is
here.

What changes a gradient on its way, a hook of the user's on the parameter, or a backward that is to
be differentiated, goes autograd's own way; its result is adopted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dynoffload.memory.device import Device
from dynoffload.runtime.adoption.fused import FusedStore, zero_slices
from dynoffload.runtime.adoption.held import is_torchs
from dynoffload.runtime.adoption.slots import Fused, Slot
from dynoffload.runtime.interrupts import uninterrupted
from dynoffload.runtime.placing import put
from dynoffload.runtime.unseen import unseen
from dynoffload.runtime.updates.deferred_optimizer import DeferredOptimizer


class SliceGradients:
    """The gradients of one call's graph, which go to their slices of a row as they are made; as
    often as backward runs through it."""

    def __init__(self, gradients: FusedGradients, fused: Fused) -> None:
        self._gradients, self._fused = gradients, fused
        self._whole: torch.Tensor | None = None  # while backward runs

    def _begin(self) -> torch.Tensor:
        gradients, fused = self._gradients, self._fused
        self._row = gradients.row_for(fused)
        self._count = 0
        # The first, until it is known whether there are others.
        self._first: tuple[int, torch.Tensor] | None = None
        self._may_draft = fused.parameter.grad is None
        if self._may_draft:
            gradients.rows.point(fused, self._row)
        return gradients.rows.view(fused, self._row)

    @uninterrupted
    def put(self, number: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of one slice, in its place; see [Note: signed zeros]."""
        if self._whole is None:
            self._whole = self._begin()
        place = self._whole[number]
        self._gradients.make_room(self._row[number])
        self._count += 1
        if self._count == 1:
            self._first = number, place.copy_(gradient)
            return place
        if self._first is not None:
            self._first[1].add_(0.0)
            self._end_first()
        torch.add(gradient, 0.0, out=place)
        self._draft(number)
        return place

    def _end_first(self) -> None:
        if self._first is not None:
            number, self._first = self._first[0], None
            self._draft(number)

    def _draft(self, number: int) -> None:
        if self._may_draft:
            self._gradients.draft(self._fused.slots[number])

    @uninterrupted
    def finish(self) -> torch.Tensor | None:
        """Return the parameter's gradient; None: there is none."""
        if self._whole is not None:
            self._end_first()
        whole, self._whole = self._whole, None
        return whole


class FusedGradients:
    """The gradients of one session's fused parameters.

    Args:
        rows: the parameters' rows.
        device: holds them.
        updates: may still have to read gradients; None without an optimizer.
    """

    def __init__(self, rows: FusedStore, device: Device, updates: DeferredOptimizer | None) -> None:
        self.rows, self._device, self._updates = rows, device, updates

    def watch(self, fused: Fused) -> Callable[[], None]:
        """Run before autograd adds to the parameter's gradient, until what is returned is called.

        It has to be held until then, as the node that adds lives only while a graph or somebody in
        Python holds it; what its own hook holds is a cycle, which the collector ends.
        """
        nodes = [torch.autograd.graph.get_gradient_edge(fused.parameter).node]

        def arrive(gradients: tuple[torch.Tensor | None, ...]) -> Any:
            taken = gradients[0] is not None and self._take(fused, gradients[0])
            return (None,) if taken else None

        handle = nodes[0].register_prehook(arrive)

        def end() -> None:
            handle.remove()
            nodes.clear()

        return end

    def row_for(self, fused: Fused) -> list[int]:
        """Return a row for a new gradient, all clear."""
        row = self.rows.free_row(fused)
        if self._updates is not None:
            for slot in fused.slots:
                self._updates.pending.vacate(slot, row[slot.number])
        self._device.clear(row)
        return row

    def make_room(self, region: int) -> None:
        """A clear slice is about to be overwritten as a whole: bring it without its zeros."""
        self._device.discard(region)
        self._device.acquire([region])

    def draft(self, slot: Slot) -> None:
        """The gradient of a slice is probably complete."""
        if self._updates is not None:
            self._updates.speculate(slot)

    @unseen
    def adopt(self, fused: Fused) -> None:
        """Move the gradient that autograd has made into a row; clear where it is zero."""
        gradient = fused.parameter.grad
        if (
            gradient is None
            or gradient.requires_grad
            or not self.rows.may_move(fused, gradient)
            or not is_torchs(gradient)
        ):
            return
        row = self.row_for(fused)
        with torch.no_grad():
            put(gradient, self.rows.filled(fused, row, gradient))
        self.rows.point(fused, row)

    @uninterrupted
    def _take(self, fused: Fused, gradient: torch.Tensor) -> bool:
        """Do what autograd is about to do with a gradient; return whether it was done."""
        parameter = fused.parameter
        if (
            torch.is_grad_enabled()
            or parameter._backward_hooks
            or not self.rows.is_like(fused, gradient)
            or not self.rows.is_like(fused, parameter)  # converted since its forward
        ):
            return False
        row, held = self.rows.row_of(fused, gradient), parameter.grad
        if held is None:
            if row is None:
                return False
            parameter.grad = gradient.detach()
            self.rows.point(fused, row)
            return True
        place = self.rows.row_of(fused, held)
        if place is None or held.requires_grad:
            return False
        self._add(fused, held, place, gradient, row)
        return True

    def _add(
        self,
        fused: Fused,
        held: torch.Tensor,
        place: list[int],
        gradient: torch.Tensor,
        row: list[int] | None,
    ) -> None:
        """Add ``gradient``, which lies over ``row`` if that is one, to ``held``, over ``place``."""
        empty = self._device.is_clear(place)
        if row is not None:
            nothing = self._device.is_clear(row)
        else:
            nothing = zero_slices(gradient, at_once=not self._device.serves)
        for slot in fused.slots:
            number = slot.number
            adds_zero = nothing[number]
            if adds_zero and empty[number]:
                continue
            if row is not None and not adds_zero:
                self._device.acquire([row[number]])
            self._settle(slot, place[number])
            ours = held.detach()[number]
            if empty[number]:
                self.make_room(place[number])
                torch.add(gradient[number], 0.0, out=ours)
            else:
                ours.add_(0.0 if adds_zero else gradient[number])
        torch.autograd.graph.increment_version(held)

    def _settle(self, slot: Slot, region: int) -> None:
        """Make the update that still has to read the gradient in ``region``."""
        if self._updates is not None and slot.owed == region:
            self._updates.pending.flush(slot)
