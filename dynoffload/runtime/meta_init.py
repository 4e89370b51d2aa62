"""Weights of a model that was built on the meta device, given as its block begins.

`remember` notes before the block where they come from; `MetaInit` gives them: an initialiser's
module by module, those of safetensors files tensor by tensor, so that the model is never whole in
memory. What is given no value is refused by name, and the model is on the meta device as before.

[Note: models that stay]  Trainers call ``model.to(device)`` before any callback can begin a block,
and a model on the meta device cannot be moved. One whose weights are noted needs no move: its
``to`` and ``cpu`` note the device instead.

[Note: written]  A tensor counts as written once its version has gone up or another stands in its
place. Writing through ``Tensor.data`` leaves the version, so a stamp is put on the first element
before, and is gone afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from dynoffload.errors import ConfigError
from dynoffload.memory.pieces import same_bits
from dynoffload.runtime.interrupts import uninterrupted
from dynoffload.runtime.placing import leave_for_meta, put_in_place, zero_buffers
from dynoffload.runtime.weight_files import Bring, WeightFiles

Give = Callable[[nn.Module], None]
Around = Callable[[nn.Module], AbstractContextManager[None]]

_CPU = torch.device("cpu")
_NOTE, _PLACE = "_dynoffload_init", "_dynoffload_place"
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
        name: the function it calls for each module, for messages.
    """

    name: str

    def initialise(self, model: nn.Module, names: Collection[str], around: Around) -> None:
        """Write the tensors ``names`` of ``model``.

        Args:
            around: entered while a module is initialised.
        """


Init = Give | Initialiser | str | Path | tuple[str | Path, Give | Initialiser] | None
"""Each module's ``reset_parameters`` (None), a function of a module, a file, or file and function
for what the file lacks."""


def own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers that ``module`` itself owns, by name."""
    own = (*module._parameters.items(), *module._buffers.items())
    return {name: tensor for name, tensor in own if tensor is not None}


def join(path: str, name: str) -> str:
    """Return the full name of a module's tensor."""
    return f"{path}.{name}" if path else name


