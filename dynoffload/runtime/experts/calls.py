"""Experts of transformers, whose fused parameters are paged by slices: its eager loop, on parts.

The class's own eager code runs with `Parts` in the place of the parameters that are paged by
slices. So its bits are those of the eager implementation, and a class need not be known here; where
nothing is paged by slices, the eager code runs as it is. Other implementations ask for `stand_ins`.

[Note: eager]  A model whose configuration says "eager" gets this while a session of it is open:
transformers' registry has no entry of that name, and takes one. Neither the model nor its
configuration is changed, so copies and pickles of it are as ever.

[Note: compiled]  torch.compile gives a loop over the experts that were hit up, and runs it as it
is. On parts it would compile pieces of it, whose bits are others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from dynoffload.errors import ConfigError
from dynoffload.runtime.experts.parts import Parts

_MODULE = "transformers.integrations.moe"

MakeParts = Callable[[], Mapping[str, Parts]]

_sliced: dict[int, MakeParts] = {}  # id of a module -> makes its parts, while its session is open


def run_eager(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the eager forward of an experts' class; by slices, if they are paged so.

    Raises:
        ConfigError: the class has none.
    """
    eager = getattr(type(module).forward, "__wrapped__", None)
    if eager is None:
        raise ConfigError(
            f"{type(module).__name__} has no eager forward of its own: choose another "
            "experts_implementation for it"
        )
    parts = stand_ins(module)
    if not parts:
        return eager(module, *args, **kwargs)
    stand_in = object.__new__(type(module))
    stand_in.__dict__.update(module.__dict__)
    stand_in.__dict__.update(parts)  # attributes of its own are found before parameters
    if "torch._dynamo" in sys.modules:  # see [Note: compiled]
        eager = torch._disable_dynamo(eager)  # type: ignore[attr-defined]
    return eager(stand_in, *args, **kwargs)


def stand_ins(module: nn.Module) -> Mapping[str, Parts]:
    """Return what stands for the parameters of ``module`` in one call, by name: those that are
    paged by slices, while a session is open."""
    make = _sliced.get(id(module))
    return {} if make is None else make()


def watch(module: nn.Module, make: MakeParts) -> Callable[[], None]:
    """Run the experts of ``module`` by slices from now on.

    Args:
        module: owns fused parameters; if it is no experts' class of transformers, nothing changes,
            unless its class says by ``asks_for_parts`` that it takes its `stand_ins` itself.
        make: returns what stands for them in one call, by name.

    Returns:
        Ends it.
    """
    registry = getattr(sys.modules.get(_MODULE), "ALL_EXPERTS_FUNCTIONS", None)
    if getattr(type(module), "asks_for_parts", False):
        registry = {}
    elif registry is None or not hasattr(type(module).forward, "__wrapped__"):
        return lambda: None
    _sliced[id(module)] = make
    if "eager" not in registry:
        registry["eager"] = run_eager  # see [Note: eager]

    def end() -> None:
        _sliced.pop(id(module), None)
        if not _sliced and registry.get("eager") is run_eager:
            del registry["eager"]

    return end
