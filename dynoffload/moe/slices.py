"""Slices, one per expert, of a parameter that stacks one matrix for each, and their gradients.

As in `dynoffload.runtime.experts.parts`, each slice's gradient is written into one tensor of the
parameter's shape as soon as it is computed. Zeros keep the sign that they have there and in torch,
whose sums over several experts turn -0 into 0.
"""

from __future__ import annotations

from typing import Protocol

import torch

from dynoffload.memory.reused import reused
from dynoffload.runtime.experts.parts import Views

_LINE = 64  # alignment in bytes of memory allocated by torch


class Sliced(Protocol):
    """Provides the slice of each expert."""

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return the slice of one expert."""


class Gathering:
    """Collects the gradients of slices into the gradient of the whole tensor.

    Args:
        like: the whole tensor.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self._like = like
        self._whole: torch.Tensor | None = None
        self._only: torch.Tensor | None = None  # the first slice, until there is another
        self._placed: set[int] = set()

    def put(self, number: int, gradient: torch.Tensor) -> torch.Tensor:
        """Store the gradient of one slice, and return it as stored."""
        known = number in self._placed
        place = self.place(number)
        if known and gradient.data_ptr() == place.data_ptr():
            return gradient
        if len(self._placed) == 1:
            self._only = place
            return place.copy_(gradient)
        if self._only is not None:
            self._only.add_(0.0)
            self._only = None
        return torch.add(gradient, 0.0, out=place)

    def place(self, number: int) -> torch.Tensor:
        """Return memory for the gradient of one slice, to be written before `put`."""
        if self._whole is None:
            self._whole = reused(self._like)
        self._placed.add(number)
        return self._whole[number]

    def offer(self, number: int, like: torch.Tensor) -> torch.Tensor | None:
        """Return memory in which a slice's gradient can be computed directly, with positive zeros;
        None if the memory's alignment, layout or dtype could change its bits.

        Args:
            number: of the slice.
            like: the slice as it was used.
        """
        if like.dtype != self._like.dtype or like.nbytes % _LINE:
            return None
        found = self.place(number)
        return found if found.is_contiguous() and not found.data_ptr() % _LINE else None

    def finish(self) -> torch.Tensor | None:
        """Return the whole gradient, None if no slice had one, and reset."""
        whole, self._whole, self._only = self._whole, None, None
        if whole is not None:
            for number in set(range(len(whole))) - self._placed:
                whole[number].zero_()
        self._placed.clear()
        return whole


class Slices(Views):
    """The slices of a tensor, (E, ...), for one call.

    Args:
        whole: the tensor.
    """

    def __init__(self, whole: torch.Tensor) -> None:
        self._gathering = Gathering(whole)
        super().__init__(whole, self._gathering)

    @property
    def gathering(self) -> Gathering | None:
        """Collects the gradients; None if no slice has one."""
        return self._gathering if self._unbound else None


def slices_of(weight: torch.Tensor | Sliced | None) -> Sliced | None:
    """Return an object that provides the slices of ``weight``: itself, unless it is a tensor."""
    return Slices(weight) if isinstance(weight, torch.Tensor) else weight