def _named(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers, tied ones under every name."""
    return {
        join(path, key): tensor
        for path, module in model.named_modules()
        for key, tensor in own_tensors(module).items()
    }


def tensors_on_meta(model: nn.Module) -> frozenset[str]:
    """Return the names of parameters and buffers on the meta device, of tied ones every name."""
    return frozenset(name for name, tensor in _named(model).items() if tensor.is_meta)


# Before the block


@dataclass(frozen=True, eq=False)
class _Noted:
    """How the weights of a model will be given; each of its modules has this and its own path."""

    init: Init
    model: str  # the name of its type


def remember(model: nn.Module, init: Init) -> None:
    """Note how ``model`` is given its weights once a block begins.

    Raises:
        ConfigError: ``init`` is none of what it can be, or a file that does not fit.
    """
    _checked(init, model, tensors_on_meta(model))
    _note(model, init)


def _note(model: nn.Module, init: Init) -> None:
    noted = _Noted(init, type(model).__name__)
    for path, module in model.named_modules():
        module.__dict__[_NOTE] = (noted, path)
    if tensors_on_meta(model):
        model.__dict__["to"] = functools.partial(_stay, model)
        model.__dict__["cpu"] = functools.partial(_stay, model, "cpu")


def _stay(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Be ``to`` and ``cpu`` of a model whose weights are noted; see [Note: models that stay]."""
    parsed: tuple[Any, ...] = torch._C._nn._parse_to(*args, **kwargs)
    device, dtype, _, memory_format = parsed
    if device is not None and device.type != "meta":
        model.__dict__[_PLACE] = device
    if dtype is not None or memory_format is not None:
        move: Callable[..., nn.Module] = type(model).to
        move(model, dtype=dtype, memory_format=memory_format)
    return model


def place_of(model: nn.Module) -> torch.device | None:
    """Return where a model whose weights are noted was moved to since; None if it was not."""
    place: torch.device | None = model.__dict__.get(_PLACE)
    return place


def _noted_of(model: nn.Module) -> _Noted | None:
    its, path = model.__dict__.get(_NOTE, (None, ""))
    return None if path else its


def recipe_is_noted(model: nn.Module) -> bool:
    """Return whether `remember` noted how ``model``, as a whole, is given its weights."""
    return _noted_of(model) is not None


def noted(model: nn.Module) -> Init:
    """Return what `remember` noted; None, as by default, if nothing was."""
    its = _noted_of(model)
    return None if its is None else its.init


def check_parts(model: nn.Module) -> None:
    """Refuse a model of which a part has weights noted, or that is a part of one that lacks them:
    they would not be given.

    Raises:
        ConfigError: names the part.
    """
    mine = _noted_of(model)
    for path, module in model.named_modules():
        its, place = module.__dict__.get(_NOTE, (mine, ""))
        if its is mine or (place and not tensors_on_meta(module)):
            continue
        kind, verb = type(model).__name__, "has" if path else "is"
        what = (
            f"{its.model} whose part {place!r} this {kind} {verb}"
            if place
            else f"part {path!r} of this {kind}"
        )
        raise ConfigError(
            f"materialize() was called with the {what}: call it with the model that offload() is "
            "given"
        )


def _checked(init: object, model: nn.Module, empty: Collection[str]) -> WeightFiles | None:
    """Return the files of ``init``, if it names some, once they and it are checked.

    Raises:
        ConfigError: says what was given and what is accepted, or what does not fit.
    """

    def gives(value: object) -> bool:
        return callable(value) or isinstance(value, Initialiser)

    beside = isinstance(init, tuple) and len(init) == 2 and gives(init[1])
    path = init[0] if beside and isinstance(init, tuple) else init
    if isinstance(path, str | Path):
        stored = WeightFiles(path)
        stored.check(model, empty, makes=beside)
        return stored
    if beside or not (init is None or gives(init)):
        raise ConfigError(
            f"init={init!r:.80} says nothing of how to give weights: pass None (each module's "
            "reset_parameters), a function of a module, the path of a safetensors file, or a tuple "
            "(path, function) of both"
        )
    return None


# As it begins


class MetaInit:
    """What of ``model`` is on the meta device as its block begins, and how it gets its values.

    Args:
        model: before it is paged. What was noted is taken from it.
        device: where what is not paged gets its memory.
    """

    def __init__(self, model: nn.Module, device: torch.device = _CPU) -> None:
        self._model, self._device = model, device
        self._noted, self._init = recipe_is_noted(model), noted(model)
        for module in model.modules():
            for name in (_NOTE, _PLACE):
                module.__dict__.pop(name, None)
            for name in ("to", "cpu"):
                if getattr(module.__dict__.get(name), "func", None) is _stay:
                    del module.__dict__[name]
        self._names = tensors_on_meta(model)
        self._parameters = [p for p in model.parameters() if p.is_meta]
        self._buffers = [
            (module, name, buffer)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.is_meta
        ]

    @torch.no_grad()
    def give(self, bring: Bring = lambda tensors: None) -> None:
        """Give all that was on the meta device its values; what has values keeps them, except by a
        file.

        Args:
            bring: called with tensors before they are written, to fetch their memory.

        Raises:
            ConfigError: a module cannot initialise itself or leaves a tensor without a value, or a
                file does not fit.
        """
        if not (self._names or self._noted):
            return
        model, init, names = self._model, self._init, self._names
        stored = _checked(init, model, names)
        for parameter in self._parameters:
            if parameter.is_meta:
                put_in_place(parameter, torch.zeros_like(parameter, device=self._device))
        zero_buffers(model, self._device)
        if stored is None:
            assert not isinstance(init, str | Path | tuple)
            fill(model, init, names, (), bring)
            return
        if isinstance(init, tuple):
            lacking = stored.lacks(model, names)
            # Before the file is read: it may write into what the file has, too.
            fill(model, init[1], lacking, names - lacking, bring)
        stored.copy_to(model, bring)

    def undo(self) -> None:
        """Put the model back on the meta device and note again what was noted, as the block has not
        begun."""
        for module, name, buffer in self._buffers:
            if module._buffers.get(name) is not None:
                module._buffers[name] = buffer
        if self._noted:
            _note(self._model, self._init)
        leave_for_meta(self._parameters)


# By an initialiser


def fill(
    model: nn.Module,
    by: Give | Initialiser | None,
    names: Collection[str],
    free: Collection[str],
    bring: Bring = lambda tensors: None,
) -> None:
    """Have the modules of ``model`` initialised one after the other.

    Args:
        by: a function that is called with each module that owns one of ``names``, parents first;
            what initialises a whole model; or None for each module's ``reset_parameters``.
        names: the tensors that must be written.
        free: what else may be written. All others keep the values that they have.
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
    """Return what gives ``model`` its weights where reset_parameters() does not."""
    stock = any(
        base.__name__ == "PreTrainedModel" and base.__module__.startswith("transformers.")
        for base in type(model).__mro__
    )
    return _OF_TRANSFORMERS if stock else _REMEDY


class _Filling:
    """What was written so far of a model that is being initialised; see [Note: written]."""

    def __init__(
        self, model: nn.Module, names: Collection[str], free: Collection[str], bring: Bring
    ) -> None:
        self._model, self._names, self._free, self._bring = model, names, free, bring
        self._paths = {module: path for path, module in model.named_modules()}
        self._versions = {tensor: tensor._version for tensor in self._wanted().values()}
        self._stamped: set[torch.Tensor] = set()

    @contextlib.contextmanager
    def around(self, module: nn.Module) -> Iterator[None]:
        """``module`` is initialised: fetch what it owns, and afterwards restore what had its values
        from a copy."""
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
        """Return the names of what has got no value, of tied ones the first."""
        lacking: dict[torch.Tensor, str] = {}
        for name, tensor in self._wanted().items():
            stays = self._is_as_it_was(tensor) and tensor.numel()
            if stays and (tensor not in self._stamped or _has_stamp(tensor)):
                lacking.setdefault(tensor, name)
        return list(lacking.values())

    def _is_as_it_was(self, tensor: torch.Tensor) -> bool:
        return self._versions.get(tensor) == tensor._version

    def _wanted(self) -> dict[str, torch.Tensor]:
        return {name: one for name, one in _named(self._model).items() if name in self._names}


@uninterrupted
def _set_back(
    module: nn.Module, kept: Sequence[tuple[str, torch.Tensor, int, torch.Tensor]]
) -> None:
    """Give tensors of ``module`` the values of their copies, with no signal in between."""
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
    """Write a value that no initialiser gives, and leave the version; return whether there is one
    of this type."""
    if tensor.dtype == torch.bool or not tensor.numel():
        return False
    tensor.data[(0,) * tensor.dim()] = _unlikely(tensor.dtype)
    return _has_stamp(tensor)


def _has_stamp(tensor: torch.Tensor) -> bool:
    value, stamp = tensor[(0,) * tensor.dim()], _unlikely(tensor.dtype)
    return bool(value.isnan() if stamp != stamp else value == stamp)


def _unlikely(dtype: torch.dtype) -> float:
    return math.nan if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max
