"""The slices of a parameter that holds one matrix for each expert, and their gradients.

As in `dynoffload.runtime.experts.parts`, the gradient of each slice goes to its place in one tensor
of the parameter's form as soon as it is made. Zeros have the sign that they have there and in
torch, whose sums of several experts turn -0 into 0.
"""

from __future__ import annotations

from typing import Protocol

import torch

from dynoffload.memory.reused import reused
from dynoffload.runtime.experts.parts import Views

_LINE = 64  # bytes that memory of torch's begins at multiples of


class Sliced(Protocol):
    """What gives an expert's slice."""

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return the slice of one expert."""


class Gathering:
    """One gradient of a whole tensor in the making.

    Args:
        like: the tensor.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self._like = like
        self._whole: torch.Tensor | None = None
        self._only: torch.Tensor | None = None  # the first slice, until there is another
        self._placed: set[int] = set()

    def put(self, number: int, gradient: torch.Tensor) -> torch.Tensor:
        """Take the gradient of one slice, and return it as it stays."""
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
        """Return memory that the gradient of one slice is written to before it is `put`."""
        if self._whole is None:
            self._whole = reused(self._like)
        self._placed.add(number)
        return self._whole[number]

    def offer(self, number: int, like: torch.Tensor) -> torch.Tensor | None:
        """Return where the gradient of a slice may be made at once, with zeros that are positive;
        None where it cannot, as its bits could depend on where it lies.

        Args:
            number: of the slice.
            like: the slice as it was used.
        """
        if like.dtype != self._like.dtype or like.nbytes % _LINE:
            return None
        found = self.place(number)
        return found if found.is_contiguous() and not found.data_ptr() % _LINE else None

    def finish(self) -> torch.Tensor | None:
        """Return the gradient of the whole, None if no slice had one, and begin anew."""
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
        """What gathers gradients; None where nothing has one."""
        return self._gathering if self._unbound else None


def slices_of(weight: torch.Tensor | Sliced | None) -> Sliced | None:
    """Return what gives the slices of ``weight``: itself, unless it is a tensor."""
    return Slices(weight) if isinstance(weight, torch.Tensor) else weight
