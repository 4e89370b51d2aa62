"""The roofline: what operators cost by their arithmetic and by the bytes they touch.

What it is: operators as counts of FLOPs and of bytes of local memory, and the seconds of both on an
accelerator. What it is not: traced operators; these are written down from a network's dimensions.

Each operator reads its operands and writes its results once, and lasts as long as the slower of
its arithmetic and its traffic (Williams, Waterman and Patterson 2009). What traffic takes beyond
its arithmetic is *exposed local* time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dynoffload.simulation.hardware import Accelerator


@dataclass(frozen=True)
class Operator:
    """One kernel: ``flops`` of arithmetic on ``local_bytes`` of local memory."""

    name: str
    flops: float
    local_bytes: float


@dataclass(frozen=True)
class Work:
    """Seconds of a run of operators: arithmetic, and what local memory takes beyond it."""

    compute_s: float
    local_s: float


@dataclass(frozen=True)
class Matmul:
    """``batch`` products of a ``rows x inner`` with an ``inner x columns`` matrix."""

    name: str
    rows: float
    inner: float
    columns: float
    batch: float = 1

    def forward(self, element_bytes: int) -> Operator:
        """Return the product itself."""
        operands = self.rows * self.inner + self.inner * self.columns + self.rows * self.columns
        flops = 2 * self.batch * self.rows * self.inner * self.columns
        return Operator(self.name, flops, element_bytes * self.batch * operands)

    def backward(self, element_bytes: int) -> tuple[Operator, Operator]:
        """Return the two products that make the gradients of both operands."""
        left = Matmul(f"{self.name} dx", self.rows, self.columns, self.inner, self.batch)
        right = Matmul(f"{self.name} dw", self.inner, self.rows, self.columns, self.batch)
        return left.forward(element_bytes), right.forward(element_bytes)


def elementwise(name: str, moved: float) -> Operator:
    """Return an operator whose arithmetic is negligible beside the ``moved`` bytes."""
    return Operator(name, 0.0, moved)


def work(operators: Iterable[Operator], accelerator: Accelerator) -> Work:
    """Return what ``operators`` take on ``accelerator``, one after the other."""
    compute = exposed = 0.0
    for operator in operators:
        arithmetic = operator.flops / accelerator.flops_per_s
        traffic = operator.local_bytes / accelerator.local_bytes_per_s
        compute += arithmetic
        exposed += max(0.0, traffic - arithmetic)
    return Work(compute, exposed)
