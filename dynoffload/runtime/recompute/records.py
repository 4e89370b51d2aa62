"""What recomputation knows of a step: bytes, the operators that made them, and who still asks.

What it is: `Record`, one content of one storage; `Operator`, one executed ATen call, with all that
it takes to call it again; `Handle`, what autograd holds in place of a saved tensor. What it is not:
a decision about any of them. The names are those of DTR's simulator (Kirisame et al., ICLR 2021):
storage, operator, and tensors, which are views.

[Note: contents]  A storage that an operator writes into has another content afterwards, so it gets
another record: what was made from the content before is made again from that. A view is no more
than numbers: its operators are not recorded. What no recorded operator has made (parameters,
buffers, inputs, results of operators that cannot be followed) is a *root*; whoever is made from it
keeps it, and it is never dropped.

[Note: who holds what]  Autograd's handles hold a `Saved`, which holds the storage, or nothing once
it was dropped. An operator holds the records of its inputs, which hold no storage but roots'. So
what nobody needs any more ends by itself, and no code of ours runs as it ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from dynoffload.runtime.adoption.store import offset_of
from dynoffload.runtime.passes.saved import _check, witness_of


class Saved:
    """The storage of a record of which autograd holds handles; None while it is dropped."""

    __slots__ = ("__weakref__", "record", "storage")

    def __init__(self, record: Record, storage: torch.UntypedStorage) -> None:
        self.record = record
        self.storage: torch.UntypedStorage | None = storage


class Record:
    """One content of one storage; see [Note: contents].

    Attributes:
        nbytes: of the storage.
        operator: what made it; None for roots.
        kept: a root's storage, once something was made from it.
        saved: what autograd's handles hold.
        users: the operators that read it.
        used_at: when it was last made or used, by `time.perf_counter`.
        checksum: of its bytes as they were dropped, in debug mode.
    """

    __slots__ = (
        "__weakref__",
        "_storage",
        "checksum",
        "kept",
        "nbytes",
        "operator",
        "saved",
        "used_at",
        "users",
    )

    def __init__(self, storage: torch.UntypedStorage, operator: Operator | None) -> None:
        self._storage: weakref.ref[torch.UntypedStorage] | None = weakref.ref(storage)
        self.nbytes = storage.nbytes()
        self.operator = operator
        self.kept: torch.UntypedStorage | None = None
        self.saved: weakref.ref[Saved] | None = None
        self.users: list[weakref.ref[Operator]] = []
        self.used_at = 0.0
        self.checksum: int | None = None

    def here(self) -> torch.UntypedStorage | None:
        """Return the storage that has this content, if anybody holds it."""
        return None if self._storage is None else self._storage()

    def saver(self) -> Saved | None:
        """Return what autograd's handles hold, if there are any."""
        return None if self.saved is None else self.saved()

    def save(self, storage: torch.UntypedStorage) -> Saved:
        """Return what another handle is to hold."""
        saved = self.saver()
        if saved is None:
            saved = Saved(self, storage)
            self.saved = weakref.ref(saved)
        return saved

    def place(self, storage: torch.UntypedStorage) -> None:
        """The content was made again, in ``storage``."""
        self._storage = weakref.ref(storage)
        saved = self.saver()
        if saved is not None:
            saved.storage = storage

    def leave(self) -> None:
        """The storage is given up."""
        self._storage = None
        saved = self.saver()
        if saved is not None:
            saved.storage = None

    def become(self, after: Record) -> None:
        """The storage was written: what it holds now is ``after``, which handles ask for."""
        self._storage = None
        saved, self.saved = self.saver(), None
        if saved is not None:
            saved.record, after.saved = after, weakref.ref(saved)

    def root(self, storage: torch.UntypedStorage) -> None:
        """What made it cannot make it again from now on: it stays."""
        self.operator, self.kept = None, storage

    def add_user(self, operator: Operator) -> None:
        """``operator`` reads it."""
        users = self.users
        if len(users) >= 32 and len(users) & (len(users) - 1) == 0:
            users[:] = [user for user in users if user() is not None]
        users.append(weakref.ref(operator))


@dataclass(frozen=True, slots=True)
class View:
    """A tensor: how it lies in a record's storage; offset, size and stride in elements."""

    record: Record
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor, record: Record) -> View:
        """Return how ``tensor`` lies in the storage of ``record``."""
        return cls(record, tensor.dtype, offset_of(tensor), tensor.size(), tensor.stride())

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor in ``storage``."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(eq=False, slots=True, weakref_slot=True)
class Operator:
    """One executed ATen call.

    Attributes:
        func: the overload.
        args: its arguments, tensors as views.
        kwargs: those by name.
        inputs: the records it reads, each once.
        written: those of them that it writes into: it is given copies of them.
        outputs: by the number of the flattened result, what it made anew.
        contents: by the record it wrote into, the record of the content after that.
        state: generator and its state before, for what draws random numbers.
        seconds: it took.
        need: bytes of what it makes.
        site: path of the module in or after which it ran.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[Record, ...]
    written: tuple[Record, ...]
    state: tuple[torch.Generator, torch.Tensor] | None
    seconds: float
    need: int
    site: str
    outputs: dict[int, weakref.ref[Record]] = field(default_factory=dict)
    contents: dict[Record, weakref.ref[Record]] = field(default_factory=dict)

    def made(self) -> Iterator[Record]:
        """Yield those of the records it made that somebody still refers to."""
        for reference in (*self.outputs.values(), *self.contents.values()):
            record = reference()
            if record is not None:
                yield record


class Handle:
    """What autograd holds in place of a saved tensor."""

    __slots__ = ("saved", "version", "view", "witness")

    def __init__(self, tensor: torch.Tensor, record: Record) -> None:
        self.saved = record.save(tensor.untyped_storage())
        self.view = View.of(tensor, record)
        self.version = tensor._version
        self.witness = witness_of(tensor)

    def check(self) -> None:
        """Raise what autograd raises if the tensor was modified since it was saved."""
        _check(self.version, self.witness._version, self.view.size, self.view.dtype)
