"""What a forked process finds in the place of paged tensors: an error that says so.

The pool is not inherited: pages that two processes share cannot be moved. So a child has the
tensors but none of their bytes: they become tensors that tell their shape, and raise where their
bytes are asked for. Views of paged tensors, and arrays over them, are not found, and end the child
by a segmentation fault.
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

_TOLD = {
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("device", "dtype", "grad", "is_leaf", "layout", "ndim", "requires_grad")
    ),
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
    *(torch.Tensor.dim, torch.Tensor.element_size, torch.Tensor.is_floating_point),
    *(torch.Tensor.nelement, torch.Tensor.numel, torch.Tensor.size, torch.Tensor.stride),
}


class Holder(Protocol):
    """Has tensors that lie in memory of this process alone."""

    def end_in_child(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Do nothing more in this process, which was forked, and yield them with their names; it
        takes no lock and reads none of their bytes."""


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()


def tell_children(holder: Holder) -> None:
    """Have processes that are forked from now on told what they lack of ``holder``'s."""
    _holders.add(holder)


def refusal(name: str) -> BackendError:
    """Return the error for ``name``, of which this process has no byte."""
    return BackendError(
        f"{name} is under offload() in the process that this one was forked from, and its memory "
        "is not inherited: clone what a worker reads before it is started, or read it in the main "
        "process"
    )


def _refuse(
    kind: type, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Answer for tensors without bytes; it is their ``__torch_function__``."""
    if function in _TOLD:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))
    given = tree_leaves((args, kwargs))
    raise refusal(next(one._paged_as for one in given if hasattr(one, "_paged_as")))


@functools.cache
def _without_bytes(kind: type) -> type:
    return type(kind)(kind.__name__, (kind,), {"__torch_function__": classmethod(_refuse)})


def _tell() -> None:
    for holder in list(_holders):
        for name, tensor in holder.end_in_child():
            if "_paged_as" not in tensor.__dict__:
                tensor.__dict__["_paged_as"] = name
                tensor.__class__ = _without_bytes(type(tensor))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_tell)
