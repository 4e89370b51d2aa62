"""The loss scale of half precision, for gradients that have left the accelerator.

`torch.amp.GradScaler` unscales ``p.grad``, and finds none where a `HostOptimizer` has taken them to
the host. `GradScaler` here is the same object, with the same schedule and ``state_dict``; it asks
that optimizer whether its gradients are finite, and has it unscale them as it reads them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from dynoffload.optim.optimizer import HostOptimizer


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for a `HostOptimizer`, and for any other optimizer as it is.

    Gradients may be float16, which torch's own refuses to unscale: they are read as float32 first,
    so that nothing is lost. ``device`` is the accelerator of this machine where there is one, and
    else the CPU.
    """

    def __init__(self, device: str | None = None, *args: Any, **kwargs: Any) -> None:
        here = torch.accelerator.current_accelerator(check_available=True)
        super().__init__(device or (here.type if here is not None else "cpu"), *args, **kwargs)

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
        """See `torch.amp.GradScaler.step`; gradients of a step that is skipped are dropped."""
        if not isinstance(optimizer, HostOptimizer):
            return super().step(optimizer, *args, **kwargs)
        if not self._enabled:
            value: float | None = optimizer.step(*args, **kwargs)
            return value
        with optimizer.scaled():
            return super().step(optimizer, *args, **kwargs)
