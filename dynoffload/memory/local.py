"""The part of a tensor that is stored in this process.

A tensor distributed over processes (torch's `DTensor`) wraps the plain tensor with this process's
part. Nothing of `torch.distributed` is imported: no `DTensor` exists before its module is loaded.
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
    """Return this process's part of a `DTensor`, or ``value`` itself if it is no `DTensor`.

    It is the same object each time: giving it other memory gives that memory to the tensor.
    """
    return value._local_tensor if is_spread(value) else value


def local_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of this process's part of ``tensor``."""
    part = local(tensor)
    return int(part.numel() * part.element_size())
