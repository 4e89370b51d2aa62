"""Weights for a model that was built on the meta device, one module after the other.

Each module's parameters are brought in, given their values, and left to the pager: the whole model
is never in memory at once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from dynoffload.errors import ConfigError

Init = Callable[[nn.Module], None] | str | Path | None

_RECIPE = "_dynoffload_init"


def remember(model: nn.Module, init: Init) -> None:
    """Note how ``model`` is to be given its weights once a session pages it."""
    model.__dict__[_RECIPE] = (init,)


def recipe_of(model: nn.Module) -> tuple[Init] | None:
    """Return and forget what `remember` noted, as a tuple of one; None if nothing was."""
    recipe: tuple[Init] | None = model.__dict__.pop(_RECIPE, None)
    return recipe


@torch.no_grad()
def give_weights(model: nn.Module, init: Init) -> None:
    """Give every parameter and buffer of ``model`` its value, module by module.

    Args:
        model: what is paged of its parameters has storage; the rest, and its buffers, may be on the
            meta device.
        init: None calls each module's own ``reset_parameters``; a function is called with each
            module that owns parameters or buffers; a path is a safetensors file with the model's
            names.

    Raises:
        ConfigError: a module cannot initialise itself, or the file lacks a tensor.
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
        _load(model, Path(init))
        return
    for path, module in model.named_modules():
        owns = any(p is not None for p in module._parameters.values()) or any(
            b is not None for b in module._buffers.values()
        )
        if init is not None:
            if owns:
                init(module)
            continue
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
        elif owns:
            raise ConfigError(
                f"module {path or '(root)'} ({type(module).__name__}) owns parameters or buffers "
                "but has no reset_parameters(): pass init= a function that initialises a module, "
                "or the path of a safetensors file"
            )


def _load(model: nn.Module, path: Path) -> None:
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
