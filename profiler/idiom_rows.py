"""The idiom table: idiom counts by operator name, and the operators that touch no data.

A row is ``(transpose, gather, scatter, reduction, stream, stencil)``, keyed by the operator's base
name: without namespace, overload and the trailing underscore of in-place variants. docs/idioms.md
explains how rows are counted. `dynoffload.profiler.idioms` covers the operators without a row.
"""

from __future__ import annotations

from typing import Final

Row = tuple[int, int, int, int, int, int]

NOTHING: Final[Row] = (0, 0, 0, 0, 0, 0)
TRANSPOSE: Final[Row] = (1, 0, 0, 0, 0, 0)
STREAM: Final[Row] = (0, 0, 0, 0, 1, 0)
REDUCTION: Final[Row] = (0, 0, 0, 1, 0, 0)

_TABLE: Final[dict[Row, str]] = {
    # Products, scans, norms with one statistic, losses, gradients that reduce.
    (0, 0, 0, 1, 1, 0): """
        mm bmm mv dot vdot linear _grouped_mm _scaled_mm _scaled_grouped_mm _int_mm _trilinear cdist
        _euclidean_dist _softmax_backward_data _log_softmax_backward_data _masked_softmax_backward
        _weight_norm_interface renorm cumsum cumprod cummax cummin logcumsumexp mse_loss
        smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy
        binary_cross_entropy_with_logits gelu_backward silu_backward _prelu_kernel_backward
        sigmoid_backward tanh_backward glu_backward _cdist_backward _pdist_backward pdist cholesky
        cholesky_inverse cholesky_solve triangular_solve linalg_solve_triangular ormqr
        linalg_householder_product matrix_exp _compute_linear_combination
        mkldnn_linear_backward_input
    """,
    # Products with a bias or a scaled addend.
    (0, 0, 0, 1, 2, 0): """
        addmm baddbmm addbmm addmv addr _addmm_activation _linear_pointwise affine_grid_generator
        affine_grid_generator_backward _sample_dirichlet
    """,
    (0, 0, 0, 3, 3, 0): "linear_backward matmul_backward",
    # Gradients of embeddings; normalisation.
    (0, 1, 1, 1, 1, 0): """
        fbgemm_linear_int8_weight batch_norm _batch_norm_with_update
        _native_batch_norm_legit_functional _batch_norm_no_update
        _native_batch_norm_legit_no_training _batch_norm_with_update_functional embedding_backward
        embedding_dense_backward _embedding_bag_dense_backward _embedding_bag_backward
        mse_loss_backward
    """,
    # Convolutions. The transposed ones read their input transposed.
    (0, 1, 0, 1, 1, 2): """
        convolution conv2d _conv_depthwise2d conv_depthwise3d slow_conv_dilated2d
        slow_conv_dilated3d _nnpack_spatial_convolution miopen_depthwise_convolution
        _convolution_pointwise
    """,
    (1, 1, 0, 1, 1, 2): "conv_tbc conv_transpose1d",
    (1, 1, 0, 1, 2, 2): """
        conv_transpose2d cudnn_convolution_transpose miopen_convolution_transpose
        _convolution_transpose_pointwise
    """,
    (0, 1, 0, 1, 2, 2): "cudnn_convolution",
    (0, 1, 0, 1, 3, 2): "cudnn_convolution_relu miopen_convolution_relu",
    (0, 1, 0, 2, 3, 2): "cudnn_convolution_add_relu miopen_convolution_add_relu",
    (1, 1, 0, 3, 2, 4): "convolution_backward _slow_conv2d_backward",
    (0, 1, 0, 0, 0, 1): "im2col",
    # Gradients of resampling.
    (0, 0, 1, 1, 0, 1): """
        col2im unfold_backward upsample_linear1d_backward upsample_bilinear2d_backward
        upsample_trilinear3d_backward upsample_bicubic2d_backward _upsample_bilinear2d_aa_backward
        _upsample_bicubic2d_aa_backward grid_sampler_2d_backward
        _grid_sampler_2d_cpu_fallback_backward cudnn_grid_sampler_backward
        _upsample_lanczos2d_aa_backward
    """,
    # Attention (two products, the row maximum and the row sum) and spectra.
    (0, 0, 0, 4, 3, 0): """
        _scaled_dot_product_flash_attention _flash_attention_forward
        _scaled_dot_product_flash_attention_for_cpu _efficient_attention_forward
        _scaled_dot_product_efficient_attention _cudnn_attention_forward
        _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable
        linalg_lstsq svd _linalg_eigh linalg_eig linalg_eigvals _linalg_eigvals
        _flash_attention_forward_no_dropout_inplace
    """,
    # Gradients of attention: five products.
    (0, 0, 0, 6, 4, 0): """
        _scaled_dot_product_flash_attention_backward
        _scaled_dot_product_flash_attention_for_cpu_backward
        _scaled_dot_product_efficient_attention_backward
        _scaled_dot_product_cudnn_attention_backward
        _scaled_dot_product_fused_attention_overrideable_backward _flash_attention_backward
        _efficient_attention_backward _cudnn_attention_backward
    """,
    (0, 0, 0, 8, 7, 0): "_native_multi_head_attention _transformer_encoder_layer_fwd",
    # Softmax.
    (0, 0, 0, 2, 2, 0): """
        _safe_softmax softmax log_softmax _masked_softmax logsumexp mkldnn_linear_backward_weights
    """,
    # Norms with two statistics.
    (0, 0, 0, 2, 1, 0): """
        layer_norm group_norm _fused_rms_norm_backward _weight_norm_interface_backward geqrf
        _fused_moving_avg_obs_fq_helper _fused_moving_avg_obs_fq_helper_functional
    """,
    (0, 0, 0, 4, 1, 0): "native_layer_norm_backward native_group_norm_backward",
    (0, 1, 1, 4, 1, 0): "batch_norm_backward",
    (0, 0, 0, 2, 0, 0): "batch_norm_stats var_mean std_mean var std aminmax _linalg_check_errors",
    # Element by element, copies that may convert, packing, random numbers.
    (0, 0, 0, 0, 1, 0): """
        batch_norm_elemt batch_norm_backward_elemt smooth_l1_loss_backward huber_loss_backward
        soft_margin_loss_backward binary_cross_entropy_backward _prelu_kernel glu rrelu_with_noise
        _masked_scale _fused_adam _fused_adamw _fused_sgd _fused_adagrad
        _amp_foreach_non_finite_check_and_unscale copy _to_copy constant_pad_nd tril triu cross
        complex polar zero fill floor_divide normal bernoulli binomial hardswish linspace logspace
        _add_relu log_sigmoid glu_jvp glu_backward_jvp _standard_gamma_grad _dirichlet_grad
        _conj_copy _neg_view_copy randint_like
    """,
    (0, 0, 0, 4, 0, 0): "batch_norm_backward_reduce",
    # Reductions.
    (0, 0, 0, 1, 0, 0): """
        batch_norm_gather_stats batch_norm_gather_stats_with_counts batch_norm_update_stats sum prod
        norm max min count_nonzero trace dist equal nll_loss nll_loss2d _amp_update_scale allclose
        _is_all_true _is_any_true max_pool2d max_pool2d_with_indices _foreach_powsum hash_tensor
    """,
    # Look-ups by index.
    (0, 1, 0, 0, 0, 0): """
        embedding index_select gather index take _unsafe_index unfold_copy masked_select
        _unsafe_masked_index repeat_interleave roll flip rot90 masked_scatter_backward
        nll_loss_backward nll_loss2d_backward upsample_nearest2d _upsample_nearest_exact1d
        _upsample_nearest_exact2d _upsample_nearest_exact3d reflection_pad2d replication_pad2d
        pixel_shuffle pixel_unshuffle channel_shuffle _pack_padded_sequence
        _convert_indices_from_csr_to_coo
    """,
    # Searches and selections.
    (0, 1, 0, 1, 0, 0): """
        embedding_bag _embedding_bag_forward_only _embedding_bag_per_sample_weights_backward topk
        kthvalue median nanmedian mode searchsorted bucketize multinomial
    """,
    # Unique values.
    (0, 1, 1, 1, 0, 0): """
        gather_backward unique_dim _unique _unique2 unique_consecutive unique_dim_consecutive isin
    """,
    # Sums over looked-up rows.
    (0, 1, 0, 1, 1, 0): "embedding_renorm multi_margin_loss multilabel_margin_loss",
    # Writes by index.
    (0, 0, 1, 0, 0, 0): """
        index_put _unsafe_index_put index_copy index_fill scatter masked_scatter put slice_scatter
        select_scatter diagonal_scatter as_strided_scatter slice_backward select_backward
        diagonal_backward multi_margin_loss_backward multilabel_margin_loss_backward max_unpool2d
    """,
    # Sums by index; gradients of pooling and of nearest resampling.
    (0, 0, 1, 1, 0, 0): """
        index_add scatter_add scatter_reduce index_reduce bincount histc histogram nonzero
        nonzero_static _unsafe_masked_index_put_accumulate segment_reduce _segment_reduce_backward
        avg_pool2d_backward max_pool2d_backward max_pool2d_with_indices_backward
        _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward adaptive_max_pool2d_backward
        fractional_max_pool2d_backward upsample_nearest2d_backward
        _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward
        _upsample_nearest_exact3d_backward reflection_pad2d_backward replication_pad2d_backward
        mkldnn_adaptive_avg_pool2d_backward adaptive_avg_pool3d_backward
    """,
    # Sorts.
    (0, 1, 1, 0, 0, 0): "sort randperm",
    (0, 1, 0, 3, 3, 0): "_ctc_loss_backward ctc_loss",
    # Pooling.
    (0, 0, 0, 1, 0, 1): """
        avg_pool2d adaptive_max_pool2d adaptive_avg_pool2d max_pool3d max_pool3d_with_indices
        fractional_max_pool2d mkldnn_max_pool3d
    """,
    # Resampling.
    (0, 1, 0, 0, 1, 1): """
        upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
        _upsample_bilinear2d_aa _upsample_bicubic2d_aa grid_sampler_2d _grid_sampler_2d_cpu_fallback
        _upsample_lanczos2d_aa grid_sampler
    """,
    (0, 0, 0, 0, 6, 0): "_thnn_fused_lstm_cell _thnn_fused_gru_cell",
    # Gradients of recurrent cells.
    (0, 0, 0, 1, 6, 0): "_thnn_fused_gru_cell_backward _thnn_fused_lstm_cell_backward_impl",
    # Recurrent layers and cells.
    (0, 0, 0, 2, 6, 0): "mkldnn_rnn_layer lstm gru _cudnn_rnn miopen_rnn",
    # Gradients of recurrent layers.
    (0, 0, 0, 4, 12, 0): "mkldnn_rnn_layer_backward _cudnn_rnn_backward miopen_rnn_backward",
    # Copies that keep type and order, and queries that synchronise with a device.
    (0, 0, 0, 0, 0, 0): """
        clone cat stack diag_embed repeat block_diag _copy_from _copy_from_and_resize _pin_memory
        _chunk_cat _local_scalar_dense _assert_async _functional_assert_async
        _cudnn_rnn_flatten_weight
    """,
    # Fourier transforms: butterflies read neighbours at growing distance.
    (0, 0, 0, 1, 1, 1): "_fft_r2c _fft_c2r _fft_c2c",
    # Factorisations: a pivot is searched for and its row fetched.
    (0, 1, 0, 2, 1, 0): "linalg_lu linalg_lu_factor_ex linalg_ldl_factor_ex",
    (0, 1, 0, 3, 1, 0): "det slogdet",
    (0, 1, 0, 2, 2, 0): "lu_solve linalg_ldl_solve",
    (0, 2, 0, 4, 3, 0): "_linalg_solve_ex linalg_inv_ex",
    (0, 0, 1, 0, 1, 0): "lu_unpack to_padded_tensor",
    (0, 0, 0, 3, 2, 0): "qr",
    (0, 0, 0, 5, 4, 0): "linalg_pinv",
    (1, 0, 0, 0, 1, 0): "_transform_bias_rescale_qkv",
    (1, 0, 0, 0, 0, 0): "_mkldnn_transpose",
}

