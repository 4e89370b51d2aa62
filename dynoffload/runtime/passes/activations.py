"""Pages saved activations: tensors that autograd saves for backward, packed into regions.

Each storage that autograd saves during a forward of the managed model is copied once into the
current *chunk*, a region filled from its start. The original is freed when the forward releases it.
A chunk's bytes are discarded with its last saved tensor. Backward visits chunks in reverse order,
so they migrate like parameters.

Tensors below a threshold stay in place and are counted; beyond their allowance they are moved too.
A view of a parameter stays a view.

[Note: hidden writes]  Backward gets the values that a tensor had when it was first saved. A later
write that autograd sees raises, as in plain PyTorch. A write hidden from autograd (through
``.data``, or a numpy view) affects backward in plain PyTorch, but not here. A tensor from ``.data``
has its own version counter, so its saved bytes are stored separately.

[Note: parts]  If less than half of a storage is saved, only that part is moved if it is dense. A
part with gaps, such as some columns of a table, is moved as its whole storage, because kernels
depend on its strides. If that is larger than the pool, or is an input of the model, `Columns` has
the elements alone. Saved tensors never keep more bytes than are counted.

[Note: cast weights]  Autocast caches the low-precision copy of each weight until its block ends:
half of all weights, in addition to what autograd saves. The cache must stay, as it decides how
gradients of a weight used twice are summed. So once such a copy is saved, its tensor is moved onto
the saved bytes, and is paged with them.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from dynoffload.distributed.sharded import Gathered
from dynoffload.errors import BudgetError, StepLostError
from dynoffload.memory.accelerator.guarded import fit, unguard, untraced
from dynoffload.memory.device import Device
from dynoffload.memory.pieces import is_dense
from dynoffload.memory.region_allocator import users_of
from dynoffload.runtime.adoption.store import bytes_of, offset_of, view_of
from dynoffload.runtime.interrupts import uninterrupted
from dynoffload.runtime.passes.compiled import CompiledModules
from dynoffload.runtime.passes.finalization import Endings, Keeping
from dynoffload.runtime.passes.saved import (
    ALIGNMENT,
    Chunk,
    Columns,
    Entry,
    InPlace,
    Packed,
    Source,
    cast_that_autocast_keeps,
    is_of_a_subclass,
    is_plain,
    memory_of,
    name_of_kind,
    without_lazy_bits,
)
from dynoffload.runtime.placing import put
from dynoffload.runtime.unseen import unseen
from dynoffload.units import KiB, format_bytes

_SHORT = 128 * KiB  # copied by one thread
_FEW, _MANY = 8, 1024  # freed objects that may stay uncounted

_alive: weakref.WeakSet[Activations] = weakref.WeakSet()


def tensors_in(value: Any, depth: int) -> Iterator[torch.Tensor]:
    """Yield the tensors of a nest of mappings, sequences and objects, down to ``depth``."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth:
        items: Iterable[Any] = ()
        if isinstance(value, dict):
            items = value.values()
        elif isinstance(value, tuple | list):
            items = value
        elif hasattr(value, "__dict__"):
            items = vars(value).values()
        for item in items:
            yield from tensors_in(item, depth - 1)


def _close_in_child() -> None:
    """Close all in a forked process: it does not own the paged memory, and must not free it."""
    for activations in list(_alive):
        activations.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


