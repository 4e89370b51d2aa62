"""Weights for a model that was built on the meta device, one module after the other.

Each module's tensors are brought in, given their values, and left to the pager: the whole model is
never in memory at once. Who gives them is `dynoffload.runtime.filling`'s.

[Note: models that stay]  Trainers place a model by ``model.to(device)`` before any of their
callbacks can page it, and a model on the meta device cannot be moved. One whose weights are noted
needs no move, as they will be given where the block trains it: until then its ``to`` and ``cpu``
answer for that, and note where that was to be.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dynoffload.errors import ConfigError
from dynoffload.runtime.access import Access
from dynoffload.runtime.filling import Give, Initialiser, fill, join, own_tensors
from dynoffload.runtime.placing import put_in_place
from dynoffload.runtime.stored import Stored

Init = Give | Initialiser | str | Path | tuple[str | Path, Give | Initialiser] | None

_CPU = torch.device("cpu")
_RECIPE, _PLACE = "_dynoffload_init", "_dynoffload_place"
_wholes: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models with a recipe


def check_kind(init: object) -> None:
    """Refuse what says nothing of how to give weights.

    Raises:
        ConfigError: says what was given and what is accepted.
    """

    def gives(value: object) -> bool:
        return callable(value) or isinstance(value, Initialiser)

    if isinstance(init, tuple) and len(init) == 2:
        fits = isinstance(init[0], str | Path) and gives(init[1])
    else:
        fits = init is None or isinstance(init, str | Path) or gives(init)
    if not fits:
        raise ConfigError(
            f"init={init!r:.80} says nothing of how to give weights: pass None (each module's "
            "reset_parameters), a function of a module, the path of a safetensors file, or a tuple "
            "(path, function) of both"
        )


def check_init(init: object, model: nn.Module, empty: Collection[str]) -> None:
    """Refuse what `materialize` cannot take, and a file that does not fit ``model``.

    Args:
        empty: names of the tensors that have no values.

    Raises:
        ConfigError: says what was given and what is accepted, or what does not fit.
    """
    check_kind(init)
    if isinstance(init, str | Path):
        Stored(init).check(model, empty, makes=False)
    elif isinstance(init, tuple):
        Stored(init[0]).check(model, empty, makes=True)


def remember(model: nn.Module, init: Init) -> None:
    """Note how ``model`` is to be given its weights once a session pages it.

    Raises:
        ConfigError: ``init`` is none of what it can be, or a file that does not fit.
    """
    check_init(init, model, tensors_on_meta(model))
    note(model, init)


def note(model: nn.Module, init: Init) -> None:
    """Note ``init``, which was checked."""
    model.__dict__[_RECIPE] = (init,)
    _wholes.add(model)
    if tensors_on_meta(model):
        model.__dict__["to"] = functools.partial(_stay, model)
        model.__dict__["cpu"] = functools.partial(_stay, model, "cpu")


def check_parts(model: nn.Module) -> None:
    """Refuse a model of which a part has weights noted, or that is a part of one that lacks them:
    they would not be asked for.

    Raises:
        ConfigError: names the part.
    """
    remedy = "call it with the model that offload() is given, or inside the block"
    for path, module in model.named_modules():
        if path and recipe_is_noted(module):
            raise ConfigError(
                f"materialize() was called with the part {path!r} of this {type(model).__name__}: "
                f"{remedy}"
            )
    if recipe_is_noted(model):
        return
    own = set(model.modules())
    for whole in list(_wholes):
        if not recipe_is_noted(whole):
            continue
        for path, part in whole.named_modules():
            if part in own and tensors_on_meta(part):
                raise ConfigError(
                    f"materialize() was called with the {type(whole).__name__} whose part {path!r} "
                    f"this {type(model).__name__} {'is' if part is model else 'has'}: {remedy}"
                )


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


def recipe_is_noted(model: nn.Module) -> bool:
    """Return whether `remember` noted how ``model`` is to be given its weights."""
    return _RECIPE in model.__dict__


def place_of(model: nn.Module) -> torch.device | None:
    """Return where a model whose weights are noted was moved to since; None if it was not."""
    place: torch.device | None = model.__dict__.get(_PLACE)
    return place


def noted(model: nn.Module) -> Init:
    """Return what `remember` noted; None, as by default, if nothing was."""
    recipe: tuple[Init] = model.__dict__.get(_RECIPE, (None,))
    return recipe[0]


def recipe_of(model: nn.Module) -> tuple[Init] | None:
    """Return and forget what `remember` noted, as a tuple of one; None if nothing was."""
    recipe: tuple[Init] | None = model.__dict__.pop(_RECIPE, None)
    if recipe is not None:
        _wholes.discard(model)
        for name in ("to", "cpu", _PLACE):
            model.__dict__.pop(name, None)
    return recipe


def tensors_on_meta(model: nn.Module) -> frozenset[str]:
    """Return the names of parameters and buffers on the meta device, of tied ones every name."""
    return frozenset(
        join(path, key)
        for path, module in model.named_modules()
        for key, tensor in own_tensors(module).items()
        if tensor.is_meta
    )


@torch.no_grad()
def give_weights(
    model: nn.Module,
    init: Init,
    empty: Collection[str],
    access: Access,
    *,
    kept: Collection[str] = (),
    device: torch.device = _CPU,
) -> None:
    """Give the tensors of ``model`` that have no values theirs, one module after the other.

    Args:
        model: what is paged of its parameters has storage; the rest, and its buffers, may be on the
            meta device.
        init: None calls each module's own ``reset_parameters``; a function is called with each
            module that owns such tensors; an `Initialiser` knows an order of its own; a path is a
            safetensors file with the model's names, an index of such files, or a directory with
            either; a path and a function are such a file and what makes the buffers that are not
            saved.
        empty: names of the tensors that have no values; others keep what they have, except by a
            file.
        access: to the tensors' memory.
        kept: names of what a file does not replace.
        device: for what is not paged.

    Raises:
        ConfigError: ``init`` is none of these, a module cannot initialise itself or leaves a tensor
            without a value, or the file does not fit; then it has written nothing.
    """
    check_init(init, model, empty)
    leave_meta(model, device)
    if isinstance(init, str | Path):
        Stored(init).copy_to(model, kept, access)
    elif isinstance(init, tuple):
        stored = Stored(init[0])
        lacking = stored.lacks(model, empty)
        # Before the file is read: it may write into what the file has, too.
        fill(model, init[1], lacking, frozenset(empty) - lacking, access)
        stored.copy_to(model, kept, access)
    else:
        wanted = frozenset(empty)
        if init is blank:
            fill(model, init, wanted & {name for name, _ in model.named_buffers()}, wanted, access)
        else:
            fill(model, init, wanted, (), access)


def leave_meta(model: nn.Module, device: torch.device = _CPU) -> None:
    """Give what is not paged memory of ``device``, of zeros; tensors that are views of one another
    stay so."""
    for parameter in model.parameters():
        if parameter.is_meta:
            put_in_place(parameter, torch.zeros_like(parameter, device=device))
    zero_buffers(model, device)


def zero_buffers(model: nn.Module, device: torch.device = _CPU) -> None:
    """Give buffers on the meta device memory of ``device``, of zeros; what is shared among them
    stays so."""
    # They are not swapped: one that is a view of another cannot be.
    made: dict[int, torch.Tensor] = {}
    storages: dict[int, torch.UntypedStorage] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                if id(buffer) not in made:
                    made[id(buffer)] = _zeros_as(buffer, storages, device)
                module._buffers[name] = made[id(buffer)]


def _zeros_as(
    buffer: torch.Tensor, storages: dict[int, torch.UntypedStorage], device: torch.device
) -> torch.Tensor:
    """Return zeros like ``buffer``, in a storage that stands for its own."""
    if buffer.layout is not torch.strided or type(buffer) is not torch.Tensor:
        return torch.zeros_like(buffer, device=device)
    away = buffer.untyped_storage()
    if away._cdata not in storages:
        zeros = torch.zeros(away.nbytes(), dtype=torch.uint8, device=device)
        storages[away._cdata] = zeros.untyped_storage()
    empty = torch.empty(0, dtype=buffer.dtype, device=device)
    storage = storages[away._cdata]
    return empty.set_(storage, int(buffer.storage_offset()), buffer.size(), buffer.stride())


def blank(module: nn.Module) -> None:
    """Initialise a module of whose tensors a checkpoint will replace all that are saved."""
    transient = module._non_persistent_buffers_set
    reset = getattr(module, "reset_parameters", None)
    if callable(reset) and any(module._buffers.get(name) is not None for name in transient):
        reset()
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in transient:
            buffer.zero_()
