"""Operators that touch no data although their schemas do not say so: views and metadata.

What it is: three lists of base names for the first two rules of `dynoffload.profiler.idioms`. What
it is not: a list of all views; most are known by the aliasing that their schemas declare.
"""

from __future__ import annotations

SHARING = frozenset(
    "_unsafe_view unsafe_split unsafe_split_with_sizes unsafe_chunk lift broadcast_tensors meshgrid"
    " atleast_1d atleast_2d atleast_3d unflatten_dense_tensors _add_batch_dim _remove_batch_dim"
    " _reshape_from_tensor as_strided".split()
)
"""Operators whose results share an argument's memory although their schemas do not say so."""

RESHAPING = frozenset(
    "set resize resize_as _resize_output _coalesced sparse_resize sparse_resize_and_clear"
    " resize_as_sparse".split()
)
"""Operators that in place change only metadata; their other variants do that to a copy."""

METADATA = frozenset(
    "empty empty_like new_empty empty_strided new_empty_strided empty_permuted empty_quantized"
    " _empty_affine_quantized _empty_per_channel_affine_quantized _efficientzerotensor _lazy_clone"
    " from_file get_gradients _make_dep_token _make_token _sink_tokens"
    " requires_grad retain_grad retains_grad _version _backward data set_data output_nr is_leaf"
    " is_same_size is_set_to is_complex is_floating_point is_inference is_neg is_signed is_conj"
    " is_distributed is_pinned is_coalesced is_contiguous _is_zerotensor get_device result_type"
    " size stride numel dim storage_offset sym_size sym_stride sym_numel sym_storage_offset"
    " sym_is_contiguous _shape_as_tensor sparse_dim dense_dim _dimI _dimV _nnz data_ptr _nbytes"
    " _get_mkldnn_serialized_md _propagate_xla_data record_stream _debug_has_internal_overlap"
    " _has_same_storage_numel _has_compatible_shallow_copy_type _print"
    " _assert_tensor_metadata _assert_scalar _functional_assert_scalar"
    " sym_constrain_range sym_constrain_range_for_size _functional_sym_constrain_range"
    " _functional_sym_constrain_range_for_size"
    " qscheme q_scale q_zero_point q_per_channel_scales q_per_channel_zero_points"
    " q_per_channel_axis _fused_sdp_choice _use_cudnn_ctc_loss _use_miopen_ctc_loss"
    " _use_cudnn_rnn_flatten_weight cudnn_is_acceptable _cslt_sparse_mm_search"
    " _record_function_enter _record_function_enter_new _record_function_exit"
    " sparse_coo_tensor _sparse_coo_tensor_unsafe _sparse_coo_tensor_with_dims"
    " _sparse_coo_tensor_with_dims_and_tensors _sparse_compressed_tensor_unsafe"
    " _sparse_compressed_tensor_with_dims _sparse_csr_tensor_unsafe _sparse_csc_tensor_unsafe"
    " _sparse_bsr_tensor_unsafe _sparse_bsc_tensor_unsafe _validate_sparse_coo_tensor_args"
    " _nested_tensor_size _nested_tensor_strides _nested_tensor_storage_offsets"
    " _nested_compute_contiguous_strides_offsets _nested_get_offsets _nested_get_lengths"
    " _nested_get_ragged_idx _nested_get_min_seqlen _nested_get_max_seqlen"
    " _nested_get_jagged_dummy".split()
)
"""Operators that ask, wrap, allocate without writing, or mark; see [Note: rules]."""
