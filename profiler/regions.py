"""Regions of one step, told apart by storage: number, name, kind, and the bytes alive.

No tensor is held alive; a weak reference tells when a storage ends.

[Note: a storage's Python object lives as long as the storage]
torch keeps one Python object per storage and revives it when only C++ holds the storage, so a weak
reference to it dies with the memory itself, not with a Python name. Its address (``_cdata``) may be
reused after that, which is why the entry is dropped in the same moment.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from dynoffload.profiler.signatures import dense_parts
from dynoffload.profiler.trace import RegionInfo


class _Death(weakref.ref[Any]):
    """A weak reference to a storage that knows under which key it is filed."""

    __slots__ = ("key",)
    key: int


class RegionTable:
    """The storages of one step.

    Attributes:
        live: bytes of all known storages that are alive.
        clock: number of operators so far; births and deaths are dated by it.
    """

    def __init__(self) -> None:
        self.live = 0
        self.clock = 0
        self._alive: dict[int, tuple[int, _Death]] = {}  # storage address -> (index, its end)
        self._names: list[str] = []
        self._kinds: list[str] = []
        self._sizes: list[int] = []
        self._born: list[int] = []
        self._died: list[int] = []
        self._bury = self._on_death  # One bound method for all weak references.

    def label(self, tensor: torch.Tensor, name: str, kind: str) -> None:
        """Say what the storage of ``tensor`` is; the first name given to it stays (tied weights).

        A region that was known only as an activation or an input takes the name it is given.
        """
        for part in dense_parts(tensor):
            index = self._find(part)
            if index < 0:
                self._add(part, name, kind, -1)
            elif self._kinds[index] in ("activation", "input"):
                self._names[index] = name
                self._kinds[index] = kind

    def read(self, tensor: torch.Tensor) -> list[int]:
        """Return the regions of a tensor that is read; one not seen before came from outside."""
        indices = []
        for part in dense_parts(tensor):
            index = self._find(part)
            if index < 0:
                index = self._add(part, f"input:{len(self._names)}", "input", -1)
            indices.append(index)
        return indices

    def write(self, tensor: torch.Tensor) -> list[int]:
        """Return the regions of a tensor that is written in place."""
        indices = self.read(tensor)
        for index, part in zip(indices, dense_parts(tensor), strict=True):
            self._resize(index, part.untyped_storage().nbytes())
        return indices

    def make(self, tensor: torch.Tensor, site: str) -> list[int]:
        """Return the regions of a tensor that an operator at ``site`` returned.

        A storage that is known is only aliased by it; one that is not was made by it.
        """
        indices = []
        for part in dense_parts(tensor):
            index = self._find(part)
            if index < 0:
                name = f"{site}:{len(self._names)}"
                index = self._add(part, name, "activation", self.clock)
            indices.append(index)
        return indices

    def infos(self) -> list[RegionInfo]:
        """Return all regions of the step, by index."""
        columns = zip(self._names, self._kinds, self._sizes, self._born, self._died, strict=True)
        return [RegionInfo(*column) for column in columns]

    def close(self) -> None:
        """Forget all storages, so that no later death is noticed."""
        self._alive.clear()

    def _find(self, tensor: torch.Tensor) -> int:
        entry = self._alive.get(tensor.untyped_storage()._cdata)
        return -1 if entry is None else entry[0]

    def _add(self, tensor: torch.Tensor, name: str, kind: str, born: int) -> int:
        storage = tensor.untyped_storage()
        index = len(self._names)
        nbytes = storage.nbytes()
        self._names.append(name)
        self._kinds.append(kind)
        self._sizes.append(nbytes)
        self._born.append(born)
        self._died.append(-1)
        death = _Death(storage, self._bury)
        death.key = storage._cdata
        self._alive[death.key] = (index, death)
        self.live += nbytes
        return index

    def _resize(self, index: int, nbytes: int) -> None:
        grown = nbytes - self._sizes[index]
        if grown > 0:
            self._sizes[index] = nbytes
            self.live += grown

    def _on_death(self, death: weakref.ref[Any]) -> None:
        assert isinstance(death, _Death)
        entry = self._alive.get(death.key)
        if entry is not None and entry[1] is death:
            del self._alive[death.key]
            self.live -= self._sizes[entry[0]]
            # Dated by the last operator that has been recorded; it is the last that can have
            # needed it, or the storage went while the next one ran.
            self._died[entry[0]] = max(self.clock - 1, 0)
