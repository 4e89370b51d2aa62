"""Weights for a model that was built on the meta device, one module after the other.

Each module's tensors are brought in, given their values, and left to the pager: the whole model is
never in memory at once. Who gives them is `dynoffload.runtime.filling`'s.

[Note: models that stay]  Trainers place a model by ``model.to(device)`` before any of their
callbacks can page it, and a model on the meta device cannot be moved. One whose weights are noted
needs no move, as they will be given on the CPU: until then its ``to`` and ``cpu`` answer for that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dynoffload.errors import ConfigError
from dynoffload.runtime.filling import Bring, Give, Initialiser, fill, join, names_of, own_tensors

Init = Give | Initialiser | str | Path | tuple[str | Path, Give | Initialiser] | None

_RECIPE = "_dynoffload_init"


def check_init(init: object) -> None:
    """Refuse what `materialize` cannot take.

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


def remember(model: nn.Module, init: Init) -> None:
    """Note how ``model`` is to be given its weights once a session pages it.

    Raises:
        ConfigError: ``init`` is none of what it can be.
    """
    check_init(init)
    model.__dict__[_RECIPE] = (init,)
    if tensors_on_meta(model):
        model.__dict__["to"] = functools.partial(_stay, model)
        model.__dict__["cpu"] = functools.partial(_stay, model, "cpu")


def _stay(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Be ``to`` and ``cpu`` of a model whose weights are noted; see [Note: models that stay]."""
    parsed: tuple[Any, ...] = torch._C._nn._parse_to(*args, **kwargs)
    device, dtype, _, memory_format = parsed
    if device is not None and device.type not in ("cpu", "meta"):
        raise ConfigError(
            f"this {type(model).__name__} gets its weights on the CPU, under offload(), and cannot "
            f"be moved to {device}: leave it there (transformers: TrainingArguments(use_cpu=True), "
            "Lightning: Trainer(accelerator='cpu'), accelerate: Accelerator(cpu=True))"
        )
    if dtype is not None or memory_format is not None:
        move: Callable[..., nn.Module] = type(model).to
        move(model, dtype=dtype, memory_format=memory_format)
    return model


def recipe_is_noted(model: nn.Module) -> bool:
    """Return whether `remember` noted how ``model`` is to be given its weights."""
    return _RECIPE in model.__dict__


def recipe_of(model: nn.Module) -> tuple[Init] | None:
    """Return and forget what `remember` noted, as a tuple of one; None if nothing was."""
    recipe: tuple[Init] | None = model.__dict__.pop(_RECIPE, None)
    if recipe is not None:
        for name in ("to", "cpu"):
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
def give_weights(model: nn.Module, init: Init, empty: Collection[str], bring: Bring) -> None:
    """Give the tensors of ``model`` that have no values theirs, one module after the other.

    Args:
        model: what is paged of its parameters has storage; the rest, and its buffers, may be on the
            meta device.
        init: None calls each module's own ``reset_parameters``; a function is called with each
            module that owns such tensors; an `Initialiser` knows an order of its own; a path is a
            safetensors file with the model's names; a path and a function are such a file and what
            makes the buffers that are not saved.
        empty: names of the tensors that were on the meta device; others keep what they have, except
            by a file. None at all means every tensor.
        bring: called with tensors that are about to be written.

    Raises:
        ConfigError: ``init`` is none of these, a module cannot initialise itself or leaves a tensor
            without a value, or the file lacks a tensor.
    """
    check_init(init)
    _leave_meta(model)
    if isinstance(init, str | Path):
        _load(model, Path(init), None, empty, bring)
    elif isinstance(init, tuple):
        _load(model, Path(init[0]), init[1], empty, bring)
    else:
        wanted = frozenset(empty) or names_of(model)
        if init is blank:
            fill(model, init, wanted & {name for name, _ in model.named_buffers()}, wanted, bring)
        else:
            fill(model, init, wanted, (), bring)


def _leave_meta(model: nn.Module) -> None:
    """Give what is not paged memory, without values."""
    for parameter in model.parameters():
        if parameter.is_meta:
            fresh = torch.empty_like(parameter, device="cpu")
            made = nn.Parameter(fresh, requires_grad=parameter.requires_grad)
            torch.utils.swap_tensors(parameter, made)  # type: ignore[no-untyped-call]
    # Buffers are not swapped: one that is a view of another cannot be.
    buffers: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                known = buffers.get(id(buffer))
                if known is None:
                    known = buffers[id(buffer)] = torch.empty_like(buffer, device="cpu")
                module._buffers[name] = known


def blank(module: nn.Module) -> None:
    """Initialise a module of whose tensors a checkpoint will replace all that are saved."""
    transient = module._non_persistent_buffers_set
    reset = getattr(module, "reset_parameters", None)
    if callable(reset) and any(module._buffers.get(name) is not None for name in transient):
        reset()
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in transient:
            buffer.zero_()


def _load(
    model: nn.Module,
    path: Path,
    give: Give | Initialiser | None,
    empty: Collection[str],
    bring: Bring,
) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            persistent = set(model.state_dict().keys())
            lacking = frozenset(empty) - names - persistent
            if give is not None:
                # Before the file is read: it may write into what the file has, too.
                fill(model, give, lacking, frozenset(empty) | names, bring)
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if name in names:
                    given = file.get_tensor(name)
                    if given.shape != tensor.shape:
                        raise ConfigError(
                            f"tensor {name!r} of {path} has shape {list(given.shape)} but the "
                            f"model's has {list(tensor.shape)}: give a file saved from this model"
                        )
                    bring([tensor])
                    tensor.copy_(given)
                elif name in persistent:
                    raise ConfigError(
                        f"{path} has no tensor {name!r}: give a file saved from this model"
                    )
                elif give is None and name in lacking:
                    raise ConfigError(
                        f"{path} has no tensor {name!r}, a buffer that is not saved: pass "
                        "init=(path, function) with a function that makes the buffers of a module"
                    )
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"cannot read {path} as safetensors: {error}") from error
