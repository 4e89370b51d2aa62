"""Finalization queue: finds freed objects without running Python code, and counts kept tensors.

A signal that arrives when Python enters a destructor or weak-reference callback raises there and is
swallowed. The body does not run, so the count stays wrong, and Ctrl-C is lost. A built-in function
as callback avoids this. So `Endings` only appends to a list, which is read later.

`Keeping` counts saved tensors that stay in place, each storage once however often it is saved.
Storages of the model itself, such as buffers or small parameters, are counted with the model.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch

_Note = TypeVar("_Note")


class Endings(Generic[_Note]):
    """Watches objects; returns each one's note after the object is freed."""

    def __init__(self) -> None:
        self._notes: dict[weakref.ref[Any], _Note] = {}
        self._ended: list[weakref.ref[Any]] = []

    def watch(self, one: object, note: _Note) -> None:
        """Keep ``note`` until ``one`` is freed."""
        self._notes[weakref.ref(one, self._ended.append)] = note

    def __len__(self) -> int:
        """Return how many objects were freed and not taken yet."""
        return len(self._ended)

    def take(self) -> list[_Note]:
        """Return the notes of objects freed since the last call."""
        taken: list[_Note] = []
        with contextlib.suppress(IndexError):  # the list is empty; other threads take too
            while True:
                taken.append(self._notes.pop(self._ended.pop()))
        return taken

    def alive(self) -> list[Any]:
        """Return the watched objects that are alive."""
        return [one for one in (reference() for reference in list(self._notes)) if one is not None]


class _Held:
    """One storage, counted while any saved tensor of it is kept."""

    __slots__ = ("key", "nbytes", "source", "users")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.key, self.nbytes, self.users = storage._cdata, storage.nbytes(), 0
        self.source = weakref.ref(storage)


class Keeping:
    """Counts the bytes of saved tensors that stay in place.

    Attributes:
        nbytes: bytes of all, including those freed since `settle`.
        peak: highest `nbytes` since `take_peak`.
        largest: bytes and name of the largest one saved between the last two `take_peak`, or 0, "".
    """

    def __init__(self) -> None:
        self.nbytes = self.peak = 0
        self._held: dict[int, _Held] = {}
        self._own: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._endings: Endings[tuple[list[_Held], int]] = Endings()
        self._largest = self.largest = 0, ""

    def __len__(self) -> int:
        """Return how many were freed and are not settled."""
        return len(self._endings)

    def counted_elsewhere(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Set the storages that are not counted here, because they are counted with the model."""
        self._own = {storage._cdata: weakref.ref(storage) for storage in storages}

    def _is_own(self, storage: torch.UntypedStorage) -> bool:
        known = self._own.get(storage._cdata)
        return known is not None and known() is storage

    def _known(self, storage: torch.UntypedStorage) -> _Held | None:
        held = self._held.get(storage._cdata)
        # The address of a freed storage that is not settled may have been reused.
        return held if held is not None and held.source() is storage else None

    def adds(self, storage: torch.UntypedStorage) -> int:
        """Return the bytes that keeping ``storage`` would add to the count."""
        known = self._is_own(storage) or self._known(storage) is not None
        return 0 if known else storage.nbytes()

    def add(
        self,
        kept: object,
        storages: Sequence[torch.UntypedStorage],
        others: int,
        name: Callable[[], str],
    ) -> None:
        """Count ``storages``, and ``others`` bytes outside storages, until ``kept`` is freed.

        ``name`` returns a description, for `largest`.
        """
        notes = []
        for storage in storages:
            if self._is_own(storage):
                continue
            held = self._known(storage)
            if held is None:
                held = self._held[storage._cdata] = _Held(storage)
                self.nbytes += held.nbytes
            held.users += 1
            notes.append(held)
        self.nbytes += others
        self.peak = max(self.peak, self.nbytes)
        if notes or others:
            total = others + sum(held.nbytes for held in notes)
            if total > self._largest[0]:
                self._largest = total, name()
            self._endings.watch(kept, (notes, others))

    def settle(self) -> None:
        """Subtract what was freed since the last call."""
        for notes, others in self._endings.take():
            self.nbytes -= others
            for held in notes:
                held.users -= 1
                if not held.users:
                    self.nbytes -= held.nbytes
                    if self._held.get(held.key) is held:
                        del self._held[held.key]

    def take_peak(self) -> int:
        """Return the highest count since the last call, and reset it."""
        peak, self.peak = self.peak, self.nbytes
        self.largest, self._largest = self._largest, (0, "")
        return peak
