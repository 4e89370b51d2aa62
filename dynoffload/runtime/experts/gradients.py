"""Collects gradients of fused parameters in rows, slice by slice, skipping zero slices.

Autograd produces a fused parameter's gradient whole, mostly zeros if few experts were hit. A slice
of zeros is *clear*: it takes no memory and moves no bytes. When a gradient accumulates into an
existing one, a hook before autograd's own addition adds slice by slice and skips slices clear on
both sides.

[Note: signed zeros]  Autograd sums the contributions of several experts. Each has the parameter's
shape, with zeros for all other experts. Adding +0 turns -0 into +0. So a slice has no -0 if several
experts contributed, but may have one if only a single expert did. The same holds here.

User hooks on the parameter, and a backward that is differentiated, use autograd's own path; its
result is adopted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dynoffload.memory.device import Device
from dynoffload.runtime.adoption.fused import FusedStore, zero_slices
from dynoffload.runtime.adoption.held import is_torchs
from dynoffload.runtime.adoption.slots import Fused, Slot
from dynoffload.runtime.consumed import gradient_of
from dynoffload.runtime.interrupts import uninterrupted
from dynoffload.runtime.placing import put
from dynoffload.runtime.unseen import unseen
from dynoffload.runtime.updates.deferred_optimizer import DeferredOptimizer


class SliceGradients:
    """Writes the gradients of one call's graph into their slices of a row as they are made.
    Backward may run through the graph several times."""

    def __init__(self, gradients: FusedGradients, fused: Fused) -> None:
        self._gradients, self._fused = gradients, fused
        self._whole: torch.Tensor | None = None  # the row's tensor while backward runs
        self._row: list[int] = []
        self._only: int | None = None  # number of the only slice so far; -1: there are several

    @uninterrupted
    def put(self, number: int, gradient: torch.Tensor) -> torch.Tensor:
        """Write one slice's gradient into the row and return it; see [Note: signed zeros]."""
        if self._whole is None:
            self._row, self._only = self._gradients.row_for(self._fused), None
            self._whole = self._gradients.rows.view(self._fused, self._row)
        place = self._whole[number]
        self._gradients.make_room(self._row[number])
        if self._only is None:
            self._only = number
            return place.copy_(gradient)
        if self._only >= 0:
            self._whole[self._only].add_(0.0)
            self._only = -1
        return torch.add(gradient, 0.0, out=place)

    @uninterrupted
    def finish(self) -> torch.Tensor | None:
        """Return the parameter's gradient, or None if no slice had one."""
        whole, self._whole = self._whole, None
        return whole


class FusedGradients:
    """The gradients of one session's fused parameters.

    Args:
        rows: the parameters' rows.
        device: holds the rows.
        updates: deferred updates, which may still read gradients; None without an optimizer.
    """

    def __init__(self, rows: FusedStore, device: Device, updates: DeferredOptimizer | None) -> None:
        self.rows, self._device, self._updates = rows, device, updates

    def watch(self, fused: Fused) -> Callable[[], None]:
        """Hook in before autograd accumulates the parameter's gradient; return a function that ends
        this.

        The caller must keep that function: the accumulation node lives only while a graph or Python
        references it. Its own hook's reference is a cycle, which the garbage collector frees.
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
        """Return a row for a new gradient, with all slices clear."""
        row = self.rows.free_row(fused)
        if self._updates is not None:
            for slot in fused.slots:
                self._updates.pending.vacate(slot, row[slot.number])
        self._device.clear(row)
        return row

    def make_room(self, region: int) -> None:
        """Make ``region`` resident without fetching or zeroing it: it will be overwritten whole."""
        self._device.discard(region)
        self._device.acquire([region])

    @unseen
    def adopt(self, fused: Fused) -> None:
        """Move the gradient that autograd has made into a row; zero slices become clear."""
        gradient = gradient_of(fused.parameter)
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
        """Accumulate a gradient in place of autograd; return whether this was done."""
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
        """Add ``gradient``, stored in ``row`` unless that is None, to ``held`` in ``place``."""
        empty = self._device.is_clear(place)
        if row is not None:
            nothing = self._device.is_clear(row)
        else:
            nothing = zero_slices(fused, gradient, at_once=not self._device.serves)
        parts = zip(fused.slots, fused.parts(held.detach()), fused.parts(gradient), strict=True)
        for slot, ours, theirs in parts:
            number = slot.number
            adds_zero = nothing[number]
            if adds_zero and empty[number]:
                continue
            if row is not None and not adds_zero:
                self._device.acquire([row[number]])
            self._settle(slot, place[number])
            if empty[number]:
                self.make_room(place[number])
                torch.add(theirs, 0.0, out=ours)
            else:
                ours.add_(0.0 if adds_zero else theirs)
        torch.autograd.graph.increment_version(held)

    def _settle(self, slot: Slot, region: int) -> None:
        """Make the pending update that still has to read the gradient in ``region``."""
        if self._updates is not None and slot.owed == region:
            self._updates.pending.flush(slot)
