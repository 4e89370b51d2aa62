"""The memory of tensors that wrap others.

A tensor distributed over processes (torch's `DTensor`) wraps the plain tensor with this process's
part. Nothing of `torch.distributed` is imported: no `DTensor` exists before its module is loaded.
Others, such as torchao's quantized weights, wrap several: the largest is paged, the others stay.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.UntypedStorage)
_MODULE = "torch.distributed.tensor"


def is_spread(value: Any) -> bool:
    """Return whether ``value`` is a `DTensor`, distributed over processes."""
    if type(value) in _PLAIN:
        return False
    kind = getattr(sys.modules.get(_MODULE), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def local(value: Any) -> Any:
    """Return this process's part of a `DTensor`, the largest part of another wrapper, or ``value``
    itself if it is none.

    It is the same object each time: giving it other memory gives that memory to the tensor.
    """
    if type(value) in _PLAIN:
        return value
    return max(wrapped(value), key=lambda part: part.nbytes) if is_wrapper(value) else value


def is_wrapper(value: Any) -> bool:
    """Return whether the memory of ``value`` is that of other tensors."""
    return type(value) not in _PLAIN and hasattr(value, "__tensor_flatten__")


def wrapped(value: Any) -> list[torch.Tensor]:
    """Return the tensors that have the memory of ``value``; itself if it is no wrapper."""
    if is_spread(value):
        return [value._local_tensor]
    if not is_wrapper(value):
        return [value]
    names, _ = value.__tensor_flatten__()
    return [part for name in names for part in wrapped(getattr(value, name))]


def local_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of what `local` returns."""
    part = local(tensor)
    return int(part.numel() * part.element_size())
