"""Which parameters are paged by slices, and with which optimizers that changes no bit.

A *fused* parameter holds one matrix for each expert in a tensor of three dimensions. It can be
paged by slices where a slice is a whole number of pages, and where the optimizer treats elements
apart, so that updates of slices are the update of the whole.

[Note: tails]  A vectorized kernel handles what is left at the end of a stretch of memory by scalar
code, which may round otherwise: in half precision, whose vector code keeps intermediate values in
single precision. Where stretches end depends on the number of threads and of elements. Fused
optimizers cut between cache lines, so slices of whole pages leave no ends. The others are cut by
PyTorch's iterator into equal parts: where parts of the whole or of a slice would end off the vector
size, parameters in half precision are updated whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dynoffload.memory.accelerator.storages import size_of
from dynoffload.memory.local import is_spread

_ELEMENTWISE = frozenset(
    "Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD".split()
)
_GRAIN = 32768  # elements below which PyTorch's iterator makes no further part
_VECTORS = 64  # elements of the longest pair of vectors
_WIDE = (torch.float32, torch.float64)
_NARROW = (torch.float16, torch.bfloat16)


def may_slice(optimizer: Optimizer | None) -> bool:
    """Return whether ``optimizer`` treats every element of a parameter by itself."""
    if optimizer is None:
        return True
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and kind.__name__ in _ELEMENTWISE


def slice_bytes(parameter: torch.Tensor) -> int:
    """Return the bytes of one slice of a parameter that has the form of fused experts, else 0."""
    if (
        is_spread(parameter)
        or parameter.dim() != 3
        or parameter.shape[0] < 2
        or parameter.layout != torch.strided
        or parameter.dtype not in (*_WIDE, *_NARROW)
        or not parameter.is_contiguous()
    ):
        return 0
    return parameter.shape[1] * parameter.shape[2] * parameter.element_size()


def slices_of(parameter: torch.Tensor, page_bytes: int, least: int) -> int:
    """Return by how many slices a parameter can be paged; 1 for whole.

    Args:
        parameter: a parameter, or one on the meta device.
        page_bytes: of the device.
        least: smaller slices are not worth a move of their own.
    """
    nbytes = slice_bytes(parameter)
    return int(parameter.shape[0]) if nbytes >= max(1, least) and nbytes % page_bytes == 0 else 1


def sole_owners(parameters: Iterable[nn.Parameter]) -> set[int]:
    """Return the ids of the parameters that fill a storage of their own, on the meta device too."""
    users: dict[int, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.layout != torch.strided or is_spread(parameter):
            continue
        users.setdefault(parameter.untyped_storage()._cdata, []).append(parameter)
    return {
        id(first)
        for first, *others in users.values()
        if not others and size_of(first.untyped_storage()) == first.numel() * first.element_size()
    }


def keeps_bits(group: Mapping[str, Any], whole: torch.Tensor, count: int) -> bool:
    """Return whether updates of ``count`` slices give the bits of the update of the ``whole``; see
    [Note: tails].

    Args:
        group: hyperparameters of its optimizer.
        whole: the parameter.
        count: slices.
    """
    if whole.dtype in _WIDE:
        return True
    if group.get("fused"):
        # SGD's fused kernel leaves its momentum partly to chance in half precision.
        return not group.get("momentum")
    threads = torch.get_num_threads()
    return ends_evenly(whole.numel(), threads) and ends_evenly(whole.numel() // count, threads)


def ends_evenly(elements: int, threads: int) -> bool:
    """Return whether the parts in which ``threads`` treat so many elements are whole vectors."""
    parts = min(threads, -(-elements // _GRAIN))
    return -(-elements // parts) % _VECTORS == 0
