"""An optimizer's state while updates are put off: nobody sees an entry before its update is made.

Large state tensors are guarded by the device. Small ones (step counts, factored moments) are not;
they are reached through ``optimizer.state`` only, so this is where a look at them is noticed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
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


class ObservedState(State):
    """``optimizer.state``, which reports when somebody looks.

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
        self._before.update(dict.items(self))
        return self._before

    def copy(self) -> State:  # type: ignore[override]
        """Return the same entries, in a mapping that reports nothing."""
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
    """Return a method of a mapping, of one entry or of all, that reports the look first; what it
    ``writes`` goes into what the state stands for, too."""
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
