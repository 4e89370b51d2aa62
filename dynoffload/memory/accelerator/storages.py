"""Storages of regions, which fetch their bytes when Python code accesses them.

torch returns the Python object that a storage was made with, so copying, pickling or saving a
tensor's storage uses this class. Operators bypass it, and are announced by `Accelerator.use`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dynoffload.errors import BackendError

_READERS = (
    *("nbytes", "size", "__len__", "__getitem__", "tolist", "__deepcopy__", "__reduce__"),
    *("cpu", "cuda", "hpu", "to", "_to", "_write_file", "byteswap"),
)
_WRITERS = ("copy_", "fill_", "__setitem__", "_byteswap")
_SHARING = ("share_memory_", "_share_fd_cpu_", "_share_filename_cpu_", "_share_cuda_")


class RegionStorage(torch.UntypedStorage):
    """A storage that is empty while its region is absent.

    Attributes:
        bring: called before its bytes are accessed, with whether they may be written, and
            whether the address is given away; None once it is an ordinary storage.
        content: bytes that it has while it is present.
    """

    bring: Callable[[bool, bool], None] | None = None
    content = 0

    def clone(self) -> torch.UntypedStorage:
        """Return an ordinary storage with the same bytes."""
        nbytes = self.nbytes()
        copy = torch.UntypedStorage(nbytes, device=self.device)  # type: ignore[no-untyped-call]
        copy.copy_(self)
        return copy

    def data_ptr(self) -> int:
        """Return a number of its own, by which code tells whether tensors share memory. Regions
        that are present one after another may have the same address."""
        return int(self._cdata if self.bring is not None else super().data_ptr())


def size_of(storage: torch.UntypedStorage) -> int:
    """Return the bytes of a storage, without fetching that of a region."""
    if isinstance(storage, RegionStorage) and storage.bring is not None:
        return storage.content
    return int(storage.nbytes())


def _brings(name: str, *, writes: bool) -> None:
    """Make a method of `RegionStorage` fetch its bytes first."""
    inherited = getattr(torch.UntypedStorage, name)

    def method(self: RegionStorage, *args: Any, **kwargs: Any) -> Any:
        if self.bring is not None:
            self.bring(writes, False)
        return inherited(self, *args, **kwargs)

    setattr(RegionStorage, name, method)


def _shares(name: str) -> None:
    """Make a method of `RegionStorage` refuse to share its memory with another process."""
    inherited = getattr(torch.UntypedStorage, name)

    def method(self: RegionStorage, *args: Any, **kwargs: Any) -> Any:
        if self.bring is not None:
            raise BackendError(
                f"{name}: the memory of a tensor that is paged cannot be shared with another "
                "process, as it comes and goes: send a clone"
            )
        return inherited(self, *args, **kwargs)

    setattr(RegionStorage, name, method)


for _name in _SHARING:
    _shares(_name)
for _name in _READERS:
    _brings(_name, writes=False)
for _name in _WRITERS:
    _brings(_name, writes=True)


_HAS_NO_ADDRESS = (
    "the slices of this tensor move by themselves, so that it has no memory as a whole: use "
    "operators of torch within the offload() block, or clone() it there first"
)


class RowStorage(torch.UntypedStorage):
    """The storage over a whole row: it has the row's size, but no memory.

    Tensors and their views use it, while the bytes are in the storages of the row's regions. Python
    code that asks for its bytes gets them from there, slice by slice.

    [Note: no memory]  Its address is null, and torch refuses to return it for writing. (Builds for
    CUDA could refuse it for reading too, but then also put no further tensor over it.) So code that
    takes an address without the dispatcher (`data_ptr`, numpy, DLPack) raises. An operator needs
    the slices' own storages (`dynoffload.runtime.over_rows`). Without them it raises where torch
    checks the address, and else ends the process.

    Attributes:
        slice_bytes: bytes of each slice.
        slices: the addresses (`_cdata`) of the storages of the slices' regions.
        read: copies its bytes into an ordinary storage of the same size, on any device.
        write: takes its bytes from such a storage.
    """

    slice_bytes: int
    slices: Sequence[int]
    read: Callable[[torch.UntypedStorage], None]
    write: Callable[[torch.UntypedStorage], None]

    @staticmethod
    def of(nbytes: int, device: torch.device) -> RowStorage:
        """Return a new storage of ``nbytes`` on ``device``."""
        storage: Any = torch._C._construct_storage_from_data_pointer(0, device, nbytes)
        storage.__class__ = RowStorage
        over = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        torch._C._set_throw_on_mutable_data_ptr(over)
        made: RowStorage = storage
        return made

    def copied(self, device: torch.device) -> torch.UntypedStorage:
        """Return an ordinary storage with the same bytes."""
        copy = torch.UntypedStorage(self.nbytes(), device=device)  # type: ignore[no-untyped-call]
        self.read(copy)
        return copy

    def clone(self) -> torch.UntypedStorage:
        """Return an ordinary storage with the same bytes, on the same device."""
        return self.copied(self.device)

    def cpu(self) -> torch.UntypedStorage:
        """Return an ordinary storage with the same bytes, in host memory."""
        return self.copied(torch.device("cpu"))

    def to(self, *, device: Any, non_blocking: bool = False) -> torch.UntypedStorage:
        """Return an ordinary storage with the same bytes on ``device``; this one if it is there."""
        device = torch.device(device)
        if device.type == self.device.type and device.index in (None, self.device.index):
            return self
        return self.copied(device)

    def data_ptr(self) -> int:
        """Return a number of its own: it has no address."""
        return int(self._cdata)


def place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return an identifier of a tensor's first byte. It is equal for two tensors if and only if
    they begin at the same byte, and never changes, even if the memory moves."""
    storage = tensor.untyped_storage()
    offset = int(tensor.storage_offset()) * tensor.element_size()
    if isinstance(storage, RowStorage):
        number = min(offset // storage.slice_bytes, len(storage.slices) - 1)
        return storage.slices[number], offset - number * storage.slice_bytes
    if isinstance(storage, RegionStorage):
        return storage._cdata, offset
    return 0, tensor.data_ptr()


def _of_copy(name: str, *, writes: bool) -> None:
    """Make a method of `RowStorage` act on a copy in host memory; write it back if ``writes``."""
    inherited = getattr(torch.UntypedStorage, name)

    def method(self: RowStorage, *args: Any, **kwargs: Any) -> Any:
        copy = self.cpu()
        result = inherited(copy, *args, **kwargs)
        if writes:
            self.write(copy)
        return self if result is copy else result

    setattr(RowStorage, name, method)


def _refuses(name: str) -> None:
    def method(self: RowStorage, *args: Any, **kwargs: Any) -> Any:
        raise BackendError(f"{name}: {_HAS_NO_ADDRESS}")

    setattr(RowStorage, name, method)


for _name in ("__getitem__", "tolist", "__reduce__", "_to", "_write_file"):
    _of_copy(_name, writes=False)
for _name in ("copy_", "fill_", "__setitem__", "_byteswap"):
    _of_copy(_name, writes=True)
for _name in (*_SHARING, "_set_from_file"):
    _refuses(_name)
