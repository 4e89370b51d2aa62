"""The optimizer on the host: `HostOptimizer`, and the loss scaler that works with it."""

from dynoffload.host_optimizer.optimizer import HostOptimizer
from dynoffload.host_optimizer.scaler import GradScaler

__all__ = ["GradScaler", "HostOptimizer"]
