"""The operators of a step as arrays, for vectorised computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from dynoffload.profiler.idioms import Idioms
from dynoffload.profiler.trace import Operator, Phase

PHASES = tuple(Phase)
"""Phases by their integer code."""

_CODES = {phase: code for code, phase in enumerate(PHASES)}


@dataclass(frozen=True, eq=False)
class Columns:
    """The n operators of a step, in order, as arrays.

    Attributes:
        phase: index into `PHASES`, ``[n]``.
        call: innermost module call, -1 if none, ``[n]``.
        seconds: float64 ``[n]``.
        idioms: counts, int64 ``[n, 6]``.
        used: indices of the regions each operator reads, then writes, concatenated.
        stops: where each operator's entries begin in ``used``, then the total, ``[n + 1]``.
    """

    phase: npt.NDArray[np.int64]
    call: npt.NDArray[np.int64]
    seconds: npt.NDArray[np.float64]
    idioms: npt.NDArray[np.int64]
    used: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]

    @classmethod
    def of(cls, operators: Sequence[Operator]) -> Columns:
        """Return the columns of a trace's operators."""
        count = len(operators)
        used = [(*op.reads, *op.writes) for op in operators]
        return cls(
            np.fromiter((_CODES[op.phase] for op in operators), np.int64, count),
            np.fromiter((op.call for op in operators), np.int64, count),
            np.fromiter((op.seconds for op in operators), np.float64, count),
            np.fromiter(chain.from_iterable(op.idioms for op in operators), np.int64).reshape(
                count, len(Idioms._fields)
            ),
            np.fromiter(chain.from_iterable(used), np.int64),
            np.cumsum([0, *map(len, used)], dtype=np.int64),
        )
