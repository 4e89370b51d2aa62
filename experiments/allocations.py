"""Counts the bytes of tensors that operators allocate, while they live.

Temporaries inside an operator are not seen, nor is memory that the allocator caches.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages, from when an operator returns them until they are freed.

    Attributes:
        bytes: live bytes of storages allocated since the mode was entered.
        peak: maximum of ``bytes``.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[int, int] = {}
        self.bytes = self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, and count the new storages of its results."""
        given = {
            one.untyped_storage()._cdata
            for one in tree_leaves((args, kwargs))
            if isinstance(one, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for one in tree_leaves(out):
            if isinstance(one, torch.Tensor):
                storage = one.untyped_storage()
                key = storage._cdata
                if key not in self._known and key not in given:
                    self._known[key] = storage.nbytes()
                    self.bytes += storage.nbytes()
                    self.peak = max(self.peak, self.bytes)
                    weakref.finalize(storage, self._forget, key)
        return out

    def _forget(self, key: int) -> None:
        self.bytes -= self._known.pop(key)
