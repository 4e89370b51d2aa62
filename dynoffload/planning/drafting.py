"""Which updates a backward drafts: an even share of the parameters' bytes, as far as there is room.

What it is: the choice alone, by sizes. What it is not: the drafting, nor whether a parameter's
update can be drafted at all; whoever asks says that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from dynoffload.planning.reference import HeldT

_ROOM = 0.5  # of the capacity that the updates of one unit may take while they are drafted


def choose_drafts(
    order: Iterable[Sequence[HeldT]],
    *,
    share: float,
    capacity: int,
    size: Callable[[int], int],
    eligible: Callable[[HeldT], bool],
) -> Iterator[HeldT]:
    """Yield the slots whose updates a backward drafts that completes gradients in ``order``.

    Args:
        order: the slots of each unit, whose gradients are complete at one time.
        share: of the parameters' bytes, 0 to 1, kept everywhere along the way.
        capacity: bytes of fast memory that plans may use.
        size: bytes of a region.
        eligible: whether the update of a slot can be drafted.
    """
    due = 0.0  # bytes to draft so that the share is kept
    for slots in order:
        # Parameters and gradients are there in any case; then state and twins.
        room = _ROOM * capacity - sum(2 * size(slot.region) for slot in slots)
        for slot in slots:
            if slot.gradient is None:
                continue
            due += share * size(slot.region)
            need = 2 * sum(map(size, drafted_regions(slot))) - size(slot.region)
            if due >= size(slot.region) / 2 and need <= room and eligible(slot):
                due -= size(slot.region)
                room -= need
                yield slot


def drafted_regions(slot: HeldT) -> tuple[int, ...]:
    """Return the regions that have twins where the update of ``slot`` is drafted."""
    return (slot.region, *slot.states.values())
