"""What a step makes of a gradient as it reads it: float32, unscaled and clipped.

[Note: order]  Without a scaler a gradient is clipped in its own dtype, as
`torch.nn.utils.clip_grad_norm_` would have done where it was made, and then read as float32. With
one it is read as float32, unscaled, and clipped then: nothing is lost to half precision.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Reading:
    """How gradients are read.

    Attributes:
        inverse: of the loss scale, float32 of no dimension; None where there is none.
        coefficients: that they are clipped by, one after the other, of no dimension.
    """

    inverse: torch.Tensor | None = None
    coefficients: tuple[torch.Tensor, ...] = ()

    def clipped(self, coefficient: torch.Tensor) -> Reading:
        """Return the same with one clipping more."""
        return Reading(self.inverse, (*self.coefficients, coefficient))

    @property
    def is_plain(self) -> bool:
        """Whether gradients are read as they are."""
        return self.inverse is None and not self.coefficients

    def to(self, device: torch.device) -> Reading:
        """Return the same for gradients on ``device``."""
        inverse = None if self.inverse is None else self.inverse.to(device)
        return Reading(inverse, tuple(one.to(device) for one in self.coefficients))

    def seen(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return what a gradient is by now, of any shape, for its norm; it is not changed."""
        if self.is_plain:
            return gradient
        if self.inverse is not None:
            gradient = gradient.float() * self.inverse.to(gradient.device)
        for coefficient in self.coefficients:
            gradient = gradient * coefficient.to(gradient.device)
        return gradient

    def read(self, gradient: torch.Tensor, scratch: torch.Tensor | None = None) -> torch.Tensor:
        """Return a flat gradient as float32; one that is float32 is changed in place.

        Args:
            gradient: of any floating dtype; what it holds may be lost.
            scratch: float32, for what is not; no smaller. None: new memory.
        """
        if self.inverse is None:
            for coefficient in self.coefficients:
                gradient.mul_(coefficient)
        if gradient.dtype == torch.float32:
            wide = gradient
        elif scratch is None:
            wide = gradient.float()
        else:
            wide = scratch[: len(gradient)]
            wide.copy_(gradient)
        if self.inverse is not None:
            wide.mul_(self.inverse)
            for coefficient in self.coefficients:
                wide.mul_(coefficient)
        return wide
