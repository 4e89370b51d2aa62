"""How a budget is divided, before anything is touched: pool, resident tensors, reserve, chunks.

[Note: the budget]  budget = pool + tensors that stay resident (small parameters, their gradients
and optimizer state, the optimizer's scalars, buffers) + small saved activations that stay in place.
The pool's pages hold everything else, in flight included; a part of it, the reserve, is never
planned away, so that an access nobody predicted finds room. What stays resident is estimated here
and counted by `ordinary_bytes` from then on.

[Note: the spill file]  What it needs is allocated before anything is touched: parameters, gradients
and optimizer state, padded; for what is paged by slices the gradients once more, as those of one
step may wait while the next are made; and, where updates may be drafted in backward, the twins of
as many as a backward drafts. How much is saved for backward nobody knows before a sample has run:
chunks come on top when they are first opened, so a disk that is too full for them stops a forward,
in which no parameter changes. In networks whose order varies, other updates may be drafted from
step to step: their twins too come on top, and a disk too full for those ends drafting.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from dynoffload.config import OffloadConfig
from dynoffload.errors import BudgetError
from dynoffload.memory.device import Device
from dynoffload.memory.pager import probe
from dynoffload.runtime.adoption.held import held_parameters
from dynoffload.runtime.adoption.slicing import may_slice, slice_bytes, slices_of, sole_owners
from dynoffload.runtime.adoption.store import can_move, moved_bytes
from dynoffload.runtime.updates.updates import can_split
from dynoffload.units import KiB, MiB, format_bytes, parse_bytes

_LEAST_PAGES = 40  # of a pool, so that regions of several pages find room
_PADDING = 1.1  # how much larger the paged parameters may become by padding
_LEAST_SLICED = 64 * KiB  # page for the sake of slices
_RESIDENT = 8  # the share of the budget that small tensors may take is one in so many
_STATES = {"SGD": 1, "ASGD": 1, "Adagrad": 1, "Muon": 1, "RMSprop": 2, "Rprop": 2}
_STATES_OF_ADAM = 2
_SCALARS = 32  # bytes of a parameter's step counts and the like: up to four tensors of one number


@dataclass(frozen=True)
class Sizing:
    """The division of one budget; all in bytes.

    Attributes:
        budget: what the user allows.
        pool_bytes: the device's pool.
        page_bytes: size of its pages.
        min_paged_bytes: parameters and state below this stay resident.
        min_moved_bytes: saved tensors below this stay in place.
        kept_bytes: how much those may take.
        small_bytes: resident parameters, gradients, state and buffers.
        chunk_bytes: size of a chunk of saved activations.
        reserve_bytes: part of the pool that plans leave free.
        spill_bytes: what the spill file will take at least; see [Note: the spill file].
        states_bytes: parameters, gradients and optimizer state together.
    """

    budget: int
    pool_bytes: int
    page_bytes: int
    min_paged_bytes: int
    min_moved_bytes: int
    kept_bytes: int
    small_bytes: int
    chunk_bytes: int
    reserve_bytes: int
    spill_bytes: int
    states_bytes: int


def state_tensors(optimizer: Optimizer | None) -> int:
    """Return how many tensors of a parameter's size the optimizer keeps for it, at most."""
    if optimizer is None:
        return 0
    if type(optimizer).__name__ == "Adafactor":
        return int(any(group.get("beta1") is not None for group in optimizer.param_groups))
    count = _STATES.get(type(optimizer).__name__, _STATES_OF_ADAM)
    if any(group.get("amsgrad") or group.get("centered") for group in optimizer.param_groups):
        count += 1
    return count


def _small_state(optimizer: Optimizer | None, parameter: nn.Parameter) -> int:
    """Return the bytes that the optimizer keeps for ``parameter`` in tensors of other sizes."""
    if optimizer is None:
        return 0
    if type(optimizer).__name__ != "Adafactor":
        return _SCALARS
    # Means over rows and over columns, or of a vector all of it, in single precision.
    *outer, inner = parameter.shape or (1,)
    rows = math.prod(outer)
    columns = math.prod(outer[:-1]) * inner if outer else 0
    return _SCALARS + 4 * (rows + columns if outer else inner)


