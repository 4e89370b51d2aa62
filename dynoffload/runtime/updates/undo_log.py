"""The undo log of one optimizer step: the old values of what the step overwrites.

An interrupted step has made only some of its updates. Before each update, its parameter and state
are written to a file, piece by piece through one small buffer. If the step is interrupted they are
read back, so model and optimizer are those of the last finished step. The log restarts with each
step, once every update of the last one is made.

Gradients, buffers, hyperparameters, and counters of schedulers and scalers are not kept. If user
code has moved a parameter or its state to other memory since, nothing is undone.
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

_SMALL = 16  # most elements of a state tensor that is kept in memory

_IN_FILE = object()  # placeholder for a larger one


@dataclass(frozen=True)
class _Entry:
    """Where the log keeps the bytes of a parameter, of a state tensor, or of a slice of one."""

    parameter: torch.Tensor
    key: str | None
    number: int | None
    offset: int
    place: tuple[int, int]
    dtype: torch.dtype
    shape: torch.Size


class UndoLog:
    """Keeps the old values that one step overwrites.

    Args:
        optimizer: the optimizer that steps.
        memory: keeps a piece of a tensor resident while it is copied.
        directory: directory of the file.
        need: least bytes that the file will take.

    Raises:
        SpillError: the directory cannot be used.
    """

    def __init__(self, optimizer: Optimizer, memory: Holder, directory: Path, need: int) -> None:
        self._optimizer, self._memory = optimizer, memory
        self._file = SpillFile(directory, need, direct=False, purpose="rollback")
        self._buffer = Buffer()
        self._end = 0  # bytes written
        self._entries: list[_Entry] = []
        self._states: dict[torch.Tensor, dict[str, Any] | None] = {}

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def any(self) -> bool:
        """Return whether the log holds a step."""
        return bool(self._states)

    def forget(self) -> None:
        """Clear the log."""
        self._entries.clear()
        self._states.clear()
        self._end = 0

    def begin(self, parameters: Iterable[torch.Tensor]) -> None:
        """Begin a step over ``parameters``; all earlier updates are made."""
        self.forget()
        for parameter in parameters:
            state = dict.get(self._optimizer.state, parameter)
            self._states[parameter] = None if state is None else _small(state)

    def keep(self, parameter: torch.Tensor) -> None:
        """Save a whole parameter and its state before they change in place.

        Raises:
            SpillError: they cannot be written to the log; no tensor has changed.
        """
        state = dict.get(self._optimizer.state, parameter) or {}
        for key, value in ((None, local(parameter).detach()), *state.items()):
            self._keep(parameter, key, None, local(value), local(value))

    def keep_tensor(self, slot: Slot, key: str | None, own: Any, shown: Any) -> None:
        """Save a parameter, a state tensor, or a slice of one, before it changes.

        Args:
            slot: slot of the parameter or slice.
            key: key of the state; None for the parameter itself.
            own: the tensor at its own address.
            shown: the same bytes, possibly at another address; not saved if it is no tensor.

        Raises:
            SpillError: it cannot be written to the log; no tensor has changed.
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
        """Restore parameters and state to their values before the step.

        Raises:
            SpillError: the log, or a tensor that it restores, cannot be read: the step stays lost.
            ValueError: a tensor was moved or its state is gone; nothing was changed.
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
                _restore_state(states[parameter], before)
            torch.autograd.graph.increment_version(parameter)
        self.forget()

    def _tensor_of(self, entry: _Entry) -> torch.Tensor:
        """Return the tensor that ``entry`` restores."""
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
        """Append the bytes of ``tensor``; return their offset in the file."""
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
        """Read ``tensor`` back from file offset ``at``; only pieces that differ are written."""
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
    """Return a copy of a parameter's state, with `_IN_FILE` for large tensors."""

    def kept(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.clone() if value.numel() <= _SMALL else _IN_FILE

    return {key: kept(value) for key, value in state.items()}


def _restore_state(state: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Restore ``state`` from its copy ``before``, except tensors kept in the file."""
    for key in state.keys() - before.keys():
        del state[key]
    for key, value in before.items():
        now = state.get(key)
        if value is _IN_FILE:
            continue
        if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor):
            with torch.no_grad():
                now.copy_(value)  # in place, so that references see it
        else:
            state[key] = value
