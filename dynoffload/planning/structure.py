"""The static structure of a network: the control flow of all its samples in one form.

What it is: `Structure`, into which the traces of many samples are merged, one after the other and
in any order, and `Path`, the decisions of one sample: which optional element comes next, and how
often a loop runs. A path together with its structure gives the operators of the trace back, exactly
and in order: name, phase and site, in forward, backward and optimizer alike. What it is not: a
record of costs or regions, which stay in traces and programs; nor a predictor. `pilot.skeleton` is
its special case of one level: the blocks of forward in one canonical order, without nesting, made
to be tolerant of what was never seen, where this one is exact and says so.

A structure has one procedure for each phase of each module (see `dynoffload.planning.frames`), and
a procedure's body is a nested sequence of runs of operators, calls of children and loops (see
`dynoffload.planning.flow`). A module that calls itself is a procedure that calls itself. A program
(`dynoffload.profiler.resolve`) groups the operators of a trace into visits by their positions, so
the path of a trace is the path of its program too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from dynoffload.errors import TraceError
from dynoffload.planning.arrangement import Loop
from dynoffload.planning.flow import Flow
from dynoffload.planning.frames import Procedure, Symbol, tokens
from dynoffload.planning.walking import Frame, Unseen, walk
from dynoffload.profiler.trace import Phase, Trace


class Step(NamedTuple):
    """One operator on a path: its name, its phase and its site, as in `Operator`."""

    name: str
    phase: Phase
    site: str


@dataclass(frozen=True)
class Path:
    """The decisions of one sample, in order.

    Attributes:
        structure: digest of the structure in which they are decisions.
        decisions: at a choice, how many optional elements are passed over; at a loop, its count.
            Where there is nothing to decide, nothing stands.
    """

    structure: str
    decisions: tuple[int, ...]


@dataclass(frozen=True)
class Size:
    """How large a structure is, and how large what was merged into it.

    Attributes:
        sites: module paths at which operators run.
        procedures: phases of sites that have a body of their own.
        slots: operators and calls that stand in the structure.
        choices: places at which what comes next is to be decided.
        loops: loops, whose counts are to be decided.
        traces: traces that were merged.
        operators: operators in those traces.
    """

    sites: int
    procedures: int
    slots: int
    choices: int
    loops: int
    traces: int
    operators: int

    @property
    def compression(self) -> float:
        """Operators of the traces for each slot of the structure."""
        return self.operators / self.slots if self.slots else 0.0


class Structure:
    """The canonical control flow of a network, as its samples showed it.

    Example:
        structure = Structure(traces)
        path = structure.path_of(traces[0])
        assert [s.name for s in structure.operators(path)] == [o.name for o in traces[0].operators]
    """

    def __init__(self, traces: Iterable[Trace] = ()) -> None:
        self._flows: dict[Procedure | None, Flow] = {None: Flow()}  # None: the step itself
        self._network: str | None = None
        self._traces = 0
        self._operators = 0
        self._digest: str | None = None
        for trace in traces:
            self.merge(trace)

    def merge(self, trace: Trace) -> bool:
        """Take in one more sample; return whether it showed anything new.

        The result depends on which traces were merged, not on their order. If it changed, paths
        that were found before do not fit any more.

        Raises:
            TraceError: if the trace is damaged or of another network.
        """
        self._check(trace)
        bodies: list[tuple[Procedure | None, list[Symbol]]] = [(None, [])]
        changed = False
        for token in tokens(trace):
            if token is None:
                changed |= self._learn(*bodies.pop())
            else:
                bodies[-1][1].append(token)
                if isinstance(token, Procedure):
                    bodies.append((token, []))
        changed |= self._learn(*bodies.pop())
        self._network = trace.network
        self._traces += 1
        self._operators += len(trace.operators)
        if changed:
            self._digest = None
        return changed

    @property
    def digest(self) -> str:
        """The sha256 (hex) of all that the structure is made from."""
        if self._digest is None:
            found = hashlib.sha256()
            for name, procedure in sorted((str(key), key) for key in self._flows if key):
                found.update(f"\0{name}\n".encode())
                for fact in self._flows[procedure].facts():
                    found.update("\1".join((*fact, "\n")).encode())
            for fact in self._flows[None].facts():
                found.update("\1".join((*fact, "\n")).encode())
            self._digest = found.hexdigest()
        return self._digest

    @property
    def size(self) -> Size:
        """Counts of what the structure consists of."""
        slots = choices = loops = 0
        for flow in self._flows.values():
            slots += len(flow.arranged.runs)
            for series in flow.arranged.series():
                choices += series.choices
                loops += sum(isinstance(element, Loop) for element in series.elements)
        procedures = [key for key in self._flows if key is not None]
        return Size(
            sites=len({key.site for key in procedures}),
            procedures=len(procedures),
            slots=slots,
            choices=choices,
            loops=loops,
            traces=self._traces,
            operators=self._operators,
        )

    def path_of(self, trace: Trace) -> Path:
        """Return the path of a sample, merged before or not.

        Raises:
            TraceError: if it did something that no merged sample did, naming site and operator; or
                if the trace is damaged or of another network.
        """
        self._check(trace)
        decisions: list[int] = []
        frames = [Frame(None, self._flows[None], decisions)]
        operators = 0
        for token in tokens(trace):
            try:
                if token is None:
                    frames.pop().end()
                    continue
                frames[-1].enter(token)
            except Unseen as unseen:
                raise TraceError(_complaint(trace, operators, unseen)) from None
            if isinstance(token, Procedure):
                frames.append(Frame(token, self._flows[token], decisions))
            else:
                operators += 1
        try:
            frames.pop().end()
        except Unseen as unseen:
            raise TraceError(_complaint(trace, operators, unseen)) from None
        return Path(self.digest, tuple(decisions))

    def operators(self, path: Path) -> Iterator[Step]:
        """Yield the operators of the sample whose path this is, in order.

        Raises:
            TraceError: if the path is of another structure, or is none.
        """
        if path.structure != self.digest:
            raise TraceError(
                f"the path is of the structure {path.structure[:12]}, this is {self.digest[:12]}:"
                " find it again with path_of, as the structure changes with what is merged"
            )
        decisions = iter(path.decisions)
        opened: list[tuple[Procedure | None, Iterator[Symbol]]] = []
        opened.append((None, walk(self._flows[None].arranged.top, decisions)))
        while opened:
            procedure, body = opened[-1]
            for symbol in body:
                if isinstance(symbol, Procedure):
                    top = self._flows[symbol].arranged.top
                    opened.append((symbol, walk(top, decisions)))
                    break
                assert procedure is not None, "an operator outside any frame"
                yield Step(symbol, procedure.phase, procedure.site)
            else:
                opened.pop()
        if next(decisions, None) is not None:
            raise TraceError("the path goes on after its last operator: it is damaged")

    def _learn(self, procedure: Procedure | None, body: list[Symbol]) -> bool:
        return self._flows.setdefault(procedure, Flow()).add(body)

    def _check(self, trace: Trace) -> None:
        if self._network not in (None, trace.network):
            raise TraceError(
                f"a trace of network {trace.network[:12]} (step {trace.step}, source"
                f" {trace.source!r}), but the structure is of {str(self._network)[:12]}: merge"
                " traces of one network"
            )


def _complaint(trace: Trace, operators: int, unseen: Unseen) -> str:
    """Say which operator of which site ran where no merged sample ran it."""
    if operators < len(trace.operators):
        operator = trace.operators[operators]
        what = f"operator {operators}, {operator.name} at site {operator.site!r}"
    else:
        what = "the end"
    frame = "the step" if unseen.procedure is None else f"{unseen.procedure}"
    symbol, after = unseen.symbol, unseen.after
    did = "ends" if symbol is None else f"goes on with {symbol}"
    where = "as the first of it" if after is None else f"after {after}"
    return (
        f"step {trace.step} (source {trace.source!r}) leaves the structure at {what}: {frame} {did}"
        f" {where}, which no merged sample did; merge this trace too"
    )
