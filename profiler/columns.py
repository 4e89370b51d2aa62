"""The operators of a step as arrays, for computing with all of them at once.

`Operators`, the sequence of a trace read from a file, has the columns at once and makes `Operator`
objects when one is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from dynoffload.profiler.idioms import Idioms
from dynoffload.profiler.trace import Operator, Phase

PHASES = tuple(Phase)
"""By the code of a column."""

_CODES = {phase: code for code, phase in enumerate(PHASES)}


@dataclass(frozen=True, eq=False)
class Columns:
    """What ran, in order, as arrays of n operators.

    Attributes:
        phase: place in `PHASES`, ``[n]``.
        call: innermost module call, -1 if none, ``[n]``.
        seconds: float64 ``[n]``.
        idioms: counts, int64 ``[n, 6]``.
        used: regions that each operator reads, then those it writes, one operator after the other.
        stops: where those of each operator begin in ``used``, and last where they end, ``[n + 1]``.
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
        if isinstance(operators, Operators):
            return operators.columns
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


class Operators(Sequence[Operator]):
    """Operators whose columns are known; the objects are made at the first question for one.

    Args:
        columns: of all of them.
        make: returns the objects, in order.
    """

    def __init__(self, columns: Columns, make: Callable[[], list[Operator]]) -> None:
        self.columns = columns
        self._make = make
        self._made: list[Operator] | None = None

    @property
    def _list(self) -> list[Operator]:
        if self._made is None:
            self._made = self._make()
        return self._made

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.columns.phase)

    @overload
    def __getitem__(self, index: int) -> Operator: ...

    @overload
    def __getitem__(self, index: slice) -> list[Operator]: ...

    def __getitem__(self, index: int | slice) -> Operator | list[Operator]:
        """Return one operator, or a list of some."""
        return self._list[index]

    def __iter__(self) -> Iterator[Operator]:
        """Yield them in order."""
        return iter(self._list)

    def __eq__(self, other: object) -> bool:
        """Equal when the operators are."""
        if not isinstance(other, list | Operators):
            return NotImplemented
        return self._list == list(other)

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as a plain list."""
        return list, (self._list,)
