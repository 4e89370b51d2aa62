"""An optimizer's state while updates are put off: nobody sees an entry before its update is made.

Large state tensors are guarded by the device. Small ones (step counts, factored moments) are not;
they are reached through ``optimizer.state`` only, so this is where a look at them is noticed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

State = defaultdict[torch.Tensor, Any]


class WatchedState(State):
    """``optimizer.state``, which says when somebody looks.

    Args:
        entries: the state so far.
        on_look: called with the parameter whose entry is asked for, or None for all of them.
    """

    def __init__(self, entries: State, on_look: Callable[[torch.Tensor | None], None]) -> None:
        super().__init__(entries.default_factory or dict, entries)
        self._on_look = on_look

    def plain(self) -> State:
        """Return the same entries, unwatched."""
        return defaultdict(self.default_factory, super().items())

    def __getitem__(self, key: torch.Tensor) -> Any:
        self._on_look(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._on_look(key if isinstance(key, torch.Tensor) else None)
        return super().__contains__(key)

    def get(self, key: torch.Tensor, default: Any = None) -> Any:
        """Return the entry of ``key``, or ``default``; it makes none."""
        self._on_look(key)
        return super().get(key, default)

    def pop(self, key: torch.Tensor, *default: Any) -> Any:
        """Remove and return the entry of ``key``."""
        self._on_look(key)
        return super().pop(key, *default)

    def clear(self) -> None:
        """Remove all entries."""
        self._on_look(None)
        super().clear()

    def __iter__(self) -> Iterator[torch.Tensor]:
        self._on_look(None)
        return super().__iter__()

    def __len__(self) -> int:
        self._on_look(None)
        return super().__len__()

    def keys(self) -> Any:
        """Return the parameters that have state."""
        self._on_look(None)
        return super().keys()

    def values(self) -> Any:
        """Return the entries."""
        self._on_look(None)
        return super().values()

    def items(self) -> Any:
        """Return the parameters with their entries."""
        self._on_look(None)
        return super().items()

    def copy(self) -> State:  # type: ignore[override]
        """Return the same entries, unwatched."""
        self._on_look(None)
        return self.plain()

    def __reduce__(self) -> Any:
        """Copy and pickle as the plain mapping."""
        self._on_look(None)
        return defaultdict, (self.default_factory,), None, None, iter(super().items())
