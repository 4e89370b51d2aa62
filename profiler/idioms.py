"""Which memory-access idioms an ATen operator shows.

The encoding (Ren et al., HPCA 2024) gives the pilot one alphabet for all operators, so that it can
read a network it has not seen. The table is `dynoffload.profiler.idiom_rows`; an operator without a
row is covered by the first rule of [Note: rules] that applies.

[Note: rules]
1. ``view``: the schema says that the result aliases an argument which is not written, or torch tags
   the operator as a view in place; besides, a short list whose results share memory although the
   schema is silent. Counts nothing.
2. ``metadata``: asks about a tensor, wraps or allocates one without writing, marks something for a
   profiler, or has no tensor going in or out. Counts nothing.
3. ``row:<name>``: a row under the base name (no namespace, no overload, no trailing underscore).
4. ``foreach:<rule>``: ``_foreach_x`` counts as ``x`` does, by row or tag.
5. ``pointwise``, ``reduction``: torch's own tags, also of a sibling overload, as ``out`` variants
   are not tagged. One stream; one reduction.
6. ``copy``: the ``*_copy`` and ``out`` variants of views, and the functional ones of operators that
   change only metadata in place. They move data in order, which counts nothing, except that the
   copy of a transposing view is one transpose.
7. ``synonym:<rule>``: another name of an operator (``absolute`` for ``abs``, ``special_x`` for
   ``x``) counts as it.
8. ``factory``: no tensor goes in, or one whose shape is asked for, and a filled one comes out. One
   stream.
9. ``fill``: draws random numbers into one tensor, or one for each of its elements. One stream.
10. ``backward:<rule>``: where ``x`` is one stream by row or tag, and neither says anything of
    ``x_backward``, that is one stream too, as the gradient of what works element by element does.
11. ``variant:<row>``: the kernel of a library, an internal helper, or one more number of dimensions
   (``cudnn_grid_sampler`` of ``grid_sampler``, ``_lu_with_info``, ``x3d`` of ``x2d``) counts as the
   operator that it computes.
12. ``unknown``: counts nothing; `is_known` is false.

Rows, synonyms and tags of a name hold in torch's own namespaces for dense work (`NAMESPACES`). Of
an operator of another namespace only its own schema and tags are believed.
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
    SYNONYMS,
    TRANSPOSE,
    Row,
)

NAMESPACES = frozenset(("aten", "prims", "mkldnn", "profiler"))
"""The namespaces in which a base name means the operator that the table means by it."""

_TRANSPOSING = frozenset(("transpose_copy", "t_copy", "permute_copy"))
_ROW = "row:"
_LIBRARY = re.compile(
    "^_*(?:(?:cudnn|miopen|mkldnn|mps|quantized|native|slow|linalg|fft|sparse|nested|fused)_)*_*"
    "|_(?:ex|impl|legit|functional|overrideable|for_cpu|helper|forward)(?=_backward$|_out$|$)"
)
_DIMENSIONS = re.compile("[13]d")


class Idioms(NamedTuple):
    """How often an operator shows each memory-access pattern.

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
    """Return the six counts of ``func``; all zero where no rule knows it (see `is_known`)."""
    return _resolve(func)[1]


def rule_of(func: torch._ops.OpOverload) -> str:
    """Return the name of the row or rule that covers ``func``; ``"unknown"`` where none does.

    See [Note: rules] for the names.
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
    """Apply [Note: rules] in order; an empty ``name`` has no row, tag of a sibling or synonym."""
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
    synonym = SYNONYMS.get(name, name.removeprefix("special_"))
    if synonym != name and (found := _by_name(synonym)) is not None:
        return f"synonym:{found[0]}", found[1]
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
    return "unknown", NOTHING


def _by_name(name: str) -> tuple[str, Row] | None:
    """Return what is known by a name alone: its row, its base's under foreach, or a tag."""
    if name in ROWS:
        return _ROW + name, ROWS[name]
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
