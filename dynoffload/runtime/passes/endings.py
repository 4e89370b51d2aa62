"""Ends of objects, told without running any code of ours as they end.

What it is: a list of what has ended since it was last asked for. What it is not: a destructor. A
signal that comes as Python enters a destructor, or the callback of a weak reference, raises there,
where it is swallowed: the body does not run, the books are wrong from then on, and Ctrl-C is lost.
A callback that is a built-in function leaves no such moment.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Generic, TypeVar

_Note = TypeVar("_Note")


class Endings(Generic[_Note]):
    """Watches objects; each has a note, which is what remains of it."""

    def __init__(self) -> None:
        self._notes: dict[weakref.ref[Any], _Note] = {}
        self._ended: list[weakref.ref[Any]] = []

    def watch(self, one: object, note: _Note) -> None:
        """Remember ``note`` for when ``one`` has ended."""
        self._notes[weakref.ref(one, self._ended.append)] = note

    def __len__(self) -> int:
        """Return how many have ended, and were not taken yet."""
        return len(self._ended)

    def take(self) -> list[_Note]:
        """Return the notes of what has ended since the last call."""
        taken: list[_Note] = []
        with contextlib.suppress(IndexError):  # another thread may take, too
            while True:
                taken.append(self._notes.pop(self._ended.pop()))
        return taken

    def alive(self) -> list[Any]:
        """Return what has not ended."""
        return [one for one in (reference() for reference in list(self._notes)) if one is not None]
