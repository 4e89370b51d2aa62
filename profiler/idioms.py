"""Which memory-access idioms an ATen operator shows.

What it is: `Idioms`, six counts; `idioms_of`, which gives them for any operator; `rule_of`, which
names the row or the rule they came from. What it is not: a cost; how many bytes an operator moves
and how long it takes is recorded per call (see `dynoffload.profiler.trace`).

How it fits: the encoding (Ren et al., HPCA 2024) gives the pilot one alphabet for all operators, so
that it can read a network it has not seen. The table is `dynoffload.profiler.idiom_rows`; an
operator without a row is covered by the first rule of [Note: rules] that applies.

[Note: rules]
1. ``view``: the schema says that the result aliases an argument, or the operator only changes
   metadata. Counts nothing.
2. ``metadata``: asks about a tensor, allocates without writing, or is a mark for a profiler. Counts
   nothing.
3. ``row:<name>``: a row under the base name (no namespace, no overload, no trailing underscore).
4. ``foreach:<rule>``: ``_foreach_x`` counts as ``x`` does.
5. ``pointwise``, ``reduction``: torch's own tags, also of a sibling overload, as ``out`` variants
   are not tagged. One stream; one reduction.
6. ``copy``: a ``*_copy`` variant of a view moves data in order, except that of a transposing view,
   which is one transpose.
7. ``factory``: no tensor goes in, a filled tensor comes out. One stream.
8. ``fill``: only scalars go in besides one tensor, which is overwritten, or gives the shape in
   which random numbers are drawn. One stream.
9. ``backward:<rule>``: ``x_backward`` counts as ``x`` does, where neither row nor tag says more.
10. ``dense``: dense linear algebra (``linalg_*`` and its like). A product's row.
11. ``unknown``: counts nothing; `is_known` is false.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from dynoffload.profiler.idiom_rows import NOTHING, REDUCTION, ROWS, STREAM, Row

_TRANSPOSING = frozenset(("transpose_copy", "t_copy", "permute_copy"))
_VIEWS = frozenset(
    "_unsafe_view _reshape_alias _reshape_copy alias detach lift lift_fresh view_as unsafe_split"
    " unsafe_split_with_sizes unsafe_chunk set resize resize_as swapaxes _conj _neg_view"
    " resolve_conj resolve_neg requires_grad rename refine_names align_to squeeze unsqueeze"
    " reshape reshape_as flatten unflatten transpose permute expand narrow movedim moveaxis"
    " _fw_primal _make_dual _version is_pinned sym_constrain_range _nested_view_from_buffer"
    " coalesce _coalesced retain_grad as_strided chunk split tensor_split hsplit vsplit dsplit"
    " numpy_T matrix_H mH mT adjoint real imag view_as_real view_as_complex atleast_1d atleast_2d"
    " atleast_3d broadcast_tensors broadcast_to ravel meshgrid indices values crow_indices"
    " col_indices ccol_indices row_indices".split()
)
_METADATA = frozenset(
    "empty empty_like new_empty empty_strided new_empty_strided empty_permuted empty_quantized"
    " _empty_affine_quantized _empty_per_channel_affine_quantized _efficientzerotensor"
    " empty_memory_format is_same_size"
    " _assert_tensor_metadata _assert_scalar _functional_assert_scalar _nested_tensor_size"
    " _has_same_storage_numel _has_compatible_shallow_copy_type _backward data set_data"
    " output_nr is_leaf _debug_has_internal_overlap record_stream is_set_to is_complex"
    " is_floating_point is_inference is_neg is_signed is_conj is_distributed is_vulkan_available"
    " can_cast promote_types result_type _cufft_get_plan_cache_size sparse_dim dense_dim"
    " size stride numel dim storage_offset sym_size sym_stride sym_numel sym_storage_offset"
    " sym_is_contiguous is_contiguous is_non_overlapping_and_dense is_strides_like_format"
    " qscheme q_scale q_zero_point q_per_channel_scales q_per_channel_zero_points"
    " q_per_channel_axis _nnz _dimI _dimV is_coalesced _foreach_tensor_version"
    " _fused_sdp_choice _use_cudnn_ctc_loss _use_cudnn_rnn_flatten_weight"
    " _record_function_enter _record_function_enter_new _record_function_exit"
    " _sparse_coo_tensor_with_dims_and_tensors _sparse_coo_tensor_unsafe sparse_coo_tensor"
    " _sparse_coo_tensor_with_dims _validate_sparse_coo_tensor_args dense_dim"
    " cudnn_is_acceptable _cslt_sparse_mm_search _dirichlet_grad_shape _dim_arange".split()
)
_DENSE = (
    "linalg_", "_linalg_", "cholesky", "_cholesky", "lu_", "qr", "geqrf", "orgqr", "ormqr",
    "triangular_", "svd", "inverse", "det", "_det", "logdet", "slogdet", "pinverse",
    "matrix_exp", "matrix_power", "lstsq",
)  # fmt: skip
_DENSE_ROW: Row = (0, 0, 0, 1, 1, 0)
_ROW = "row:"


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

    def plus(self, other: Idioms) -> Idioms:
        """Return the componentwise sum (``+`` on a tuple would concatenate)."""
        return Idioms(
            self[0] + other[0],
            self[1] + other[1],
            self[2] + other[2],
            self[3] + other[3],
            self[4] + other[4],
            self[5] + other[5],
        )


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


@cache
def _resolve(func: torch._ops.OpOverload) -> tuple[str, Idioms]:
    rule, row = _by_rules(_base_name(func), func)
    return rule, Idioms(*row)


def _base_name(func: torch._ops.OpOverload) -> str:
    name = func._schema.name.split("::", 1)[1]
    return name if name.endswith("__") else name.removesuffix("_")


def _by_rules(name: str, func: torch._ops.OpOverload) -> tuple[str, Row]:
    """Apply [Note: rules] in order."""
    tags = func.tags
    if func.is_view or torch.Tag.inplace_view in tags or name in _VIEWS:
        return "view", NOTHING
    if name in _METADATA:
        return "metadata", NOTHING
    if (found := _by_name(name)) is not None:
        return found
    if torch.Tag.pointwise in tags or _has_pointwise_overload(name):
        return "pointwise", STREAM
    if torch.Tag.reduction in tags:
        return "reduction", REDUCTION
    if torch.Tag.view_copy in tags or name.endswith("_copy"):
        return "copy", (1, 0, 0, 0, 0, 0) if name in _TRANSPOSING else NOTHING
    return _by_schema(name, func)


def _by_name(name: str) -> tuple[str, Row] | None:
    row = ROWS.get(name)
    if row is not None:
        return _ROW + name, row
    if name.startswith("_foreach_"):
        base = name.removeprefix("_foreach_")
        if base in ROWS:
            return f"foreach:{_ROW}{base}", ROWS[base]
        if _has_pointwise_overload(base):
            return "foreach:pointwise", STREAM
    return None


def _by_schema(name: str, func: torch._ops.OpOverload) -> tuple[str, Row]:
    """Decide by what goes in and what comes out, for operators without row or tag."""
    inputs = [
        a
        for a in func._schema.arguments
        if "Tensor" in str(a.type) and not (a.kwarg_only and a.name.startswith("out"))
    ]
    gives_tensor = any("Tensor" in str(r.type) for r in func._schema.returns)
    if not gives_tensor and not inputs:
        return "metadata", NOTHING
    if gives_tensor and not inputs:
        return "factory", STREAM
    if len(inputs) == 1:
        if name.startswith("new_") or name.endswith("_like"):
            return "factory", STREAM
        written = inputs[0].alias_info is not None and inputs[0].alias_info.is_write
        if written or torch.Tag.nondeterministic_seeded in func.tags:
            return "fill", STREAM
    forward = name.removesuffix("_backward")
    if forward in ROWS:
        return f"backward:{_ROW}{forward}", ROWS[forward]
    if _has_pointwise_overload(forward):
        return "backward:pointwise", STREAM
    if name.startswith(_DENSE):
        return "dense", _DENSE_ROW
    return "unknown", NOTHING


def _has_pointwise_overload(name: str) -> bool:
    """Whether torch tags any overload of ``aten::name`` as pointwise."""
    if not hasattr(torch.ops.aten, name):
        return False
    packet = getattr(torch.ops.aten, name)
    return any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())
