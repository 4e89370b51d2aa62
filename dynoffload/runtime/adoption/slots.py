"""Records of paged parameters and their regions: whole parameters, fused ones, and slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from dynoffload.runtime.consumed import gradient_of


@dataclass(eq=False)
class Slot:
    """One paged parameter, or one slice of a fused parameter, and its regions.

    Attributes:
        name: the parameter's name in the model.
        parameter: the user's parameter object.
        region: holds its bytes.
        gradient: region of its gradient, kept across steps.
        states: regions of its optimizer state, by the optimizer's key.
        shared: whether another parameter has the same region.
        fused: the parameter that it is a slice of, or None.
        number: index of the slice.
        owed: region of the gradient that a deferred update will read; slices only.
        home: region where that gradient was made; `owed` is this region or its twin.
    """

    name: str
    parameter: nn.Parameter
    region: int
    gradient: int | None = None
    states: dict[str, int] = field(default_factory=dict)
    shared: bool = False
    fused: Fused | None = None
    number: int = 0
    owed: int | None = None
    home: int | None = None

    @property
    def is_slice(self) -> bool:
        """Whether it is a slice of a fused parameter."""
        return self.fused is not None

    @property
    def is_flat(self) -> bool:
        """Whether it is a slice of a flat parameter."""
        return self.fused is not None and self.fused.is_flat

    @property
    def has_gradient(self) -> bool:
        """Whether the parameter has a gradient now."""
        return gradient_of(self.parameter) is not None

    def update_regions(self) -> list[int]:
        """Return the regions that an optimizer update of the parameter reads and writes."""
        gradient = [] if self.gradient is None else [self.gradient]
        return [self.region, *gradient, *self.states.values()]


@dataclass(eq=False)
class Fused:
    """One parameter that is paged by slices: fused experts by expert, a *flat* one by ranges of its
    elements.

    Attributes:
        name: the parameter's name in the model.
        parameter: the user's parameter object.
        like: meta tensor with the parameter's dtype and shape at adoption.
        each: meta tensor like one slice; the last of a flat parameter may be shorter.
        row: the regions of its slices.
        slots: one per slice; `Slot.gradient` is in the row that holds the gradient.
        gradients: rows for gradients; a free one is reused before another is allocated.
        states: rows of its optimizer state, by the optimizer's key.
    """

    name: str
    parameter: nn.Parameter
    like: torch.Tensor
    each: torch.Tensor
    row: list[int]
    slots: tuple[Slot, ...] = ()
    gradients: list[list[int]] = field(default_factory=list)
    states: dict[str, list[int]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of slices."""
        return len(self.row)

    @property
    def is_flat(self) -> bool:
        """Whether operators read the parameter whole, and only its updates go slice by slice."""
        return self.each.dim() == 1

    def parts(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the slices of a contiguous tensor like the parameter."""
        if self.is_flat:
            return torch.split(tensor.view(-1), self.each.numel())
        return tensor.unbind()

    def like_of(self, number: int) -> torch.Tensor:
        """Return a meta tensor like the slice of this number."""
        left = self.like.numel() - number * self.each.numel()
        return self.each[:left] if left < self.each.numel() else self.each

    def rows(self) -> list[list[int]]:
        """Return the rows of the parameter, its gradients and its state."""
        return [self.row, *self.gradients, *self.states.values()]

    def row_with(self, region: int) -> list[int] | None:
        """Return the row that contains ``region``, or None."""
        return next((row for row in self.rows() if region in row), None)

    @property
    def slice_bytes(self) -> int:
        """Bytes of one slice."""
        return self.each.nbytes
