"""Storages of regions, which bring their bytes when Python code asks for them.

torch hands out the Python object that a storage was made with, so whoever takes a tensor's storage
to copy, pickle or save it meets this one. What operators do is announced elsewhere
(`Accelerator.use`), and passes by here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_READERS = (
    *("nbytes", "size", "__len__", "__getitem__", "tolist", "__deepcopy__", "__reduce__"),
    *("cpu", "cuda", "hpu", "to", "_to", "_write_file", "byteswap"),
)
_WRITERS = ("copy_", "fill_", "__setitem__", "data_ptr", "_byteswap")


class RegionStorage(torch.UntypedStorage):
    """A storage that is empty while its region is absent.

    Attributes:
        bring: called before its bytes are looked at, with whether they may be written; None once
            it is a storage like any other.
        content: bytes that it has while it is present.
    """

    bring: Callable[[bool], None] | None = None
    content = 0

    def clone(self) -> torch.UntypedStorage:
        """Return an ordinary storage with the same bytes."""
        nbytes = self.nbytes()
        copy = torch.UntypedStorage(nbytes, device=self.device)  # type: ignore[no-untyped-call]
        copy.copy_(self)
        return copy


def size_of(storage: torch.UntypedStorage) -> int:
    """Return the bytes of a storage; that of a region is not brought for that."""
    if isinstance(storage, RegionStorage) and storage.bring is not None:
        return storage.content
    return int(storage.nbytes())


def place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return what says where a tensor lies: the same for two tensors of one size if and only if
    they are one. It is no address, which what is absent has none of."""
    storage = tensor.untyped_storage()
    if isinstance(storage, RegionStorage):
        return storage._cdata, int(tensor.storage_offset()) * tensor.element_size()
    return 0, tensor.data_ptr()


def _brings(name: str, *, writes: bool) -> None:
    """Let a method of `RegionStorage` bring its bytes first."""
    inherited = getattr(torch.UntypedStorage, name)

    def method(self: RegionStorage, *args: Any, **kwargs: Any) -> Any:
        if self.bring is not None:
            self.bring(writes)
        return inherited(self, *args, **kwargs)

    setattr(RegionStorage, name, method)


for _name in _READERS:
    _brings(_name, writes=False)
for _name in _WRITERS:
    _brings(_name, writes=True)
