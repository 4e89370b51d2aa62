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
GATHER: Final[Row] = (0, 1, 0, 0, 0, 0)
SCATTER: Final[Row] = (0, 0, 1, 0, 0, 0)
_PRODUCT: Final[Row] = (0, 0, 0, 1, 1, 0)
_PRODUCT_PLUS: Final[Row] = (0, 0, 0, 1, 2, 0)
_SCATTER_SUM: Final[Row] = (0, 0, 1, 1, 0, 0)
_SORT: Final[Row] = (0, 1, 1, 0, 0, 0)
_CONVOLUTION: Final[Row] = (0, 1, 0, 1, 1, 2)
_CONVOLUTION_BACKWARD: Final[Row] = (1, 1, 0, 3, 2, 4)
_ATTENTION: Final[Row] = (0, 0, 0, 4, 3, 0)
_ATTENTION_BACKWARD: Final[Row] = (0, 0, 0, 6, 4, 0)
_MULTI_HEAD: Final[Row] = (0, 0, 0, 8, 7, 0)
_SOFTMAX: Final[Row] = (0, 0, 0, 2, 2, 0)
_NORM: Final[Row] = (0, 0, 0, 2, 1, 0)
_NORM_BACKWARD: Final[Row] = (0, 0, 0, 4, 1, 0)
_POOL: Final[Row] = (0, 0, 0, 1, 0, 1)
_POOL_BACKWARD: Final[Row] = (0, 0, 1, 1, 0, 0)
_RECURRENT: Final[Row] = (0, 0, 0, 2, 6, 0)
_RECURRENT_BACKWARD: Final[Row] = (0, 0, 0, 4, 12, 0)
_CELL_BACKWARD: Final[Row] = (0, 0, 0, 1, 6, 0)
_RESAMPLE: Final[Row] = (0, 1, 0, 0, 1, 1)
_RESAMPLE_BACKWARD: Final[Row] = (0, 0, 1, 1, 0, 1)
_BATCH_NORM: Final[Row] = (0, 1, 1, 1, 1, 0)
_SPARSE_PRODUCT: Final[Row] = (0, 1, 0, 1, 1, 0)
_SPARSE_PRODUCT_PLUS: Final[Row] = (0, 1, 0, 1, 2, 0)
_UNIQUE: Final[Row] = (0, 1, 1, 1, 0, 0)
_FILLED_SCATTER: Final[Row] = (0, 0, 1, 0, 1, 0)
_LU: Final[Row] = (0, 1, 0, 2, 1, 0)
_LU_SOLVE: Final[Row] = (0, 1, 0, 2, 2, 0)
_SPECTRUM: Final[Row] = (0, 0, 0, 4, 3, 0)
_FOURIER: Final[Row] = (0, 0, 0, 1, 1, 1)


def _rows(row: Row, names: str) -> dict[str, Row]:
    return dict.fromkeys(names.split(), row)


