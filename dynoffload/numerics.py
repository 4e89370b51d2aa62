"""Forces the choice of kernels that are chosen at their first call, before threads can race on it.

PyTorch's builds with oneMKL before 2025.0 compute `cos`, `exp`, `sqrt` and similar functions by a
library that chooses each function's kernel at its first call. If two threads make that call at
once, one of them may use a kernel of half the digits, once. In the first forward of a process, part
of a tensor is then off by 1e-4, and every later one is right (pytorch/pytorch issue 188792). Plain
PyTorch does so too, the more often the slower its code loads from disk
(`tests/test_numerics.py` provokes it: up to one process in a hundred).

Calls of such a function in two threads before or during this setup are not protected.
"""

from __future__ import annotations

import threading

import torch
from torch.utils._python_dispatch import _disable_current_modes

FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "cosh", "digamma", "erf", "erfc", "erfinv", "exp", "exp2"),
    *("expm1", "lgamma", "log", "log10", "log1p", "log2", "rsqrt", "sigmoid", "sin", "sinh"),
    *("sqrt", "tan", "tanh", "trunc"),
)
"""Functions that may be computed by that library, in single and double precision."""

_lock = threading.Lock()
_settled = False


def settle_kernels() -> None:
    """Choose every function's kernel, once in a process and in this thread alone."""
    global _settled
    with _lock:
        if _settled:
            return
        with _disable_current_modes(), torch.inference_mode():
            for dtype in (torch.float32, torch.float64):
                one = torch.full((1,), 0.5, dtype=dtype, device="cpu")  # one element: one thread
                for name in FUNCTIONS:
                    getattr(torch.ops.aten, name).default(one)
        _settled = True
