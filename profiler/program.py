"""The program: a trace with its dynamism resolved, in names that two samples share.

A visit is one call of a module that owns parameters itself. Every operator of the step belongs to
exactly one visit, so idioms are conserved.

[Note: to which visit an operator belongs]
A call *owns* if an operator directly inside it uses a parameter in forward; that holds for a module
with parameters of its own, and for one that uses a tied or borrowed weight. An operator belongs to
the owning call it ran in, or, inside a helper (an activation, a dropout) that contains no owning
call, to the owning call around it. What is left is glue between owning calls, such as a residual
addition or a product of attention scores. In forward it goes to the next owning call within the
module whose glue it is; failing that to the one before within that module; failing that to the
next, or the last, of the phase. Backward runs by the forward calls of its nodes, and its glue goes
to the next owning call that runs, or the last. The optimizer has no calls: an operator belongs to
the one module whose parameter, gradient or state it uses, and to the root (``""``) where it uses
several modules' at once (foreach and fused optimizers, clipping). Consecutive operators of one
owner and phase are one visit, so a module that owns parameters and calls others that do is visited
before and after each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from dynoffload.profiler.columns import PHASES, Columns
from dynoffload.profiler.idioms import Idioms
from dynoffload.profiler.input_features import InputFeatures
from dynoffload.profiler.routing import RoutingHint
from dynoffload.profiler.trace import ModuleCall, Phase, RegionInfo, Trace, owner_of


@dataclass(frozen=True)
class Visit:
    """A stretch of one phase that belongs to one call of a module that owns parameters.

    Attributes:
        path: the module's path.
        phase: forward, backward or optimizer.
        idioms: sum over its operators.
        regions: names of the parameters, buffers, gradients and optimizer state it used, in order
            of first use.
        activation_bytes: bytes of activations it made that were still alive at its end.
        operators: first and one past last index of the operators it covers in the trace.
    """

    path: str
    phase: Phase
    idioms: Idioms
    regions: tuple[str, ...]
    activation_bytes: int
    operators: tuple[int, int]


@dataclass(frozen=True)
class Program:
    """What one sample ran, in canonical names.

    Attributes:
        network: the model's fingerprint.
        visits: in the order they ran: forward, backward, optimizer.
        regions: parameters, buffers, gradients and optimizer state by name.
        calls: the trace's module calls.
        sample: what the sample showed before it ran.
        source: which file or document the sample came from.
        step: number of the step.
        hints: what the network foretold of its decisions.
    """

    network: str
    visits: tuple[Visit, ...]
    regions: Mapping[str, RegionInfo]
    calls: tuple[ModuleCall, ...]
    sample: InputFeatures
    source: str
    step: int
    hints: tuple[RoutingHint, ...] = ()


def resolve(trace: Trace) -> Program:
    """Return the program of ``trace``; see [Note: to which visit an operator belongs].

    Each operator is in exactly one visit, so the sums of idioms are those of the trace.
    """
    columns = Columns.of(trace.operators)
    stretches = list(_stretches(trace, columns))
    bounds = np.array([each[2:] for each in stretches], dtype=np.int64).reshape(-1, 2)
    used = _Used(trace, columns, bounds)
    sums = np.zeros((len(trace.operators) + 1, columns.idioms.shape[1]), dtype=np.int64)
    np.cumsum(columns.idioms, axis=0, out=sums[1:])
    idioms: list[list[int]] = np.diff(sums[bounds], axis=1)[:, 0].tolist()
    visits = []
    for number, (phase, path, start, stop) in enumerate(stretches):
        visit = Visit(
            path=path,
            phase=phase,
            idioms=Idioms(*idioms[number]),
            regions=used.names(number),
            activation_bytes=used.activations[number],
            operators=(start, stop),
        )
        visits.append(visit)
    return Program(
        network=trace.network,
        visits=tuple(visits),
        regions={r.name: r for r in trace.regions if r.kind not in _UNNAMED},
        calls=tuple(trace.calls),
        sample=trace.sample,
        source=trace.source,
        step=trace.step,
        hints=tuple(trace.hints),
    )


_Ints = npt.NDArray[np.int64]
_UNNAMED = ("activation", "input")
_NONE: tuple[tuple[Any, ...], ...] = ((),) * len(RegionInfo._fields)
_FORWARD, _OPTIMIZER = PHASES.index(Phase.FORWARD), PHASES.index(Phase.OPTIMIZER)


class _Used:
    """Which regions each of a trace's stretches used.

    Args:
        trace: one step.
        columns: of its operators.
        bounds: first and one past last operator of each stretch, ``[stretches, 2]``; every
            operator is in one.

    Attributes:
        activations: bytes of those that each stretch made and that were alive at its end.
    """

    def __init__(self, trace: Trace, columns: Columns, bounds: _Ints) -> None:
        self._names, kinds, *numbers = zip(*trace.regions, strict=True) if trace.regions else _NONE
        stretch = np.repeat(np.arange(len(bounds)), np.diff(columns.stops[bounds], axis=1)[:, 0])
        both = stretch * len(self._names) + columns.used
        first = np.sort(np.unique(both, return_index=True)[1])  # uses of a region new to a stretch
        stretch, region = stretch[first], columns.used[first]
        named = np.array([kind not in _UNNAMED for kind in kinds], dtype=np.bool_)[region]
        self._named = region[named].tolist()
        self._stops = [0, *np.cumsum(np.bincount(stretch[named], minlength=len(bounds))).tolist()]
        made = np.array([kind == "activation" for kind in kinds], dtype=np.bool_)[region]
        stretch, region = stretch[made], region[made]
        begin, end = bounds[stretch].T
        nbytes, born, died = (np.array(column, dtype=np.int64)[region] for column in numbers)
        alive = (born >= begin) & ((died < 0) | (died >= end))
        totals = np.zeros(len(bounds), dtype=np.int64)
        np.add.at(totals, stretch[alive], nbytes[alive])
        self.activations: list[int] = totals.tolist()

    def names(self, stretch: int) -> tuple[str, ...]:
        """Return the named regions that a stretch used, in order of first use."""
        begin, end = self._stops[stretch], self._stops[stretch + 1]
        return tuple(dict.fromkeys(self._names[each] for each in self._named[begin:end]))


def _stretches(trace: Trace, columns: Columns) -> Iterator[tuple[Phase, str, int, int]]:
    """Yield each visit's phase, its owner's path, and its first and one past its last operator."""
    owners = _owners(trace, columns)
    phases = columns.phase
    for begin, end in _runs(phases):
        code = int(phases[begin])
        if code == _OPTIMIZER:
            paths = _optimizer_paths(trace, columns, begin, end)
            at = begin
            for path, group in groupby(paths):
                after = at + len(list(group))
                yield PHASES[code], path, at, after
                at = after
            continue
        owning = _owning_calls(trace, columns, owners, begin, end)
        for first, last in _runs(owning):
            call = int(owning[first])
            path = trace.calls[call].path if call >= 0 else ""
            yield PHASES[code], path, begin + first, begin + last


def _runs(values: _Ints) -> Iterator[tuple[int, int]]:
    """Yield first and one past last of each run of equal values."""
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return ((first, last) for first, last in pairwise(edges) if last > first)


def _owners(trace: Trace, columns: Columns) -> _Ints:
    """Return for each call the owning call its direct operators belong to, -1 if they are glue."""
    count = len(trace.calls)
    parameter = np.array([region.kind == "parameter" for region in trace.regions], dtype=np.bool_)
    uses = np.zeros(len(columns.phase), dtype=np.bool_)  # whether an operator uses a parameter
    if len(columns.used):
        operator = np.repeat(np.arange(len(uses)), np.diff(columns.stops))
        uses[operator[parameter[columns.used]]] = True
    direct = columns.call[uses & (columns.phase == _FORWARD) & (columns.call >= 0)]
    owns = [False] * count
    for call in np.unique(direct).tolist():
        owns[call] = True
    contains = [False] * count  # Whether a call encloses an owning one.
    for index in range(count - 1, -1, -1):
        parent = trace.calls[index].parent
        if parent >= 0 and (owns[index] or contains[index]):
            contains[parent] = True
    owners = [-1] * count
    for index, each in enumerate(trace.calls):
        if owns[index]:
            owners[index] = index
        elif not contains[index] and each.parent >= 0:
            owners[index] = owners[each.parent]
    return np.array(owners, dtype=np.int64)


def _owning_calls(trace: Trace, columns: Columns, owners: _Ints, begin: int, end: int) -> _Ints:
    """Return the owning call of each operator of one stretch of forward or backward."""
    call = columns.call[begin:end]
    place = np.arange(end - begin)
    # The last entry is what an operator outside of any call finds.
    direct = np.append(owners, -1)[call]
    owned = direct >= 0
    before = np.maximum.accumulate(np.where(owned, place, -1))  # the last owned operator, or -1
    far = end - begin
    after = np.minimum.accumulate(np.where(owned, place, far)[::-1])[::-1]  # the next, or beyond
    chosen = np.where(after < far, after, before)
    if columns.phase[begin] == _FORWARD:
        starts = np.array([*(each.start for each in trace.calls), 0])[call]
        stops = np.array([*(each.stop for each in trace.calls), 0])[call]
        outside = (after == far) | (begin + after >= stops)
        inside_before = (before >= 0) & (begin + before >= starts)
        back = ~owned & (call >= 0) & outside & inside_before
        chosen = np.where(back, before, chosen)
    return np.where(chosen >= 0, direct[chosen], -1)


def _optimizer_paths(trace: Trace, columns: Columns, begin: int, end: int) -> list[str]:
    """Return the owner of each operator of one stretch of the optimizer."""
    owners: dict[int, str | None] = {}  # of the regions that were looked at
    direct: list[str | None] = []
    for operator in range(begin, end):
        found: str | None = None
        for index in columns.used[columns.stops[operator] : columns.stops[operator + 1]].tolist():
            if index not in owners:
                owners[index] = owner_of(trace.regions[index])
            owner = owners[index]
            if owner is not None and found is not None and owner != found:
                found = ""
                break
            found = found if owner is None else owner
        direct.append(found)
    return _filled(direct)


def _filled(paths: Sequence[str | None]) -> list[str]:
    """Give each gap the path that follows it, and gaps at the end the last path."""
    following = next((path for path in reversed(paths) if path is not None), "")
    filled: list[str] = []
    for path in reversed(paths):
        following = path if path is not None else following
        filled.append(following)
    filled.reverse()
    return filled
