"""Roofline model of an accelerator and of the time its operators take.

Operators are derived from a network's dimensions. Each reads its operands and writes its results
once, and takes the longer of its arithmetic and its traffic (Williams, Waterman and Patterson
2009). The time of traffic beyond the arithmetic is *exposed local* time. Rates may be infinite:
traffic over an infinite link costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dynoffload.errors import ConfigError

ELEMENT = 2
"""Bytes of an element of a weight, an activation, and a gradient as computed in backward."""


@dataclass(frozen=True)
class SharedLink:
    """A link to memory or to other devices, which several devices may share.

    Attributes:
        bytes_per_s: rate of the whole link, both directions together.
        sharers: devices that share it when all of them use it at once.
        port_bytes_per_s: the highest rate of one device.

    Raises:
        ConfigError: a rate or the number of sharers is not positive.
    """

    bytes_per_s: float
    sharers: int = 1
    port_bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        if not (self.bytes_per_s > 0 and self.port_bytes_per_s > 0 and self.sharers > 0):
            raise ConfigError(f"rates and sharers of a link must be above 0: {self}")

    @property
    def share(self) -> float:
        """Bytes per second of one device while all sharers use the link."""
        return min(self.port_bytes_per_s, self.bytes_per_s / self.sharers)

    def seconds(self, count: float) -> float:
        """Return the seconds of ``count`` bytes of one device while all sharers move as many."""
        return count / self.share


@dataclass(frozen=True)
class Accelerator:
    """One device with two tiers of memory and a network.

    Attributes:
        name: display name.
        flops_per_s: peak rate of matrix products.
        local_bytes_per_s: bandwidth of its fast memory.
        remote: link to its remote memory.
        network: link to the other devices, for the bytes that one device receives.

    Raises:
        ConfigError: a rate is not positive.
    """

    name: str
    flops_per_s: float
    local_bytes_per_s: float
    remote: SharedLink
    network: SharedLink

    def __post_init__(self) -> None:
        if not (self.flops_per_s > 0 and self.local_bytes_per_s > 0):
            raise ConfigError(f"rates of {self.name!r} must be above 0: {self}")


@dataclass(frozen=True)
class Operator:
    """One kernel: ``flops`` of arithmetic on ``local_bytes`` of local memory."""

    flops: float
    local_bytes: float


@dataclass(frozen=True)
class Work:
    """Seconds of a run of operators: arithmetic, and exposed local memory time."""

    compute_s: float
    local_s: float


def matmul(rows: float, inner: float, columns: float, batch: float = 1) -> Operator:
    """Return ``batch`` products of a ``rows x inner`` with an ``inner x columns`` matrix.

    The product for the gradient of either operand costs the same."""
    operands = rows * inner + inner * columns + rows * columns
    return Operator(2 * batch * rows * inner * columns, ELEMENT * batch * operands)


def elementwise(moved: float) -> Operator:
    """Return an operator that moves ``moved`` bytes, with negligible arithmetic."""
    return Operator(0.0, moved)


def work(operators: Iterable[Operator], accelerator: Accelerator) -> Work:
    """Return the time of ``operators`` on ``accelerator``, run one after the other."""
    compute = exposed = 0.0
    for operator in operators:
        arithmetic = operator.flops / accelerator.flops_per_s
        traffic = operator.local_bytes / accelerator.local_bytes_per_s
        compute += arithmetic
        exposed += max(0.0, traffic - arithmetic)
    return Work(compute, exposed)
