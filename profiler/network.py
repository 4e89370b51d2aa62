"""Identifiers of a network and of a call's shapes, which match between recorded and later runs.

A pilot recognises the network it was trained for by `fingerprint`; `shape_key` distinguishes calls
of one module by their shapes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

MAX_KEY_TENSORS = 8
"""The most tensors in a call's shape key."""
_MAX_DEPTH = 3
_EXACT = 8


def fingerprint(model: torch.nn.Module) -> str:
    """Return the sha256 (hex, 64 characters) of the model's architecture.

    It covers module paths and class names, and the names, shapes and types of parameters and
    buffers. It ignores values, devices, tied weights, the Python module of a class, and
    non-persistent buffers, which some networks create as they run. A model on the meta device has
    the fingerprint of the same model with storage.
    """
    digest = hashlib.sha256()
    for path, module in model.named_modules(remove_duplicate=False):
        digest.update(f"m {path} {type(module).__qualname__}\n".encode())
    for name, parameter in model.named_parameters(remove_duplicate=False):
        digest.update(f"p {name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(path, recurse=False, remove_duplicate=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                digest.update(f"b {name} {tuple(buffer.shape)} {buffer.dtype}\n".encode())
    return digest.hexdigest()


def shape_key(args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    """Return the canonical bucket of the tensor shapes of one call, such as ``"2x256,1x256"``.

    Extents up to 8 are exact; larger ones are rounded up to a power of two, so that calls of
    similar cost share a key. Tensors follow the order of the arguments, keywords sorted by name, at
    most `MAX_KEY_TENSORS`. A 0-dimensional tensor is ``"0d"``; a call without tensors has the key
    ``""``.

    Args:
        args: positional arguments of the call; tensors, or lists, tuples and dicts of them.
        kwargs: its keyword arguments.
    """
    parts: list[str] = []
    for argument in (*args, *(kwargs[name] for name in sorted(kwargs))):
        _collect(argument, parts, _MAX_DEPTH)
    return ",".join(parts)


def _collect(value: object, parts: list[str], depth: int) -> None:
    if len(parts) >= MAX_KEY_TENSORS:
        return
    if isinstance(value, torch.Tensor):
        extents = [str(n if n <= _EXACT else 1 << (n - 1).bit_length()) for n in value.shape]
        parts.append("x".join(extents) or "0d")
    elif depth and isinstance(value, list | tuple | dict):
        items = list(value.values()) if isinstance(value, dict) else value
        for item in items[:MAX_KEY_TENSORS]:
            _collect(item, parts, depth - 1)
