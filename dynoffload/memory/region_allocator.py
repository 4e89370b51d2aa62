"""Assigns regions their places: the same page numbers in the address arena and the spill file."""

from __future__ import annotations

import ctypes
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from dynoffload.errors import BudgetError, SpillError
from dynoffload.memory.local import local
from dynoffload.memory.spill import NoFile, SpillFile
from dynoffload.planning.extents import Extents
from dynoffload.units import GiB, MiB, format_bytes

REGIONS = 65536  # most regions alive at once
_LISTED = 6  # regions that an error names
_ARENA_BYTES = {True: 1024 * GiB, False: 64 * GiB}


def arena_pages(page_bytes: int) -> int:
    """Return how many pages of ``page_bytes`` an arena has: addresses only, no memory."""
    return _ARENA_BYTES[page_bytes == 2 * MiB] // page_bytes


def users_of(storage: torch.UntypedStorage) -> int:
    """Return how many tensors use ``storage``, plus one for its Python object."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def called(names: Mapping[int, str], region: int, nbytes: int) -> str:
    """Return the name and size of a region, for messages."""
    return f"{names.get(region, f'region {region}')} ({format_bytes(nbytes)})"


class Place(NamedTuple):
    """A region's first page in arena and file, its number of pages, and its bytes of content."""

    page: int
    pages: int
    nbytes: int


