"""The undo log of one optimizer step: what it overwrites, as it was before.

A step that is cut off half-way has made some updates and not others. Before an update is made, its
parameter and state are written to a file, piece by piece through one small buffer. If the step is
cut off, they are read back, and model and optimizer are those of the last finished step. The log
begins anew with each step, once every update of the last one is made.

Not kept are gradients, buffers, hyperparameters, and what schedulers and scalers count. Where the
user has given a parameter, or its state, other memory since, nothing is undone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.optim import Optimizer

from dynoffload.errors import SpillError
from dynoffload.memory.accelerator.storages import place_of
from dynoffload.memory.local import local
from dynoffload.memory.pieces import Buffer, Holder, same_bits
from dynoffload.memory.spill import SpillFile, reason, transfer
from dynoffload.runtime.adoption.slots import Slot

_SMALL = 16  # elements of a state tensor that is kept in memory

_IN_FILE = object()  # in place of a larger one


@dataclass(frozen=True)
class _Entry:
    """Where the bytes of a tensor are kept: of a parameter, of its state, or of a slice of one."""

    parameter: torch.Tensor
    key: str | None
    number: int | None
    offset: int
    place: tuple[int, int]
    dtype: torch.dtype
    shape: torch.Size


class UndoLog:
    """What one step has overwritten.

    Args:
        optimizer: whose step it is.
        memory: keeps the bytes under a piece of a tensor at hand.
        directory: where the file lies.
        need: bytes it will take at least.

    Raises:
        SpillError: the directory cannot be used.
    """

    def __init__(self, optimizer: Optimizer, memory: Holder, directory: Path, need: int) -> None:
        self._optimizer, self._memory = optimizer, memory
        self._file = SpillFile(directory, need, direct=False, purpose="rollback")
        self._buffer = Buffer()
        self._end = 0  # of what is written
        self._entries: list[_Entry] = []
        self._states: dict[torch.Tensor, dict[str, Any] | None] = {}

    def close(self) -> None:
        """Give the file back."""
        self._file.close()

    def any(self) -> bool:
        """Return whether a step is kept."""
        return bool(self._states)

    def forget(self) -> None:
        """What was kept is of no use any more."""
        self._entries.clear()
        self._states.clear()
        self._end = 0

    def begin(self, parameters: Iterable[torch.Tensor]) -> None:
        """A step over ``parameters`` begins, and all before it is made."""
        self.forget()
        for parameter in parameters:
            state = dict.get(self._optimizer.state, parameter)
            self._states[parameter] = None if state is None else _small(state)

    def keep(self, parameter: torch.Tensor) -> None:
        """A whole parameter and its state are about to change where they are.

        Raises:
            SpillError: they cannot be written; nothing has changed.
        """
        state = dict.get(self._optimizer.state, parameter) or {}
        for key, value in ((None, local(parameter).detach()), *state.items()):
            self._keep(parameter, key, None, local(value), local(value))

    def keep_tensor(self, slot: Slot, key: str | None, own: Any, shown: Any) -> None:
        """A parameter or a tensor of its state, or a slice of one, is about to change.

        Args:
            slot: of the parameter, or of the slice.
            key: of the state; None for the parameter itself.
            own: the tensor where it lies; what is none is passed over.
            shown: the same bytes, maybe elsewhere.

        Raises:
            SpillError: it cannot be written; nothing has changed.
        """
        number = None if slot.fused is None else slot.number
        self._keep(slot.parameter, key, number, own, shown)

    def _keep(
        self, parameter: torch.Tensor, key: str | None, number: int | None, own: Any, shown: Any
    ) -> None:
        if parameter not in self._states or not isinstance(shown, torch.Tensor):
            return
        before = self._states[parameter] or {}
        if key is None or before.get(key) is _IN_FILE:
            at, place = self._write(shown.detach()), place_of(local(own))
            self._entries.append(
                _Entry(parameter, key, number, at, place, shown.dtype, shown.shape)
            )

    def undo(self) -> None:
        """Give parameters and state back what they had before the step.

        Raises:
            SpillError: the log, or what lies beside an entry, cannot be read: the step stays lost.
            ValueError: a tensor lies elsewhere by now; nothing was changed.
        """
        tensors = [self._tensor_of(entry) for entry in self._entries]
        states = self._optimizer.state
        for parameter, before in self._states.items():
            if before and dict.get(states, parameter) is None:
                raise ValueError("the optimizer has no state any more where it had some")
        for entry, tensor in reversed(list(zip(self._entries, tensors, strict=True))):
            self._read(entry.offset, tensor)
        for parameter, before in self._states.items():
            if before is None:
                if parameter in states:
                    del states[parameter]
            else:
                _give_back(states[parameter], before)
            torch.autograd.graph.increment_version(parameter)
        self.forget()

    def _tensor_of(self, entry: _Entry) -> torch.Tensor:
        """Return the tensor that ``entry`` is of."""
        tensor: Any = local(entry.parameter).data
        if entry.key is not None:
            tensor = local((dict.get(self._optimizer.state, entry.parameter) or {}).get(entry.key))
        if isinstance(tensor, torch.Tensor) and entry.number is not None:
            tensor = tensor[entry.number]
        found = None
        if isinstance(tensor, torch.Tensor):
            found = place_of(tensor), tensor.dtype, tensor.shape
        if found != (entry.place, entry.dtype, entry.shape):
            raise ValueError("a tensor that the step has changed lies elsewhere by now")
        return cast(torch.Tensor, tensor).detach()

    def _write(self, tensor: torch.Tensor) -> int:
        """Append the bytes of ``tensor``; return where they begin."""
        start = at = self._end
        self._file.grow(start + tensor.nbytes)
        for piece in self._memory.pieces(tensor):
            content = self._buffer.like(piece)
            with self._memory.held(piece), torch.no_grad():
                content.copy_(piece)
            try:
                transfer(self._file.fd, _raw(content), at, reads=False)
            except OSError as error:
                message = self._file.unwritable("a before-image", reason(error.errno or 0))
                unharmed = "its update was not made, and nothing is lost by this"
                raise SpillError(error.errno, f"{message}; {unharmed}") from error
            at += piece.nbytes
        self._end = at
        return start

    def _read(self, at: int, tensor: torch.Tensor) -> None:
        """Give ``tensor`` the bytes from ``at`` on; it is written to only where they differ."""
        for piece in self._memory.pieces(tensor):
            before = self._buffer.like(piece)
            try:
                transfer(self._file.fd, _raw(before), at, reads=True)
            except OSError as error:
                message = self._file.unreadable("a before-image", reason(error.errno or 0))
                raise SpillError(error.errno, message) from error
            at += piece.nbytes
            with self._memory.held(piece), torch.no_grad():
                if not same_bits(piece, before):
                    piece.copy_(before)


def _raw(content: torch.Tensor) -> torch.Tensor:
    return content.reshape(-1).view(torch.uint8)


def _small(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a parameter's state, with `_IN_FILE` for what is large."""

    def kept(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.clone() if value.numel() <= _SMALL else _IN_FILE

    return {key: kept(value) for key, value in state.items()}


def _give_back(state: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Make ``state`` what ``before`` is a copy of, but for what is in the file."""
    for key in state.keys() - before.keys():
        del state[key]
    for key, value in before.items():
        now = state.get(key)
        if value is _IN_FILE:
            continue
        if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor):
            with torch.no_grad():
                now.copy_(value)  # whoever holds it sees it
        else:
            state[key] = value
