"""Assigns each forward operator to a module call.

[Note: to which call an operator belongs]
A call is *owning* if an operator directly inside it uses a parameter in forward, its module's own
or another's (tied weights). An operator belongs to the owning call it ran in. Inside a helper (an
activation, a dropout) that contains no owning call, it belongs to the enclosing owning call. All
other operators are glue between owning calls, such as a residual addition or a product of attention
scores. Glue belongs to the next owning call within the module that ran it, else to the previous one
within that module, else to the next, or last, owning call of the phase.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dynoffload.profiler.columns import PHASES, Columns
from dynoffload.profiler.trace import Phase, Trace

_Ints = npt.NDArray[np.int64]


def forward_owners(trace: Trace, columns: Columns) -> _Ints:
    """Return for each operator the call it belongs to, by [Note: to which call an operator
    belongs].

    The value is -1 outside forward. In a forward without owning calls it is the first call of the
    root, or -1.
    """
    calls = trace.calls
    root = next((index for index, call in enumerate(calls) if call.path == ""), -1)
    forward = columns.phase == PHASES.index(Phase.FORWARD)
    direct = np.append(_direct_owners(trace, columns, forward), -1)[columns.call]
    starts = np.array([*(call.start for call in calls), 0])[columns.call]
    stops = np.array([*(call.stop for call in calls), 0])[columns.call]
    found = np.full(len(forward), -1, dtype=np.int64)
    edges = [0, *(np.flatnonzero(np.diff(forward)) + 1).tolist(), len(forward)]
    for begin, end in pairwise(edges):
        if begin == end or not forward[begin]:
            continue
        here = slice(begin, end)
        place = np.arange(begin, end)
        owned = direct[here] >= 0
        before = np.maximum.accumulate(np.where(owned, place, -1))  # the last owned, or -1
        after = np.minimum.accumulate(np.where(owned, place, end)[::-1])[::-1]  # the next, or end
        outside = (after == end) | (after >= stops[here])
        back = ~owned & (columns.call[here] >= 0) & outside
        back &= (before >= 0) & (before >= starts[here])
        chosen = np.where(back | (after == end), before, after)
        found[here] = np.where(chosen >= 0, direct[chosen], root)
    return found


def _direct_owners(trace: Trace, columns: Columns, forward: npt.NDArray[np.bool_]) -> _Ints:
    """Return for each call the owning call its direct operators belong to, -1 if they are glue."""
    parameter = np.array([region.kind == "parameter" for region in trace.regions], dtype=np.bool_)
    uses = np.zeros(len(forward), dtype=np.bool_)  # whether an operator uses a parameter
    if len(columns.used):
        operator = np.repeat(np.arange(len(uses)), np.diff(columns.stops))
        uses[operator[parameter[columns.used]]] = True
    owns = set(columns.call[uses & forward & (columns.call >= 0)].tolist())
    contains: set[int] = set()  # calls that enclose an owning one
    for index in reversed(range(len(trace.calls))):
        if index in owns or index in contains:
            contains.add(trace.calls[index].parent)
    owners = [-1] * len(trace.calls)
    for index, call in enumerate(trace.calls):
        if index in owns:
            owners[index] = index
        elif index not in contains and call.parent >= 0:
            owners[index] = owners[call.parent]
    return np.array(owners, dtype=np.int64)
