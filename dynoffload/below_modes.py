"""Calls operators from a dispatch mode, or for a guarded tensor, as torch calls them without.

Torch calls Python there with the dispatch keys above it excluded, for the operator and for what
its C++ code calls. Some kernels are chosen by what those keys would do.

[Note: views]  In inference mode a composite operator, a C++ function of others, reaches a mode
undecomposed. Some choose by their views: ``linear`` of a transposed batch asks whether the view of
its weight belongs to a tensor that requires a gradient. So views are tracked there as usual.
Conjugates made inside are resolved too, else ``hfftn`` would transform another tensor.

[Note: autocast]  The operators that a composite one calls there are cast as usual, unless autocast
handles the composite itself. Outside inference mode, two others consist of products that autocast
casts.

[Note: whether a mode is on]  A few operators choose by that alone, or by whether a tensor calls
Python, which nothing below can change. For guarded tensors they are refused where their choice
would differ: gradients in backward, tangents of dual numbers in forward. ``eigvalsh`` arrives as
``eigh``, and ``svdvals`` as a reduced ``svd``, so these are refused with them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from dynoffload.errors import DynOffloadError

_Key = torch._C.DispatchKey
_AUTOCAST = {
    kind: getattr(_Key, f"Autocast{name}")
    for kind, name in {
        "cpu": "CPU",
        "cuda": "CUDA",
        "hpu": "HPU",
        "mps": "MPS",
        "privateuseone": "PrivateUse1",  # torch knows it by this name too
        "xpu": "XPU",
    }.items()
}
_BELOW_AUTOGRAD = (_Key.ADInplaceOrView, _Key.ZeroTensor, _Key.Negative, _Key.Conjugate)
_OF_PRODUCTS = {"aten::_transformer_encoder_layer_fwd", "aten::_trilinear"}


def _may_be_values_alone(args: tuple[Any, ...]) -> bool:
    """Return whether the caller may be ``svdvals`` or ``eigvalsh``, which need no vectors."""
    has_gradient = torch.is_grad_enabled() and args[0].requires_grad
    return not has_gradient and args[1:2] != (True,)  # a full svd


def _is_cast(args: tuple[Any, ...]) -> bool:
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined] # as above the mode
        return any(map(torch.is_autocast_enabled, _AUTOCAST))


_VALUES = "with gradients enabled, on an input that requires a gradient"
_BY_MODE: dict[str, tuple[str, Callable[[tuple[Any, ...]], bool], str]] = {
    "aten::_linalg_svd": (
        "svdvals(), cond(), the nuclear norm or a reduced svd() without gradients",
        _may_be_values_alone,
        f"{_VALUES}, or svd() with full_matrices=True",
    ),
    "aten::_linalg_eigh": ("eigvalsh() or eigh() without gradients", _may_be_values_alone, _VALUES),
    "aten::linalg_pinv.atol_rtol_tensor": (
        "pinv() under autocast",
        _is_cast,
        "within torch.autocast(..., enabled=False)",
    ),
}
_PROD = ("prod()", "multiply slices one by one")
_EXTREME = (
    "max(), min(), median() or nanmedian() of a whole tensor",
    "take it over a dimension, as x.flatten().max(0)",
)
_GRADIENTS_BY_MODE = {
    "ProdBackward0": _PROD,
    "ProdBackward1": _PROD,
    **dict.fromkeys(
        ("MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0"), _EXTREME
    ),
    "MaskedFillBackward1": ("masked_fill()'s value", "call torch.where(mask, value, x)"),
}
"""By autograd node name: the operator it is the gradient of, and what to call instead."""
_GRAPHS_BY_MODE = {"LinalgDetBackward0": "det()", "LinalgLstsqBackward0": "lstsq()"}
"""By autograd node name: the operator it is the gradient of; refused with create_graph=True."""
_TANGENTS_BY_MODE = re.compile(r"(batch|group|layer)_norm|^aten::prod(\.dim_int)?$")


def refuse_by_mode(func: Any, args: tuple[Any, ...]) -> None:
    """Refuse what torch would compute differently only because a mode is on; see the note above.

    Raises:
        DynOffloadError: names it, and what to call instead.
    """
    node = torch._C._current_autograd_node()
    if node is not None:
        name = node.name()
        if (found := _GRADIENTS_BY_MODE.get(name)) is not None:
            ends = node.next_functions
            if len(ends) < 2 or ends[1][0] is not None:  # for masked_fill: the value's gradient
                _refuse(f"the gradient of {found[0]}", found[1])
        if name in _GRAPHS_BY_MODE and torch.is_grad_enabled():
            _refuse(f"the gradient of {_GRAPHS_BY_MODE[name]} with create_graph=True", "do without")
    _, _, by_mode, has_tangent = _choices_of(func)
    if by_mode is not None and by_mode[1](args):
        _refuse(by_mode[0], by_mode[2])
    if has_tangent and forward_ad._current_level >= 0:
        _refuse(f"forward-mode differentiation of {func}", "differentiate in reverse mode")


def is_plain(func: Any) -> bool:
    """Return whether ``func`` is called and chosen as without a mode, but for gradients."""
    composite, casts, by_mode, has_tangent = _choices_of(func)
    return not (composite or casts or by_mode or has_tangent)


def _refuse(what: str, remedy: str) -> NoReturn:
    raise DynOffloadError(
        f"{what} cannot keep the bits of plain PyTorch on an accelerator: torch chooses its kernel "
        "by whether its tensors call Python, as paged ones do. Call it outside of the offload() "
        f"block, or {remedy}"
    )


def call_below(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of ``func``, called from a dispatch mode; see the notes above."""
    composite, casts, *_ = _choices_of(func)
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


@contextmanager
def noting_views(func: Any) -> Iterator[None]:
    """Return a context for calling the parts of a composite operator; see [Note: views]."""
    with ExitStack() as keys:
        if torch.is_inference_mode_enabled() and _choices_of(func)[0]:
            for key in _BELOW_AUTOGRAD:
                keys.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        yield


@functools.cache
def _choices_of(func: Any) -> tuple[bool, bool, Any, bool]:
    """Return whether an operator is composite, whether it consists of products, when it would
    choose by a mode, and whether its tangents do."""
    if not isinstance(func, torch._ops.OpOverload):
        return False, False, None, False
    name: str = func.name()  # type: ignore[no-untyped-call]
    composite = _has_kernel(func, _Key.CompositeImplicitAutograd)
    makes_views = _has_kernel(func, _Key.ADInplaceOrView)  # it would track them twice
    tangents = _TANGENTS_BY_MODE.search(name) is not None
    return composite and not makes_views, name in _OF_PRODUCTS, _BY_MODE.get(name), tangents


@functools.cache
def _has_kernel(func: Any, key: Any) -> bool:
    name = func.name()
    if not torch._C._dispatch_has_kernel(name):  # as prim::device, by which fake tensors are asked
        return False
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key.name))
