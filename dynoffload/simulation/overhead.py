"""What a simulated runtime is given and takes itself: a divided budget, and its own work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace


@dataclass(frozen=True)
class Division:
    """How a budget is divided, in bytes; the runtime's sizing says it.

    Attributes:
        pool_bytes: of the pool.
        page_bytes: of its pages.
        reserve_bytes: part of the pool that plans leave free.
        chunk_bytes: of a chunk of saved activations.
        min_paged_bytes: parameters and state below this stay in memory.
        min_moved_bytes: saved tensors below this stay in place, while `kept_bytes` lasts.
        kept_bytes: how much those may take.
        draft_share: share of the parameters' bytes whose updates are drafted in backward.
    """

    pool_bytes: int
    page_bytes: int
    reserve_bytes: int
    chunk_bytes: int
    min_paged_bytes: int
    min_moved_bytes: int
    kept_bytes: int
    draft_share: float = 0.5


@dataclass(frozen=True)
class Phase:
    """What a phase of a simulated step took.

    Attributes:
        name: ``"forward"``, ``"backward"`` or ``"optimizer"``.
        seconds: in all.
        counts: how often the runtime did what takes each of `COSTS`.
        faults: accesses that waited for a transfer.
        beside_s: seconds of work that was done beside transfers.
    """

    name: str
    seconds: float
    counts: Counter[str]
    faults: int
    beside_s: float


@dataclass(frozen=True)
class RuntimeOverhead:
    """What the runtime itself takes, beside the network's own work; seconds.

    Attributes:
        visit_s: of a unit's visit.
        save_s: of a tensor that is saved.
        ask_s: of one that backward asks for, a parameter or what was saved.
        update_s: of an update that waited and is made by itself, beside its arithmetic.
        draft_s: of one that is made in backward.
        settle_s: of a parameter that has a gradient as the optimizer steps.
        plan_s: of one use of a string that is planned.
        copy_s: of a byte that is copied, into chunks, gradients' regions and twins.
        moves: of moving a page of the pool between a slot and a region's address, by its bytes;
            without any it takes nothing.
    """

    visit_s: float = 0.0
    save_s: float = 0.0
    ask_s: float = 0.0
    update_s: float = 0.0
    draft_s: float = 0.0
    settle_s: float = 0.0
    plan_s: float = 0.0
    copy_s: float = 0.0
    moves: Mapping[int, float] = field(default_factory=dict)

    def times(self, factor: float) -> RuntimeOverhead:
        """Return the same where all but moving pages takes ``factor`` times as long."""
        return replace(self, **{name: factor * getattr(self, name) for name in COSTS})

    def seconds(self, done: Mapping[str, float]) -> float:
        """Return what ``done`` takes, counts by the names of `COSTS`."""
        return float(sum(count * getattr(self, cost) for cost, count in done.items()))

    def move_s(self, page_bytes: int) -> float:
        """Return the seconds of moving a page of a pool with such pages."""
        return self.moves[page_bytes] if self.moves else 0.0


COSTS = tuple(one.name for one in fields(RuntimeOverhead) if one.name != "moves")
"""What is fitted of `RuntimeOverhead`."""
