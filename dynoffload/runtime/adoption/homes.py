"""Tensors on their way between the accelerator and where the user had them.

What it is: what lies beside the device's regions and has to be where operators run (`Homes.bring`),
and the way back of all that a block leaves on the accelerator (`Homes.leave`); and `Room`, which
gives copies memory: at home, or in a mapped file where home has none left. What it is not: what
lies in regions (`dynoffload.runtime.adoption.restoring`).

[Note: where steps are]  Optimizers of torch keep a parameter's count of steps on the CPU, unless
they are fused or capturable. So do we, as torch's own `load_state_dict` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dynoffload.memory.limits import available_bytes
from dynoffload.memory.outside import mapped_copy
from dynoffload.runtime.adoption.store import offset_of, view_of
from dynoffload.runtime.counting import tensors_of
from dynoffload.runtime.placing import put
from dynoffload.runtime.target import Target
from dynoffload.units import format_bytes

_KEEP_FREE = 0.1  # share of available memory that is left alone
# A storage and its copy: the first is held, as another may come to lie where it did.
_Pair = tuple[torch.UntypedStorage, torch.UntypedStorage]


class Room:
    """Memory for what leaves a block.

    Args:
        home: where it is wanted.
        free: bytes that there are.
        directory: for what has no room on the CPU.

    Attributes:
        outside: bytes that lie in mapped files of ``directory``.
        away: bytes that lie on the CPU, as there was no room at home.
    """

    def __init__(self, home: torch.device, free: int, directory: Path) -> None:
        self._home, self._directory = home, directory
        self._free = int(free * (1 - _KEEP_FREE))
        self._host = self._free if home.type == "cpu" else _host_bytes()
        self.outside = self.away = 0

    @property
    def where(self) -> str:
        """Where what did not fit lies, or ""."""
        told = [f"{format_bytes(self.away)} on the CPU"] if self.away else []
        if self.outside:
            told.append(f"{format_bytes(self.outside)} mapped from {self._directory}")
        return ", ".join(told)

    def empty(self, nbytes: int) -> torch.UntypedStorage | None:
        """Return a new storage of ``nbytes``, at home or on the CPU; None: there is no memory."""
        if nbytes <= self._free:
            self._free -= nbytes
            if self._home.type == "cpu":
                self._host = self._free
            return torch.UntypedStorage(nbytes, device=self._home)  # type: ignore[no-untyped-call]
        if nbytes <= self._host:
            self._host -= nbytes
            self.away += nbytes
            return torch.UntypedStorage(nbytes)  # type: ignore[no-untyped-call]
        return None

    def mapped(self, source: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return a copy of ``source`` in a mapped file.

        Raises:
            SpillError: it cannot be made.
        """
        copy = mapped_copy(source, self._directory)
        self.outside += source.nbytes()
        return copy

    def copy_of(self, source: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return a copy of ``source``.

        Raises:
            SpillError: there is room for it nowhere.
        """
        copy = self.empty(source.nbytes())
        if copy is None:
            return self.mapped(source)
        copy.copy_(source)
        return copy


def _host_bytes() -> int:
    return int(available_bytes() * (1 - _KEEP_FREE))


def room_for(target: Target, device: torch.device, directory: Path) -> Room:
    """Return the room of a place: what is free on ``device``, the target's or the CPU."""
    if device.type == "cpu" or target.queues is None:
        return Room(device, available_bytes(), directory)
    return Room(device, target.queues.free_bytes(), directory)


class Homes:
    """Where tensors beside the regions are, during a block and after it.

    Args:
        model: the root.
        optimizer: its optimizer, or None.
        target: where operators run, and where tensors were.
        directory: for what has no room at home.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, target: Target, directory: Path
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._target, self._directory = target, directory
        self._moves = target.home != target.device

    @torch.no_grad()
    def bring(self) -> None:
        """Move what is at home to where operators run."""
        if not self._moves:
            return
        home, device = self._target.home, self._target.device
        storages: dict[int, _Pair] = {}
        for tensor in self._staying():
            if tensor.device == home:
                _move(tensor, device, storages, lambda source: _copied(source, device))

    @torch.no_grad()
    def leave(self) -> str:
        """Move everything that is where operators run home.

        Returns:
            Where what has no room there lies now, or "".

        Raises:
            SpillError: a tensor has room nowhere; it stays where it is, as do those after it.
        """
        if not self._moves:
            return ""
        room = room_for(self._target, self._target.home, self._directory)
        storages: dict[int, _Pair] = {}
        for tensor in tensors_of(self._model, self._optimizer):
            if tensor.device == self._target.device:
                _move(tensor, self._target.home, storages, room.copy_of)
        return room.where

    def _staying(self) -> Iterator[torch.Tensor]:
        """Yield what operators of the accelerator take: all but steps that stay on the CPU."""
        stays = set()
        for group in [] if self._optimizer is None else self._optimizer.param_groups:
            if not (group.get("fused") or group.get("capturable")):
                stays |= {id(_step(self._optimizer, one)) for one in group["params"]}
        for tensor in tensors_of(self._model, self._optimizer):
            if id(tensor) not in stays:
                yield tensor


def _step(optimizer: Any, parameter: torch.Tensor) -> object:
    return (dict.get(optimizer.state, parameter) or {}).get("step")


def _copied(source: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
    copy = torch.UntypedStorage(source.nbytes(), device=device)  # type: ignore[no-untyped-call]
    copy.copy_(source)
    return copy


def _move(
    tensor: torch.Tensor,
    device: torch.device,
    storages: dict[int, _Pair],
    copy: Callable[[torch.UntypedStorage], torch.UntypedStorage],
) -> None:
    """Give ``tensor`` the copy of its storage; those that share one share the copy."""
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        put(tensor, tensor.detach().to(device))
        return
    source = tensor.untyped_storage()
    if source._cdata not in storages:
        storages[source._cdata] = source, copy(source)
    ours = storages[source._cdata][1]
    put(tensor, view_of(ours, tensor.detach(), offset_of(tensor)))