@dataclass(eq=False)
class Activations:
    """The saved-tensor hooks of one session.

    Attributes:
        device: holds the chunks.
        chunk_bytes: size of a chunk; a larger storage gets its own chunk.
        min_moved_bytes: smaller storages are kept in place while `allowance` lasts.
        allowance: most bytes of tensors kept in place.
        on_borrow: called with the region of a parameter that autograd saves.
        on_borrowed: called in backward with the region of a saved parameter, before its use.
        on_chunk: called in backward with the region of each chunk that is reached.
        on_open: called in forward when a chunk is opened.
        site: returns the path of the running module, for errors.
        enough: returns a budget with room for a region of the given bytes.
        region_of: returns the region of a parameter, -1 for none.
        names: maps regions to their names in reports; it is extended here.
        kept: counts the tensors kept in place.
        gathered: finds the shard of a gathered tensor; None if the model has no shards.
    """

    device: Device
    chunk_bytes: int
    min_moved_bytes: int
    allowance: int
    on_borrow: Callable[[int], None]
    on_borrowed: Callable[[int], None]
    on_chunk: Callable[[int], None]
    on_open: Callable[[Chunk], None]
    site: Callable[[], str]
    enough: Callable[[int], int]
    region_of: Callable[[torch.nn.Parameter], int] = lambda parameter: -1
    names: dict[int, str] = field(default_factory=dict)
    saved_bytes: int = 0  # moved since the start
    left_bytes: int = 0  # left over in full chunks since the start

    def __post_init__(self) -> None:
        _alive.add(self)
        self._regions: list[int] = []  # of standard chunks, by index
        self._free: list[int] = []  # indices of free chunks, highest first
        self._current: Chunk | None = None
        self._entries: dict[Hashable, weakref.ref[Entry]] = {}
        self._last: int = -1
        self._waiting: list[Chunk] = []  # ended, but with external references to their memory
        self._live = 0  # entries whose saved tensors may still be unpacked
        self._moved = self._peak = 0  # bytes of their storages, and the most with those in place
        self._entered: Endings[Chunk] = Endings()
        self._sources: dict[int, weakref.ref[Source]] = {}  # of this forward, by storage
        self._of_sources: Endings[int] = Endings()  # bytes
        self.kept = Keeping()
        self.gathered: Gathered | None = None
        self.compiled: CompiledModules | None = None  # on an accelerator
        self._closed = False
        self._inputs: set[int] = set()  # storages of the model's inputs
        self._borrowed: Endings[None] = Endings()

    # Chunks

    @property
    def taken_bytes(self) -> int:
        """Bytes of chunks filled since the start; the difference is what a visit takes."""
        return self.saved_bytes + self.left_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes kept in place, including those freed since the last `settle`."""
        return self.kept.nbytes

    def take_peak(self) -> int:
        """Return the most bytes that storages of saved tensors would have taken in memory since the
        last call, and reset it."""
        peak, self._peak = self._peak, self._moved + self.kept_bytes
        return peak

    def region(self, index: int) -> int:
        """Return the region of the standard chunk ``index``, allocated at first use."""
        while index >= len(self._regions):
            region = self.device.allocate(self.chunk_bytes, extra=True)
            self.names[region] = f"activations[{len(self._regions)}]"
            self._regions.append(region)
            self._free.insert(0, len(self._regions) - 1)
        return self._regions[index]

    def are_held(self) -> bool:
        """Return whether graphs or user references still need saved tensors."""
        self.sweep()
        return self._live > 0 or bool(self._waiting)

    def close(self) -> None:
        """Refuse to unpack from now on; saved tensors are lost."""
        self._closed = True
        for borrowed in self._borrowed.alive():
            borrowed.release()

    def __len__(self) -> int:
        return len(self._regions)

    def next_indices(self) -> list[int]:
        """Return free chunks' indices in the order in which they will be opened."""
        self.settle()
        return self._free[::-1]

    def _open(self, nbytes: int) -> Chunk:
        self.settle()
        if nbytes > self.chunk_bytes:
            if self.device.padded(nbytes) > self.device.capacity:
                raise BudgetError(
                    f"a tensor of {format_bytes(nbytes)} that autograd saves in or after module "
                    f"{self.site()!r} is larger than the pool of "
                    f"{format_bytes(self.device.capacity)}: raise the budget to "
                    f"{format_bytes(self.enough(nbytes))} (it is memory that lacks if a warning "
                    "said that the pool shrinks), or make the sample smaller"
                )
            region = self.device.allocate(nbytes, extra=True)
            self.names[region] = "activations (large)"
            chunk = Chunk(-1, region, nbytes)
        else:
            if not self._free:
                self.region(len(self._regions))
            index = self._free.pop()
            chunk = Chunk(index, self._regions[index], self.chunk_bytes)
        try:
            self.device.acquire([chunk.region], pin=True)  # until it is shut, unknown to plans
        except BaseException:
            self._drop(chunk)
            raise
        try:
            self.on_open(chunk)
        except BaseException:  # memory lacks
            self._shut(chunk)
            raise
        return chunk

    def _place(self, nbytes: int) -> tuple[Chunk, int]:
        if nbytes > self.chunk_bytes:
            if self.device.padded(nbytes) + self.chunk_bytes > self.device.capacity:
                self._shut_current()  # the new chunk may need the whole pool
            return self._open(nbytes), 0
        chunk_or_none = self._current
        if chunk_or_none is None or chunk_or_none.filled + nbytes > chunk_or_none.size:
            if chunk_or_none is not None:
                self.left_bytes += chunk_or_none.size - chunk_or_none.filled
            self._shut_current()
            chunk_or_none = self._current = self._open(nbytes)
        offset = chunk_or_none.filled
        chunk_or_none.filled += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return chunk_or_none, offset

    def _shut_current(self) -> None:
        if self._current is not None:
            chunk, self._current = self._current, None
            self._shut(chunk)

    def _shut(self, chunk: Chunk) -> None:
        chunk.open = False
        self.device.unpin([chunk.region])
        if chunk.live == 0:
            self._drop(chunk)

    def begin_forward(self, inputs: Iterable[torch.Tensor]) -> None:
        """Begin a forward; the user owns the memory of its ``inputs``."""
        kind = self.device.device.type
        self._inputs = {t.untyped_storage()._cdata for t in inputs if is_plain(t, kind)}

    @uninterrupted
    def end_forward(self) -> None:
        """End the forward; the next one starts a new chunk."""
        self._shut_current()
        self._inputs = set()
        self._entries.clear()
        self._sources.clear()
        self.sweep()

    def settle(self) -> None:
        """Account for saved tensors freed since the last call, and drop chunks with none left."""
        if not self._closed and (self._entered or self.kept or len(self._borrowed) > _MANY):
            self._settle()

    @uninterrupted
    def _settle(self) -> None:
        self._borrowed.take()
        self.kept.settle()
        self._moved -= sum(self._of_sources.take())
        for chunk in self._entered.take():
            self._live -= 1
            chunk.live -= 1
            if chunk.live == 0 and not chunk.open:
                self._drop(chunk)

    def _drop(self, chunk: Chunk) -> None:
        if self.compiled is not None:
            self.compiled.let_go(chunk.region)
        if users_of(self.device.storage(chunk.region)) > 1:
            self._waiting.append(chunk)  # user code still holds an unpacked tensor
            return
        if chunk.index < 0:
            self.device.release(chunk.region)
        else:
            self.device.discard(chunk.region)
            self._free.append(chunk.index)
            if len(self._free) > 1 and self._free[-2] < chunk.index:
                self._free.sort(reverse=True)

    @uninterrupted
    def sweep(self) -> None:
        """Drop chunks that no longer have external references."""
        self.settle()
        waiting, self._waiting = self._waiting, []
        for chunk in waiting:
            self._drop(chunk)

    # Hooks

    @untraced
    @unseen
    def pack(self, tensor: torch.Tensor) -> Packed | InPlace:
        """Return the stand-in for a tensor that autograd saves, moved to a chunk if possible."""
        if not is_plain(tensor, self.device.device.type):
            return self._keep(tensor)
        storage = tensor.untyped_storage()
        # In a row this is the region of the first byte used; others are fetched when touched.
        region = self.device.owner(tensor if tensor.numel() else storage)
        if region >= 0:
            self.on_borrow(region)
            borrowed = InPlace(tensor, region, compiled=self._is_compiled)
            self._borrowed.watch(borrowed, None)
            if self.compiled is not None:
                self.compiled.saved(borrowed)
            return borrowed
        if self.gathered is not None:
            shard = self.gathered.source_of(tensor)
            if shard is not None:  # FSDP frees it and gathers it again
                region = self.region_of(shard)
                return InPlace(tensor, region)
        return self._pack(tensor, storage)

    @uninterrupted
    def _pack(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Packed | InPlace:
        nbytes = storage.nbytes()
        self.settle()
        more = self.kept.adds(storage)
        small = nbytes < self.min_moved_bytes and self.kept_bytes + more <= self.allowance
        if not nbytes or small or is_of_a_subclass(tensor):
            return self._keep(tensor)
        key: Hashable = storage._cdata
        used = tensor.numel() * tensor.element_size()
        whole, gaps = nbytes <= 2 * used, used > 0 and not is_dense(tensor)
        if not whole and gaps:
            most = self.device.capacity - self.chunk_bytes  # bytes that can be saved as one
            whole = key not in self._inputs and self.device.padded(nbytes) <= most
        if not whole:
            nbytes = used
            key = (key, tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())
        form, place = (Packed, offset_of(tensor)) if whole else (Columns if gaps else Packed, 0)
        known = self._entries.get(key)
        entry = known() if known is not None else None
        if entry is not None and entry.stands_for(tensor):
            return form(tensor, entry, place, self._is_compiled)
        chunk, offset = self._place(nbytes)
        ours = self.device.storage(chunk.region)
        entry = Entry(chunk, offset, self._source_of(storage), tensor)
        self._live += 1
        self._note_peak()
        chunk.live += 1
        self._entered.watch(entry, chunk)
        # Made before a cast moves, because the tensor may be that cast.
        packed = form(tensor, entry, place, self._is_compiled)
        try:
            with torch.no_grad():
                if whole:
                    if nbytes <= _SHORT and self.device.serves:
                        at = ours.data_ptr() + offset
                        ctypes.memmove(at, storage.data_ptr(), nbytes)  # a tenth of copy_'s time
                    else:
                        bytes_of(ours, offset, nbytes).copy_(bytes_of(storage))
                    cast = cast_that_autocast_keeps(tensor)
                    if cast is not None:
                        begin = offset // cast.element_size() + offset_of(cast)
                        put(cast, view_of(ours, cast, begin))
                else:
                    packed.raw_in(ours).copy_(without_lazy_bits(tensor))
        finally:
            if chunk.index < 0:
                self._shut(chunk)
        self._entries[key] = weakref.ref(entry)
        self.saved_bytes += nbytes
        return packed

    def _source_of(self, storage: torch.UntypedStorage) -> Source:
        """Return what stands for ``storage`` in this forward; the first time its bytes count."""
        known = self._sources.get(storage._cdata)
        source = None if known is None else known()
        if source is None or source.storage() is not storage:
            source = Source(storage)
            self._sources[storage._cdata] = weakref.ref(source)
            self._moved += storage.nbytes()
            self._of_sources.watch(source, storage.nbytes())
        return source

    @uninterrupted
    def _keep(self, tensor: torch.Tensor) -> InPlace:
        def name() -> str:
            where = f"that autograd saves in or after module {self.site()!r}"
            return f"{name_of_kind(tensor)} {where}"

        kept = InPlace(tensor)
        storages, others = memory_of(tensor, self.device.device.type)
        self.kept.add(kept, storages, others, name)
        self._note_peak()
        return kept

    def _note_peak(self) -> None:
        self._peak = max(self._peak, self._moved + self.kept_bytes)

    @untraced
    @unseen
    def unpack(self, packed: Packed | InPlace) -> torch.Tensor:
        """Return a saved tensor for backward.

        Raises:
            RuntimeError: it was modified in place since it was saved, as autograd raises.
            StepLostError: the session is over.
        """
        if self._closed:
            raise StepLostError(
                "backward of a forward that was made inside an offload() block which has ended: "
                "call backward() inside the block"
            )
        if len(self.kept) > _FEW:
            self.settle()
        if isinstance(packed, Packed):
            packed.check()
            chunk = packed.entry.chunk
            if chunk.region != self._last:
                self.settle()
                self._last = chunk.region
                self.on_chunk(chunk.region)
            plain = packed.compiled and self._hold(chunk.region)
            return packed.unpack(self.device.storage(chunk.region), plain=plain)
        packed.check()
        if packed.region >= 0:
            self.on_borrowed(packed.region)
            stays = packed.compiled and self._hold(packed.region)
            return (unguard if stays else fit)(packed.tensor)
        return packed.tensor

    @property
    def _is_compiled(self) -> bool:
        """Whether a compiled module runs."""
        return self.compiled is not None and self.compiled.running

    def _hold(self, region: int) -> bool:
        """Keep a region present until the running node of the graph has ended."""
        return self.compiled is not None and self.compiled.hold(region)
