"""Operators called from a dispatch mode as torch calls them where there is no mode.

A dispatch mode is called with the dispatch keys above it excluded, for the operator and for what
its C++ code calls. Two choices of kernels follow from what those keys would do.

[Note: views]  In inference mode a composite operator, a C++ function of others, comes to a mode
whole. Some choose by their views: ``linear`` of a transposed batch asks whether the view of its
weight belongs to a tensor that requires a gradient. So views are noted there as ever.

[Note: autocast]  A few operators that autocast leaves alone are made of products that it casts.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

_Key = torch._C.DispatchKey
_AUTOCAST = {"cpu": _Key.AutocastCPU, "cuda": _Key.AutocastCUDA}
_OF_PRODUCTS = {
    "aten::_transformer_encoder_layer_fwd",
    "aten::_trilinear",
    "aten::linalg_pinv.atol_rtol_tensor",
}


def call_below(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what ``func`` gives, called from a dispatch mode; see the notes above."""
    notes, casts = _choices_of(func)
    if notes and torch.is_inference_mode_enabled():
        with noting_views(func):
            return func(*args, **kwargs)
    if casts:
        with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined] # as above the mode
            on = [key for kind, key in _AUTOCAST.items() if torch.is_autocast_enabled(kind)]
        with ExitStack() as keys:
            for key in on:
                keys.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
            return func(*args, **kwargs)
    return func(*args, **kwargs)


def noting_views(func: Any) -> AbstractContextManager[Any]:
    """Return within what the parts of a composite operator are called; see [Note: views]."""
    if torch.is_inference_mode_enabled() and _choices_of(func)[0]:
        return torch._C._SetExcludeDispatchKeyGuard(_Key.ADInplaceOrView, False)
    return nullcontext()


@functools.cache
def _choices_of(func: Any) -> tuple[bool, bool]:
    """Return whether an operator looks at its views, and whether it is made of products."""
    if not isinstance(func, torch._ops.OpOverload):
        return False, False
    name: str = func.name()  # type: ignore[no-untyped-call]
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    composite = has(name, "CompositeImplicitAutograd") and not has(name, "ADInplaceOrView")
    return composite, name in _OF_PRODUCTS