def ordinary_bytes(
    model: nn.Module, optimizer: Optimizer | None, device: Device | None = None
) -> int:
    """Return the bytes of ``model``'s tensors that lie outside of ``device``, as they are now.

    Counted are parameters, gradients, optimizer state and buffers: each storage once and whole,
    none on the meta device. It reads no content, so it waits for nothing and makes no update that
    was put off. One to two microseconds a tensor: for once in a step.

    Args:
        model: the root.
        optimizer: its optimizer, or None.
        device: whose memory is not counted; None counts all.
    """
    found: dict[int, int] = {}
    for whole in tensors_of(model, optimizer):
        for tensor in (whole,) if whole.layout is torch.strided else _parts(whole):
            if tensor.is_meta:
                continue
            if device is None or device.owner(tensor.data_ptr()) < 0:
                storage = tensor.untyped_storage()
                found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def tensors_of(model: nn.Module, optimizer: Optimizer | None) -> Iterator[torch.Tensor]:
    """Yield parameters with their gradients and optimizer state, and buffers; it reads nothing."""
    states = {} if optimizer is None else optimizer.state
    for parameter in model.parameters():
        if torch._C._functorch.is_functorch_wrapped_tensor(parameter):
            continue  # a functional call has put it there for now
        yield parameter
        gradient = parameter.grad if parameter.is_leaf else None
        if gradient is not None:
            yield gradient
        # Asked as a plain dict: the state that a session watches would make updates first.
        entry = dict.get(states, parameter)
        for value in tuple(entry.values()) if entry else ():
            if isinstance(value, torch.Tensor):
                yield value
    yield from model.buffers()


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the strided tensors that hold what ``tensor`` does."""
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def sizing_of(
    model: nn.Module, optimizer: Optimizer | None, budget: int, config: OffloadConfig
) -> Sizing:
    """Divide ``budget`` for ``model``.

    Raises:
        BudgetError: the largest parameter's update, or the small tensors, do not fit; names need,
            have and remedy.
    """
    sizing, need, largest, culprit = _divide(model, optimizer, budget, config)
    if sizing is None:
        enough = need
        while True:  # what a larger budget is divided into is larger too
            enough = _readable(enough)
            sizing, more, _, _ = _divide(model, optimizer, enough, config)
            if sizing is not None:
                break
            enough = max(more, enough + 4 * KiB)
        raise BudgetError(
            f"a budget of {format_bytes(budget)} cannot hold the largest update: "
            f"{culprit or 'the model'} needs {format_bytes(largest)} at once (parameter, gradient "
            "and optimizer state), besides the smaller tensors that stay, activations and reserve: "
            f"raise the budget to at least {format_bytes(enough)}, or make that layer smaller"
            f"{_held_too(model)}"
        )
    return sizing


def _held_too(model: nn.Module) -> str:
    """Return what to say of parameters that cannot move, "" if all can."""
    held = held_parameters(model)
    name = next((name for name, parameter in model.named_parameters() if parameter in held), "")
    if not name:
        return ""
    nbytes = sum(parameter.numel() * parameter.element_size() for parameter in held)
    return (
        f"; {format_bytes(nbytes)} of parameters stay in memory because something else holds it "
        f"too: let go of the views, arrays, state_dicts or graphs of {name!r} and others"
    )


def _readable(nbytes: int) -> int:
    """Return the least number of bytes from ``nbytes`` on that reads as written by
    `format_bytes`."""
    while (read := parse_bytes(format_bytes(nbytes))) < nbytes:
        nbytes += max(1, nbytes // 2048)
    return read


def _divide(
    model: nn.Module, optimizer: Optimizer | None, budget: int, config: OffloadConfig
) -> tuple[Sizing | None, int, int, str]:
    """Return the division of ``budget``, or None if it is too small; what it needs by itself; the
    bytes of the largest update, and its parameter."""
    states = state_tensors(optimizer)
    least = config.min_paged_bytes or _least_for(model, budget, states)
    page = config.page_bytes or _page_for(model, budget, least, slices=config.slices)
    alone = sole_owners(model.parameters()) if config.slices and may_slice(optimizer) else set()
    total = padded = updated = widest = most_beside = 0
    moved: set[int] = set()  # storages that are counted
    largest, culprit = 0, ""
    resident = list(model.buffers())
    held = held_parameters(model)
    small = 0
    for name, parameter in model.named_parameters():
        nbytes = parameter.numel() * parameter.element_size()
        copies = 2 + states if parameter.requires_grad else 1
        total += nbytes * copies
        if parameter.requires_grad:
            small += _small_state(optimizer, parameter)
        if nbytes < least or not can_move(parameter) or parameter in held:
            resident.append(parameter)
            small += nbytes * (copies - 1)
            continue
        slices = slices_of(parameter, page, least) if id(parameter) in alone else 1
        whole = -(-nbytes // page) * page
        region = whole // slices
        beside = -(-moved_bytes(parameter) // page) * page - whole  # what shares its storage
        most_beside = max(most_beside, beside)
        padded += whole * (copies - 1)
        storage = parameter.untyped_storage()._cdata
        if storage not in moved:
            moved.add(storage)
            padded += whole + beside
        if slices > 1 and copies > 1:  # gradients that wait, and one slice of zeros
            padded += whole + region
        if copies > 2:
            updated += whole
            widest = max(widest, region)
        if region * copies + beside > largest:
            largest, culprit = region * copies + beside, name
    storages = [part.untyped_storage() for tensor in resident for part in _parts(tensor)]
    small += sum({storage._cdata: storage.nbytes() for storage in storages}.values())
    kept = budget // 32
    chunk = max(page, min(32 * MiB, budget // 32 // page * page))
    pool = (budget - small - kept) // page * page
    biggest_region = max(chunk, largest // max(1, 2 + states), most_beside)
    reserve = min(biggest_region, max(0, pool // 8)) // page * page
    need = largest + 2 * chunk + reserve
    if pool < need:
        return None, need + small + kept, largest, culprit
    sizing = Sizing(
        budget=budget,
        pool_bytes=pool,
        page_bytes=page,
        min_paged_bytes=least,
        min_moved_bytes=min(16 * KiB, max(256, budget // 4096)),
        kept_bytes=kept,
        small_bytes=small,
        chunk_bytes=chunk,
        reserve_bytes=reserve,
        spill_bytes=padded + _twins(optimizer, config, updated, widest, states),
        states_bytes=total,
    )
    return sizing, need + small + kept, largest, culprit


def _twins(
    optimizer: Optimizer | None, config: OffloadConfig, updated: int, widest: int, states: int
) -> int:
    """Return the bytes of the twins on which one backward drafts updates.

    Args:
        optimizer: makes the updates.
        config: says whether and how many are drafted.
        updated: bytes of the paged parameters that have state.
        widest: bytes of the largest of them.
        states: tensors of a parameter's size that each has as state.
    """
    if (
        optimizer is None
        or not can_split(optimizer)
        or not config.draft_share
        or config.defer_updates == "never"
        or config.policy == "on-demand"  # what is drafted is part of a plan
        or config.backend == "mapped"
        or probe()
    ):
        return 0
    drafted = min(updated, int(config.draft_share * updated) + widest // 2)
    return drafted * (1 + states) + widest  # the copy of a gradient, to see if it is written


def _least_for(model: nn.Module, budget: int, states: int) -> int:
    """Return the size from which tensors are paged; those below take a small share of a budget."""
    sizes = [
        (parameter.numel() * parameter.element_size(), 2 + states if parameter.requires_grad else 1)
        for parameter in model.parameters()
    ]
    least = max(1, min(MiB, budget // 256))
    while least > 1 and sum(n * copies for n, copies in sizes if n < least) > budget // _RESIDENT:
        least //= 2
    return least


def _page_for(model: nn.Module, budget: int, least: int, *, slices: bool) -> int:
    """Return the largest page that pads the paged parameters little and leaves the pool supple.

    Larger pages move and transfer faster; of 2 MiB they are huge pages. Slices are whole pages:
    with ``slices``, for their sake pages become as small as `_LEAST_SLICED`.
    """
    sizes = [parameter.numel() * parameter.element_size() for parameter in model.parameters()]
    paged = [nbytes for nbytes in sizes if nbytes >= least]
    parts = [slice_bytes(parameter) for parameter in model.parameters()] if slices else []
    sliced = [nbytes for nbytes in parts if nbytes >= least and nbytes % _LEAST_SLICED == 0]
    page = 2 * MiB
    while page > 4 * KiB:
        padded = sum(-(-nbytes // page) * page for nbytes in paged)
        supple = page * _LEAST_PAGES <= budget and padded <= _PADDING * sum(paged)
        if supple and not any(nbytes % page for nbytes in sliced):
            break
        page //= 2
    return page
