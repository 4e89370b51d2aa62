"""Encodes values that are not tensors as JSON: hyperparameters, step counts, scheduler state.

Decoding restores every type, and every float but the payload of a NaN bit for bit. Tensors in
nested values are stored elsewhere; their names replace them. A value that JSON cannot represent is
refused, since pickle could run code when loaded.

A value of a type that JSON lacks is an object whose key ``"$"`` gives its kind.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dynoffload.errors import CheckpointError

Put = Callable[[str, torch.Tensor], dict[str, Any]]
Get = Callable[[dict[str, Any]], torch.Tensor]

KIND = "$"
TENSOR = "tensor"
_SEQUENCES: dict[str, Callable[..., Any]] = {"tuple": tuple, "size": torch.Size, "set": set}
_MAPPINGS: dict[str, Callable[..., Any]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "counter": Counter,
}
_KINDS: dict[Any, str] = {kind: name for name, kind in (_SEQUENCES | _MAPPINGS).items()}


def is_tensor(value: Any) -> bool:
    """Return whether an encoded value stands for a tensor."""
    return isinstance(value, dict) and value.get(KIND) == TENSOR


def encode(value: Any, path: str, put: Put) -> Any:
    """Return ``value`` in types that JSON can represent.

    Args:
        value: numbers, texts, tensors, numpy values, and lists, tuples, sets and dicts of these.
        path: its name in errors.
        put: stores a tensor found at a path, and returns its object of kind ``"tensor"``.

    Raises:
        CheckpointError: a value cannot be represented; names it.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {KIND: "float", "value": str(value)}
    if kind is complex:
        parts = [encode(part, path, put) for part in (value.real, value.imag)]
        return {KIND: "complex", "parts": parts}
    if kind is bytes:
        return {KIND: "bytes", "base64": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        return put(path, value)
    if kind in (torch.dtype, torch.device):
        return {KIND: kind.__name__, "name": str(value).removeprefix("torch.")}
    if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "biufc":
        raw = torch.frombuffer(bytearray(value.tobytes()) or bytearray(1), dtype=torch.uint8)
        return {
            KIND: "numpy",
            "dtype": value.dtype.str,
            "shape": None if isinstance(value, np.generic) else list(value.shape),
            "bytes": put(path, raw[: value.nbytes]),
        }
    if kind is dict and KIND not in value and all(type(key) is str for key in value):
        return {key: encode(item, f"{path}.{key}", put) for key, item in value.items()}
    items: list[Any]
    if kind in (dict, OrderedDict, Counter):
        items = [
            [encode(key, f"{path} (a key)", put), encode(item, f"{path}.{key}", put)]
            for key, item in value.items()
        ]
    elif kind is list or kind in _KINDS:
        items = [encode(item, f"{path}.{at}", put) for at, item in enumerate(value)]
    else:
        raise CheckpointError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold: "
            "it holds numbers, texts, tensors, numpy arrays, and lists, tuples, sets and dicts of "
            "them; leave it out of the state, or give the object a state_dict() of such values"
        )
    return items if kind is list else {KIND: _KINDS[kind], "items": items}


def decode(value: Any, get: Get) -> Any:
    """Return what `encode` was given.

    Args:
        value: as it was read.
        get: returns the tensor for an object of kind ``"tensor"``.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it is malformed.
    """
    if isinstance(value, list):
        return [decode(item, get) for item in value]
    if not isinstance(value, dict):
        return value
    if KIND not in value:
        return {key: decode(item, get) for key, item in value.items()}
    kind = value[KIND]
    if kind == TENSOR:
        return get(value)
    if kind == "float":
        return float(value["value"])
    if kind == "complex":
        return complex(*(decode(part, get) for part in value["parts"]))
    if kind == "bytes":
        return base64.b64decode(value["base64"], validate=True)
    if kind == "dtype":
        found = getattr(torch, value["name"], None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"torch has no dtype {value['name']!r}")
        return found
    if kind == "device":
        return torch.device(value["name"])
    if kind == "numpy":
        dtype = np.dtype(value["dtype"])
        if dtype.kind not in "biufc":
            raise ValueError(f"an array of dtype {dtype}")
        flat = np.frombuffer(get(value["bytes"]).numpy().tobytes(), dtype)
        return flat[0] if value["shape"] is None else flat.reshape(value["shape"]).copy()
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decode(item, get) for item in value["items"])
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({decode(k, get): decode(v, get) for k, v in value["items"]})
    raise ValueError(f"a value of unknown kind {kind!r}")
