"""Table of one step's regions, one per storage: index, name, kind, and the bytes alive.

No tensor is kept alive; a weak reference reports when a storage is freed. torch keeps one Python
object per storage and revives it while only C++ holds the storage, so a weak reference to it
expires with the memory itself. The address (``_cdata``) may then be reused.
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
        infos: description of each region, by index.
        live: bytes of all known storages that are alive.
        clock: number of operators so far; the time unit of ``born`` and ``died``.
    """

    def __init__(self) -> None:
        self.infos: list[RegionInfo] = []
        self.live = 0
        self.clock = 0
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}  # address -> index, weakref

    def label(self, tensor: torch.Tensor, name: str, kind: str) -> None:
        """Name the storage of ``tensor``; its first label is kept (tied weights).

        A region known only as an activation or an input is renamed.
        """
        for index in self._indices(tensor, name, kind, -1):
            if self.infos[index].kind in ("activation", "input"):
                self.infos[index] = self.infos[index]._replace(name=name, kind=kind)

    def read(self, tensor: torch.Tensor) -> list[int]:
        """Return the regions of a tensor that is read; an unknown one is added as an input."""
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

        A known storage is aliased by the result; an unknown one was allocated by the operator.
        """
        return self._indices(tensor, f"{site}:{len(self.infos)}", "activation", self.clock)

    def close(self) -> None:
        """Drop all storages; frees after this are not recorded."""
        self._alive.clear()

    def _indices(self, tensor: torch.Tensor, name: str, kind: str, born: int) -> list[int]:
        """Return the regions of a tensor; add unknown ones with this description."""
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
            # Died at the last recorded operator: either that was its last use, or it was freed
            # while the next one ran.
            self.infos[entry[0]] = info._replace(died=max(self.clock - 1, 0))
