"""The optimizer on the host: `HostOptimizer`, and the loss scale that knows it."""

from dynoffload.optim.optimizer import HostOptimizer
from dynoffload.optim.scaler import GradScaler

__all__ = ["GradScaler", "HostOptimizer"]
