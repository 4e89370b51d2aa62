"""Rows of an accelerator: tensors over many regions, each of which has a storage of its own.

On the CPU the regions of a row are contiguous. Here each region's memory is allocated separately,
and tensors over the row use a `RowStorage`, which has no memory. So views, strides, versions and
identity are torch's own, and cost nothing.
"""

from __future__ import annotations

import functools
import gc
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch

from dynoffload.memory.accelerator.guarded import unguard
from dynoffload.memory.accelerator.region import DeviceRegion
from dynoffload.memory.accelerator.storages import RowStorage
from dynoffload.memory.accelerator.streams import hidden
from dynoffload.memory.region_allocator import called, users_of
from dynoffload.memory.region_cache import RegionCache
from dynoffload.memory.spill import NoFile, SpillFile

logger = logging.getLogger(__name__)

NOBODYS = -1  # `lookup` of a storage without a region; row numbers are below it
_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


def unseen(method: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """Hide a method's operators, as `hidden` does: from the runtime's own modes, and the user's."""

    @functools.wraps(method)
    def call(*args: _Given.args, **kwargs: _Given.kwargs) -> _Made:
        with hidden():
            return method(*args, **kwargs)

    return call


@dataclass(eq=False, frozen=True, slots=True)
class Row:
    """A sequence of regions that one tensor can span.

    Attributes:
        regions: one for each slice.
        slice_bytes: bytes of each slice.
        storage: over all of them.
    """

    regions: Sequence[int]
    slice_bytes: int
    storage: RowStorage

    def under(self, tensor: torch.Tensor) -> range:
        """Return the indices of the slices between the first and the last byte of ``tensor``, which
        is over the row."""
        if not tensor.numel():
            return range(0)
        first, last = span_of(tensor)
        return range(first // self.slice_bytes, last // self.slice_bytes + 1)

    def first_under(self, held: torch.Tensor | torch.UntypedStorage) -> int:
        """Return the region with the first byte of a tensor or storage over the row."""
        if not isinstance(held, torch.Tensor):
            return self.regions[0]
        start = int(held.storage_offset()) * held.element_size() // self.slice_bytes
        return self.regions[start] if start < len(self.regions) else -1  # empty, at the end


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the offsets in its storage of the first and the last byte of a tensor's elements."""
    start = int(tensor.storage_offset())
    each = zip(tensor.stride(), tensor.shape, strict=True)
    end = start + sum(int(step) * (size - 1) for step, size in each)
    return start * tensor.element_size(), (end + 1) * tensor.element_size() - 1


def bytes_of(storage: torch.UntypedStorage, start: int, nbytes: int) -> torch.Tensor:
    """Return ``nbytes`` of an ordinary storage from ``start`` on, uint8."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, start, (nbytes,), (1,))


def tensors_over(storage: torch.UntypedStorage) -> Iterator[torch.Tensor]:
    """Yield the tensors over ``storage`` that Python knows; autograd graphs may hold others.

    It scans all Python objects, which takes tens of milliseconds.
    """
    for one in gc.get_objects():
        # Tests the type, as a proxy object may answer anything to isinstance.
        if not issubclass(type(one), torch.Tensor) or not torch._C._has_storage(one):
            continue
        strided = one.layout is torch.strided and not one.is_meta
        if strided and one.untyped_storage()._cdata == storage._cdata:
            yield one


class Rows(RegionCache[DeviceRegion]):
    """Maps the storages of an accelerator to their regions or rows.

    Attributes:
        regions: address of a storage's object -> its region, or the number of its row.
    """

    def __init__(
        self, capacity: int, page_bytes: int, spill: SpillFile | NoFile, base: int
    ) -> None:
        super().__init__(capacity, page_bytes, spill, base)
        self.regions: dict[int, int] = {}
        self._by_number: dict[int, Row] = {}
        self._number = NOBODYS

    @abstractmethod
    def use(self, regions: Sequence[int], written: Sequence[int] = ()) -> None:
        """Make ``regions`` present, until `used`, for work that is about to be enqueued."""

    @abstractmethod
    def used(self, regions: Sequence[int]) -> None:
        """Report that the work announced by `use` has been enqueued."""

    def allocate_row(
        self, nbytes: int, each: int, *, extra: bool = False, backed: bool = True
    ) -> list[int]:
        """See `Device.allocate_row`."""
        regions = super().allocate_row(nbytes, each, extra=extra, backed=backed)
        storage = RowStorage.of(nbytes, self.device)
        row = Row(tuple(regions), each, storage)
        storage.slice_bytes = each
        storage.slices = [self.storage(region)._cdata for region in regions]
        storage.read = functools.partial(self._copy_row, row)
        storage.write = functools.partial(self._copy_row, row, writes=True)
        with self._placing:
            self._number -= 1
            self._by_number[self._number] = row
            self.regions[storage._cdata] = self._number
            self._rows[regions[0]] = storage
        return regions

    def release(self, region: int) -> None:
        """See `Device.release`."""
        with self._placing:
            storage = self._rows.get(region)
            if storage is not None:
                del self._by_number[self.regions.pop(storage._cdata)]
        super().release(region)

    def row_storage(self, regions: Sequence[int]) -> torch.UntypedStorage:
        """See `Device.row_storage`: it never has memory."""
        return self._rows[regions[0]]

    def lookup(self, held: torch.Tensor | torch.UntypedStorage) -> int:
        """Return the region whose storage ``held`` is or uses, `NOBODYS` if there is none, or a
        smaller number, that of a `row`."""
        storage = held.untyped_storage() if isinstance(held, torch.Tensor) else held
        return self.regions.get(storage._cdata, NOBODYS)

    def row(self, number: int) -> Row:
        """Return the row that `lookup` found."""
        return self._by_number[number]

    def owner(self, held: torch.Tensor | torch.UntypedStorage) -> int:
        """See `Device.owner`."""
        found = self.lookup(held)
        return self._by_number[found].first_under(held) if found < NOBODYS else found

    def owners(self, tensor: torch.Tensor) -> list[int]:
        """See `Device.owners`."""
        found = self.lookup(tensor) if tensor.numel() else NOBODYS
        if found < NOBODYS:
            row = self._by_number[found]
            return sorted(row.regions[number] for number in row.under(tensor))
        return [] if found == NOBODYS else [found]

    def begins(self, tensor: torch.Tensor, region: int) -> bool:
        """See `Device.begins`."""
        found = self.lookup(tensor)
        if found >= NOBODYS:
            return found == region and tensor.storage_offset() == 0
        row = self._by_number[found]
        start = tensor.storage_offset() * tensor.element_size()
        return start % row.slice_bytes == 0 and row.first_under(tensor) == region

    @unseen
    @torch.no_grad()
    def _copy_row(self, row: Row, other: torch.UntypedStorage, *, writes: bool = False) -> None:
        """Copy a row's bytes to an ordinary storage, or from one if ``writes``."""
        for number, region in enumerate(row.regions):
            theirs = bytes_of(other, number * row.slice_bytes, row.slice_bytes)
            self.use([region], [region] if writes else [])
            ours = bytes_of(self.storage(region), 0, row.slice_bytes)
            target, source = (ours, theirs) if writes else (theirs, ours)
            target.copy_(source)
            self.used([region])

    @unseen
    @torch.no_grad()
    def _make_ordinary(self) -> None:
        """Move the tensors over rows to storages with memory.

        A tensor that only an autograd graph holds cannot be moved: it raises where it is used.
        """
        for row in self._by_number.values():
            if users_of(row.storage) == 1:
                continue
            whole = row.storage.clone()
            for tensor in tensors_over(row.storage):
                place = tensor.storage_offset(), tensor.size(), tensor.stride()
                empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                tensor.data = empty.set_(whole, *place)
                unguard(tensor)
            left = users_of(row.storage) - 1
            if left:
                logger.warning(
                    "%d tensors over %s and what lies beside it are held by graphs beyond the "
                    "offload() block, and have no memory there: run backward inside of it",
                    left,
                    called(self.names, row.regions[0], row.slice_bytes),
                )
