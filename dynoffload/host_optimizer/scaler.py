"""Loss scaler for half precision, for gradients that are on the host."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from dynoffload.host_optimizer.optimizer import HostOptimizer


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for a `HostOptimizer`; other optimizers are scaled as in torch.

    torch's version unscales ``p.grad``, which is None here. Schedule and ``state_dict`` stay
    torch's. The optimizer unscales each gradient as it reads it, in float32, so gradients may be
    float16. ``device`` defaults to the accelerator, or the CPU.
    """

    def __init__(self, device: str | None = None, *args: Any, **kwargs: Any) -> None:
        found = torch.accelerator.current_accelerator(check_available=True)
        super().__init__(device or (found.type if found is not None else "cpu"), *args, **kwargs)

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        if not isinstance(optimizer, HostOptimizer):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        finite = optimizer.unscale(inv_scale)
        return {found_inf.device: torch.full_like(found_inf, 0.0 if finite else 1.0)}

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """See `torch.amp.GradScaler.step`; gradients of a skipped step are discarded."""
        if not isinstance(optimizer, HostOptimizer):
            return super().step(optimizer, *args, **kwargs)
        if not self._enabled:
            value: float | None = optimizer.step(*args, **kwargs)
            return value
        with optimizer.scaled():
            return super().step(optimizer, *args, **kwargs)
