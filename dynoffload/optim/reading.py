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
        coefficient: that they are clipped by, of no dimension; None where they are not.
    """

    inverse: torch.Tensor | None = None
    coefficient: torch.Tensor | None = None

    def to(self, device: torch.device) -> Reading:
        """Return the same for gradients on ``device``."""
        inverse, coefficient = (
            None if one is None else one.to(device) for one in (self.inverse, self.coefficient)
        )
        return Reading(inverse, coefficient)

    def read(self, gradient: torch.Tensor, scratch: torch.Tensor | None = None) -> torch.Tensor:
        """Return a flat gradient as float32; one that is float32 is changed in place.

        Args:
            gradient: of any floating dtype; what it holds may be lost.
            scratch: float32, for what is not; no smaller. None: new memory.
        """
        if self.inverse is None and self.coefficient is not None:
            gradient.mul_(self.coefficient)
        if gradient.dtype == torch.float32:
            wide = gradient
        elif scratch is None:
            wide = gradient.float()
        else:
            wide = scratch[: len(gradient)]
            wide.copy_(gradient)
        if self.inverse is not None:
            wide.mul_(self.inverse)
            if self.coefficient is not None:
                wide.mul_(self.coefficient)
        return wide
