"""Divides a budget, before anything is changed: pool, resident tensors, reserve, chunks.

[Note: the budget]  budget = pool + tensors that stay resident (small parameters, their gradients
and optimizer state, the optimizer's scalars, buffers) + small saved activations that stay in place.
The pool's pages hold everything else, transfers in flight included. Plans leave a part of it free,
the reserve, for unpredicted accesses. Resident tensors are estimated here, and counted by
`counting.ordinary_bytes` from then on.

[Note: the least pool]  Pinned regions cannot be evicted, so the pool must exceed all that is pinned
at one time; otherwise allocation deadlocks. Pinned are: the regions of one update
(`States.update_bytes`), as updates are made one after the other; in forward the chunk that is being
filled; a saved tensor larger than a chunk, while it is copied. On top come a second chunk and the
reserve, as room for the thread that makes the update and for the running operator.

[Note: the spill file]  Its least size is allocated before anything is changed: parameters,
gradients and optimizer state, padded. Gradients of parameters paged by slices count twice, as those
of one step may be pending while the next are made. Chunks come on top, as their size is unknown
before a sample has run. A disk too full for chunks stops a forward, in which no parameter changes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import nn
from torch.optim import Optimizer

from dynoffload.config import ACCELERATOR, LEAST_PAGE, OffloadConfig
from dynoffload.errors import BudgetError
from dynoffload.memory.local import local, local_bytes, wrapped
from dynoffload.memory.pager import probe
from dynoffload.profiler.routing import read_early
from dynoffload.runtime.adoption.held import held_parameters, held_text
from dynoffload.runtime.adoption.slicing import (
    flat_bytes,
    may_be_flat,
    may_slice,
    slice_bytes,
    slices_of,
    sole_owners,
)
from dynoffload.runtime.adoption.store import can_move, moved_bytes
from dynoffload.runtime.counting import SCALARS, States, is_trained, padded, parts_of
from dynoffload.runtime.updates.update import can_split
from dynoffload.units import KiB, MiB, Quantity, format_bytes, readable

_LEAST_PAGES = 40  # of a pool, so that regions of several pages find room
_PADDING = 1.1  # how much larger the paged parameters may become by padding
_LEAST_SLICED = 64 * KiB  # smallest page that is chosen to fit slices
_HOST_CHUNKS = 8  # chunks that host memory below an accelerator has room for, at least
_RESIDENT = 8  # small tensors may take one part in so many of the budget
_RESIDENT_TRAINED = 4  # and so may all that is trained, beside frozen weights


@dataclass(frozen=True)
class Sizing:
    """The division of one budget; all in bytes.

    Attributes:
        budget: the user's budget.
        pool_bytes: the device's pool.
        least_bytes: the smallest pool that works; see [Note: the least pool].
        page_bytes: size of its pages.
        min_paged_bytes: parameters and state below this stay resident.
        min_trained_bytes: trained parameters below this stay resident, with gradient and state; see
            `_least_trained`.
        min_moved_bytes: saved tensors below this stay in place.
        kept_bytes: the most that those may take.
        small_bytes: resident parameters, gradients, state and buffers.
        chunk_bytes: size of a chunk of saved activations.
        reserve_bytes: part of the pool that plans leave free.
        spill_bytes: the least size of the spill file; see [Note: the spill file].
        states_bytes: parameters, gradients and optimizer state together.
        bucket_bytes: DDP's gradient buckets, outside the pool.
        culprit: the parameter with the largest update.
        asked: names of the parameters of routers that stay resident, to be asked early.
        flat: names of the parameters that are paged by ranges of their elements.
    """

    budget: int = 0
    pool_bytes: int = 0
    least_bytes: int = 0
    page_bytes: int = 0
    min_paged_bytes: int = 0
    min_trained_bytes: int = 0
    min_moved_bytes: int = 0
    kept_bytes: int = 0
    small_bytes: int = 0
    chunk_bytes: int = 0
    reserve_bytes: int = 0
    spill_bytes: int = 0
    states_bytes: int = 0
    bucket_bytes: int = 0
    culprit: str = ""
    asked: tuple[str, ...] = ()
    flat: tuple[str, ...] = ()


class _Division(NamedTuple):
    """The sizing, None if too small; the least budget; the largest update, and its parameter."""

    sizing: Sizing | None
    need: int
    largest: int
    culprit: str


def sizing_of(
    model: nn.Module,
    optimizer: Optimizer | None,
    budget: int,
    config: OffloadConfig,
    buckets: int = 0,
    host: int | None = None,
    sourced: Collection[nn.Parameter] = (),
) -> Sizing:
    """Divide ``budget`` for ``model``; ``buckets`` is the bytes of DDP's gradient buckets.

    ``host`` is the bytes of host memory below an accelerator; None: as many as needed. Parameters
    in ``sourced`` take no room in the spill file.

    Raises:
        BudgetError: the largest parameter's update, or the small tensors, do not fit; names need,
            have and remedy.
    """
    staying, asked = held_parameters(model), _asked(model, config)
    divider = _Divider(model, optimizer, config, buckets, host, staying, sourced, asked)
    division = divider.divided(max(1 + buckets, budget))
    if division.sizing is not None:
        return replace(division.sizing, budget=budget)
    enough, division = divider.enough(division.need)
    flat = division.sizing is not None and division.culprit in division.sizing.flat
    error = BudgetError(
        f"a budget of {format_bytes(budget)}{_unit_of(budget)} cannot hold the largest "
        f"{'parameter' if flat else 'update'}: {division.culprit or 'the model'} needs "
        f"{format_bytes(division.largest)} at once "
        f"({'all of it' if flat else 'parameter, gradient and optimizer state'}), besides the "
        "smaller tensors that stay, "
        f"activations and reserve{_bucket_text(buckets)}: raise the budget to at least "
        f"{format_bytes(enough)}, or make "
        f"that layer smaller{_split_advice(model, division)}{held_text(model)}"
    )
    error.lacking = enough - budget
    raise error


def _asked(model: nn.Module, config: OffloadConfig) -> frozenset[nn.Parameter]:
    """Return the parameters of the routers that are asked early if these stay resident."""
    asks = config.policy not in ("repeat", "on-demand") and config.routing_probes is None
    return frozenset(read_early(model) if asks and not config.min_paged_bytes else ())


def enough_for(
    model: nn.Module,
    optimizer: Optimizer | None,
    sizing: Sizing,
    config: OffloadConfig,
    staying: Collection[nn.Parameter],
    nbytes: int,
) -> int:
    """Return a budget whose pool has room for two regions of ``nbytes``, as an operator may use
    two, in addition to all that is pinned.

    Args:
        model, optimizer, sizing, config: those of a session that has begun.
        staying: parameters that stay in memory.
        nbytes: size of a region that was too large.
    """
    asked = _asked(model, config)
    divider = _Divider(model, optimizer, config, sizing.bucket_bytes, None, staying, (), asked)
    return divider.enough(sizing.budget, nbytes)[0]


def lowest_for(
    model: nn.Module,
    optimizer: Optimizer | None,
    sizing: Sizing,
    config: OffloadConfig,
    staying: Collection[nn.Parameter],
) -> tuple[int, int]:
    """Return the lowest budget and its least pool; see `enough_for`."""
    divider = _Divider(model, optimizer, config, sizing.bucket_bytes, None, staying)
    lowest, division = divider.enough(1 + sizing.bucket_bytes)
    return lowest, division.sizing.least_bytes if division.sizing else 0


def _unit_of(budget: int) -> str:
    """Return a text with the unit that a small int most likely lacks, or "" if none does."""
    if isinstance(budget, Quantity) or not 0 < budget < MiB:
        return ""
    return f" (an int is in bytes: write '{budget}GiB' or '{budget}MB' if that is meant)"


def _bucket_text(buckets: int) -> str:
    if not buckets:
        return ""
    return f", and {format_bytes(buckets)} of DistributedDataParallel's buckets of gradients"


def _split_advice(model: nn.Module, division: _Division) -> str:
    """Return a text on splitting the culprit if it is a layer's weight, else ""."""
    path, _, key = division.culprit.rpartition(".")
    if key != "weight" or type(model.get_submodule(path)) not in (nn.Linear, nn.Embedding):
        return ""
    return (
        ", or split its weight by dynoffload.tile(model, max_bytes=...) before the optimizer is "
        "made"
    )