ROWS: Final[dict[str, Row]] = {name: row for row, names in _TABLE.items() for name in names.split()}
"""Counts by base name; variants of a listed operator are not listed."""

SHARING: Final = frozenset("_unsafe_view unsafe_split unsafe_split_with_sizes lift".split())
"""Operators whose results share an argument's memory although their schemas do not declare it."""

RESHAPING: Final = frozenset(
    "set resize resize_as _resize_output _coalesced sparse_resize sparse_resize_and_clear"
    " resize_as_sparse".split()
)
"""Operators whose in-place variants change only metadata; their other variants copy first."""

METADATA: Final = frozenset(
    "empty empty_like new_empty empty_strided new_empty_strided empty_permuted empty_quantized"
    " _empty_affine_quantized _empty_per_channel_affine_quantized _efficientzerotensor _lazy_clone"
    " from_file _make_dep_token is_same_size is_set_to is_pinned is_coalesced sparse_dim dense_dim"
    " _dimI _dimV _nnz data_ptr _nbytes _get_mkldnn_serialized_md record_stream"
    " _has_same_storage_numel _assert_tensor_metadata _functional_assert_scalar"
    " _functional_sym_constrain_range _functional_sym_constrain_range_for_size qscheme q_scale"
    " q_zero_point q_per_channel_scales q_per_channel_zero_points q_per_channel_axis"
    " _fused_sdp_choice _use_cudnn_ctc_loss _use_miopen_ctc_loss _cslt_sparse_mm_search"
    " _record_function_enter _record_function_exit sparse_coo_tensor _sparse_coo_tensor_with_dims"
    " _sparse_coo_tensor_with_dims_and_tensors _sparse_compressed_tensor_with_dims"
    " _nested_tensor_size _nested_tensor_strides _nested_tensor_storage_offsets"
    " _nested_compute_contiguous_strides_offsets _nested_get_offsets _nested_get_lengths"
    " _nested_get_ragged_idx _nested_get_min_seqlen _nested_get_max_seqlen"
    " _nested_get_jagged_dummy".split()
)
"""Operators that query metadata, wrap, allocate without writing, or mark."""
