"""Data of the idiom table: counts of operators by name, second names, and those that touch no data.

The rules that cover every operator without a row are in `dynoffload.profiler.idioms`.

A row is ``(transpose, gather, scatter, reduction, stream, stencil)``, keyed by the operator's base
name: without namespace, overload and the trailing underscore of in-place variants.

[Note: how a row is counted]
Each pass over memory that the operator's algorithm makes counts once, under the pattern by which it
reads or writes: ``stream`` A[i]=f(A[i],B[i]); ``transpose`` A[i][j]=B[j][i]; ``gather``
A[i]=B[C[i]]; ``scatter`` A[C[i]]=B[i]; ``reduction`` s+=A[i]; ``stencil`` A[i]=f(A[i-1..i+1]). A
matrix product is one reduction (the inner dimension) and one stream (its output); a bias or a
scaled addend is one stream more. Scatter with accumulation is one scatter and one reduction. A copy
that keeps type and order counts nothing (its bytes are recorded beside it). An algorithm that
repeats its passes, as a factorisation does column by column, counts each of them once. A row is for
dense tensors in row-major order. The rows that Ren et al. (HPCA 2024) print are kept, but for
``transpose``, ``relu_`` and ``add_``: a view touches no data, and a stream in place is a stream.
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
        mm bmm mv dot vdot matmul linear einsum inner outer ger kron chain_matmul
        _grouped_mm _scaled_mm _scaled_grouped_mm _weight_int8pack_mm _int_mm _trilinear
        cdist _euclidean_dist _softmax_backward_data _log_softmax_backward_data
        _masked_softmax_backward _sparse_softmax_backward_data
        _sparse_log_softmax_backward_data rms_norm _weight_norm_interface _weight_norm
        renorm cumsum cumprod cummax cummin logcumsumexp cumprod_backward cummaxmin_backward
        mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss poisson_nll_loss
        binary_cross_entropy binary_cross_entropy_with_logits kl_div gelu_backward
        silu_backward _prelu_kernel_backward sigmoid_backward tanh_backward glu_backward
        _cdist_backward _pdist_backward pdist pairwise_distance cholesky cholesky_inverse
        cholesky_solve triangular_solve linalg_solve_triangular orgqr ormqr
        linalg_householder_product linalg_multi_dot linalg_vecdot tensordot bilinear
        matrix_power matrix_exp matrix_exp_backward _compute_linear_combination vander
        hinge_embedding_loss margin_ranking_loss infinitely_differentiable_gelu_backward
        mkldnn_linear_backward_input _scaled_mm_v2 _scaled_grouped_mm_v2 _weight_int4pack_mm
        _weight_int4pack_mm_for_cpu _weight_int4pack_mm_with_scales_and_zeros
    """,
    # Products with a bias or a scaled addend.
    (0, 0, 0, 1, 2, 0): """
        addmm baddbmm addbmm addmv addr _addmm_activation _linear_pointwise
        affine_grid_generator affine_grid_generator_backward _mixed_dtypes_linear
        _wrapped_quantized_linear_prepacked _sample_dirichlet
    """,
    (0, 0, 0, 3, 3, 0): "linear_backward matmul_backward",
    # Gradients of embeddings; normalisation and products of quantized tensors.
    (0, 1, 1, 1, 1, 0): """
        fbgemm_linear_int8_weight fbgemm_linear_fp16_weight
        fbgemm_linear_int8_weight_fp32_activation fbgemm_linear_fp16_weight_fp32_activation
        batch_norm _batch_norm_with_update _native_batch_norm_legit_functional
        _batch_norm_no_update _native_batch_norm_legit_no_training
        _batch_norm_with_update_functional _batch_norm_impl_index embedding_backward
        embedding_dense_backward embedding_sparse_backward _embedding_bag_dense_backward
        _embedding_bag_backward _embedding_bag_sparse_backward mse_loss_backward _spsolve
    """,
    # Convolutions. The transposed ones read their input transposed.
    (0, 1, 0, 1, 1, 2): """
        convolution conv2d thnn_conv2d _conv_depthwise2d conv_depthwise3d
        slow_conv_dilated2d slow_conv_dilated3d _nnpack_spatial_convolution
        miopen_depthwise_convolution _convolution_mode _convolution_pointwise
    """,
    (1, 1, 0, 1, 1, 2): "conv_tbc conv_transpose1d",
    (1, 1, 0, 1, 2, 2): """
        conv_transpose2d cudnn_convolution_transpose miopen_convolution_transpose
        _mps_convolution_transpose _convolution_transpose_pointwise
    """,
    (0, 1, 0, 1, 2, 2): "cudnn_convolution",
    (0, 1, 0, 1, 3, 2): "cudnn_convolution_relu miopen_convolution_relu",
    (0, 1, 0, 2, 3, 2): "cudnn_convolution_add_relu miopen_convolution_add_relu",
    (1, 1, 0, 3, 2, 4): """
        convolution_backward _slow_conv2d_backward conv_tbc_backward
        mps_convolution_transpose_backward
    """,
    (2, 2, 0, 6, 4, 8): "_convolution_double_backward",
    (0, 1, 0, 0, 0, 1): "im2col",
    # Gradients of resampling.
    (0, 0, 1, 1, 0, 1): """
        col2im unfold_backward upsample_linear1d_backward upsample_bilinear2d_backward
        upsample_trilinear3d_backward upsample_bicubic2d_backward
        _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward
        grid_sampler_2d_backward _grid_sampler_2d_cpu_fallback_backward
        cudnn_grid_sampler_backward _upsample_lanczos2d_aa_backward
    """,
    # Attention (two products, the row maximum and the row sum) and spectra.
    (0, 0, 0, 4, 3, 0): """
        scaled_dot_product_attention _scaled_dot_product_attention_math
        _scaled_dot_product_flash_attention _flash_attention_forward
        _scaled_dot_product_flash_attention_for_cpu _efficient_attention_forward
        _scaled_dot_product_efficient_attention _cudnn_attention_forward
        _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable
        linalg_lstsq svd linalg_svdvals linalg_eigh _linalg_eigh linalg_eigvalsh linalg_eig
        linalg_eigvals _linalg_eigvals linalg_cond linalg_matrix_rank
        _scaled_dot_product_attention_math_for_mps _triton_scaled_dot_attention
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
    (0, 0, 0, 8, 7, 0): """
        _native_multi_head_attention _transformer_encoder_layer_fwd
        _triton_multi_head_attention
    """,
    # Softmax.
    (0, 0, 0, 2, 2, 0): """
        _safe_softmax softmax log_softmax _masked_softmax logsumexp
        mkldnn_linear_backward_weights _nested_tensor_softmax_with_shape
    """,
    # Norms with two statistics.
    (0, 0, 0, 2, 1, 0): """
        layer_norm group_norm instance_norm _fused_rms_norm_backward
        _weight_norm_interface_backward geqrf _weight_norm_differentiable_backward
        quantize_per_tensor_dynamic fused_moving_avg_obs_fake_quant
        _fused_moving_avg_obs_fq_helper fbgemm_linear_quantize_weight
        _fused_moving_avg_obs_fq_helper_functional
        _fake_quantize_learnable_per_tensor_affine_backward
        _fake_quantize_learnable_per_channel_affine_backward
    """,
    (0, 0, 0, 4, 1, 0): """
        native_layer_norm_backward native_group_norm_backward cosine_embedding_loss
    """,
    (0, 1, 1, 4, 1, 0): "batch_norm_backward _batch_norm_impl_index_backward",
    (0, 0, 0, 2, 0, 0): """
        batch_norm_stats var_mean std_mean var std aminmax _linalg_check_errors
        _choose_qparams_per_tensor choose_qparams_optimized
    """,
    # Element by element, copies that may convert, packing, random numbers.
    (0, 0, 0, 0, 1, 0): """
        batch_norm_elemt batch_norm_backward_elemt smooth_l1_loss_backward
        huber_loss_backward soft_margin_loss_backward binary_cross_entropy_backward prelu
        _prelu_kernel glu dropout alpha_dropout native_dropout_backward feature_dropout
        rrelu rrelu_with_noise _masked_scale rrelu_with_noise_backward _fused_adam
        _fused_adamw _fused_sgd _fused_adagrad _amp_foreach_non_finite_check_and_unscale
        copy _to_copy type_as constant_pad_nd pad tril triu to_dense to_mkldnn
        mkldnn_reorder_conv2d_weight fill_diagonal clamp where cross complex polar zero fill
        masked_fill floor_divide normal bernoulli binomial hardswish hardswish_backward
        __and__ __or__ __xor__ __lshift__ __rshift__ log_sigmoid_backward linspace logspace
        isnan isinf isclose isreal _make_per_tensor_quantized_tensor quantize_per_tensor
        dequantize quantize_per_channel fake_quantize_per_tensor_affine_cachemask
        fake_quantize_per_channel_affine_cachemask _sparse_semi_structured_apply_dense
        copy_sparse_to_sparse _gather_sparse_backward
        _fake_quantize_learnable_per_tensor_affine fake_quantize_per_tensor_affine
        _fake_quantize_learnable_per_channel_affine fake_quantize_per_channel_affine
        _fake_quantize_per_tensor_affine_cachemask_tensor_qparams int_repr
        _make_per_channel_quantized_tensor _saturate_weight_to_fp16
        _convert_weight_to_int4pack _convert_weight_to_int4pack_for_cpu
        _dyn_quant_pack_4bit_weight _wrapped_linear_prepack mkldnn_reorder_conv3d_weight
        fbgemm_pack_gemm_matrix_fp16 fbgemm_pack_quantized_matrix
        _reorder_convolution_weight _reorder_convolution_transpose_weight
        _reorder_linear_weight _reorder_mkldnn_rnn_layer_weight __iand__ __ior__ __irshift__
        _add_relu special_ndtr log_sigmoid glu_jvp glu_backward_jvp _standard_gamma_grad
        _dirichlet_grad chalf _pad_circular feature_alpha_dropout _pad_enum _conj_copy
        _neg_view_copy _cast_Byte _cast_Char _cast_Short _cast_Int _cast_Long _cast_Half
        _cast_Float _cast_Double _new_zeros_with_same_feature_meta randint_like _dim_arange
        _sobol_engine_draw _sobol_engine_ff _sobol_engine_scramble
        _sobol_engine_initialize_state _philox_normal _philox_uniform _philox_key_fold_in
        _philox_key_split bessel_i0 bessel_i0e bessel_i1 bessel_i1e bessel_j0 bessel_j1 cbrt
        erf_inv erfcx ndtri spherical_bessel_j0 zeta shift_left shift_right_arithmetic
        copy_to convert_element_type iota _test_optional_intlist
        _test_optional_filled_intlist _test_optional_floatlist _test_serialization_subcmul
    """,
    (0, 0, 0, 4, 0, 0): "batch_norm_backward_reduce",
    # Reductions.
    (0, 0, 0, 1, 0, 0): """
        batch_norm_gather_stats batch_norm_gather_stats_with_counts batch_norm_update_stats
        sum mean nansum nanmean prod norm linalg_vector_norm amax amin max min argmax argmin
        all any count_nonzero trace dist equal nll_loss nll_loss_nd nll_loss2d
        _amp_update_scale allclose is_nonzero _is_all_true _is_any_true max_pool2d
        max_pool2d_with_indices linalg_matrix_norm frobenius_norm norm_except_dim
        linalg__powsum _foreach_powsum hash_tensor sum_to_size xor_sum _sparse_csr_sum
        _sparse_csr_prod sparse_compressed_tensor sparse_csr_tensor sparse_csc_tensor
        sparse_bsr_tensor sparse_bsc_tensor _validate_compressed_sparse_indices
        _validate_sparse_compressed_tensor_args _validate_sparse_csr_tensor_args
        _validate_sparse_csc_tensor_args _validate_sparse_bsr_tensor_args
        _validate_sparse_bsc_tensor_args _nested_tensor_from_mask_left_aligned
    """,
    # Look-ups by index.
    (0, 1, 0, 0, 0, 0): """
        embedding index_select gather index take _unsafe_index unfold_copy masked_select
        _unsafe_masked_index _nested_select_backward repeat_interleave roll flip
        combinations cartesian_prod rot90 fliplr flipud masked_scatter_backward
        nll_loss_backward nll_loss2d_backward upsample_nearest2d _upsample_nearest_exact1d
        _upsample_nearest_exact2d _upsample_nearest_exact3d reflection_pad2d
        replication_pad2d pixel_shuffle pixel_unshuffle channel_shuffle
        _pack_padded_sequence _pad_packed_sequence fft_fftshift fft_ifftshift take_along_dim
        _rowwise_prune rev to_dense_backward sparse_mask _sparse_mask_projection
        _sparse_sum_backward _cslt_compress _to_sparse_semi_structured
        _sparse_semi_structured_apply _convert_indices_from_csr_to_coo _nested_from_padded
        _nested_from_padded_tensor _nested_sum_backward
        _nested_from_padded_and_nested_example _padded_dense_to_jagged_forward
        _nested_tensor_from_mask
    """,
    # Searches and selections.
    (0, 1, 0, 1, 0, 0): """
        embedding_bag _embedding_bag_forward_only _embedding_bag_per_sample_weights_backward
        topk kthvalue median nanmedian mode searchsorted bucketize multinomial quantile
        nanquantile
    """,
    # Unique values, conversions to sparse layouts.
    (0, 1, 1, 1, 0, 0): """
        gather_backward index_select_backward unique_dim _unique _unique2 unique_consecutive
        unique_dim_consecutive isin _sparse_sparse_matmul to_sparse to_sparse_csr
        to_sparse_csc to_sparse_bsr to_sparse_bsc
    """,
    # Sparse products.
    (0, 1, 0, 1, 1, 0): """
        embedding_renorm multi_margin_loss multilabel_margin_loss _sparse_mm smm hspmm
        _sparse_mm_reduce_impl _cslt_sparse_mm _sparse_semi_structured_mm
        _sparse_semi_structured_tile
    """,
    # Writes by index.
    (0, 0, 1, 0, 0, 0): """
        index_put _unsafe_index_put index_copy index_fill scatter masked_scatter put
        slice_scatter select_scatter diagonal_scatter one_hot as_strided_scatter
        slice_backward select_backward diagonal_backward value_selecting_reduction_backward
        trace_backward multi_margin_loss_backward multilabel_margin_loss_backward
        max_unpool2d _pack_padded_sequence_backward masked_select_backward
    """,
    # Sums by index; gradients of pooling and of nearest resampling.
    (0, 0, 1, 1, 0, 0): """
        index_add scatter_add scatter_reduce index_reduce bincount histc histogram nonzero
        nonzero_static _unsafe_masked_index_put_accumulate segment_reduce
        _segment_reduce_backward _histogramdd_bin_edges _histogramdd_from_bin_cts
        _histogramdd_from_bin_tensors histogramdd avg_pool2d_backward max_pool2d_backward
        max_pool2d_with_indices_backward _adaptive_avg_pool2d_backward
        _adaptive_avg_pool3d_backward adaptive_max_pool2d_backward
        fractional_max_pool2d_backward upsample_nearest2d_backward
        _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward
        _upsample_nearest_exact3d_backward reflection_pad2d_backward
        replication_pad2d_backward mkldnn_adaptive_avg_pool2d_backward
        adaptive_avg_pool3d_backward argwhere nonzero_numpy
    """,
    # Sorts.
    (0, 1, 1, 0, 0, 0): "sort argsort msort randperm",
    (0, 0, 0, 2, 3, 0): "cross_entropy_loss cov",
    (0, 1, 0, 3, 3, 0): "_ctc_loss_backward ctc_loss",
    # Pooling.
    (0, 0, 0, 1, 0, 1): """
        avg_pool2d adaptive_max_pool2d adaptive_avg_pool2d max_pool3d
        max_pool3d_with_indices fractional_max_pool2d mkldnn_max_pool3d trapezoid trapz
        quantized_max_pool3d
    """,
    # Resampling.
    (0, 1, 0, 0, 1, 1): """
        upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
        _upsample_bilinear2d_aa _upsample_bicubic2d_aa grid_sampler_2d
        _grid_sampler_2d_cpu_fallback _upsample_lanczos2d_aa grid_sampler
    """,
    (0, 0, 0, 0, 6, 0): "_thnn_fused_lstm_cell _thnn_fused_gru_cell",
    # Gradients of recurrent cells.
    (0, 0, 0, 1, 6, 0): """
        _thnn_fused_lstm_cell_backward _thnn_fused_gru_cell_backward
        _thnn_fused_lstm_cell_backward_impl _thnn_differentiable_lstm_cell_backward
        _thnn_differentiable_gru_cell_backward
    """,
    # Recurrent layers and cells.
    (0, 0, 0, 2, 6, 0): """
        mkldnn_rnn_layer lstm gru rnn_tanh rnn_relu _cudnn_rnn miopen_rnn lstm_cell gru_cell
        rnn_tanh_cell rnn_relu_cell _lstm_mps
    """,
    # Gradients of recurrent layers.
    (0, 0, 0, 4, 12, 0): """
        mkldnn_rnn_layer_backward _cudnn_rnn_backward miopen_rnn_backward lstm_mps_backward
    """,
    # Copies that keep type and order, and questions that wait for a device.
    (0, 0, 0, 0, 0, 0): """
        clone cat concat concatenate stack hstack vstack dstack diag diag_embed diagflat
        lift_fresh_copy repeat tile block_diag _copy_from column_stack row_stack
        _copy_from_and_resize _pin_memory _chunk_cat _local_scalar_dense item _assert_async
        _functional_assert_async _nested_tensor_from_tensor_list copy_strided device_put
        collapse reshape _to_cpu flatten_dense_tensors _cudnn_rnn_flatten_weight _foobar
        _test_autograd_multiple_dispatch _test_warn_in_autograd _test_ambiguous_defaults
        _test_check_tensor _test_string_default _test_functorch_fallback
        _test_parallel_materialize
    """,
    # Fourier transforms: butterflies read neighbours at growing distance.
    (0, 0, 0, 1, 1, 1): """
        _fft_r2c _fft_c2r _fft_c2c stft istft fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2
        fft_ifftn fft_rfft fft_rfft2 fft_rfftn fft_irfft fft_irfft2 fft_irfftn fft_hfft
        fft_hfft2 fft_hfftn fft_ihfft fft_ihfft2 fft_ihfftn fft_r2c fft_c2r fft_c2c
        cumulative_trapezoid
    """,
    # Factorisations: a pivot is searched for and its row fetched.
    (0, 1, 0, 2, 1, 0): """
        linalg_lu linalg_lu_factor linalg_lu_factor_ex _lu_with_info linalg_ldl_factor
        linalg_ldl_factor_ex
    """,
    (0, 1, 0, 3, 1, 0): "det logdet slogdet",
    (0, 1, 0, 2, 2, 0): "lu_solve linalg_ldl_solve",
    (0, 2, 0, 4, 3, 0): """
        linalg_solve linalg_solve_ex _linalg_solve_ex linalg_tensorsolve inverse linalg_inv
        linalg_inv_ex linalg_tensorinv
    """,
    (0, 0, 1, 0, 1, 0): """
        lu_unpack to_padded_tensor pad_sequence _jagged_to_padded_dense_forward
    """,
    (0, 0, 0, 3, 2, 0): "qr _dyn_quant_matmul_4bit",
    (0, 0, 0, 5, 3, 0): "nuclear_norm",
    (0, 0, 0, 5, 4, 0): "linalg_pinv pinverse",
    (0, 0, 0, 2, 4, 0): "corrcoef",
    (0, 0, 0, 0, 0, 1): "diff gradient",
    (0, 0, 0, 3, 1, 0): "cosine_similarity triplet_margin_loss",
    (1, 0, 0, 0, 1, 0): "_transform_bias_rescale_qkv",
    # Sparse products with an addend.
    (0, 1, 0, 1, 2, 0): """
        sspaddmm _sparse_addmm sparse_sampled_addmm _sparse_semi_structured_addmm
        _sparse_semi_structured_linear
    """,
    (0, 2, 0, 2, 2, 0): "_sparse_mm_reduce_impl_backward",
    (0, 2, 1, 1, 0, 0): "_coalesce",
    (0, 0, 1, 0, 0, 1): "_convert_indices_from_coo_to_csr",
    (0, 1, 0, 0, 1, 0): "_spdiags",
    (1, 0, 0, 0, 0, 0): "_mkldnn_transpose",
}

ROWS: Final[dict[str, Row]] = {name: row for row, names in _TABLE.items() for name in names.split()}
"""Our counts by base name; what is a variant of another operator is not listed."""

SYNONYMS: Final[dict[str, str]] = {
    "absolute": "abs", "arccos": "acos", "arccosh": "acosh", "arcsin": "asin", "arcsinh": "asinh",
    "arctan": "atan", "arctan2": "atan2", "arctanh": "atanh", "divide": "div", "fix": "trunc",
    "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "multiply": "mul",
    "negative": "neg", "not_equal": "ne", "subtract": "sub", "special_expit": "sigmoid",
    "special_gammainc": "igamma", "special_gammaincc": "igammac", "special_gammaln": "lgamma",
    "special_multigammaln": "mvlgamma", "special_psi": "digamma",
}  # fmt: skip
"""Second names that torch has for an operator; what is ``special_x`` to ``x`` is not listed."""

SHARING: Final = frozenset(
    "_unsafe_view unsafe_split unsafe_split_with_sizes unsafe_chunk lift broadcast_tensors meshgrid"
    " atleast_1d atleast_2d atleast_3d unflatten_dense_tensors _add_batch_dim _remove_batch_dim"
    " _reshape_from_tensor as_strided".split()
)
"""Operators whose results share an argument's memory although their schemas do not say so."""

RESHAPING: Final = frozenset(
    "set resize resize_as _resize_output _coalesced sparse_resize sparse_resize_and_clear"
    " resize_as_sparse".split()
)
"""Operators that in place change only metadata; their other variants do that to a copy."""

METADATA: Final = frozenset(
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
