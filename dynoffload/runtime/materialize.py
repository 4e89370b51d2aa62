"""Weights for a model that was built on the meta device, one module after the other.

Each module's parameters are brought in, given their values, and left to the pager: the whole model
is never in memory at once.

[Note: models that stay]  Trainers place a model by ``model.to(device)`` before any of their
callbacks can page it, and a model on the meta device cannot be moved. One whose weights are noted
needs no move, as they will be given on the CPU: until then its ``to`` and ``cpu`` answer for that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dynoffload.errors import ConfigError

Init = Callable[[nn.Module], None] | str | Path | None
Bring = Callable[[Iterable[torch.Tensor]], None]

_RECIPE = "_dynoffload_init"


def remember(model: nn.Module, init: Init) -> None:
    """Note how ``model`` is to be given its weights once a session pages it."""
    model.__dict__[_RECIPE] = (init,)
    if modules_on_meta(model):
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


def modules_on_meta(model: nn.Module) -> frozenset[str]:
    """Return the paths of the modules that own parameters or buffers on the meta device."""
    return frozenset(
        path
        for path, module in model.named_modules()
        if any(t is not None and t.is_meta for t in _own(module).values())
    )


def _own(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {**module._parameters, **module._buffers}


@torch.no_grad()
def give_weights(model: nn.Module, init: Init, empty: Collection[str], bring: Bring) -> None:
    """Give the modules of ``model`` that have no values theirs, one after the other.

    Args:
        model: what is paged of its parameters has storage; the rest, and its buffers, may be on the
            meta device.
        init: None calls each module's own ``reset_parameters``; a function is called with each
            module that owns parameters or buffers; a path is a safetensors file with the model's
            names.
        empty: paths of the modules whose tensors were on the meta device; others keep what they
            have, except by a file. None at all means every module.
        bring: called with tensors that are about to be written.

    Raises:
        ConfigError: a module cannot initialise itself, leaves a tensor without a value, or the file
            lacks a tensor.
    """
    for parameter in model.parameters():
        if parameter.is_meta:  # too small to be paged
            fresh = nn.Parameter(
                torch.empty_like(parameter, device="cpu"), requires_grad=parameter.requires_grad
            )
            torch.utils.swap_tensors(parameter, fresh)  # type: ignore[no-untyped-call]
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    if isinstance(init, str | Path):
        _load(model, Path(init), bring)
        return
    for path, module in model.named_modules():
        owns = {name: t for name, t in _own(module).items() if t is not None}
        if empty and path not in empty:
            continue
        bring(owns.values())
        before = {n: b._version for n, b in module._buffers.items() if b is not None}
        reset = getattr(module, "reset_parameters", None)
        if init is not None:
            if owns:
                init(module)
        elif callable(reset):
            reset()
        elif owns:
            raise ConfigError(
                f"module {path or '(root)'} ({type(module).__name__}) owns parameters or buffers "
                "but has no reset_parameters(): pass init= a function that initialises a module, "
                "or the path of a safetensors file"
            )
        for name in before if path in empty else ():
            if module._buffers.get(name) is owns[name] and owns[name]._version == before[name]:
                raise ConfigError(
                    f"{f'{path}.{name}' if path else name} got no value: "
                    f"{'init' if init is not None else 'reset_parameters'}() of its module "
                    f"({type(module).__name__}) did not write it; pass init= a function that does"
                )


def blank(module: nn.Module) -> None:
    """Initialise a module of whose tensors a checkpoint will replace all that are saved."""
    transient = module._non_persistent_buffers_set
    reset = getattr(module, "reset_parameters", None)
    if callable(reset) and any(module._buffers.get(name) is not None for name in transient):
        reset()
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in transient:
            buffer.zero_()


def _load(model: nn.Module, path: Path, bring: Bring) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            wanted = dict(model.named_parameters()) | dict(model.named_buffers())
            persistent = set(model.state_dict().keys())
            for name, tensor in wanted.items():
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
                else:
                    raise ConfigError(
                        f"{path} has no tensor {name!r}, a buffer that is not saved: pass init= a "
                        "function that makes it, or use reset_parameters()"
                    )
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"cannot read {path} as safetensors: {error}") from error
