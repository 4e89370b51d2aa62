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
from itertools import groupby

from dynoffload.profiler.hints import Hint
from dynoffload.profiler.idioms import Idioms
from dynoffload.profiler.sample import Sample
from dynoffload.profiler.trace import ModuleCall, Operator, Phase, RegionInfo, Trace, owner_of
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
    owners = _owners(trace)
    times_called = Counter(call.path for call in trace.calls)
    visits = []
    named = [_is_named(region) for region in trace.regions]
    shared: dict[Work, Work] = {}  # Operators repeat: equal work is one object.
    start = 0
    for (phase, path, call), group in groupby(_keys(trace, owners)):
        stop = start + len(list(group))
        variant = trace.calls[call].shape_key if call >= 0 and times_called[path] > 1 else ""
        visits.append(_visit(trace, path, variant, phase, start, stop, shared, work, named))
        start = stop
    return Program(
        network=trace.network,
        visits=tuple(visits),
        regions={r.name: r for r in trace.regions if _is_named(r)},
        calls=tuple(trace.calls),
        sample=trace.sample,
        source=trace.source,
        step=trace.step,
        hints=tuple(trace.hints),
    )


_Key = tuple[Phase, str, int]
"""Phase, owner's path and owning call (-1 for the optimizer, and where nothing owns)."""


def _is_named(region: RegionInfo) -> bool:
    return region.kind not in ("activation", "input")


def _visit(
    trace: Trace,
    path: str,
    variant: str,
    phase: Phase,
    start: int,
    stop: int,
    shared: dict[Work, Work],
    keep_work: bool,
    named: Sequence[bool],
) -> Visit:
    work: list[Work] = []
    operators = trace.operators[start:stop]
    used = dict.fromkeys(i for op in operators for i in (*op.reads, *op.writes))
    if keep_work:
        for operator in operators:
            done = work_of(operator)
            work.append(shared.setdefault(done, done))
    idioms = Idioms(*map(sum, zip(*(operator.idioms for operator in operators), strict=True)))
    names: dict[str, None] = {}
    made: list[int] = []
    for index in used:
        region = trace.regions[index]
        if named[index]:
            names[region.name] = None
        elif region.kind == "activation" and region.born >= start:
            made.append(index)
    alive = [trace.regions[i] for i in made if not 0 <= trace.regions[i].died < stop]
    return Visit(
        path=path,
        variant=variant,
        phase=phase,
        idioms=idioms,
        seconds=sum(operator.seconds for operator in operators),
        regions=tuple(names),
        activation_bytes=sum(region.nbytes for region in alive),
        operators=(start, stop),
        work=tuple(work),
    )


def _owners(trace: Trace) -> list[int]:
    """Return for each call the owning call its direct operators belong to, -1 if they are glue."""
    count = len(trace.calls)
    owns = [False] * count
    for operator in trace.operators:
        if operator.phase is Phase.FORWARD and operator.call >= 0 and not owns[operator.call]:
            used = operator.reads + operator.writes
            owns[operator.call] = any(trace.regions[i].kind == "parameter" for i in used)
    contains = [False] * count  # Whether a call encloses an owning one.
    for index in range(count - 1, -1, -1):
        parent = trace.calls[index].parent
        if parent >= 0 and (owns[index] or contains[index]):
            contains[parent] = True
    owners = [-1] * count
    for index, call in enumerate(trace.calls):
        if owns[index]:
            owners[index] = index
        elif not contains[index] and call.parent >= 0:
            owners[index] = owners[call.parent]
    return owners


def _keys(trace: Trace, owners: Sequence[int]) -> Iterator[_Key]:
    """Yield the visit of each operator, in order."""
    operators = trace.operators
    for phase, group in groupby(range(len(operators)), key=lambda i: operators[i].phase):
        stretch = list(group)
        if phase is Phase.OPTIMIZER:
            for path in _optimizer_paths(trace, [operators[i] for i in stretch]):
                yield phase, path, -1
        else:
            for call in _owning_calls(trace, owners, stretch):
                yield phase, trace.calls[call].path if call >= 0 else "", call


def _owning_calls(trace: Trace, owners: Sequence[int], stretch: Sequence[int]) -> list[int]:
    """Return the owning call of each operator of one stretch of forward or backward."""
    direct = [
        owners[trace.operators[i].call] if trace.operators[i].call >= 0 else -1 for i in stretch
    ]
    preceding = _carry(direct)  # Position of the last owned operator, or -1.
    mirrored = _carry(direct[::-1])[::-1]
    following = [len(direct) - 1 - p if p >= 0 else -1 for p in mirrored]  # The next, or -1.
    resolved = []
    for position, index in enumerate(stretch):
        operator = trace.operators[index]
        after, before = following[position], preceding[position]
        if after == position:
            resolved.append(direct[position])
            continue
        chosen = after if after >= 0 else before
        if operator.phase is Phase.FORWARD and operator.call >= 0 and before >= 0:
            glue_of = trace.calls[operator.call]
            outside = after < 0 or stretch[after] >= glue_of.stop
            if outside and stretch[before] >= glue_of.start:
                chosen = before
        resolved.append(direct[chosen] if chosen >= 0 else -1)
    return resolved


def _carry(owned: Sequence[int]) -> list[int]:
    """Return for each position the last one up to it that is owned, or -1."""
    last = -1
    positions = []
    for position, call in enumerate(owned):
        if call >= 0:
            last = position
        positions.append(last)
    return positions


def _optimizer_paths(trace: Trace, operators: Sequence[Operator]) -> list[str]:
    """Return the owner of each operator of one stretch of the optimizer."""
    owners: dict[int, str | None] = {}  # of the regions that were looked at
    direct: list[str | None] = []
    for operator in operators:
        found: str | None = None
        for index in (*operator.reads, *operator.writes):
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
