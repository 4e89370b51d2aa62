"""Decides which parameters are paged by slices, and for which optimizers that keeps all bits.

A *fused* parameter holds one matrix per expert in a three-dimensional tensor. It can be paged by
slices if a slice is a whole number of pages and the optimizer is elementwise: then updates of the
slices equal the update of the whole. A *flat* parameter is one whose update, whole, does not fit
the budget, such as a large embedding: its slices are ranges of elements.

[Note: tails]  A vectorized kernel handles the last elements of a range with scalar code. In half
precision that may round differently, as the vector code keeps intermediates in single precision.
Where ranges end depends on the numbers of threads and elements. Fused optimizers cut at cache
lines, so slices of whole pages leave no tails. For others, PyTorch's iterator cuts equal parts. If
parts of the whole or of a slice are no multiple of the vector size, half-precision parameters are
updated whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dynoffload.memory.accelerator.storages import size_of
from dynoffload.memory.local import is_wrapper

_ELEMENTWISE = frozenset(
    "Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD".split()
)
_FLAT = 64  # slices of a flat parameter, at most
_GRAIN = 32768  # least elements of a part that PyTorch's iterator makes
_VECTORS = 64  # elements in the longest pair of vectors
_WIDE = (torch.float32, torch.float64)
_NARROW = (torch.float16, torch.bfloat16)


def may_slice(optimizer: Optimizer | None) -> bool:
    """Return whether ``optimizer`` updates parameters elementwise, or is None."""
    if optimizer is None:
        return True
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and kind.__name__ in _ELEMENTWISE


def slice_bytes(parameter: torch.Tensor) -> int:
    """Return the bytes of one slice if a parameter has the layout of fused experts, else 0."""
    if (
        is_wrapper(parameter)
        or parameter.dim() != 3
        or parameter.shape[0] < 2
        or parameter.layout != torch.strided
        or parameter.dtype not in (*_WIDE, *_NARROW)
        or not parameter.is_contiguous()
    ):
        return 0
    return parameter.shape[1] * parameter.shape[2] * parameter.element_size()


def slices_of(parameter: torch.Tensor, page_bytes: int, least: int) -> int:
    """Return the number of slices to page a parameter by; 1 means whole.

    Args:
        parameter: the parameter; may be on the meta device.
        page_bytes: page size of the device.
        least: bytes; smaller slices are not worth separate moves.
    """
    nbytes = slice_bytes(parameter)
    return int(parameter.shape[0]) if nbytes >= max(1, least) and nbytes % page_bytes == 0 else 1


def flat_bytes(nbytes: int, page_bytes: int) -> int:
    """Return the bytes of each slice of a flat parameter of ``nbytes``, in whole pages."""
    return -(-nbytes // (_FLAT * page_bytes)) * page_bytes


def may_be_flat(parameter: torch.Tensor, group: Mapping[str, Any] | None) -> bool:
    """Return whether updates of ranges of a parameter's elements equal its update, for an
    elementwise optimizer with the hyperparameters ``group``; None if it has no update."""
    return (
        group is not None
        and parameter.requires_grad
        and parameter.is_contiguous()
        and (parameter.dtype in _WIDE or (parameter.dtype in _NARROW and bool(group.get("fused"))))
        and keeps_bits(group, parameter, ())
    )


def sole_owners(parameters: Iterable[nn.Parameter]) -> set[int]:
    """Return the ids of parameters that alone fill their storage; meta parameters included."""
    users: dict[int, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.layout != torch.strided or is_wrapper(parameter):
            continue
        users.setdefault(parameter.untyped_storage()._cdata, []).append(parameter)
    return {
        id(first)
        for first, *others in users.values()
        if not others and size_of(first.untyped_storage()) == first.numel() * first.element_size()
    }


def keeps_bits(group: Mapping[str, Any], whole: torch.Tensor, slices: Iterable[int]) -> bool:
    """Return whether updates of slices equal the update of the ``whole`` bit for bit; see
    [Note: tails].

    Args:
        group: the optimizer's hyperparameters.
        whole: the parameter.
        slices: elements of each slice; equal ones may be named once.
    """
    if whole.dtype in _WIDE:
        return True
    if group.get("fused"):
        # The momentum of SGD's fused kernel is not deterministic in half precision.
        return not group.get("momentum")
    threads = torch.get_num_threads()
    return all(ends_evenly(elements, threads) for elements in (whole.numel(), *slices))


def ends_evenly(elements: int, threads: int) -> bool:
    """Return whether ``threads`` split ``elements`` into parts of whole vectors."""
    parts = min(threads, -(-elements // _GRAIN))
    return -(-elements // parts) % _VECTORS == 0
