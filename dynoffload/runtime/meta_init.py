"""Gives a model built on the meta device its weights as its block begins.

`remember` notes their source before the block. `MetaInit` gives them, so that the model is never
whole in memory: module by module from an initialiser, or tensor by tensor from safetensors files.
If a tensor gets no value, an error names it, and the model is on the meta device as before.

[Note: models that stay]  Trainers call ``model.to(device)`` before any callback can begin a block,
but a model on the meta device cannot be moved. If its weights are noted it need not be: its ``to``
and ``cpu`` only note the device.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dynoffload.errors import ConfigError
from dynoffload.runtime.initialising import Give, Initialiser, fill, tensors_on_meta
from dynoffload.runtime.placing import leave_for_meta, put_in_place, zero_buffers
from dynoffload.runtime.weight_files import Bring, Link, WeightFiles
from dynoffload.units import format_bytes

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_NOTE, _PLACE = "_dynoffload_init", "_dynoffload_place"
Init = Give | Initialiser | str | Path | tuple[str | Path, Give | Initialiser] | None
"""None: each module's ``reset_parameters``; a function of a module; a file; or a file and a
function for what the file lacks."""


# Before the block


@dataclass(eq=False)
class _Noted:
    """How a model gets its weights; stored in each of its modules, with the module's path."""

    init: Init
    model: str  # the name of its type
    stored: WeightFiles | None  # the files, as they were read last

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "stored": None}  # a copy of the model reads them itself


def remember(model: nn.Module, init: Init) -> None:
    """Note how ``model`` gets its weights once a block begins.

    Raises:
        ConfigError: ``init`` is of no accepted kind, or a file does not fit.
    """
    empty = tensors_on_meta(model)
    stored = _checked(init, model, empty)
    if stored is not None and not empty:
        logger.warning(
            "this %s is in memory: %s overwrites it as the block begins, and frozen weights are "
            "not paged from there; build it under torch.device('meta')",
            type(model).__name__,
            stored.path,
        )
    _note(model, _Noted(init, type(model).__name__, stored))


def _note(model: nn.Module, noted: _Noted) -> None:
    for path, module in model.named_modules():
        module.__dict__[_NOTE] = (noted, path)
    if tensors_on_meta(model):
        model.__dict__["to"] = functools.partial(_stay, model)
        model.__dict__["cpu"] = functools.partial(_stay, model, "cpu")


def _stay(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Replace ``to`` and ``cpu`` of a model with noted weights; see [Note: models that stay]."""
    parsed: tuple[Any, ...] = torch._C._nn._parse_to(*args, **kwargs)
    device, dtype, _, memory_format = parsed
    if device is not None and device.type != "meta":
        model.__dict__[_PLACE] = device
    if dtype is not None or memory_format is not None:
        move: Callable[..., nn.Module] = type(model).to
        move(model, dtype=dtype, memory_format=memory_format)
    return model


def place_of(model: nn.Module) -> torch.device | None:
    """Return the device that a model with noted weights was moved to since; None if it was not."""
    place: torch.device | None = model.__dict__.get(_PLACE)
    return place


def _noted_of(model: nn.Module) -> _Noted | None:
    its, path = model.__dict__.get(_NOTE, (None, ""))
    return None if path else its


def recipe_is_noted(model: nn.Module) -> bool:
    """Return whether `remember` noted how ``model``, as a whole, gets its weights."""
    return _noted_of(model) is not None


def frozen_in_files(model: nn.Module) -> frozenset[nn.Parameter]:
    """Return the frozen parameters of ``model`` on the meta device whose bytes lie in the files
    that `remember` noted. Warn if more than an eighth of the frozen bytes do not lie there.

    Raises:
        ConfigError: the files do not fit.
    """
    its = _noted_of(model)
    if its is None or not isinstance(its.init, str | Path | tuple):
        return frozenset()
    its.stored = stored = _checked(its.init, model, tensors_on_meta(model), its.stored)
    assert stored is not None
    frozen = {
        tensor: tensor.is_contiguous() and stored.extents_of(value, tensor.dtype) is not None
        for tensor, value in stored.values_in(model)
        if isinstance(tensor, nn.Parameter) and tensor.is_meta and not tensor.requires_grad
    }
    copied = sum(tensor.nbytes for tensor, lies_there in frozen.items() if not lies_there)
    if copied * 8 > sum(tensor.nbytes for tensor in frozen):
        logger.warning(
            "%s of frozen weights are copied to the spill file, as %s holds them in another dtype "
            "or form than the model; if only the dtype differs, build the model in that of the "
            "files: then they are paged from there",
            format_bytes(copied),
            stored.path,
        )
    return frozenset(tensor for tensor, lies_there in frozen.items() if lies_there)


def check_parts(model: nn.Module) -> None:
    """Refuse a model if weights are noted for only a part of it, or for a larger model that it is a
    part of. These weights would not be given.

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


def _checked(
    init: object, model: nn.Module, empty: Collection[str], stored: WeightFiles | None = None
) -> WeightFiles | None:
    """Return the files that ``init`` names, if any, after checking both; ``stored``, if they are
    those and have not changed.

    Raises:
        ConfigError: ``init`` is of no accepted kind, or a file does not fit.
    """

    def gives(value: object) -> bool:
        return callable(value) or isinstance(value, Initialiser)

    is_pair = isinstance(init, tuple) and len(init) == 2 and gives(init[1])
    path = init[0] if is_pair and isinstance(init, tuple) else init
    if isinstance(path, str | Path):
        by = init[1] if is_pair and isinstance(init, tuple) else None
        if stored is None or not stored.still_hold(path, model):
            stored = WeightFiles(path, model, by.values if isinstance(by, Initialiser) else None)
        stored.check(model, empty, makes=is_pair)
        return stored
    if is_pair or not (init is None or gives(init)):
        raise ConfigError(
            f"init={init!r:.80} says nothing of how to give weights: pass None (each module's "
            "reset_parameters), a function of a module, the path of a safetensors file, or a tuple "
            "(path, function) of both"
        )
    return None


# As the block begins


class MetaInit:
    """The tensors of ``model`` on the meta device as its block begins, and how they get values.

    Args:
        model: before it is paged. Notes of `remember` are removed from it.
        device: where unpaged tensors get their memory.
    """

    def __init__(self, model: nn.Module, device: torch.device = _CPU) -> None:
        self._model, self._device = model, device
        self._noted = _noted_of(model)
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
    def give(
        self,
        bring: Bring = lambda tensors: None,
        link: Link = lambda tensor, value, extents_of: False,
    ) -> None:
        """Give all tensors on the meta device values; others keep theirs, unless a file has them.

        Args:
            bring: called with tensors before they are written, to fetch their memory.
            link: see `WeightFiles.copy_to`.

        Raises:
            ConfigError: a module cannot initialise itself or leaves a tensor without a value, or a
                file does not fit.
        """
        if not (self._names or self._noted):
            return
        model, names, init, stored = self._model, self._names, None, None
        if self._noted is not None:
            init, stored = self._noted.init, self._noted.stored
            self._noted.stored = None
        stored = _checked(init, model, names, stored)
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
            # Before the file is read: the function may also overwrite what the file has.
            fill(model, init[1], lacking, names - lacking, bring)
        stored.copy_to(model, bring, link)

    def undo(self) -> None:
        """Move the model back to the meta device and restore the notes, as the block failed to
        begin."""
        for module, name, buffer in self._buffers:
            if module._buffers.get(name) is not None:
                module._buffers[name] = buffer
        if self._noted is not None:
            _note(self._model, self._noted)
        leave_for_meta(self._parameters)
