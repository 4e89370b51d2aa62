"""Operators called from a dispatch mode as torch calls them where there is no mode.

A dispatch mode is called with the dispatch keys above it excluded, for the operator and for what
its C++ code calls. Two choices of kernels follow from what those keys would do.

[Note: views]  In inference mode a composite operator, a C++ function of others, comes to a mode
whole. Some choose by their views: ``linear`` of a transposed batch asks whether the view of its
weight belongs to a tensor that requires a gradient. So views are noted there as ever.

[Note: autocast]  What a composite operator calls there is cast as ever, unless autocast knows the
operator itself. Outside of inference mode two others are made of products that autocast casts.

[Note: whether a mode is on]  A few operators choose by that alone, which nothing below the mode can
change. They are warned of at their first call.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

logger = logging.getLogger(__name__)

_Key = torch._C.DispatchKey
_AUTOCAST = {"cpu": _Key.AutocastCPU, "cuda": _Key.AutocastCUDA}
_BY_MODE = {
    "aten::prod": "the gradient of prod",
    "aten::prod.dim_int": "the gradient of prod",
    "aten::_linalg_svd": "without gradients, svdvals, cond and the nuclear norm",
    "aten::_linalg_eigh": "without gradients, eigvalsh",
    "aten::linalg_pinv.atol_rtol_tensor": "pinv under autocast",
}
_OF_PRODUCTS = {"aten::_transformer_encoder_layer_fwd", "aten::_trilinear"}


def call_below(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what ``func`` gives, called from a dispatch mode; see the notes above."""
    composite, casts = _choices_of(func)
    whole = composite and torch.is_inference_mode_enabled()
    if not whole and not casts:
        return func(*args, **kwargs)
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined] # as above the mode
        on = [key for kind, key in _AUTOCAST.items() if torch.is_autocast_enabled(kind)]
    with ExitStack() as keys:
        for key in on:
            if not _has_kernel(func, key):
                keys.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        keys.enter_context(noting_views(func))
        return func(*args, **kwargs)


def noting_views(func: Any) -> AbstractContextManager[Any]:
    """Return within what the parts of a composite operator are called; see [Note: views]."""
    if torch.is_inference_mode_enabled() and _choices_of(func)[0]:
        return torch._C._SetExcludeDispatchKeyGuard(_Key.ADInplaceOrView, False)
    return nullcontext()


@functools.cache
def _choices_of(func: Any) -> tuple[bool, bool]:
    """Return whether an operator is a composite one, and whether it is made of products."""
    if not isinstance(func, torch._ops.OpOverload):
        return False, False
    name: str = func.name()  # type: ignore[no-untyped-call]
    if name in _BY_MODE:
        logger.warning(
            "%s may differ from plain PyTorch in the last bits: torch chooses the kernel by "
            "whether a dispatch mode is on, as on accelerators and under policy='dtr'",
            _BY_MODE[name],
        )
    composite = _has_kernel(func, _Key.CompositeImplicitAutograd)
    makes_views = _has_kernel(func, _Key.ADInplaceOrView)  # it would note them twice
    return composite and not makes_views, name in _OF_PRODUCTS


@functools.cache
def _has_kernel(func: Any, key: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key.name))
