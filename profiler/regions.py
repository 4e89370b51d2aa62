"""Regions of one step, told apart by storage: number, name, kind, and the bytes alive.

No tensor is held alive; a weak reference tells when a storage ends. torch keeps one Python object
per storage and revives it when only C++ holds the storage, so a weak reference to it dies with the
memory itself. Its address (``_cdata``) may be reused after that.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch

from dynoffload.profiler.signatures import dense_parts
from dynoffload.profiler.trace import RegionInfo


class RegionTable:
    """The storages of one step.

    Attributes:
        infos: what is known of each region, by index.
        live: bytes of all known storages that are alive.
        clock: number of operators so far; births and deaths are dated by it.
    """

    def __init__(self) -> None:
        self.infos: list[RegionInfo] = []
        self.live = 0
        self.clock = 0
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}  # by address: index, end

    def label(self, tensor: torch.Tensor, name: str, kind: str) -> None:
        """Say what the storage of ``tensor`` is; the first name given to it stays (tied weights).

        A region that was known only as an activation or an input takes the name it is given.
        """
        for index in self._indices(tensor, name, kind, -1):
            if self.infos[index].kind in ("activation", "input"):
                self.infos[index] = self.infos[index]._replace(name=name, kind=kind)

    def read(self, tensor: torch.Tensor) -> list[int]:
        """Return the regions of a tensor that is read; one not seen before came from outside."""
        return self._indices(tensor, f"input:{len(self.infos)}", "input", -1)

    def write(self, tensor: torch.Tensor) -> list[int]:
        """Return the regions of a tensor that is written in place."""
        indices = self.read(tensor)
        for index, part in zip(indices, dense_parts(tensor), strict=True):
            nbytes, known = part.untyped_storage().nbytes(), self.infos[index].nbytes
            if nbytes > known:
                self.infos[index] = self.infos[index]._replace(nbytes=nbytes)
                self.live += nbytes - known
        return indices

    def make(self, tensor: torch.Tensor, site: str) -> list[int]:
        """Return the regions of a tensor that an operator at ``site`` returned.

        A storage that is known is only aliased by it; one that is not was made by it.
        """
        return self._indices(tensor, f"{site}:{len(self.infos)}", "activation", self.clock)

    def close(self) -> None:
        """Forget all storages, so that no later death is noticed."""
        self._alive.clear()

    def _indices(self, tensor: torch.Tensor, name: str, kind: str, born: int) -> list[int]:
        """Return the regions of a tensor; those that are not known are added as described."""
        indices = []
        for part in dense_parts(tensor):
            storage = part.untyped_storage()
            key, index = storage._cdata, len(self.infos)
            known = self._alive.get(key)
            if known is None:
                known = index, weakref.ref(storage, partial(self._on_death, key))
                self._alive[key] = known
                self.infos.append(RegionInfo(name, kind, storage.nbytes(), born))
                self.live += storage.nbytes()
            indices.append(known[0])
        return indices

    def _on_death(self, key: int, death: weakref.ref[Any]) -> None:
        entry = self._alive.get(key)
        if entry is not None and entry[1] is death:
            del self._alive[key]
            info = self.infos[entry[0]]
            self.live -= info.nbytes
            # Dated by the last operator that has been recorded; it is the last that can have
            # needed it, or the storage went while the next one ran.
            self.infos[entry[0]] = info._replace(died=max(self.clock - 1, 0))
