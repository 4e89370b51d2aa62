"""Counts the floating-point operations of one executed call from the shapes of its arguments.

A multiplication and an addition are two operations. Elementwise operators, reductions and copies
count as 0; factorisations, Fourier transforms and distances have no formula.

[Note: which formula]
Operators without a formula here use torch's registry (`torch.utils.flop_counter`). Ours differ:

- *Attention* with ``is_causal`` counts the pairs on or below the diagonal, since kernels skip the
  others in blocks; the registry counts all. With grouped keys and values, all queries of a group
  count. Backward has five products, including the recomputed scores.
- *Convolutions* count, for each output element (of a transposed one, each input element), the
  filter of its own group; the registry's weight gradient counts the channels of all groups.
- Products the registry lacks. A grouped product counts every row, even past the last offset, as
  reading the offsets would synchronise with the device. Sparse factors count as dense ones.
- *Recurrent layers*, which oneDNN and cuDNN run as one call, count the products of their gates.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch

logger = logging.getLogger(__name__)

Counter = Callable[[Sequence[object], Mapping[str, object], object], int | None]
"""Maps a call's positional arguments, keyword arguments and result to its FLOPs, if known."""
_Bound = Mapping[str, Any]  # the call's arguments by name, including "result"
_Formula = Callable[[_Bound], int]


def counter_of(func: torch._ops.OpOverload) -> Counter | None:
    """Return the function that counts the FLOPs of a call of ``func``; None if it has none.

    If a formula fails on a call (of nested tensors, for example), the count is None, unknown: an
    exception would abort the recorded training.
    """
    schema = func._schema
    base = schema.name.removeprefix("aten::")
    formula = _FORMULAS.get(base) or _FORMULAS.get(base.removesuffix("_"))
    if formula is None and base.startswith("_scaled_dot_product_"):
        formula = _attention_backward if base.endswith("_backward") else _attention
    names = [a.name for a in schema.arguments if not a.kwarg_only]
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    from torch.utils.flop_counter import flop_registry

    registered = flop_registry.get(func.overloadpacket)
    if formula is None and registered is None:
        return None

    def counted(args: Sequence[object], kwargs: Mapping[str, object], result: object) -> int | None:
        try:
            if formula is None:
                return int(registered(*args, **kwargs, out_val=result))  # type: ignore[misc]
            given = dict(zip(names, args, strict=False))
            return formula({**defaults, **given, **kwargs, "result": result})
        except Exception as error:
            logger.debug("FLOPs of %s are unknown: %r", func, error)
            return None

    return counted


# Formulas -----------------------------------------------------------------------------------------


def _product(left: str, right: str) -> _Formula:
    """Return the formula of ``[..., rows, inner] @ [..., inner, columns]``; a vector counts as one
    row or column."""

    def count(bound: _Bound) -> int:
        a, b = bound[left], bound[right]
        columns = b.shape[-1] if b.dim() > 1 else 1
        return 2 * int(a.numel()) * int(columns)

    return count


def _linear(bound: _Bound) -> int:
    """``[..., inner] @ [columns, inner].T``, under either pair of argument names."""
    rows, weight = bound.get("input", bound.get("self")), bound.get("weight", bound.get("mat2"))
    return 2 * int(rows.numel()) * int(weight.shape[0])


def _linear_backward(bound: _Bound) -> int:
    wanted = sum(bool(flag) for flag in bound["output_mask"][:2])
    return 2 * wanted * int(bound["grad_output"].numel()) * int(bound["weight"].shape[-1])


def _grouped(bound: _Bound) -> int:
    """Grouped product whose jagged dimension is rows, inner or columns; each element of the left
    factor is multiplied with the columns of its own group."""
    left, right = bound["self"], bound["mat2"]
    if left.dim() == 3 and right.dim() == 2:  # the columns are divided among the groups
        return 2 * int(left.shape[1]) * int(right.numel())
    return 2 * int(left.numel()) * int(right.shape[-1])


def _convolution(bound: _Bound) -> int:
    weight, result = bound["weight"], bound["result"]
    made = bound["input"] if bound.get("transposed", False) else result
    return 2 * int(made.numel()) * int(prod(weight.shape[1:]))


def _convolution_backward(bound: _Bound) -> int:
    wanted = sum(bool(flag) for flag in bound["output_mask"][:2])
    made = bound["input"] if bound.get("transposed", False) else bound["grad_output"]
    return 2 * wanted * int(made.numel()) * int(prod(bound["weight"].shape[1:]))


def _pairs(bound: _Bound) -> int:
    """Return the number of (query, key) pairs scored, over the batch and all query heads."""
    query, key = bound["query"], bound["key"]
    queries, keys = int(query.shape[-2]), int(key.shape[-2])
    pairs = queries * keys
    if bound.get("is_causal", False):
        seen = min(queries, keys)  # query i sees the keys up to i
        pairs = seen * (seen + 1) // 2 + (queries - seen) * keys
    return int(prod(query.shape[:-2])) * pairs


def _attention(bound: _Bound) -> int:
    return 2 * _pairs(bound) * (int(bound["query"].shape[-1]) + int(bound["value"].shape[-1]))


def _attention_backward(bound: _Bound) -> int:
    width, of_values = int(bound["query"].shape[-1]), int(bound["value"].shape[-1])
    return 2 * _pairs(bound) * (3 * width + 2 * of_values)


def _rnn(bound: _Bound) -> int:
    """Products of all gates with the input and the previous state: of one direction of one layer
    (oneDNN), or of all layers, with a list of weights (cuDNN)."""
    gates = 0
    for name, value in bound.items():
        if name.startswith("weight"):
            weights = value if isinstance(value, list | tuple) else [value]
            gates += sum(w.numel() for w in weights if isinstance(w, torch.Tensor) and w.dim() == 2)
    steps = int(bound["input"].numel()) // max(1, int(bound["input"].shape[-1]))
    return 2 * steps * gates


_TABLE: tuple[tuple[_Formula, str], ...] = (
    (_product("self", "mat2"), "mm bmm _int_mm"),
    (_product("mat1", "mat2"), "addmm _addmm_activation"),
    (_product("batch1", "batch2"), "baddbmm addbmm"),
    (_product("self", "vec"), "mv"),
    (_product("mat", "vec"), "addmv"),
    (_product("self", "tensor"), "dot"),
    (_product("self", "other"), "vdot"),
    (_linear, "linear mkldnn_linear _weight_int8pack_mm"),
    (_linear_backward, "linear_backward mkldnn_linear_backward"),
    (_grouped, "_grouped_mm _scaled_grouped_mm"),
    (_convolution, "convolution _convolution convolution_overrideable mkldnn_convolution"),
    (_convolution, "cudnn_convolution _slow_conv2d_forward slow_conv3d_forward"),
    (_convolution, "_conv_depthwise2d conv_depthwise3d miopen_convolution"),
    (_convolution_backward, "convolution_backward convolution_backward_overrideable"),
    (_rnn, "mkldnn_rnn_layer _cudnn_rnn miopen_rnn"),
    (
        lambda bound: 2 * _rnn(bound),
        "mkldnn_rnn_layer_backward _cudnn_rnn_backward miopen_rnn_backward",
    ),
)
_FORMULAS = {name: formula for formula, names in _TABLE for name in names.split()}
"""Formulas by operator name; in-place variants use the same entry."""
