"""Raises a clear error in forked children that access paged tensors.

The pool is not inherited, as pages shared by two processes cannot be moved. In a child, paged
tensors report their metadata, such as shape and dtype, and raise where their bytes are needed.
Views of paged tensors, and arrays over them, are not found: reading them ends the child by a
segmentation fault.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from dynoffload.errors import BackendError

_METADATA = {
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("device", "dtype", "grad", "is_leaf", "layout", "ndim", "requires_grad")
    ),
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
    *(torch.Tensor.dim, torch.Tensor.element_size, torch.Tensor.is_floating_point),
    *(torch.Tensor.nelement, torch.Tensor.numel, torch.Tensor.size, torch.Tensor.stride),
}


class Holder(Protocol):
    """Owns tensors whose memory exists in this process only."""

    def end_in_child(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Stop working in this forked process, and yield the tensors with their names. It takes no
        lock and reads no content."""


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()


def tell_children(holder: Holder) -> None:
    """Replace ``holder``'s tensors in every process that is forked from now on."""
    _holders.add(holder)


def refusal(name: str) -> BackendError:
    """Return the error for ``name``, whose memory this process does not have."""
    return BackendError(
        f"{name} is under offload() in the process that this one was forked from, and its memory "
        "is not inherited: clone what a worker reads before it is started, or read it in the main "
        "process"
    )


def _refuse(
    kind: type, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Be the ``__torch_function__`` of tensors without memory: return metadata, else raise."""
    if function in _METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))
    given = tree_leaves((args, kwargs))
    raise refusal(next(one._paged_as for one in given if hasattr(one, "_paged_as")))


@functools.cache
def _without_bytes(kind: type) -> type:
    return type(kind)(kind.__name__, (kind,), {"__torch_function__": classmethod(_refuse)})


def _disable_in_child() -> None:
    for holder in list(_holders):
        for name, tensor in holder.end_in_child():
            if "_paged_as" not in tensor.__dict__:
                tensor.__dict__["_paged_as"] = name
                tensor.__class__ = _without_bytes(type(tensor))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disable_in_child)
