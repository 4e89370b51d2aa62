"""Counts the memory-access idioms of an ATen operator.

The encoding (Ren et al., HPCA 2024) describes all operators in one vocabulary, so that the pilot
can handle unseen networks. The table is `dynoffload.profiler.idiom_rows`; the first matching rule
covers an operator without a row. docs/idioms.md describes the rules.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

import torch

from dynoffload.profiler.idiom_rows import (
    METADATA,
    NOTHING,
    REDUCTION,
    RESHAPING,
    ROWS,
    SHARING,
    STREAM,
    TRANSPOSE,
    Row,
)

NAMESPACES = frozenset(("aten", "mkldnn", "profiler"))
"""The namespaces in which a base name means the same operator as in the table."""

_TRANSPOSING = frozenset(("transpose_copy", "t_copy", "permute_copy"))
_LIBRARY = re.compile(
    "^_*(?:(?:cudnn|miopen|mkldnn|mps|quantized|native|slow|linalg|fft|sparse|nested|fused)_)*_*"
    "|_(?:ex|impl|legit|functional|overrideable|for_cpu|helper|forward)(?=_backward$|_out$|$)"
)
_DIMENSIONS = re.compile("[13]d")
_LAYOUT = re.compile(
    "sparse|nested|jagged|padded|quant|semi_structured|_cslt|coalesce|_coo_|per_channel|per_tensor"
    "|to_dense|to_mkldnn|reorder|int_repr|feature_meta|sspaddmm|hspmm|spsolve|spdiags|int.pack|_4bit"
    "|scaled_(?:grouped_)?mm|mixed_dtypes|mps|_triton|_philox|histogramdd|irshift|_mkldnn_reshape"
)


class Idioms(NamedTuple):
    """Number of times an operator uses each memory-access pattern.

    Attributes:
        transpose: A[i][j] = B[j][i].
        gather: A[i] = B[C[i]].
        scatter: A[C[i]] = B[i].
        reduction: s += A[i].
        stream: A[i] = f(A[i], B[i]).
        stencil: A[i] = f(A[i-1], A[i], A[i+1]).
    """

    transpose: int = 0
    gather: int = 0
    scatter: int = 0
    reduction: int = 0
    stream: int = 0
    stencil: int = 0


def idioms_of(func: torch._ops.OpOverload) -> Idioms:
    """Return the six counts of ``func``; all zero if no rule covers it (see `is_known`)."""
    return _resolve(func)[1]


def rule_of(func: torch._ops.OpOverload) -> str:
    """Return the name of the row or rule that covers ``func``, ``"unknown"`` if none does.

    docs/idioms.md lists the names.
    """
    return _resolve(func)[0]


def is_known(func: torch._ops.OpOverload) -> bool:
    """Whether a row or a rule covers ``func``."""
    return _resolve(func)[0] != "unknown"


def base_name(func: torch._ops.OpOverload) -> str:
    """Return the name without namespace, overload and the underscore of in-place variants."""
    name = func._schema.name.split("::", 1)[1]
    return name if name.endswith("__") else name.removesuffix("_")


@cache
def _resolve(func: torch._ops.OpOverload) -> tuple[str, Idioms]:
    name = base_name(func) if func.namespace in NAMESPACES else ""
    rule, row = _by_rules(name, func)
    return rule, Idioms(*row)


def _by_rules(name: str, func: torch._ops.OpOverload) -> tuple[str, Row]:
    """Apply the rules in order; an empty ``name`` matches no row and no sibling overload's tag."""
    tags = func.tags
    if func.is_view or torch.Tag.inplace_view in tags:
        return "view", NOTHING
    arguments = func._schema.arguments
    out = any(a.is_out for a in arguments)
    if name in SHARING:
        return ("copy" if out else "view"), NOTHING
    if name in RESHAPING:
        in_place = not out and any(a.alias_info is not None for a in arguments)
        return ("metadata" if in_place else "copy"), NOTHING
    inputs = [a for a in arguments if "Tensor" in str(a.type) and not a.is_out]
    gives_tensor = any("Tensor" in str(r.type) for r in func._schema.returns)
    if name in METADATA or not (inputs or gives_tensor):
        return "metadata", NOTHING
    if (found := _by_name(name)) is not None:
        return found
    if torch.Tag.pointwise in tags:
        return "pointwise", STREAM
    if torch.Tag.reduction in tags:
        return "reduction", REDUCTION
    if not name:
        return "unknown", NOTHING
    if torch.Tag.view_copy in tags or name.endswith("_copy"):
        return "copy", TRANSPOSE if name in _TRANSPOSING else NOTHING
    asks_shape = len(inputs) == 1 and (name.startswith("new_") or name.endswith("_like"))
    if gives_tensor and (not inputs or asks_shape):
        return "factory", STREAM
    if len(inputs) == 1 and torch.Tag.nondeterministic_seeded in tags:
        return "fill", STREAM
    forward = name.removesuffix("_backward")
    if forward != name and (found := _by_name(forward)) is not None and found[1] == STREAM:
        return f"backward:{found[0]}", found[1]
    variant = _DIMENSIONS.sub("2d", _LIBRARY.sub("", name))
    if variant in ROWS:
        return f"variant:{variant}", ROWS[variant]
    full = func.name()  # type: ignore[no-untyped-call]
    if torch._C._dispatch_has_kernel_for_dispatch_key(full, "CompositeImplicitAutograd"):
        return "composite", NOTHING
    if _LAYOUT.search(name):
        return "layout", STREAM
    return "unknown", NOTHING


def _by_name(name: str) -> tuple[str, Row] | None:
    """Return the rule a name alone gives: its row, its base's row (foreach), or a tag."""
    if name in ROWS:
        return f"row:{name}", ROWS[name]
    base = name.removeprefix("_foreach_")
    if base != name and (found := _by_name(base)) is not None:
        return f"foreach:{found[0]}", found[1]
    return ("pointwise", STREAM) if _has_pointwise_overload(name) else None


def _has_pointwise_overload(name: str) -> bool:
    """Whether torch tags any overload of ``aten::name`` as pointwise."""
    packet = getattr(torch.ops.aten, name, None) if name else None
    if packet is None:
        return False
    return any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())
