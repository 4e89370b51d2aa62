"""What a step does to a gradient as it reads it: float32, unscaled and clipped.

[Note: order]  Without a scaler a gradient is clipped in its own dtype, as
`torch.nn.utils.clip_grad_norm_` does, and then read as float32. With one it is read as float32,
unscaled, and clipped then: nothing is lost to half precision.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class GradientTransform:
    """Factors of all gradients of a step.

    Attributes:
        inverse: of the loss scale, float32 of no dimension; None where there is none.
        coefficients: of one clipping after the other, of no dimension.
    """

    inverse: torch.Tensor | None = None
    coefficients: tuple[torch.Tensor, ...] = ()

    def clipped(self, coefficient: torch.Tensor) -> GradientTransform:
        """Return the same with one more clipping."""
        return replace(self, coefficients=(*self.coefficients, coefficient))

    @property
    def is_identity(self) -> bool:
        """Whether gradients are read as they are."""
        return self.inverse is None and not self.coefficients

    def to_host(self) -> GradientTransform:
        """Return the same, for gradients on the CPU."""
        inverse = None if self.inverse is None else self.inverse.cpu()
        return GradientTransform(inverse, tuple(one.cpu() for one in self.coefficients))

    def of(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a transformed gradient of any shape, for its norm; it is not changed."""
        if self.inverse is not None:
            gradient = gradient.float() * self.inverse.to(gradient.device)
        for coefficient in self.coefficients:
            gradient = gradient * coefficient.to(gradient.device)
        return gradient

    def read(self, gradient: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        """Return a transformed flat gradient as float32; float32 and clipped ones change in place.

        Args:
            gradient: of any floating dtype; what it holds may be lost.
            scratch: float32, at least as large; for a gradient that is not float32.
        """
        if self.inverse is None:
            for coefficient in self.coefficients:
                gradient.mul_(coefficient)
        wide = gradient
        if gradient.dtype != torch.float32:
            wide = scratch[: len(gradient)].copy_(gradient)
        if self.inverse is not None:
            wide.mul_(self.inverse)
            for coefficient in self.coefficients:
                wide.mul_(coefficient)
        return wide
