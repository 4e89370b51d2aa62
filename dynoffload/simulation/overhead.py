"""Parameters of a simulated runtime: the division of the budget, and its own overhead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace


@dataclass(frozen=True)
class Division:
    """Division of a budget, in bytes, as the runtime's sizing computes it.

    Attributes:
        pool_bytes: size of the pool.
        page_bytes: size of a page of the pool.
        reserve_bytes: part of the pool that plans leave free.
        chunk_bytes: size of a chunk of saved activations.
        min_paged_bytes: parameters and state below this stay in memory.
        min_moved_bytes: saved tensors below this stay in place, up to `kept_bytes` in total.
        kept_bytes: most bytes of tensors saved in place.
        min_trained_bytes: trained parameters below this stay in memory too.
    """

    pool_bytes: int
    page_bytes: int
    reserve_bytes: int
    chunk_bytes: int
    min_paged_bytes: int
    min_moved_bytes: int
    kept_bytes: int
    min_trained_bytes: int = 0


@dataclass(frozen=True)
class Phase:
    """Result of one phase of a simulated step.

    Attributes:
        name: ``"forward"``, ``"backward"`` or ``"optimizer"``.
        seconds: total seconds.
        counts: number of operations of the runtime, by the names in `COSTS`.
        faults: accesses that waited for a transfer.
        beside_s: seconds of work that overlapped with transfers.
    """

    name: str
    seconds: float
    counts: Counter[str]
    faults: int
    beside_s: float


@dataclass(frozen=True)
class RuntimeOverhead:
    """The runtime's own costs, in addition to the network's work; seconds per operation.

    Attributes:
        visit_s: a visit of a unit.
        save_s: saving a tensor for backward.
        ask_s: fetching a parameter or saved tensor in backward.
        update_s: a deferred update, without its arithmetic.
        settle_s: a parameter with a gradient when the optimizer steps.
        plan_s: one use of a planned reference string.
        copy_s: one byte copied into chunks or gradients' regions.
        moves: moving a page of the pool between a slot and a region's address, by page size in
            bytes; an empty mapping means no cost.
    """

    visit_s: float = 0.0
    save_s: float = 0.0
    ask_s: float = 0.0
    update_s: float = 0.0
    settle_s: float = 0.0
    plan_s: float = 0.0
    copy_s: float = 0.0
    moves: Mapping[int, float] = field(default_factory=dict)

    def times(self, factor: float) -> RuntimeOverhead:
        """Return these costs times ``factor``, except for moving pages."""
        return replace(self, **{name: factor * getattr(self, name) for name in COSTS})

    def seconds(self, done: Mapping[str, float]) -> float:
        """Return the seconds of ``done``: counts by the names in `COSTS`."""
        return float(sum(count * getattr(self, cost) for cost, count in done.items()))

    def move_s(self, page_bytes: int) -> float:
        """Return the seconds of moving a page of this size."""
        return self.moves[page_bytes] if self.moves else 0.0


COSTS = tuple(one.name for one in fields(RuntimeOverhead) if one.name != "moves")
"""The fitted attributes of `RuntimeOverhead`."""
