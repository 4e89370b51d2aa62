"""Values for tensors that have none yet: who gives them, and the check that all got theirs.

What it is: `fill`, which has the modules of a model initialised one after the other. Each one's own
tensors are brought in first; what an initialiser writes beyond them is fetched as it is written.
What it is not: files, and models whose weights are noted (`dynoffload.runtime.materialize`).

[Note: written]  A tensor counts as written once its version has gone up, another stands in its
place, or, as code that writes through ``Tensor.data`` leaves the version as it is, the stamp is
gone that was put on its first element just before.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from dynoffload.errors import ConfigError
from dynoffload.runtime.access import Access

Give = Callable[[nn.Module], None]
Around = Callable[[nn.Module], AbstractContextManager[None]]

_REMEDY = (
    "pass materialize() init= a function that initialises a module, or the path of a safetensors "
    "file"
)
_OF_TRANSFORMERS = (
    "call dynoffload.integrations.transformers.materialize(model) before the offload() block, for "
    "random weights; with the path of a safetensors file as second argument, for those"
)


@runtime_checkable
class Initialiser(Protocol):
    """Initialises a whole model in an order of its own.

    Attributes:
        name: what it calls of each module, for messages.
    """

    name: str

    def initialise(self, model: nn.Module, names: Collection[str], around: Around) -> None:
        """Write the tensors ``names`` of ``model``.

        Args:
            around: entered while a module is initialised.
        """

    def constructed(self, model: nn.Module, names: Collection[str]) -> Mapping[str, torch.Tensor]:
        """Return the values that the constructor of ``model`` gives those of ``names`` that it
        knows: `initialise` did not write them."""


def own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers that ``module`` itself owns, by name."""
    own = (*module._parameters.items(), *module._buffers.items())
    return {name: tensor for name, tensor in own if tensor is not None}


def join(path: str, name: str) -> str:
    """Return the full name of a module's tensor."""
    return f"{path}.{name}" if path else name


def fill(
    model: nn.Module,
    by: Give | Initialiser | None,
    names: Collection[str],
    free: Collection[str],
    access: Access,
) -> None:
    """Give the tensors ``names`` of ``model`` their values.

    Args:
        by: a function that is called with each module that owns one of them, parents first; what
            initialises a whole model; or None for each module's ``reset_parameters``.
        names: what must be written.
        free: what else may be written. All others keep the values that they have.
        access: to the tensors' memory.

    Raises:
        ConfigError: a module cannot initialise itself, or a tensor was not written.
    """
    if not names:
        return
    filling = _Filling(model, names, free, access)
    if isinstance(by, Initialiser):
        by.initialise(model, names, filling.around)
        filling.write(by.constructed(model, lacking) if (lacking := filling.lacking()) else {})
        who = by.name
    else:
        who = "reset_parameters()" if by is None else "init()"
        for path, module in model.named_modules():
            if any(join(path, key) in names for key in own_tensors(module)):
                with filling.around(module):
                    _reset(model, path, module) if by is None else by(module)
    lacking = filling.lacking()
    remedy = _remedy_for(model) if by is None else _REMEDY
    if len(lacking) == 1:
        owner = type(model.get_submodule(lacking[0].rpartition(".")[0])).__name__
        raise ConfigError(
            f"{lacking[0]} got no value: {who} of its module ({owner}) did not write it; {remedy}"
        )
    if lacking:
        listed = ", ".join(lacking[:8]) + (f" and {len(lacking) - 8} more" if lacking[8:] else "")
        raise ConfigError(
            f"{listed} got no values: {who} of their modules did not write them; {remedy}"
        )


