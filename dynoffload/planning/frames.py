"""Frames: the nesting of one step's operators, by the module calls they belong to.

What it is: `tokens`, which turns a trace into a bracketed sequence: a frame opens, operators run
and frames of children nest in it, it closes. What it is not: a comparison of samples; what the
frames of one procedure have in common is for `dynoffload.planning.flow` to say.

A frame is one stretch of one phase within one call of a module. In forward that is the call. In
backward it is a stretch of the operators whose graph nodes that call made, the stretches of the
calls inside it nested in its own; recomputation under checkpointing runs in the same frames. What
ran outside any call (the loss; the optimizer, whose operators belong to the one module that owns
what they use) is in frames of its own, one for each stretch of one site.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dynoffload.errors import TraceError
from dynoffload.profiler.trace import ModuleCall, Operator, Phase, Trace


class Procedure(NamedTuple):
    """What frames are of.

    Attributes:
        phase: the part of the step.
        path: path of the module, None outside any call where no module owns what ran.
    """

    phase: Phase
    path: str | None

    @property
    def site(self) -> str:
        """The site of the operators directly inside its frames."""
        return self.path or ""

    def __str__(self) -> str:
        where = "outside any module" if self.path is None else f"of {self.path or 'the root'}"
        return f"{self.phase.value} {where}"


Symbol = str | Procedure
"""What a frame's body consists of: operators, by name, and frames of children."""
Token = Symbol | None
"""A procedure opens a frame, a name is an operator in the innermost one, None closes it."""


def tokens(trace: Trace) -> Iterator[Token]:
    """Yield the frames of a step; those at the top level belong to the step itself.

    Raises:
        TraceError: if an operator's site is not that of its module call.
    """
    chains: dict[int, tuple[int, ...]] = {}
    opened: tuple[Procedure | int, ...] = ()
    phase: Phase | None = None
    last: tuple[Phase, int, str] | None = None
    for index, operator in enumerate(trace.operators):
        where = (operator.phase, operator.call, operator.site)
        if where != last:
            wanted = _chain(trace, index, chains)
            shared = 0
            if operator.phase is phase:
                for ours, theirs in zip(opened, wanted, strict=False):
                    if ours != theirs:
                        break
                    shared += 1
            yield from [None] * (len(opened) - shared)
            for frame in wanted[shared:]:
                if isinstance(frame, int):
                    frame = Procedure(operator.phase, trace.calls[frame].path)
                yield frame
            opened, phase, last = wanted, operator.phase, where
        yield operator.name
    yield from [None] * len(opened)


def _chain(
    trace: Trace, index: int, chains: dict[int, tuple[int, ...]]
) -> tuple[Procedure | int, ...]:
    """Return the frames that an operator stands in, outermost first: calls, or one procedure."""
    operator = trace.operators[index]
    if operator.call < 0:
        return (Procedure(operator.phase, operator.site or None),)
    if trace.calls[operator.call].path != operator.site:
        raise TraceError(
            f"operator {index}, {operator.name}, is of site {operator.site!r} but of a call of"
            f" {trace.calls[operator.call].path!r}: the trace is damaged, record it again"
        )
    return _ancestors(trace.calls, operator, chains)


def _ancestors(
    calls: list[ModuleCall], operator: Operator, chains: dict[int, tuple[int, ...]]
) -> tuple[int, ...]:
    chain = chains.get(operator.call)
    if chain is None:
        found = []
        call = operator.call
        while call >= 0:
            found.append(call)
            call = calls[call].parent
        chain = chains[operator.call] = tuple(reversed(found))
    return chain
