"""Which modules may be one unit with their submodules, in the runtime and in its simulation.

A module with small submodules, such as the expert of a mixture or a cell, is one unit with all of
them: they run together, and each use costs time of its own. Modules inside a list or a dict may run
or not, so a module that holds one is no such unit; nor is one with a submodule of others', too.
"""

from __future__ import annotations

from collections import Counter

from torch import nn

SHARE = 8
"""The parameters of such a unit take at most this part of the pool, as a divisor."""


def nests(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the modules that may be one unit with their submodules, outer ones first.

    Returns:
        Path -> paths of the modules in it that own parameters, itself included; at least two.
    """
    found = {}
    places = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    for path, module in model.named_modules():
        inside = list(module.named_modules(prefix=path))
        called = all(
            type(inner).forward is not nn.Module.forward and places[inner] == places[module]
            for _, inner in inside
        )
        owners = tuple(
            p for p, inner in inside if any(v is not None for v in inner._parameters.values())
        )
        if path and called and len(owners) > 1:
            found[path] = owners
    return found