def _reset(model: nn.Module, path: str, module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise ConfigError(
            f"module {path or '(root)'} ({type(module).__name__}) owns parameters or buffers "
            f"but has no reset_parameters(): {_remedy_for(model)}"
        )
    reset()


def _remedy_for(model: nn.Module) -> str:
    """Return what gives ``model`` its weights where reset_parameters() does not."""
    stock = any(
        base.__name__ == "PreTrainedModel" and base.__module__.startswith("transformers.")
        for base in type(model).__mro__
    )
    return _OF_TRANSFORMERS if stock else _REMEDY


@dataclass(frozen=True)
class _Mark:
    """A tensor that is to be written, as it was before; see [Note: written]."""

    tensor: torch.Tensor
    version: int
    stamped: bool

    def is_on(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor``, which stands in its place now, is the same and not written."""
        if tensor is not self.tensor or tensor._version != self.version:
            return False
        return not self.stamped or _has_stamp(tensor)


class _Filling:
    """What was to be written so far, in a model that is being initialised."""

    def __init__(
        self, model: nn.Module, names: Collection[str], free: Collection[str], access: Access
    ) -> None:
        self._names, self._free, self._access = names, free, access
        self._paths = {module: path for path, module in model.named_modules()}
        self._marks: dict[str, _Mark] = {}
        self._versions = {tensor: tensor._version for tensor in self._named().values()}
        self._of_tensors: dict[torch.Tensor, _Mark] = {}  # one of all the names of a tied one

    @contextlib.contextmanager
    def around(self, module: nn.Module) -> Iterator[None]:
        """``module`` is initialised: have what it owns at hand, and keep what has its values."""
        path = self._paths[module]
        own = {key: tensor for key, tensor in own_tensors(module).items() if not tensor.is_meta}
        kept = []
        self._access.bring(own.values())
        for key, tensor in own.items():
            name = join(path, key)
            if name in self._names:
                if tensor not in self._of_tensors:
                    before = self._versions.get(tensor, tensor._version)
                    if tensor._version == before:
                        stamped = _stamp(tensor)
                        self._of_tensors[tensor] = _Mark(tensor, tensor._version, stamped)
                    else:  # a module above has written it
                        self._of_tensors[tensor] = _Mark(tensor, before, False)
                self._marks[name] = self._of_tensors[tensor]
            elif name not in self._free:
                kept.append((key, tensor))
        try:
            with self._access.kept([tensor for _, tensor in kept]):
                yield
        finally:
            for key, tensor in kept:
                if key in module._buffers:
                    module._buffers[key] = tensor

    def write(self, values: Mapping[str, torch.Tensor]) -> None:
        """Write ``values``, by name, into the tensors of the model that are like them."""
        for name, tensor in self._named().items():
            if name in values and values[name].shape == tensor.shape:
                self._access.bring([tensor])
                tensor.copy_(values[name])

    def lacking(self) -> list[str]:
        """Return the names of what has got no value, of tied ones the first."""
        lacking: dict[torch.Tensor, str] = {}
        for name, tensor in self._named().items():
            mark = self._marks.get(name, self._of_tensors.get(tensor))
            if tensor.numel() and (mark is None or mark.is_on(tensor)):
                lacking.setdefault(tensor, name)
        return list(lacking.values())

    def _named(self) -> dict[str, torch.Tensor]:
        named = {
            join(path, key): tensor
            for module, path in self._paths.items()
            for key, tensor in own_tensors(module).items()
        }
        return {name: tensor for name, tensor in named.items() if name in self._names}


def _stamp(tensor: torch.Tensor) -> bool:
    """Write a value that no initialiser gives; return whether there is one of this type."""
    if tensor.dtype == torch.bool or not tensor.numel():
        return False
    tensor[(0,) * tensor.dim()] = _unlikely(tensor.dtype)
    return _has_stamp(tensor)


def _has_stamp(tensor: torch.Tensor) -> bool:
    value, stamp = tensor[(0,) * tensor.dim()], _unlikely(tensor.dtype)
    return bool(value.isnan() if stamp != stamp else value == stamp)


def _unlikely(dtype: torch.dtype) -> float:
    return math.nan if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max
