"""Estimates of a training run before it starts: memory by tier, and the time of a step."""

from dynoffload.estimation.calibration import Calibration
from dynoffload.estimation.estimate import estimates
from dynoffload.estimation.result import Estimate

__all__ = ["Calibration", "Estimate", "estimates"]
