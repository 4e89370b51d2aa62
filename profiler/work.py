"""What one operator asks of a machine: arithmetic, bytes, a call."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from dynoffload.profiler.trace import Operator


class Kind(str, Enum):
    """What bounds an operator."""

    CALL = "call"
    """It touches no data, as a view: the call itself."""
    MEMORY = "memory"
    """The bytes that it reads and writes."""
    PRODUCT = "product"
    """Its arithmetic, or the bytes: matrix products, convolutions, attention."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one executed operator does, wherever it runs.

    Attributes:
        name: as `Operator.name`.
        dtype: as `Operator.dtype`.
        flops: floating-point operations; None where they are not known.
        nbytes: bytes that it reads and writes.
    """

    name: str
    dtype: str
    flops: int | None
    nbytes: int

    @property
    def kind(self) -> Kind:
        """What bounds it; FLOPs that are not known count as some."""
        if self.flops != 0:
            return Kind.PRODUCT
        return Kind.MEMORY if self.nbytes else Kind.CALL


def work_of(operator: Operator) -> Work:
    """Return what ``operator`` did."""
    nbytes = operator.bytes_read + operator.bytes_written
    return Work(operator.name, operator.dtype, operator.flops, nbytes)
