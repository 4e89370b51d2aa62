"""Initialises the modules of a model, and records which of its tensors were written.

[Note: written]  A tensor counts as written once its version has increased or another replaces it.
Writing through ``Tensor.data`` leaves the version unchanged. So a stamp is put on the first element
before; if it is gone afterwards, the tensor was written.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from dynoffload.errors import ConfigError
from dynoffload.memory.pieces import same_bits
from dynoffload.runtime.file_parts import FileValue, Shape
from dynoffload.runtime.interrupts import uninterrupted
from dynoffload.runtime.weight_files import Bring, WeightFiles, is_of_transformers

Give = Callable[[nn.Module], None]
Around = Callable[[nn.Module], AbstractContextManager[None]]

_REMEDY = (
    "pass materialize() init= a function that initialises a module, or the path of a safetensors "
    "file"
)
_OF_TRANSFORMERS = (
    "call dynoffload.integrations.transformers.materialize(model) before the offload() block, for "
    "random weights; with the path of a safetensors file or directory as second argument, for those"
)


@runtime_checkable
class Initialiser(Protocol):
    """Initialises a whole model in an order of its own, and knows its names in files.

    Attributes:
        name: the function it calls for each module, for messages.
    """

    name: str

    def initialise(self, model: nn.Module, names: Collection[str], around: Around) -> None:
        """Write the tensors ``names`` of ``model``.

        Args:
            around: entered while a module is initialised.
        """

    def values(
        self, model: nn.Module, shapes: Mapping[str, Shape], files: WeightFiles
    ) -> tuple[Mapping[str, FileValue], Collection[str]]:
        """Return by name the values that ``files`` have for ``model``, and the names of tensors
        that they may lack.

        Args:
            shapes: of the tensors of ``model`` that files have.

        Raises:
            ConfigError: the files do not fit.
        """


def own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers that ``module`` itself owns, by name."""
    own = (*module._parameters.items(), *module._buffers.items())
    return {name: tensor for name, tensor in own if tensor is not None}


def join(path: str, name: str) -> str:
    """Return the full name of a module's tensor."""
    return f"{path}.{name}" if path else name


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers, tied ones under every name."""
    return {
        join(path, key): tensor
        for path, module in model.named_modules(remove_duplicate=False)
        for key, tensor in own_tensors(module).items()
    }


def tensors_on_meta(model: nn.Module) -> frozenset[str]:
    """Return the names of parameters and buffers on the meta device, of tied ones every name."""
    return frozenset(name for name, tensor in named_tensors(model).items() if tensor.is_meta)


def fill(
    model: nn.Module,
    by: Give | Initialiser | None,
    names: Collection[str],
    free: Collection[str],
    bring: Bring = lambda tensors: None,
) -> None:
    """Initialise the modules of ``model`` one by one.

    Args:
        by: a function that is called with each module that owns one of ``names``, parents first;
            an `Initialiser` of whole models; or None for each module's ``reset_parameters``.
        names: the tensors that must be written.
        free: names that may be written. All other tensors keep their values.
        bring: see `MetaInit.give`.

    Raises:
        ConfigError: a module cannot initialise itself, or a tensor was not written.
    """
    if not names:
        return
    filling = _Filling(model, names, free, bring)
    if isinstance(by, Initialiser):
        by.initialise(model, names, filling.around)
        who = by.name
    else:
        who = "reset_parameters()" if by is None else "init()"
        for path, module in model.named_modules():
            if any(join(path, key) in names for key in own_tensors(module)):
                with filling.around(module):
                    _reset(model, path, module) if by is None else by(module)
    if lacking := filling.lacking():
        listed = ", ".join(lacking[:8]) + (f" and {len(lacking) - 8} more" if lacking[8:] else "")
        owner = type(model.get_submodule(lacking[0].rpartition(".")[0])).__name__
        raise ConfigError(
            f"{listed} got no value: {who} of its module ({owner}) did not write it; "
            f"{_remedy_for(model) if by is None else _REMEDY}"
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
    """Return the advice for a ``model`` whose reset_parameters() does not give its weights."""
    return _OF_TRANSFORMERS if is_of_transformers(model) else _REMEDY


class _Filling:
    """Tracks what is written while a model is initialised; see [Note: written]."""

    def __init__(
        self, model: nn.Module, names: Collection[str], free: Collection[str], bring: Bring
    ) -> None:
        self._model, self._names, self._free, self._bring = model, names, free, bring
        self._paths = {module: path for path, module in model.named_modules()}
        self._versions = {tensor: tensor._version for tensor in self._wanted().values()}
        self._stamped: set[torch.Tensor] = set()

    @contextlib.contextmanager
    def around(self, module: nn.Module) -> Iterator[None]:
        """Fetch what ``module`` owns; after its initialisation restore, from copies, the tensors
        that must keep their values."""
        path = self._paths[module]
        own = {key: tensor for key, tensor in own_tensors(module).items() if not tensor.is_meta}
        self._bring(own.values())
        kept = []
        for key, tensor in own.items():
            name = join(path, key)
            if name in self._names:
                if tensor not in self._stamped and self._is_as_it_was(tensor) and _stamp(tensor):
                    self._stamped.add(tensor)
            elif name not in self._free:
                kept.append((key, tensor, tensor._version, tensor.detach().clone()))
        try:
            yield
        finally:
            _set_back(module, kept)

    def lacking(self) -> list[str]:
        """Return the names of tensors without a value, of tied ones the first."""
        lacking: dict[torch.Tensor, str] = {}
        for name, tensor in self._wanted().items():
            stays = self._is_as_it_was(tensor) and tensor.numel()
            if stays and (tensor not in self._stamped or _has_stamp(tensor)):
                lacking.setdefault(tensor, name)
        return list(lacking.values())

    def _is_as_it_was(self, tensor: torch.Tensor) -> bool:
        return self._versions.get(tensor) == tensor._version

    def _wanted(self) -> dict[str, torch.Tensor]:
        named = named_tensors(self._model)
        return {name: tensor for name, tensor in named.items() if name in self._names}


@uninterrupted
def _set_back(
    module: nn.Module, kept: Sequence[tuple[str, torch.Tensor, int, torch.Tensor]]
) -> None:
    """Restore tensors of ``module`` from their copies, uninterrupted by signals."""
    for key, tensor, version, copy in kept:
        if tensor.layout is torch.strided:
            same = same_bits(tensor, copy)
        else:
            same = tensor._version == version
        if not same:
            tensor.copy_(copy)
        if key in module._buffers:
            module._buffers[key] = tensor


def _stamp(tensor: torch.Tensor) -> bool:
    """Write a value that no initialiser writes, without a new version; return whether ``tensor``'s
    dtype has one."""
    if tensor.dtype == torch.bool or not tensor.numel():
        return False
    tensor.data[(0,) * tensor.dim()] = _unlikely(tensor.dtype)
    return _has_stamp(tensor)


def _has_stamp(tensor: torch.Tensor) -> bool:
    value, stamp = tensor[(0,) * tensor.dim()], _unlikely(tensor.dtype)
    return bool(value.isnan() if stamp != stamp else value == stamp)


def _unlikely(dtype: torch.dtype) -> float:
    return math.nan if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max
