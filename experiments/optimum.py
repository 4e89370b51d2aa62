"""The bound of a real step: the least time any plan under a budget could take for it.

What it is: the reference string of one training step, made from what a plain run visited and saved,
and `step_bound`, which puts the seconds of its phases and the measured bandwidths to it. What it is
not: the runtime's own string; this one says precisely what is written, so that it stays a bound.

[Note: the phases]  A parameter's update may wait until its next use, so forward and optimizer are
one phase: a plan that puts updates off may overlap the optimizer's traffic with forward's work.
Backward is the other. Taken as three phases the figure would be larger, and no bound. A plan that
makes updates in backward already may move some of their traffic there; for such plans only the sum
over the phases binds, which is `StepBound.spread_s`.

[Note: one link or two]  Reads and writes overlap freely on some storage and take turns on other.
Which it is, is measured: where both directions at once moved no more than turns would have, the
link is shared, and a phase takes at least its reads and its writes one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dynoffload.planning.bound import PhaseBound, phase_bound
from dynoffload.planning.schedule import Use
from dynoffload.simulation.machine import Link

STATES_OF_ADAMW = 2
"""Tensors of a parameter's size that AdamW keeps for it."""


@dataclass(frozen=True)
class StepVisit:
    """One call of a module that owns parameters: their names, and the bytes saved for backward."""

    parameters: tuple[str, ...]
    saved_bytes: int


@dataclass(frozen=True)
class StepString:
    """The reference string of one step.

    Attributes:
        sizes: bytes of each region.
        forward: uses of forward, each with the pending updates of its parameters.
        backward: uses of backward.
    """

    sizes: tuple[int, ...]
    forward: tuple[Use, ...]
    backward: tuple[Use, ...]


@dataclass(frozen=True)
class StepBound:
    """The least time of a step, and what it is made of.

    Attributes:
        seconds: on the link as it is.
        overlapped_s: were reads and writes to overlap freely; never larger.
        spread_s: were traffic free to lie in either phase; never larger.
        forward: forward with the optimizer's updates.
        backward: backward.
    """

    seconds: float
    overlapped_s: float
    spread_s: float
    forward: PhaseBound
    backward: PhaseBound


def step_string(
    visits: Sequence[StepVisit],
    parameter_bytes: Mapping[str, int],
    states: int = STATES_OF_ADAMW,
) -> StepString:
    """Return the string of a step that made ``visits``, in a training that repeats such steps.

    Args:
        visits: in forward order.
        parameter_bytes: size of each parameter, by name.
        states: tensors of optimizer state per parameter, each of its size.
    """
    sizes: list[int] = []
    weight: dict[str, int] = {}
    gradient: dict[str, int] = {}
    state: dict[str, int] = {}
    for name in dict.fromkeys(name for visit in visits for name in visit.parameters):
        for index, factor in ((weight, 1), (gradient, 1), (state, states)):
            index[name] = len(sizes)
            sizes.append(factor * parameter_bytes[name])
    chunks = []
    for visit in visits:
        chunks.append(len(sizes))
        sizes.append(visit.saved_bytes)

    forward: list[Use] = []
    updated: set[str] = set()
    for visit, chunk in zip(visits, chunks, strict=True):
        fresh = [name for name in visit.parameters if name not in updated]
        updated.update(fresh)
        written = tuple(index[name] for name in fresh for index in (weight, state))
        gradients = tuple(gradient[name] for name in fresh)
        reads = dict.fromkeys((*(weight[n] for n in visit.parameters), *written, *gradients))
        forward.append(Use(tuple(reads), creates=(chunk,), frees=gradients, writes=written))

    backward: list[Use] = []
    made: set[str] = set()
    for visit, chunk in zip(reversed(visits), reversed(chunks), strict=True):
        fresh = [name for name in visit.parameters if name not in made]
        again = tuple(gradient[name] for name in visit.parameters if name in made)
        made.update(fresh)
        regions = (*(weight[name] for name in visit.parameters), *again, chunk)
        creates = tuple(gradient[name] for name in fresh)
        backward.append(Use(regions, creates=creates, frees=(chunk,), writes=again))
    return StepString(tuple(sizes), tuple(forward), tuple(backward))


def step_bound(
    string: StepString,
    budget: int,
    link: Link,
    forward_s: float,
    backward_s: float,
) -> StepBound:
    """Return the bound of ``string`` under ``budget`` bytes.

    Args:
        string: of the step.
        budget: bytes of fast memory.
        link: to the file tier.
        forward_s: seconds that forward and optimizer compute, measured without a budget.
        backward_s: seconds that backward computes.

    Raises:
        BudgetError: one use alone is larger than the budget.
    """
    phases = []
    for uses, seconds in ((string.forward, forward_s), (string.backward, backward_s)):
        timed = [replace(uses[0], seconds=seconds), *uses[1:]] if uses else []
        phases.append(phase_bound(timed, string.sizes, budget))
    reads, writes = link.read_bps, link.write_bps
    overlapped = sum(phase.seconds(reads, writes) for phase in phases)
    actual = sum(phase.seconds(reads, writes, shared_link=link.in_turns) for phase in phases)
    whole = PhaseBound(
        sum(phase.compute_s for phase in phases),
        sum(phase.bytes_in for phase in phases),
        sum(phase.bytes_out for phase in phases),
    )
    spread = whole.seconds(reads, writes, shared_link=link.in_turns)
    return StepBound(actual, overlapped, spread, phases[0], phases[1])