@dataclass(frozen=True)
class _Divider:
    """Divides budgets for a training; see `sizing_of`. Parameters in ``staying`` are never paged,
    and those in ``asked`` are not if they are small and there is room."""

    model: nn.Module
    optimizer: Optimizer | None
    config: OffloadConfig
    buckets: int
    host: int | None
    staying: Collection[nn.Parameter]
    sourced: Collection[nn.Parameter] = ()
    asked: frozenset[nn.Parameter] = frozenset()

    def enough(self, budget: int, nbytes: int = 0) -> tuple[int, _Division]:
        """Return the first budget found, from ``budget`` up, that has room for all that is pinned
        and two regions of ``nbytes``, and its division."""
        while True:  # a larger budget has larger chunks and reserve, and perhaps larger pages
            budget = readable(budget)
            division = self.divided(budget)
            made, lacking = division.sizing, division.need - budget
            if made is not None:
                lacking = made.least_bytes + 2 * padded(nbytes, made.page_bytes) - made.pool_bytes
                if lacking <= 0:
                    return budget, division
            budget += max(4 * KiB, lacking)

    def divided(self, budget: int) -> _Division:
        """Divide ``budget``; routers stay if they take a small share of it and the rest fits."""
        states = States(self.optimizer)
        sizes = [local_bytes(p) * (1 + is_trained(p)) + sum(states.sizes(p)) for p in self.asked]
        if self.asked and sum(sizes) <= budget // _RESIDENT:
            division = self._divided(budget)
            if division.sizing is not None:
                return division
        return replace(self, asked=frozenset())._divided(budget)

    def _divided(self, budget: int) -> _Division:
        """Divide ``budget`` with the pages that suit it; if it is too small for those, with smaller
        ones that divide the slices of fused parameters; or else with flat parameters."""
        division, config = self._divide(budget), self.config
        if division.sizing is not None or not config.slices or not may_slice(self.optimizer):
            return division
        fitting = set()
        if not config.page_bytes:
            parts = map(slice_bytes, self.model.parameters())
            fitting = {nbytes for nbytes in parts if nbytes and nbytes % LEAST_PAGE == 0}
        sliced = 0
        for nbytes in sorted(fitting, reverse=True):
            other = self._divide(budget, nbytes)
            if other.need < division.need:
                division, sliced = other, nbytes
            if division.sizing is not None:
                return division
        if config.backend == ACCELERATOR or config.rollback:
            return division
        room = division.largest - (division.need - budget)  # for an update
        return min(division, self._divide(budget, sliced, fits=room), key=lambda one: one.need)

    def _divide(
        self,
        whole_budget: int,
        sliced: int = 0,
        *,
        adapters: bool = True,
        fits: int | None = None,
    ) -> _Division:
        """Divide a budget; see [Note: the least pool].

        Args:
            whole_budget: the budget.
            sliced: bytes of slices that pages divide, if any.
            adapters: trained parameters may stay resident.
            fits: bytes of an update; parameters with larger ones may be flat. None: none are.
        """
        model, optimizer, config = self.model, self.optimizer, self.config
        staying = self.asked.union(self.staying)
        budget = whole_budget - self.buckets
        least = config.min_paged_bytes or _least_for(model, optimizer, budget)
        page = config.page_bytes or _page_for(model, budget, least, slices=config.slices)
        if sliced:
            page = min(page, sliced & -sliced)  # the largest power of two that divides it
            least = config.min_paged_bytes or min(least, sliced)
        least_trained = least
        if adapters and not config.min_paged_bytes:
            least_trained = max(least, _least_trained(model, optimizer, budget))
        alone = sole_owners(model.parameters()) if config.slices and may_slice(optimizer) else set()
        queues = may_queue(config)
        total = spilled = biggest = 0
        moved: set[int] = set()  # storages that are counted
        kept = States(optimizer)
        largest, culprit, flattened = 0, "", list[str]()
        resident = list(model.buffers())
        small = 0
        for name, parameter in model.named_parameters():
            nbytes = local_bytes(parameter)
            states, trained = kept.sizes(parameter), is_trained(parameter)
            extra = sum(states) + (nbytes if trained else 0)
            total += nbytes + extra
            if states and trained:
                small += SCALARS
            stays = nbytes < (least_trained if trained and kept.steps(parameter) else least)
            if stays or not can_move(parameter) or parameter in staying:
                resident.append(parameter)
                small += extra
                continue
            slices = slices_of(parameter, page, least) if id(parameter) in alone else 1
            update = kept.update_bytes(parameter, page, least, slices=slices, queues=queues)
            operand = 0  # bytes that operators read at once
            large = fits is not None and update > fits and slices == 1 and id(parameter) in alone
            if large and may_be_flat(parameter, kept.group(parameter)):
                flattened.append(name)
                slices, operand = -(-nbytes // flat_bytes(nbytes, page)), padded(nbytes, page)
            paged = kept.paged(parameter, least, slices)
            small += sum(states) - sum(paged)
            whole, storage = padded(nbytes, page), padded(moved_bytes(parameter), page)
            own = local(parameter).untyped_storage()._cdata
            spilled += 0 if own in moved or parameter in self.sourced else storage
            moved.add(own)
            resident += [part for part in wrapped(parameter) if part is not local(parameter)]
            changes = sum(padded(size, page) for size in paged)
            if trained:
                changes += whole
                if slices > 1:  # pending gradients, and one slice of zeros
                    spilled += whole + whole // slices
            spilled += changes
            biggest = max(biggest, storage // slices)
            update = kept.update_bytes(parameter, page, least, slices=slices, queues=queues)
            if max(update, operand) > largest:
                largest, culprit = max(update, operand), name
        storages = [part.untyped_storage() for tensor in resident for part in parts_of(tensor)]
        small += sum({storage._cdata: storage.nbytes() for storage in storages}.values())
        saved = most = budget // 32
        if config.backend == ACCELERATOR:  # its chunks are evicted to host memory
            most = min(most, (total if self.host is None else self.host) // _HOST_CHUNKS)
        chunk = max(page, min(32 * MiB, most // page * page))
        pool = (budget - small - saved) // page * page
        reserve = min(max(chunk, biggest), max(0, pool // 8)) // page * page
        need = largest + 2 * chunk + reserve
        lowest = need + small + saved + self.buckets
        if pool < need and least_trained > least:
            return self._divide(whole_budget, sliced, adapters=False, fits=fits)
        if pool < need:
            return _Division(None, lowest, largest, culprit)
        sizing = Sizing(
            budget=whole_budget,
            pool_bytes=pool,
            least_bytes=need,
            page_bytes=page,
            min_paged_bytes=least,
            min_trained_bytes=least_trained,
            min_moved_bytes=min(16 * KiB, max(256, budget // 4096)),
            kept_bytes=saved,
            small_bytes=small,
            chunk_bytes=chunk,
            reserve_bytes=reserve,
            spill_bytes=spilled,
            states_bytes=total,
            bucket_bytes=self.buckets,
            culprit=culprit,
            asked=tuple(name for name, p in model.named_parameters() if p in self.asked),
            flat=tuple(flattened),
        )
        return _Division(sizing, lowest, largest, culprit)


def may_queue(config: OffloadConfig) -> bool:
    """Return whether the updates of several steps may wait for a slice that is not hit."""
    if config.rollback or config.defer_updates == "never" or config.backend == "mapped":
        return False
    return config.backend == ACCELERATOR or not probe()


def _least_for(model: nn.Module, optimizer: Optimizer | None, budget: int) -> int:
    """Return the size from which tensors are paged; smaller ones take a small share of a budget."""
    sizes = []
    states = States(optimizer)
    for parameter in model.parameters():
        nbytes = local_bytes(parameter)
        gradient = nbytes if is_trained(parameter) else 0
        sizes.append((nbytes, nbytes + gradient + sum(states.sizes(parameter))))
    least = max(1, min(MiB, budget // 256))
    while least > 1 and sum(taken for n, taken in sizes if n < least) > budget // _RESIDENT:
        least //= 2
    return least


def _least_trained(model: nn.Module, optimizer: Optimizer | None, budget: int) -> int:
    """Return the size from which trained parameters are paged; 0 if none is special to them.

    Adapters on frozen weights change in each step, so paging writes them to disk each time. They
    stay if with gradients and state they take a small share of a budget that the model exceeds.
    """
    if optimizer is None or not can_split(optimizer):
        return 0  # the state of an optimizer that steps whole is paged
    states = States(optimizer)
    trained = [p for p in model.parameters() if is_trained(p) and states.steps(p)]
    taken = sum(2 * local_bytes(p) + sum(states.sizes(p)) for p in trained)
    frozen = sum(local_bytes(p) for p in model.parameters() if not is_trained(p))
    if taken > budget // _RESIDENT_TRAINED or taken + frozen <= budget:
        return 0
    return 1 + max(map(local_bytes, trained), default=0)


def _page_for(model: nn.Module, budget: int, least: int, *, slices: bool) -> int:
    """Return the largest page that pads paged parameters little, and of which the pool has many.

    Larger pages move and transfer faster; those of 2 MiB are huge pages. Slices are whole pages, so
    with ``slices`` pages may become as small as `_LEAST_SLICED`.
    """
    sizes = [local_bytes(parameter) for parameter in model.parameters()]
    paged = [nbytes for nbytes in sizes if nbytes >= least]
    parts = [slice_bytes(parameter) for parameter in model.parameters()] if slices else []
    sliced = [nbytes for nbytes in parts if nbytes >= least and nbytes % _LEAST_SLICED == 0]
    page = 2 * MiB
    while page > LEAST_PAGE:
        padded = sum(-(-nbytes // page) * page for nbytes in paged)
        supple = page * _LEAST_PAGES <= budget and padded <= _PADDING * sum(paged)
        if supple and not any(nbytes % page for nbytes in sliced):
            break
        page //= 2
    return page
