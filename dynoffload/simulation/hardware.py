"""One accelerator as a model sees it: how fast it computes, and how fast bytes reach it.

What it is: the numbers that time is computed from, for one device of many alike. What it is not: a
measurement of a machine, or a rule of what overlaps what. Rates may be infinite: what is behind an
infinite link costs nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dynoffload.errors import ConfigError


@dataclass(frozen=True)
class SharedLink:
    """A way to memory or to other devices, as one of those that use it sees it.

    Attributes:
        bytes_per_s: of the whole link, both directions together.
        sharers: devices that divide it when all of them use it at once.
        port_bytes_per_s: the most that one device can take of it.

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
        """Bytes per second that a device gets while all sharers use the link."""
        return min(self.port_bytes_per_s, self.bytes_per_s / self.sharers)

    def seconds(self, count: float) -> float:
        """Return how long ``count`` bytes of one device take while all sharers move as many."""
        return count / self.share


@dataclass(frozen=True)
class Accelerator:
    """One device with two tiers of memory and a network.

    Attributes:
        name: as a reader knows it.
        flops_per_s: peak rate of matrix products.
        local_bytes_per_s: of its fast memory.
        remote: to the memory that expands it.
        network: to the other devices, as bytes that one device receives.

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
