"""An optimizer's state mapping that makes a deferred update before its entry is read.

The device guards large state tensors. Small ones (step counts, factored moments) are not guarded.
They are reached only through ``optimizer.state``, so this mapping detects accesses to them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

State = defaultdict[torch.Tensor, Any]


class Order:
    """The order in which a whole step would create entries: that of the groups' parameters."""

    def __init__(self) -> None:
        self._ranks: dict[int, int] = {}  # by id of a parameter whose entry this session creates
        self._next = 0
        self._changed = False

    def created(self, parameters: Iterable[torch.Tensor]) -> None:
        """Rank ``parameters``, whose entries a step has created or may create, now or later."""
        for parameter in parameters:
            self._ranks[id(parameter)] = self._next
            self._next += 1
            self._changed = True

    def restore(self, entries: State) -> None:
        """Sort the entries created since, after those that existed before."""
        if self._changed:
            self._changed = False
            ordered = sorted(dict.items(entries), key=lambda one: self._ranks.get(id(one[0]), -1))
            dict.clear(entries)
            dict.update(entries, ordered)


class ObservedState(State):
    """``optimizer.state`` that reports each access before it happens.

    Writes also go into the original mapping, which is put back at the end, so references to that
    mapping stay valid.

    Args:
        entries: the original state mapping.
        on_look: called with the parameter whose entry is accessed, or None for all entries.
    """

    def __init__(self, entries: State, on_look: Callable[[torch.Tensor | None], None]) -> None:
        factory = getattr(entries, "default_factory", None)  # user code may set a plain dict
        super().__init__(factory or dict, entries)
        self._on_look, self._before = on_look, entries

    def before(self) -> State:
        """Return the original mapping, updated to the current entries."""
        self._before.clear()
        self._before.update(dict.items(self))
        return self._before

    def copy(self) -> State:  # type: ignore[override]
        """Return the same entries in a plain mapping that reports nothing."""
        self._on_look(None)
        return defaultdict(self.default_factory, super().items())

    __copy__ = copy  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __reduce__(self) -> Any:
        """Copy and pickle as the plain mapping."""
        self._on_look(None)
        return defaultdict, (self.default_factory,), None, None, iter(super().items())


def _reporting(name: str, *, of_one: bool, writes: bool) -> Callable[..., Any]:
    """Return the mapping method ``name``, which reports the access to one or all entries first. If
    it ``writes``, the original mapping is updated too."""
    plain = getattr(defaultdict, name)

    def call(state: ObservedState, *args: Any, **kwargs: Any) -> Any:
        key: Any = args[0] if of_one else None
        state._on_look(key)
        found = plain(state, *args, **kwargs)
        if writes and not of_one:
            state.before()
        elif writes and dict.__contains__(state, key):
            state._before[key] = dict.__getitem__(state, key)
        elif writes:
            state._before.pop(key, None)
        return found

    return call


for _name in ("__getitem__", "get", "__contains__"):
    setattr(ObservedState, _name, _reporting(_name, of_one=True, writes=False))
for _name in ("__setitem__", "__delitem__", "setdefault", "pop"):
    setattr(ObservedState, _name, _reporting(_name, of_one=True, writes=True))
for _name in ("__iter__", "__reversed__", "__len__", "__eq__", "__ne__", "__repr__"):
    setattr(ObservedState, _name, _reporting(_name, of_one=False, writes=False))
for _name in ("keys", "values", "items"):
    setattr(ObservedState, _name, _reporting(_name, of_one=False, writes=False))
for _name in ("popitem", "clear", "update", "__ior__"):
    setattr(ObservedState, _name, _reporting(_name, of_one=False, writes=True))
