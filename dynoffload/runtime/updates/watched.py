"""An optimizer's state while updates are put off: nobody sees an entry before its update is made.

Large state tensors are guarded by the device. Small ones (step counts, factored moments) are not;
they are reached through ``optimizer.state`` only, so this is where a look at them is noticed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

State = defaultdict[torch.Tensor, Any]


class Order:
    """The order in which a whole step makes entries: that of the groups' parameters."""

    def __init__(self) -> None:
        self._ranks: dict[int, int] = {}  # by id of a parameter whose entry a session has made
        self._next = 0
        self._changed = False

    def note(self, parameters: Iterable[torch.Tensor], entries: State) -> None:
        """A step over ``parameters`` begins; what has no entry may get one, now or later."""
        for parameter in parameters:
            if not dict.__contains__(entries, parameter):
                self._ranks[id(parameter)] = self._next
                self._next += 1
                self._changed = True

    def restore(self, entries: State) -> None:
        """Put the entries that were made since in order, behind those that were there."""
        if self._changed:
            self._changed = False
            ordered = sorted(dict.items(entries), key=lambda one: self._ranks.get(id(one[0]), -1))
            dict.clear(entries)
            dict.update(entries, ordered)


class WatchedState(State):
    """``optimizer.state``, which says when somebody looks.

    Whoever holds the state as it was before sees new entries there too, and finds it in its place
    again at the end.

    Args:
        entries: the state so far.
        on_look: called with the parameter whose entry is asked for, or None for all of them.
    """

    def __init__(self, entries: State, on_look: Callable[[torch.Tensor | None], None]) -> None:
        factory = getattr(entries, "default_factory", None)  # the user's may be a plain dict
        super().__init__(factory or dict, entries)
        self._on_look, self._before = on_look, entries

    def before(self) -> State:
        """Return what this stands for, with the entries of now."""
        self._before.clear()
        self._before.update(super().items())
        return self._before

    def plain(self) -> State:
        """Return the same entries, unwatched."""
        return defaultdict(self.default_factory, super().items())

    def __setitem__(self, key: torch.Tensor, value: Any) -> None:
        self._on_look(key)
        super().__setitem__(key, value)
        self._before[key] = value

    def __delitem__(self, key: torch.Tensor) -> None:
        self._on_look(key)
        super().__delitem__(key)
        self._before.pop(key, None)

    def setdefault(self, key: torch.Tensor, default: Any = None) -> Any:
        """Return the entry of ``key``, made of ``default`` if there is none."""
        self._on_look(key)
        if not super().__contains__(key):
            self[key] = default
        return super().__getitem__(key)

    def popitem(self) -> tuple[torch.Tensor, Any]:
        """Remove and return the last entry."""
        self._on_look(None)
        key, value = super().popitem()
        self._before.pop(key, None)
        return key, value

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Take entries over."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __eq__(self, other: object) -> bool:
        self._on_look(None)
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __repr__(self) -> str:
        self._on_look(None)
        return super().__repr__()

    def __or__(self, other: Any) -> Any:
        self._on_look(None)
        return self.plain() | other

    def __ior__(self, other: Any) -> WatchedState:  # type: ignore[override]
        self.update(other)
        return self

    def __ror__(self, other: Any) -> Any:
        self._on_look(None)
        return other | self.plain()

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
        self._before.pop(key, None)
        return super().pop(key, *default)

    def clear(self) -> None:
        """Remove all entries."""
        self._on_look(None)
        super().clear()
        self._before.clear()

    def __iter__(self) -> Iterator[torch.Tensor]:
        self._on_look(None)
        return super().__iter__()

    def __reversed__(self) -> Iterator[torch.Tensor]:
        self._on_look(None)
        return super().__reversed__()

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

    def __copy__(self) -> State:  # type: ignore[override]
        return self.copy()

    def __reduce__(self) -> Any:
        """Copy and pickle as the plain mapping."""
        self._on_look(None)
        return defaultdict, (self.default_factory,), None, None, iter(super().items())
