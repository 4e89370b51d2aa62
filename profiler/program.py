"""The program: a trace with its dynamism resolved, in names that two samples share.

What it is: `Visit` and `Program`, and `resolve`, which makes a program of a trace. A visit is one
call of a module that owns parameters itself; every operator of the step belongs to exactly one
visit, so seconds and idioms are conserved. What it is not: a cut into blocks, which depends on the
budget and on other programs (see `dynoffload.planning`).

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

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, groupby, pairwise

import numpy as np
import numpy.typing as npt

from dynoffload.profiler.columns import PHASES, Columns
from dynoffload.profiler.hints import Hint
from dynoffload.profiler.idioms import Idioms
from dynoffload.profiler.sample import Sample
from dynoffload.profiler.trace import ModuleCall, Phase, RegionInfo, Trace, owner_of
from dynoffload.profiler.work import Work, work_of


@dataclass(frozen=True)
class Visit:
    """A stretch of one phase that belongs to one call of a module that owns parameters.

    Attributes:
        path: the module's path.
        variant: the call's shape key where the sample calls this path more than once, else ``""``.
        phase: forward, backward or optimizer.
        idioms: sum over its operators.
        seconds: sum over its operators.
        regions: names of the parameters, buffers, gradients and optimizer state it used, in order
            of first use.
        activation_bytes: bytes of activations it made that were still alive at its end.
        operators: first and one past last index of the operators it covers in the trace.
        work: what each of them does, in order, so that a cost model can time the visit.
    """

    path: str
    variant: str
    phase: Phase
    idioms: Idioms
    seconds: float
    regions: tuple[str, ...]
    activation_bytes: int
    operators: tuple[int, int]
    work: tuple[Work, ...] = ()


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
    sample: Sample
    source: str
    step: int
    hints: tuple[Hint, ...] = ()


def resolve(trace: Trace, *, work: bool = True) -> Program:
    """Return the program of ``trace``; see [Note: to which visit an operator belongs].

    Each operator is in exactly one visit, so sums of seconds and idioms are those of the trace.

    Args:
        trace: one step.
        work: whether the visits shall say what their operators do, which few readers need.
    """
    columns = Columns.of(trace.operators)
    times_called = Counter(call.path for call in trace.calls)
    make = _Visits(trace, columns)
    visits = []
    shared: dict[Work, Work] = {}  # Operators repeat: equal work is one object.
    for phase, path, call, start, stop in _stretches(trace, columns):
        variant = trace.calls[call].shape_key if call >= 0 and times_called[path] > 1 else ""
        done: list[Work] = []
        if work:
            works = map(work_of, trace.operators[start:stop])
            done = [shared.setdefault(each, each) for each in works]
        visits.append(make(phase, path, variant, start, stop, tuple(done)))
    return Program(
        network=trace.network,
        visits=tuple(visits),
        regions={r.name: r for r in compress(trace.regions, make.named)},
        calls=tuple(trace.calls),
        sample=trace.sample,
        source=trace.source,
        step=trace.step,
        hints=tuple(trace.hints),
    )


_Ints = npt.NDArray[np.int64]
_UNNAMED = ("activation", "input")
_FORWARD, _OPTIMIZER = PHASES.index(Phase.FORWARD), PHASES.index(Phase.OPTIMIZER)


class _Visits:
    """Makes the visits of one trace, each from a stretch of its operators."""

    def __init__(self, trace: Trace, columns: Columns) -> None:
        self._regions = trace.regions
        self.named = [region.kind not in _UNNAMED for region in trace.regions]
        self._seconds: list[float] = columns.seconds.tolist()
        self._sums = np.concatenate(
            (np.zeros((1, columns.idioms.shape[1]), np.int64), columns.idioms)
        )
        np.cumsum(self._sums, axis=0, out=self._sums)
        self._used: list[int] = columns.used.tolist()
        self._stops: list[int] = columns.stops.tolist()

    def __call__(
        self, phase: Phase, path: str, variant: str, start: int, stop: int, work: tuple[Work, ...]
    ) -> Visit:
        regions, named = self._regions, self.named
        used = dict.fromkeys(self._used[self._stops[start] : self._stops[stop]])
        names: dict[str, None] = {}
        alive = 0
        for index in used:
            if named[index]:
                names[regions[index].name] = None
                continue
            region = regions[index]
            if region.born >= start and region.kind == "activation":
                alive += 0 if 0 <= region.died < stop else region.nbytes
        return Visit(
            path=path,
            variant=variant,
            phase=phase,
            idioms=Idioms(*(self._sums[stop] - self._sums[start]).tolist()),
            seconds=sum(self._seconds[start:stop]),
            regions=tuple(names),
            activation_bytes=alive,
            operators=(start, stop),
            work=work,
        )


def _stretches(trace: Trace, columns: Columns) -> Iterator[tuple[Phase, str, int, int, int]]:
    """Yield each visit's phase, its owner's path, the owning call (-1 for the optimizer, and where
    nothing owns), and its first and one past its last operator, in order."""
    owners = _owners(trace, columns)
    phases = columns.phase
    for begin, end in _runs(phases):
        code = int(phases[begin])
        if code == _OPTIMIZER:
            paths = _optimizer_paths(trace, columns, begin, end)
            at = begin
            for path, group in groupby(paths):
                after = at + len(list(group))
                yield PHASES[code], path, -1, at, after
                at = after
            continue
        owning = _owning_calls(trace, columns, owners, begin, end)
        for first, last in _runs(owning):
            call = int(owning[first])
            path = trace.calls[call].path if call >= 0 else ""
            yield PHASES[code], path, call, begin + first, begin + last


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