ROWS: Final[dict[str, Row]] = {
    # Matrix products.
    **_rows(_PRODUCT, "mm bmm mv dot vdot matmul linear einsum inner outer ger kron chain_matmul"),
    **_rows(_PRODUCT, "_grouped_mm _scaled_mm _scaled_grouped_mm _weight_int8pack_mm _int_mm"),
    **_rows(_PRODUCT, "mkldnn_linear _trilinear cdist _cdist_forward _euclidean_dist"),
    **_rows(_PRODUCT_PLUS, "addmm baddbmm addbmm addmv addr _addmm_activation"),
    **_rows((0, 0, 0, 3, 3, 0), "linear_backward mkldnn_linear_backward matmul_backward"),
    **_rows((0, 1, 1, 1, 1, 0), "fbgemm_linear_int8_weight fbgemm_linear_fp16_weight"),
    **_rows((0, 1, 1, 1, 1, 0), "fbgemm_linear_int8_weight_fp32_activation"),
    **_rows((0, 1, 1, 1, 1, 0), "fbgemm_linear_fp16_weight_fp32_activation"),
    # Convolutions. The transposed ones read their input transposed.
    **_rows(_CONVOLUTION, "convolution _convolution conv1d conv2d conv3d mkldnn_convolution"),
    **_rows(_CONVOLUTION, "convolution_overrideable thnn_conv2d _slow_conv2d_forward"),
    **_rows(_CONVOLUTION, "slow_conv3d slow_conv3d_forward _conv_depthwise2d conv_depthwise3d"),
    **_rows(_CONVOLUTION, "slow_conv_dilated2d slow_conv_dilated3d miopen_convolution"),
    **_rows(_CONVOLUTION, "_nnpack_spatial_convolution miopen_depthwise_convolution"),
    **_rows((1, 1, 0, 1, 1, 2), "conv_tbc conv_transpose1d"),
    **_rows((1, 1, 0, 1, 2, 2), "conv_transpose2d conv_transpose3d slow_conv_transpose2d"),
    **_rows((1, 1, 0, 1, 2, 2), "slow_conv_transpose3d cudnn_convolution_transpose"),
    **_rows((1, 1, 0, 1, 2, 2), "miopen_convolution_transpose"),
    **_rows((0, 1, 0, 1, 2, 2), "cudnn_convolution"),
    **_rows((0, 1, 0, 1, 3, 2), "cudnn_convolution_relu miopen_convolution_relu"),
    **_rows((0, 1, 0, 2, 3, 2), "cudnn_convolution_add_relu miopen_convolution_add_relu"),
    **_rows(_CONVOLUTION_BACKWARD, "convolution_backward convolution_backward_overrideable"),
    **_rows(_CONVOLUTION_BACKWARD, "_slow_conv2d_backward conv_tbc_backward"),
    **_rows((2, 2, 0, 6, 4, 8), "_convolution_double_backward"),
    **_rows((0, 1, 0, 0, 0, 1), "im2col"),
    **_rows((0, 0, 1, 1, 0, 1), "col2im unfold_backward"),
    # Attention: two products, the row maximum and the row sum; backward has five products.
    **_rows(_ATTENTION, "scaled_dot_product_attention _scaled_dot_product_attention_math"),
    **_rows(_ATTENTION, "_scaled_dot_product_flash_attention _flash_attention_forward"),
    **_rows(_ATTENTION, "_scaled_dot_product_flash_attention_for_cpu _efficient_attention_forward"),
    **_rows(_ATTENTION, "_scaled_dot_product_efficient_attention _cudnn_attention_forward"),
    **_rows(_ATTENTION, "_scaled_dot_product_cudnn_attention"),
    **_rows(_ATTENTION, "_scaled_dot_product_fused_attention_overrideable"),
    **_rows(_ATTENTION_BACKWARD, "_scaled_dot_product_flash_attention_backward"),
    **_rows(_ATTENTION_BACKWARD, "_scaled_dot_product_flash_attention_for_cpu_backward"),
    **_rows(_ATTENTION_BACKWARD, "_scaled_dot_product_efficient_attention_backward"),
    **_rows(_ATTENTION_BACKWARD, "_scaled_dot_product_cudnn_attention_backward"),
    **_rows(_ATTENTION_BACKWARD, "_scaled_dot_product_fused_attention_overrideable_backward"),
    **_rows(_ATTENTION_BACKWARD, "_flash_attention_backward _efficient_attention_backward"),
    **_rows(_ATTENTION_BACKWARD, "_cudnn_attention_backward"),
    **_rows(_MULTI_HEAD, "_native_multi_head_attention _transformer_encoder_layer_fwd"),
    # Softmax and normalisation: a reduction per statistic, a stream per pass that writes.
    **_rows(_SOFTMAX, "_softmax _log_softmax _safe_softmax softmax log_softmax"),
    **_rows(_SOFTMAX, "_sparse_softmax _sparse_log_softmax _masked_softmax logsumexp"),
    **_rows(_PRODUCT, "_softmax_backward_data _log_softmax_backward_data _masked_softmax_backward"),
    **_rows(_PRODUCT, "_sparse_softmax_backward_data _sparse_log_softmax_backward_data"),
    **_rows(_NORM, "native_layer_norm layer_norm native_group_norm group_norm instance_norm"),
    **_rows(_PRODUCT, "_fused_rms_norm rms_norm _weight_norm_interface _weight_norm renorm"),
    **_rows(_NORM_BACKWARD, "native_layer_norm_backward native_group_norm_backward"),
    **_rows((0, 0, 0, 2, 1, 0), "_fused_rms_norm_backward _weight_norm_interface_backward"),
    **_rows(_BATCH_NORM, "cudnn_batch_norm native_batch_norm batch_norm miopen_batch_norm"),
    **_rows(_BATCH_NORM, "_native_batch_norm_legit _batch_norm_with_update"),
    **_rows(_BATCH_NORM, "_native_batch_norm_legit_functional _batch_norm_no_update"),
    **_rows(_BATCH_NORM, "_native_batch_norm_legit_no_training"),
    **_rows(_BATCH_NORM, "_batch_norm_with_update_functional _batch_norm_impl_index"),
    **_rows((0, 1, 1, 4, 1, 0), "cudnn_batch_norm_backward native_batch_norm_backward"),
    **_rows((0, 1, 1, 4, 1, 0), "miopen_batch_norm_backward batch_norm_backward"),
    **_rows((0, 1, 1, 4, 1, 0), "_batch_norm_impl_index_backward"),
    **_rows((0, 0, 0, 2, 0, 0), "batch_norm_stats var_mean std_mean var std"),
    **_rows(STREAM, "batch_norm_elemt batch_norm_backward_elemt"),
    **_rows((0, 0, 0, 4, 0, 0), "batch_norm_backward_reduce"),
    **_rows(REDUCTION, "batch_norm_gather_stats batch_norm_gather_stats_with_counts"),
    **_rows(REDUCTION, "batch_norm_update_stats"),
    # Embedding, indexing, selection.
    **_rows(GATHER, "embedding index_select gather index take _unsafe_index unfold_copy"),
    **_rows(GATHER, "masked_select _unsafe_masked_index _nested_select_backward repeat_interleave"),
    **_rows(GATHER, "roll flip combinations cartesian_prod rot90 fliplr flipud"),
    **_rows((0, 1, 0, 1, 0, 0), "_embedding_bag embedding_bag _embedding_bag_forward_only"),
    **_rows((0, 1, 1, 1, 0, 0), "gather_backward index_select_backward"),
    **_rows((0, 1, 1, 1, 1, 0), "embedding_backward embedding_dense_backward"),
    **_rows((0, 1, 1, 1, 1, 0), "embedding_sparse_backward _embedding_bag_dense_backward"),
    **_rows((0, 1, 1, 1, 1, 0), "_embedding_bag_backward _embedding_bag_sparse_backward"),
    **_rows((0, 1, 0, 1, 0, 0), "_embedding_bag_per_sample_weights_backward"),
    **_rows((0, 1, 0, 1, 1, 0), "embedding_renorm"),
    **_rows(SCATTER, "index_put _index_put_impl _unsafe_index_put index_copy index_fill scatter"),
    **_rows(SCATTER, "masked_scatter put slice_scatter select_scatter diagonal_scatter one_hot"),
    **_rows(SCATTER, "as_strided_scatter slice_backward select_backward diagonal_backward"),
    **_rows(SCATTER, "value_selecting_reduction_backward trace_backward"),
    **_rows((0, 1, 0, 0, 0, 0), "masked_scatter_backward"),
    **_rows(_SCATTER_SUM, "index_add scatter_add scatter_reduce index_reduce bincount histc"),
    **_rows(_SCATTER_SUM, "histogram nonzero nonzero_static _unsafe_masked_index_put_accumulate"),
    **_rows(_SCATTER_SUM, "segment_reduce _segment_reduce_backward _histogramdd_bin_edges"),
    **_rows(_SCATTER_SUM, "_histogramdd_from_bin_cts _histogramdd_from_bin_tensors"),
    **_rows(_SCATTER_SUM, "histogramdd"),
    **_rows((0, 1, 0, 1, 0, 0), "topk kthvalue median nanmedian mode searchsorted bucketize"),
    **_rows((0, 1, 0, 1, 0, 0), "multinomial quantile nanquantile"),
    **_rows(_SORT, "sort argsort msort randperm"),
    **_rows(_UNIQUE, "unique_dim _unique _unique2 unique_consecutive"),
    **_rows(_UNIQUE, "unique_dim_consecutive isin"),
    # Scans and reductions.
    **_rows(_PRODUCT, "cumsum cumprod cummax cummin logcumsumexp _cummax_helper _cummin_helper"),
    **_rows(_PRODUCT, "cumprod_backward cummaxmin_backward _logcumsumexp"),
    **_rows(REDUCTION, "sum mean nansum nanmean prod norm linalg_vector_norm amax amin max min"),
    **_rows(REDUCTION, "argmax argmin all any count_nonzero trace nll_loss_forward dist equal"),
    **_rows(REDUCTION, "nll_loss2d_forward nll_loss nll_loss_nd nll_loss2d _amp_update_scale"),
    **_rows(REDUCTION, "allclose is_nonzero _is_all_true _is_any_true"),
    **_rows((0, 0, 0, 2, 0, 0), "aminmax _aminmax _linalg_check_errors"),
    # Losses.
    **_rows(GATHER, "nll_loss_backward nll_loss2d_backward"),
    **_rows((0, 1, 1, 1, 1, 0), "mse_loss_backward"),
    **_rows(_PRODUCT, "mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss"),
    **_rows(
        _PRODUCT, "poisson_nll_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div"
    ),
    **_rows((0, 1, 0, 1, 1, 0), "multi_margin_loss multilabel_margin_loss_forward"),
    **_rows((0, 0, 0, 2, 3, 0), "cross_entropy_loss"),
    **_rows((0, 1, 0, 3, 3, 0), "_ctc_loss _cudnn_ctc_loss _ctc_loss_backward ctc_loss"),
    **_rows(STREAM, "smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward"),
    **_rows(STREAM, "binary_cross_entropy_backward"),
    **_rows(SCATTER, "multi_margin_loss_backward multilabel_margin_loss_backward"),
    # Activations whose gradients have published rows.
    **_rows(_PRODUCT, "gelu_backward silu_backward _prelu_kernel_backward"),
    **_rows(_PRODUCT, "sigmoid_backward tanh_backward glu_backward"),
    **_rows(STREAM, "prelu _prelu_kernel glu native_dropout dropout alpha_dropout"),
    **_rows(STREAM, "native_dropout_backward feature_dropout rrelu rrelu_with_noise"),
    **_rows(STREAM, "_fused_dropout _masked_scale rrelu_with_noise_backward"),
    # Pooling and resampling.
    **_rows(_POOL, "avg_pool1d avg_pool2d avg_pool3d adaptive_max_pool1d adaptive_max_pool2d"),
    **_rows(_POOL, "adaptive_max_pool3d adaptive_avg_pool1d adaptive_avg_pool2d max_pool3d"),
    **_rows(_POOL, "adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d"),
    **_rows(_POOL, "max_pool3d_with_indices fractional_max_pool2d fractional_max_pool3d"),
    **_rows(_POOL, "mkldnn_max_pool3d"),
    **_rows(REDUCTION, "max_pool1d max_pool2d max_pool1d_with_indices max_pool2d_with_indices"),
    **_rows(REDUCTION, "mkldnn_max_pool2d quantized_max_pool1d quantized_max_pool2d"),
    **_rows(_POOL_BACKWARD, "avg_pool2d_backward avg_pool3d_backward max_pool2d_backward"),
    **_rows(_POOL_BACKWARD, "max_pool2d_with_indices_backward max_pool3d_with_indices_backward"),
    **_rows(_POOL_BACKWARD, "_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward"),
    **_rows(_POOL_BACKWARD, "adaptive_max_pool2d_backward adaptive_max_pool3d_backward"),
    **_rows(_POOL_BACKWARD, "fractional_max_pool2d_backward fractional_max_pool3d_backward"),
    **_rows(_POOL_BACKWARD, "mkldnn_max_pool2d_backward mkldnn_max_pool3d_backward"),
    **_rows(SCATTER, "max_unpool2d max_unpool3d"),
    **_rows(_RESAMPLE, "upsample_linear1d upsample_bilinear2d upsample_trilinear3d"),
    **_rows(_RESAMPLE, "upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa"),
    **_rows(_RESAMPLE, "grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback"),
    **_rows(_RESAMPLE, "cudnn_grid_sampler"),
    **_rows(GATHER, "upsample_nearest1d upsample_nearest2d upsample_nearest3d"),
    **_rows(GATHER, "_upsample_nearest_exact1d _upsample_nearest_exact2d"),
    **_rows(GATHER, "_upsample_nearest_exact3d reflection_pad1d reflection_pad2d"),
    **_rows(GATHER, "reflection_pad3d replication_pad1d replication_pad2d replication_pad3d"),
    **_rows(GATHER, "pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle"),
    **_rows(_RESAMPLE_BACKWARD, "upsample_linear1d_backward upsample_bilinear2d_backward"),
    **_rows(_RESAMPLE_BACKWARD, "upsample_trilinear3d_backward upsample_bicubic2d_backward"),
    **_rows(_RESAMPLE_BACKWARD, "_upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward"),
    **_rows(_RESAMPLE_BACKWARD, "grid_sampler_2d_backward grid_sampler_3d_backward"),
    **_rows(_RESAMPLE_BACKWARD, "_grid_sampler_2d_cpu_fallback_backward"),
    **_rows(_RESAMPLE_BACKWARD, "cudnn_grid_sampler_backward"),
    **_rows(_SCATTER_SUM, "upsample_nearest1d_backward upsample_nearest2d_backward"),
    **_rows(_SCATTER_SUM, "upsample_nearest3d_backward _upsample_nearest_exact1d_backward"),
    **_rows(_SCATTER_SUM, "_upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward"),
    **_rows(_SCATTER_SUM, "reflection_pad1d_backward reflection_pad2d_backward"),
    **_rows(_SCATTER_SUM, "reflection_pad3d_backward replication_pad1d_backward"),
    **_rows(_SCATTER_SUM, "replication_pad2d_backward replication_pad3d_backward"),
    # Recurrent cells and layers.
    **_rows((0, 0, 0, 0, 6, 0), "_thnn_fused_lstm_cell _thnn_fused_gru_cell"),
    **_rows(_CELL_BACKWARD, "_thnn_fused_lstm_cell_backward _thnn_fused_gru_cell_backward"),
    **_rows(_CELL_BACKWARD, "_thnn_fused_lstm_cell_backward_impl"),
    **_rows(_RECURRENT, "mkldnn_rnn_layer lstm gru rnn_tanh rnn_relu _cudnn_rnn miopen_rnn"),
    **_rows(_RECURRENT, "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"),
    **_rows(_RECURRENT_BACKWARD, "mkldnn_rnn_layer_backward _cudnn_rnn_backward"),
    **_rows(_RECURRENT_BACKWARD, "miopen_rnn_backward"),
    **_rows(GATHER, "_pack_padded_sequence _pad_packed_sequence"),
    **_rows(SCATTER, "_pack_padded_sequence_backward"),
    # Optimizers: one pass over parameter, gradient and state together.
    **_rows(STREAM, "_fused_adam _fused_adamw _fused_sgd _fused_adagrad"),
    **_rows(STREAM, "_amp_foreach_non_finite_check_and_unscale"),
    # Copies. Those that keep type and order count nothing; those that may convert are a stream.
    **_rows(
        NOTHING, "clone cat concat concatenate stack hstack vstack dstack diag diag_embed diagflat"
    ),
    **_rows(
        NOTHING, "lift_fresh_copy repeat tile block_diag _copy_from _stack column_stack row_stack"
    ),
    **_rows(NOTHING, "_copy_from_and_resize _pin_memory _chunk_cat"),
    **_rows(NOTHING, "_local_scalar_dense item _assert_async _functional_assert_async"),
    **_rows(STREAM, "copy _to_copy type_as constant_pad_nd pad tril triu"),
    **_rows(STREAM, "_to_dense to_dense to_mkldnn mkldnn_reorder_conv2d_weight fill_diagonal"),
    **_rows(STREAM, "clamp where cross linalg_cross complex polar zero fill"),
    **_rows(STREAM, "masked_fill floor_divide normal bernoulli binomial log_sigmoid_forward"),
    **_rows(STREAM, "hardswish hardswish_backward __and__ __or__ __xor__ __lshift__ __rshift__"),
    **_rows(STREAM, "log_sigmoid_backward linspace logspace isnan isinf isclose isreal"),
    **_rows(_PRODUCT, "_cdist_backward _pdist_forward _pdist_backward pdist pairwise_distance"),
    **_rows(STREAM, "_make_per_tensor_quantized_tensor quantize_per_tensor dequantize"),
    **_rows(STREAM, "quantize_per_channel fake_quantize_per_tensor_affine_cachemask"),
    **_rows(STREAM, "fake_quantize_per_channel_affine_cachemask"),
    **_rows(_FOURIER, "_fft_r2c _fft_c2r _fft_c2c stft istft"),
    # Fourier transforms: butterflies read neighbours at growing distance. Shifts are rolls.
    **_rows(_FOURIER, "fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn fft_rfft fft_rfft2"),
    **_rows(_FOURIER, "fft_rfftn fft_irfft fft_irfft2 fft_irfftn fft_hfft fft_hfft2 fft_hfftn"),
    **_rows(_FOURIER, "fft_ihfft fft_ihfft2 fft_ihfftn fft_r2c fft_c2r fft_c2c"),
    **_rows(GATHER, "fft_fftshift fft_ifftshift"),
    # Dense linear algebra. An update by blocks or reflectors is a product; a pivot is searched for
    # by a reduction and its row fetched by a gather; a spectrum is found by reduction to a band
    # (norms and products), rotations in place and products back.
    **_rows(_PRODUCT, "cholesky linalg_cholesky linalg_cholesky_ex cholesky_inverse"),
    **_rows(_PRODUCT, "cholesky_solve _cholesky_solve_helper triangular_solve"),
    **_rows(_PRODUCT, "linalg_solve_triangular orgqr ormqr linalg_householder_product"),
    **_rows(_PRODUCT, "linalg_matmul linalg_multi_dot linalg_vecdot tensordot bilinear"),
    **_rows(_PRODUCT, "matrix_power linalg_matrix_power matrix_exp linalg_matrix_exp"),
    **_rows(_PRODUCT, "matrix_exp_backward _compute_linear_combination"),
    **_rows(_LU, "linalg_lu linalg_lu_factor linalg_lu_factor_ex _lu_with_info"),
    **_rows(_LU, "linalg_ldl_factor linalg_ldl_factor_ex"),
    **_rows((0, 1, 0, 3, 1, 0), "det linalg_det _linalg_det logdet slogdet linalg_slogdet"),
    **_rows((0, 1, 0, 3, 1, 0), "_linalg_slogdet"),
    **_rows(_LU_SOLVE, "linalg_lu_solve lu_solve linalg_ldl_solve"),
    **_rows((0, 2, 0, 4, 3, 0), "linalg_solve linalg_solve_ex _linalg_solve_ex linalg_tensorsolve"),
    **_rows((0, 2, 0, 4, 3, 0), "inverse linalg_inv linalg_inv_ex linalg_tensorinv"),
    **_rows(_FILLED_SCATTER, "lu_unpack"),
    **_rows((0, 0, 0, 2, 1, 0), "geqrf"),
    **_rows((0, 0, 0, 3, 2, 0), "qr linalg_qr"),
    **_rows((0, 0, 0, 4, 3, 0), "linalg_lstsq"),
    **_rows(_SPECTRUM, "svd linalg_svd _linalg_svd linalg_svdvals linalg_eigh _linalg_eigh"),
    **_rows(_SPECTRUM, "linalg_eigvalsh linalg_eig linalg_eigvals _linalg_eigvals"),
    **_rows(_SPECTRUM, "linalg_cond linalg_matrix_rank"),
    **_rows((0, 0, 0, 5, 3, 0), "nuclear_norm"),
    **_rows((0, 0, 0, 5, 4, 0), "linalg_pinv pinverse"),
    **_rows(REDUCTION, "linalg_norm linalg_matrix_norm frobenius_norm native_norm norm_except_dim"),
    **_rows(REDUCTION, "linalg__powsum _foreach_powsum hash_tensor sum_to_size xor_sum"),
    **_rows(_PRODUCT, "vander linalg_vander"),
    **_rows((0, 0, 0, 2, 3, 0), "cov"),
    **_rows((0, 0, 0, 2, 4, 0), "corrcoef"),
    # Differences of neighbours.
    **_rows((0, 0, 0, 0, 0, 1), "diff gradient"),
    **_rows((0, 0, 0, 1, 0, 1), "trapezoid trapz"),
    **_rows((0, 0, 0, 1, 1, 1), "cumulative_trapezoid"),
    # Composite losses, and what is made of rows above.
    **_rows(_PRODUCT, "hinge_embedding_loss margin_ranking_loss"),
    **_rows((0, 0, 0, 3, 1, 0), "cosine_similarity triplet_margin_loss"),
    **_rows((0, 0, 0, 4, 1, 0), "cosine_embedding_loss"),
    **_rows((0, 1, 0, 1, 1, 0), "multilabel_margin_loss"),
    **_rows((0, 1, 0, 3, 3, 0), "miopen_ctc_loss"),
    **_rows(_PRODUCT, "infinitely_differentiable_gelu_backward"),
    **_rows(_CONVOLUTION, "_convolution_mode _mps_convolution _convolution_pointwise"),
    **_rows((1, 1, 0, 1, 2, 2), "_mps_convolution_transpose _convolution_transpose_pointwise"),
    **_rows(_CONVOLUTION_BACKWARD, "mps_convolution_backward mps_convolution_transpose_backward"),
    **_rows(
        _PRODUCT_PLUS, "_linear_pointwise affine_grid_generator affine_grid_generator_backward"
    ),
    **_rows(_PRODUCT_PLUS, "cudnn_affine_grid_generator cudnn_affine_grid_generator_backward"),
    **_rows(_PRODUCT, "mkldnn_linear_backward_input"),
    **_rows((0, 0, 0, 2, 2, 0), "mkldnn_linear_backward_weights"),
    **_rows(_ATTENTION, "_scaled_dot_product_attention_math_for_mps _triton_scaled_dot_attention"),
    **_rows(_ATTENTION, "_flash_attention_forward_no_dropout_inplace"),
    **_rows(_MULTI_HEAD, "_triton_multi_head_attention"),
    **_rows((1, 0, 0, 0, 1, 0), "_transform_bias_rescale_qkv"),
    **_rows((0, 0, 0, 2, 1, 0), "_weight_norm_differentiable_backward"),
    **_rows(_POOL, "mkldnn_adaptive_avg_pool2d quantized_max_pool3d"),
    **_rows(_POOL_BACKWARD, "mkldnn_adaptive_avg_pool2d_backward adaptive_avg_pool3d_backward"),
    **_rows(_RESAMPLE, "_upsample_lanczos2d_aa grid_sampler"),
    **_rows(_RESAMPLE_BACKWARD, "_upsample_lanczos2d_aa_backward"),
    **_rows(_RECURRENT, "_lstm_mps quantized_lstm quantized_gru quantized_lstm_cell"),
    **_rows(_RECURRENT, "quantized_gru_cell quantized_rnn_tanh_cell quantized_rnn_relu_cell"),
    **_rows(_RECURRENT_BACKWARD, "lstm_mps_backward"),
    **_rows(_CELL_BACKWARD, "_thnn_differentiable_lstm_cell_backward"),
    **_rows(_CELL_BACKWARD, "_thnn_differentiable_gru_cell_backward"),
    **_rows(_SCATTER_SUM, "argwhere nonzero_numpy"),
    **_rows(GATHER, "take_along_dim _rowwise_prune rev to_dense_backward"),
    **_rows(SCATTER, "masked_select_backward"),
    # Sparse tensors. A sparse product reads rows of the other factor by index; made dense or
    # compressed, values are written by index; coalescing sorts and sums equal indices.
    **_rows(_SPARSE_PRODUCT, "_sparse_mm smm hspmm _sparse_mm_reduce_impl"),
    **_rows(_SPARSE_PRODUCT, "_cslt_sparse_mm _sparse_semi_structured_mm"),
    **_rows(_SPARSE_PRODUCT_PLUS, "sspaddmm _sparse_addmm sparse_sampled_addmm"),
    **_rows(_SPARSE_PRODUCT_PLUS, "_sparse_semi_structured_addmm _sparse_semi_structured_linear"),
    **_rows((0, 2, 0, 2, 2, 0), "_sparse_mm_reduce_impl_backward"),
    **_rows(_UNIQUE, "_sparse_sparse_matmul"),
    **_rows((0, 1, 1, 1, 1, 0), "_spsolve"),
    **_rows((0, 2, 1, 1, 0, 0), "_coalesce"),
    **_rows(_UNIQUE, "_to_sparse _to_sparse_csr _to_sparse_csc _to_sparse_bsr _to_sparse_bsc"),
    **_rows(_UNIQUE, "to_sparse to_sparse_csr to_sparse_csc to_sparse_bsr to_sparse_bsc"),
    **_rows(GATHER, "sparse_mask _sparse_mask_projection _sparse_sum_backward _cslt_compress"),
    **_rows(GATHER, "_to_sparse_semi_structured _sparse_semi_structured_apply"),
    **_rows(GATHER, "_convert_indices_from_csr_to_coo"),
    **_rows((0, 0, 1, 0, 0, 1), "_convert_indices_from_coo_to_csr"),
    **_rows((0, 1, 0, 0, 1, 0), "_spdiags"),
    **_rows((0, 1, 0, 1, 1, 0), "_sparse_semi_structured_tile"),
    **_rows(STREAM, "_sparse_semi_structured_apply_dense copy_sparse_to_sparse"),
    **_rows(STREAM, "_gather_sparse_backward"),
    **_rows(REDUCTION, "_sparse_sum _sparse_csr_sum _sparse_csr_prod sparse_compressed_tensor"),
    **_rows(REDUCTION, "sparse_csr_tensor sparse_csc_tensor sparse_bsr_tensor sparse_bsc_tensor"),
    **_rows(
        REDUCTION, "_validate_compressed_sparse_indices _validate_sparse_compressed_tensor_args"
    ),
    **_rows(REDUCTION, "_validate_sparse_csr_tensor_args _validate_sparse_csc_tensor_args"),
    **_rows(REDUCTION, "_validate_sparse_bsr_tensor_args _validate_sparse_bsc_tensor_args"),
    # Nested tensors: rows of unlike length, read from or written to padded ones by their offsets.
    **_rows(GATHER, "_nested_from_padded _nested_from_padded_tensor _nested_sum_backward"),
    **_rows(GATHER, "_nested_from_padded_and_nested_example _padded_dense_to_jagged_forward"),
    **_rows(GATHER, "_nested_tensor_from_mask"),
    **_rows(_FILLED_SCATTER, "to_padded_tensor nested_to_padded_tensor pad_sequence"),
    **_rows(_FILLED_SCATTER, "_jagged_to_padded_dense_forward"),
    **_rows(REDUCTION, "_nested_tensor_from_mask_left_aligned"),
    **_rows(_SOFTMAX, "_nested_tensor_softmax_with_shape"),
    **_rows(NOTHING, "_nested_tensor_from_tensor_list"),
    # Quantization: a range found is two reductions, values rounded are a stream.
    **_rows(_PRODUCT, "_scaled_mm_v2 _scaled_grouped_mm_v2 _weight_int4pack_mm"),
    **_rows(_PRODUCT, "_weight_int4pack_mm_for_cpu _weight_int4pack_mm_with_scales_and_zeros"),
    **_rows(_PRODUCT_PLUS, "_mixed_dtypes_linear _wrapped_quantized_linear_prepacked"),
    **_rows((0, 0, 0, 3, 2, 0), "_dyn_quant_matmul_4bit"),
    **_rows((0, 0, 0, 2, 1, 0), "quantize_per_tensor_dynamic fused_moving_avg_obs_fake_quant"),
    **_rows((0, 0, 0, 2, 1, 0), "_fused_moving_avg_obs_fq_helper fbgemm_linear_quantize_weight"),
    **_rows((0, 0, 0, 2, 1, 0), "_fused_moving_avg_obs_fq_helper_functional"),
    **_rows((0, 0, 0, 2, 1, 0), "_fake_quantize_learnable_per_tensor_affine_backward"),
    **_rows((0, 0, 0, 2, 1, 0), "_fake_quantize_learnable_per_channel_affine_backward"),
    **_rows((0, 0, 0, 2, 0, 0), "_choose_qparams_per_tensor choose_qparams_optimized"),
    **_rows(_BATCH_NORM, "quantized_batch_norm"),
    **_rows(STREAM, "_fake_quantize_learnable_per_tensor_affine fake_quantize_per_tensor_affine"),
    **_rows(STREAM, "_fake_quantize_learnable_per_channel_affine fake_quantize_per_channel_affine"),
    **_rows(STREAM, "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams int_repr"),
    **_rows(STREAM, "_make_per_channel_quantized_tensor _saturate_weight_to_fp16"),
    # Weights packed for a library: read in order, written in tiles.
    **_rows(STREAM, "_convert_weight_to_int4pack _convert_weight_to_int4pack_for_cpu"),
    **_rows(
        STREAM, "_dyn_quant_pack_4bit_weight _wrapped_linear_prepack mkldnn_reorder_conv3d_weight"
    ),
    **_rows(STREAM, "fbgemm_pack_gemm_matrix_fp16 fbgemm_pack_quantized_matrix"),
    **_rows(STREAM, "_reorder_convolution_weight _reorder_convolution_transpose_weight"),
    **_rows(STREAM, "_reorder_linear_weight _reorder_mkldnn_rnn_layer_weight"),
    **_rows(TRANSPOSE, "_mkldnn_transpose"),
    # Element by element, where torch has no tag for it.
    **_rows(STREAM, "__iand__ __ior__ __irshift__ _add_relu special_ndtr log_sigmoid glu_jvp"),
    **_rows(STREAM, "glu_backward_jvp _standard_gamma_grad _dirichlet_grad chalf _pad_circular"),
    **_rows(STREAM, "rrelu_with_noise_functional feature_alpha_dropout _pad_enum _conj_copy"),
    **_rows(STREAM, "_neg_view_copy _cast_Byte _cast_Char _cast_Short _cast_Int _cast_Long"),
    **_rows(STREAM, "_cast_Half _cast_Float _cast_Double _new_zeros_with_same_feature_meta"),
    **_rows(STREAM, "randint_like _dim_arange"),
    **_rows(STREAM, "_sobol_engine_draw _sobol_engine_ff _sobol_engine_scramble"),
    **_rows(STREAM, "_sobol_engine_initialize_state _philox_normal _philox_uniform"),
    **_rows(STREAM, "_philox_key_fold_in _philox_key_split"),
    **_rows((0, 0, 0, 1, 2, 0), "_sample_dirichlet"),
    # Names of `prims` that differ from ATen's.
    **_rows(STREAM, "bessel_i0 bessel_i0e bessel_i1 bessel_i1e bessel_j0 bessel_j1 cbrt erf_inv"),
    **_rows(STREAM, "erfcx ndtri spherical_bessel_j0 zeta shift_left shift_right_arithmetic"),
    **_rows(STREAM, "copy_to convert_element_type iota"),
    **_rows(NOTHING, "copy_strided device_put collapse reshape"),
    # Copies of whole tensors under other names, and torch's own test operators, which copy or add.
    **_rows(NOTHING, "_mkldnn_reshape _to_cpu flatten_dense_tensors _cudnn_rnn_flatten_weight"),
    **_rows(NOTHING, "_foobar _test_autograd_multiple_dispatch _test_warn_in_autograd"),
    **_rows(NOTHING, "_test_ambiguous_defaults _test_check_tensor _test_string_default"),
    **_rows(NOTHING, "_test_functorch_fallback _test_parallel_materialize"),
    **_rows(
        STREAM, "_test_optional_intlist _test_optional_filled_intlist _test_optional_floatlist"
    ),
    **_rows(STREAM, "_test_serialization_subcmul"),
}
"""Our counts by base name."""

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
