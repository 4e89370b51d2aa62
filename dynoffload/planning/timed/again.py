"""Which calls of modules may be computed again, and what that takes.

What it is: `computed_again`, the rule by which a call becomes an `Again`. What it is not: a choice
of calls (see `planner`).

[Note: may be checkpointed]  A call may be computed again if it gives the same once more and changes
nothing outside: it writes only what it created, what it read is not written or freed for good by
others before it is computed again, and something that it made waits for backward. That it draws the
same random numbers is up to who computes it again, as in `torch.utils.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dynoffload.planning.schedule import Use
from dynoffload.planning.timed.problem import Again


def computed_again(
    uses: Sequence[Use],
    sizes: Sequence[int],
    calls: Iterable[tuple[str, int, int]],
    backward: int,
) -> tuple[Again, ...]:
    """Return those of ``calls`` that may be computed again.

    Args:
        uses: of the step.
        sizes: bytes of each region.
        calls: name, first and one past the last use of calls of modules in forward.
        backward: the use with which backward begins.
    """
    touches: dict[int, list[int]] = {}
    modified: dict[int, list[int]] = {}
    for position, use in enumerate(uses):
        for region in dict.fromkeys((*use.regions, *use.creates)):
            touches.setdefault(region, []).append(position)
            if region in use.writes or region in use.creates:
                modified.setdefault(region, []).append(position)
    found = []
    spans: set[tuple[int, int]] = set()
    for name, start, stop in calls:
        if (start, stop) in spans or not 0 <= start < stop <= backward:
            continue
        spans.add((start, stop))
        call = _call(name, start, stop, uses, sizes, touches, modified, backward)
        if call is not None:
            found.append(call)
    return tuple(found)


def _call(
    name: str,
    start: int,
    stop: int,
    uses: Sequence[Use],
    sizes: Sequence[int],
    touches: dict[int, list[int]],
    modified: dict[int, list[int]],
    backward: int,
) -> Again | None:
    made: set[int] = set()
    inputs: dict[int, None] = {}
    freed: set[int] = set()
    for use in uses[start:stop]:
        for region in use.regions:
            if region not in made and region not in use.creates:
                inputs[region] = None
        if any(region in freed for region in use.creates):
            return None  # a name used twice within the call
        made.update(use.creates)
        if any(region not in made for region in use.writes):
            return None
        freed.update(use.frees)
    after = {
        region: _first(touches[region], stop, len(uses)) for region in made if region not in freed
    }
    makes = tuple(sorted(region for region, use in after.items() if backward <= use < len(uses)))
    if not makes or not any(sizes[region] for region in makes):
        return None
    before = min(after[region] for region in makes)
    for region in inputs:
        if any(start <= position < before for position in modified.get(region, ())):
            return None
    if any(_first(modified[region], stop, len(uses)) <= before for region in makes):
        return None  # made anew, or first modified, by who wants it
    wanted, alive, scratch = set(makes), 0, 0
    for use in uses[start:stop]:
        alive += sum(sizes[region] for region in use.creates if region not in wanted)
        scratch = max(scratch, alive)
        alive -= sum(sizes[r] for r in use.frees if r in made and r not in wanted)
    return Again(
        name=name,
        start=start,
        stop=stop,
        before=before,
        inputs=tuple(sorted(inputs)),
        makes=makes,
        scratch=scratch,
        seconds=sum(use.seconds for use in uses[start:stop]),
    )


def _first(positions: Sequence[int], at: int, none: int) -> int:
    return next((position for position in positions if position >= at), none)
