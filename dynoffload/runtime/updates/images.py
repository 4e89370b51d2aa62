"""Before-images: what a step changes, as it was before, until all of it is changed.

A step that is cut off half way has made some updates and not others. With what they have
overwritten it is undone, and model and optimizer are again those of the last finished step. Before
an update is made, its parameter and state are written to a file of their own; the next step begins
the file anew, once every update of this one is made.

[Note: what is not kept]  Gradients, which are consumed; buffers, which forward changes; and what
the user's loop changes: hyperparameters, the state of a scheduler or a scaler. Where the user has
given a parameter, or its state, other memory since, nothing is undone: it would be written there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.optim import Optimizer

from dynoffload.memory.accelerator.storages import place_of
from dynoffload.memory.copies import Copies
from dynoffload.memory.local import local
from dynoffload.memory.pieces import Holder

_SMALL = 16  # elements of a state tensor that is kept in memory

_IN_FILE = object()  # in place of a larger one


@dataclass(frozen=True)
class _Image:
    """Where the bytes of a tensor are kept: of a parameter, of its state, or of a slice of one."""

    parameter: torch.Tensor
    key: str | None
    number: int | None
    offset: int
    place: tuple[int, int]
    dtype: torch.dtype
    shape: torch.Size


class Images:
    """The before-images of one step.

    Args:
        optimizer: whose step it is.
        memory: keeps the bytes under a piece of a tensor at hand.
        directory: where the file lies.
        need: bytes it will take at least.

    Raises:
        SpillError: the directory cannot be used.
    """

    def __init__(self, optimizer: Optimizer, memory: Holder, directory: Path, need: int) -> None:
        self._optimizer = optimizer
        self._copies = Copies(
            memory,
            directory,
            need,
            what="a before-image",
            purpose="rollback",
            unwritten="its update was not made, and nothing is lost by this",
        )
        self._images: list[_Image] = []
        self._states: dict[torch.Tensor, dict[str, Any] | None] = {}

    def close(self) -> None:
        """Give the file back."""
        self._copies.close()

    def any(self) -> bool:
        """Return whether a step is kept."""
        return bool(self._states)

    def forget(self) -> None:
        """What was kept is of no use any more."""
        self._images.clear()
        self._states.clear()
        self._copies.forget()

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
            self.keep_tensor(parameter, key, None, local(value), local(value))

    def keep_tensor(
        self, parameter: torch.Tensor, key: str | None, number: int | None, own: Any, shown: Any
    ) -> None:
        """A parameter, or a tensor of its state, is about to change.

        Args:
            parameter: the user's object.
            key: of the state; None for the parameter itself.
            number: of the slice that will change, or None for all of it.
            own: the tensor where it lies; what is none is passed over.
            shown: the same bytes, maybe elsewhere.

        Raises:
            SpillError: it cannot be written; nothing has changed.
        """
        if parameter not in self._states or not isinstance(shown, torch.Tensor):
            return
        before = self._states[parameter] or {}
        if key is None or before.get(key) is _IN_FILE:
            at, place = self._copies.write(shown), place_of(local(own))
            image = _Image(parameter, key, number, at, place, shown.dtype, shown.shape)
            self._images.append(image)

    def undo(self) -> None:
        """Give parameters and state back what they had before the step.

        Raises:
            SpillError: an image, or what lies beside one, cannot be read: the step stays lost.
            ValueError: a tensor lies elsewhere by now; nothing was changed.
        """
        tensors = [self._tensor_of(image) for image in self._images]
        states = self._optimizer.state
        for parameter, before in self._states.items():
            if before and dict.get(states, parameter) is None:
                raise ValueError("the optimizer has no state any more where it had some")
        for image, tensor in reversed(list(zip(self._images, tensors, strict=True))):
            self._copies.read(image.offset, tensor)
        for parameter, before in self._states.items():
            if before is None:
                if parameter in states:
                    del states[parameter]
            else:
                _give_back(states[parameter], before)
            torch.autograd.graph.increment_version(parameter)
        self.forget()

    def _tensor_of(self, image: _Image) -> torch.Tensor:
        """Return the tensor that ``image`` is of."""
        tensor: Any = local(image.parameter).data
        if image.key is not None:
            tensor = local((dict.get(self._optimizer.state, image.parameter) or {}).get(image.key))
        if isinstance(tensor, torch.Tensor) and image.number is not None:
            tensor = tensor[image.number]
        found = None
        if isinstance(tensor, torch.Tensor):
            found = place_of(tensor), tensor.dtype, tensor.shape
        if found != (image.place, image.dtype, image.shape):
            raise ValueError("a tensor that the step has changed lies elsewhere by now")
        return cast(torch.Tensor, tensor).detach()


def _small(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a parameter's state, with `_IN_FILE` for what is large."""
    return {
        key: value
        if not isinstance(value, torch.Tensor)
        else value.clone()
        if value.numel() <= _SMALL
        else _IN_FILE
        for key, value in state.items()
    }


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