class RegionAllocator(ABC):
    """Assigns regions their places; base class of `Device`. Its storages map the arena.

    Args:
        capacity: bytes of the pool, a multiple of ``page_bytes``.
        page_bytes: regions are padded to this.
        spill: the file behind the arena; it grows to the highest page taken.
        base: address of the arena's first page.
    """

    serves = True
    device = torch.device("cpu")

    def __init__(
        self, capacity: int, page_bytes: int, spill: SpillFile | NoFile, base: int
    ) -> None:
        self.capacity, self.page_bytes = capacity, page_bytes
        self.spill_dir = spill.directory
        self._spill, self._base = spill, base
        self.names: dict[int, str] = {}
        self._extents = Extents(arena_pages(page_bytes))
        self._free_ids = list(range(REGIONS - 1, -1, -1))
        self._places: dict[int, Place] = {}
        # Region of each arena page, plus one; untouched entries take no memory.
        self._owners = np.zeros(arena_pages(page_bytes), dtype=np.int32)
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._rows: dict[int, torch.UntypedStorage] = {}  # first region of a row -> its storage
        # A twin ends with its region, as each one's content may be at the other's file offset.
        self._twins: dict[int, int] = {}
        self._extra: dict[int, int] = {}  # bytes of regions beyond the file's minimum size
        self._extra_bytes = 0
        # Reentrant: a finalizer that runs while a place is taken may release a region.
        self._placing = threading.RLock()

    @abstractmethod
    def _admit(self, region: int, place: Place) -> None:
        """Register a new region, which has no content."""

    @abstractmethod
    def _dismiss(self, region: int) -> None:
        """Discard a region's bytes and unregister it."""

    def padded(self, nbytes: int) -> int:
        """Return the fast memory that a region of ``nbytes`` takes."""
        return max(1, -(-nbytes // self.page_bytes)) * self.page_bytes

    def spill_bytes(self) -> int:
        """Return the disk bytes that the spill file takes."""
        return self._spill.size

    def nbytes(self, region: int) -> int:
        """Return the bytes of content that ``region`` has room for, present or not."""
        return self._places[region].nbytes

    def size(self, region: int) -> int:
        """Return the fast memory that ``region`` takes while resident; 0 if it does not exist."""
        place = self._places.get(region)
        return place.pages * self.page_bytes if place else 0

    def allocate(self, nbytes: int, *, extra: bool = False, backed: bool = True) -> int:
        """Return a new region of ``nbytes`` without content or fast memory.

        Args:
            nbytes: at least one.
            extra: it is not counted in the spill file's minimum size. The file grows, so that the
                counted regions keep their room.
            backed: whether the spill file has room for it from the start. If not, it lies beyond
                all that have, and takes room once it is written.

        Raises:
            BudgetError: the region alone is larger than the pool.
            SpillError: the spill file cannot grow.
        """
        if nbytes < 1:
            raise ValueError(f"a region has at least one byte, not {nbytes}")
        return self._allocate(nbytes, nbytes, extra=extra, backed=backed)[0]

    def allocate_row(
        self, nbytes: int, each: int, *, extra: bool = False, backed: bool = True
    ) -> list[int]:
        """Return new regions of ``nbytes`` that form a row, which one storage spans.

        Args:
            nbytes: of all, at least one.
            each: bytes of each, a multiple of `page_bytes`; the last has what is left.
            extra, backed: as for `allocate`.

        Raises:
            BudgetError: a region alone is larger than the pool.
            SpillError: the spill file cannot grow.
        """
        if nbytes < 1 or each < 1 or each % self.page_bytes:
            raise ValueError(
                f"a row of {nbytes} bytes has regions of a multiple of {self.page_bytes} bytes, "
                f"not {each}"
            )
        return self._allocate(nbytes, each, extra=extra, backed=backed)

    def _allocate(self, nbytes: int, each: int, *, extra: bool, backed: bool) -> list[int]:
        count, pages = -(-nbytes // each), self.padded(each) // self.page_bytes
        if pages * self.page_bytes > self.capacity:
            raise BudgetError(
                f"a region of {format_bytes(each)} does not fit the pool of "
                f"{format_bytes(self.capacity)}: raise the budget"
            )
        with self._placing:
            if len(self._free_ids) < count:
                raise BudgetError(f"more than {REGIONS} regions are alive: raise min_paged_bytes")
            first = self._take(count * pages, backed=backed)
            end = first + count * pages
            regions = self._free_ids[: -count - 1 : -1]
            admitted = []
            try:
                if backed:
                    self._spill.grow(end * self.page_bytes)
                if extra:
                    beyond = count * pages * self.page_bytes
                    self._spill.grow(self._spill.need + self._extra_bytes + beyond)
                for number, region in enumerate(regions):
                    own = min(each, nbytes - number * each)
                    self._places[region] = place = Place(first + number * pages, pages, own)
                    self._admit(region, place)
                    admitted.append(region)
            except (SpillError, BudgetError, MemoryError):
                for region in admitted:
                    self._dismiss(region)
                for region in regions:
                    self._places.pop(region, None)
                self._extents.give(first, count * pages)
                raise
            del self._free_ids[-count:]
            if extra:
                self._extra.update(dict.fromkeys(regions, pages * self.page_bytes))
                self._extra_bytes += count * pages * self.page_bytes
            self._owners[first:end] = np.repeat(np.array(regions) + 1, pages)
            return regions

    def twin(self, region: int) -> int:
        """Return a region's twin: one of its size to exchange contents with, made at first call."""
        with self._placing:
            other = self._twins.get(region)
            if other is None:
                other = self._twins[region] = self.allocate(self._places[region].nbytes)
            return other

    def _check_room(self, regions: Sequence[int]) -> None:
        """Raise `BudgetError` for regions that can never be present together."""
        if len(regions) > 1:
            need = sum(self.size(region) for region in set(regions))
            if need > self.capacity:
                raise BudgetError(
                    f"{format_bytes(need)} of regions are needed at once but the pool has "
                    f"{format_bytes(self.capacity)}: raise the budget; it lacks "
                    f"{format_bytes(need - self.capacity)} for {self._listed(regions)}"
                )

    def _no_room(
        self, regions: Iterable[int], pinned: Iterable[int], waited: str = ""
    ) -> BudgetError:
        """Return the error for regions that found no room next to the pinned ones.

        Args:
            regions: those requested.
            pinned: those that cannot be evicted.
            waited: how long the caller waited, as text for the message.
        """
        wanted, others = set(regions), set(pinned).difference(regions)
        need, held = (sum(map(self.size, some)) for some in (wanted, others))
        lack = need + held - self.capacity
        lacks = f"; it lacks {format_bytes(lack)}" if lack > 0 else ""
        return BudgetError(
            f"no room of {format_bytes(need)} came free{waited} for {self._listed(wanted)} beside "
            f"{self._listed(others)}: the rest of the pool of {format_bytes(self.capacity)} is "
            f"pinned; raise the budget{lacks}"
        )

    def _listed(self, regions: Iterable[int]) -> str:
        """Return the names of regions for a message, the largest first."""
        ordered = sorted(set(regions), key=lambda region: (-self.size(region), region))
        names = [called(self.names, region, self.size(region)) for region in ordered[:_LISTED]]
        if len(ordered) > _LISTED:
            names.append(f"{len(ordered) - _LISTED} more")
        return ", ".join(names) or "nothing"

    def _take(self, pages: int, *, backed: bool = True) -> int:
        with self._placing:
            page = (self._extents.take if backed else self._extents.take_last)(pages)
        if page is None:
            raise BudgetError(f"the arena has no {pages} pages in a row left")
        return page

    def _give(self, page: int, pages: int) -> None:
        with self._placing:
            self._extents.give(page, pages)

    def release(self, region: int) -> None:
        """End a region and discard its bytes. The regions of a row must end together."""
        twin = self._twins.pop(region, None)
        ending = [region] if twin is None else [region, twin]
        for one in ending:
            self._dismiss(one)
        with self._placing:
            for one in ending:
                self._storages.pop(one, None)
                self._rows.pop(one, None)
                self._extra_bytes -= self._extra.pop(one, 0)
                place = self._places.pop(one)
                self._owners[place.page : place.page + place.pages] = 0
                self._extents.give(place.page, place.pages)
                self._free_ids.append(one)

    def storage(self, region: int) -> torch.UntypedStorage:
        """Return the storage whose bytes are the region's; its address is fixed where the device
        `serves` accesses."""
        with self._placing:
            storage = self._storages.get(region)
            if storage is None:
                place = self._places[region]
                storage = self._storages[region] = self._at(place.page, place.nbytes)
            return storage

    def row_storage(self, regions: Sequence[int]) -> torch.UntypedStorage:
        """Return the storage over a whole row, in addition to those of its regions."""
        with self._placing:
            storage = self._rows.get(regions[0])
            if storage is None:
                nbytes = sum(self._places[region].nbytes for region in regions)
                page = self._places[regions[0]].page
                storage = self._rows[regions[0]] = self._at(page, nbytes)
            return storage

    def _at(self, page: int, nbytes: int) -> torch.UntypedStorage:
        memory = (ctypes.c_char * nbytes).from_address(self._base + page * self.page_bytes)
        return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()

    def allocated_bytes(self) -> int:
        """Return the process's peak bytes of fast memory since the last call, by the allocator's
        count, regions and all else; 0 if there is no count."""
        return 0

    def keep(self, region: int) -> bool:
        """Turn a region's storage into an ordinary one, in place and with its bytes, outside the
        budget. Return False, and leave it paged, if there is no room or the device cannot."""
        return False

    def below(self, region: int) -> torch.UntypedStorage | None:
        """Return a region's bytes as an ordinary CPU storage over the host memory that holds them,
        outside the budget; the region then has no content. Return None if there is no such memory,
        or it cannot be given away."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Release all memory and the spill file; no storage may be used afterwards."""

    def retire(self) -> int:
        """Close once no other reference to a storage is left, at once if there is none.

        Returns:
            How many storages are still referenced. They can be read and written until then.
        """
        with self._placing:
            storages = [*self._storages.values(), *self._rows.values()]
            self._storages, self._rows = {}, {}
        held = [storage for storage in storages if users_of(storage) > 1]
        storages.clear()
        if not held:
            self.close()
            return 0
        left = len(held)

        def gone() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self.close()

        for storage in held:
            weakref.finalize(storage, gone).atexit = False
        return left

    def owner(self, held: torch.Tensor | torch.UntypedStorage) -> int:
        """Return the region that contains the first byte of a tensor or storage, or -1."""
        return self._owner_at(local(held).data_ptr())

    def owners(self, tensor: torch.Tensor) -> list[int]:
        """Return the regions that have bytes between the first and the last of ``tensor``,
        ascending."""
        tensor = local(tensor)
        if not tensor.numel():
            return []
        first = tensor.data_ptr()
        each = zip(tensor.stride(), tensor.shape, strict=True)
        elements = 1 + sum(step * (size - 1) for step, size in each)
        last = first + elements * tensor.element_size() - 1
        ends = {self._owner_at(first), self._owner_at(last)}
        if ends == {-1}:
            return []
        within = {self._owner_at(address) for address in range(first, last, self.page_bytes)}
        return sorted((ends | within) - {-1})

    def begins(self, tensor: torch.Tensor, region: int) -> bool:
        """Return whether the first byte of ``tensor`` is the first of ``region``."""
        place = self._places.get(region)
        return (
            place is not None
            and local(tensor).data_ptr() == self._base + place.page * self.page_bytes
        )

    def _owner_at(self, address: int) -> int:
        page = (address - self._base) // self.page_bytes
        return int(self._owners[page]) - 1 if 0 <= page < len(self._owners) else -1
