"""`HostOptimizer`, an optimizer with its state on the host, and a matching loss scaler."""

from dynoffload.host_optimizer.optimizer import HostOptimizer
from dynoffload.host_optimizer.scaler import GradScaler

__all__ = ["GradScaler", "HostOptimizer"]
