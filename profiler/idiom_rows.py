"""The rows of the idiom table: ATen operators whose counts are written down one by one.

What it is: data. `ROWS` is ours; `PUBLISHED` repeats the rows printed in the paper that introduced
the encoding (Ren et al., "Enabling Large Dynamic Neural Network Training with Learning-based Memory
Management", HPCA 2024), and `DIFFERENCES` says, for each published row from which ours departs,
why. What it is not: the rules that cover every operator without a row; those are in
`dynoffload.profiler.idioms`, which reads this file.

A row is ``(transpose, gather, scatter, reduction, stream, stencil)``, keyed by the operator's base
name: without namespace, overload and the trailing underscore of in-place variants.

[Note: how a row is counted]
Each pass over memory that the operator's algorithm makes counts once, under the pattern by which it
reads or writes: ``stream`` A[i]=f(A[i],B[i]); ``transpose`` A[i][j]=B[j][i]; ``gather``
A[i]=B[C[i]]; ``scatter`` A[C[i]]=B[i]; ``reduction`` s+=A[i]; ``stencil`` A[i]=f(A[i-1..i+1]). A
matrix product is one reduction (the inner dimension) and one stream (its output); a bias or a
scaled addend is one stream more. Scatter with accumulation is one scatter and one reduction. A copy
that keeps type and order counts nothing, as in the published table (its bytes are recorded beside
it). Where a published row exists it is kept, unless `DIFFERENCES` says why not.
"""

from __future__ import annotations

from typing import Final

Row = tuple[int, int, int, int, int, int]

NOTHING: Final[Row] = (0, 0, 0, 0, 0, 0)
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
_NORM: Final[Row] = (0, 0, 0, 2, 1, 0)
_NORM_BACKWARD: Final[Row] = (0, 0, 0, 4, 1, 0)
_POOL: Final[Row] = (0, 0, 0, 1, 0, 1)
_POOL_BACKWARD: Final[Row] = (0, 0, 1, 1, 0, 0)
_RECURRENT: Final[Row] = (0, 0, 0, 2, 6, 0)
_RESAMPLE: Final[Row] = (0, 1, 0, 0, 1, 1)


def _rows(row: Row, names: str) -> dict[str, Row]:
    return dict.fromkeys(names.split(), row)


ROWS: Final[dict[str, Row]] = {
    # Matrix products.
    **_rows(_PRODUCT, "mm bmm mv dot vdot matmul linear einsum inner outer ger kron chain_matmul"),
    **_rows(_PRODUCT, "_grouped_mm _scaled_mm _scaled_grouped_mm _weight_int8pack_mm _int_mm"),
    **_rows(_PRODUCT, "mkldnn_linear _sparse_mm _trilinear cdist _cdist_forward"),
    **_rows(_PRODUCT_PLUS, "addmm baddbmm addbmm addmv addr _addmm_activation sspaddmm"),
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
    **_rows((0, 0, 1, 1, 0, 1), "col2im"),
    **_rows((1, 0, 0, 1, 1, 1), "col2im_backward im2col_backward unfold_backward"),
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
    **_rows((0, 0, 0, 8, 7, 0), "_native_multi_head_attention _transformer_encoder_layer_fwd"),
    # Softmax and normalisation: a reduction per statistic, a stream per pass that writes.
    **_rows((0, 0, 0, 2, 2, 0), "_softmax _log_softmax _safe_softmax softmax log_softmax"),
    **_rows((0, 0, 0, 2, 2, 0), "_sparse_softmax _sparse_log_softmax _masked_softmax logsumexp"),
    **_rows(_PRODUCT, "_softmax_backward_data _log_softmax_backward_data _masked_softmax_backward"),
    **_rows(_PRODUCT, "_sparse_softmax_backward_data _sparse_log_softmax_backward_data"),
    **_rows(_NORM, "native_layer_norm layer_norm native_group_norm group_norm instance_norm"),
    **_rows(_PRODUCT, "_fused_rms_norm rms_norm _weight_norm_interface _weight_norm renorm"),
    **_rows(_NORM_BACKWARD, "native_layer_norm_backward native_group_norm_backward"),
    **_rows((0, 0, 0, 2, 1, 0), "_fused_rms_norm_backward _weight_norm_interface_backward"),
    **_rows((0, 1, 1, 1, 1, 0), "cudnn_batch_norm native_batch_norm batch_norm miopen_batch_norm"),
    **_rows((0, 1, 1, 1, 1, 0), "_native_batch_norm_legit _batch_norm_with_update"),
    **_rows((0, 1, 1, 1, 1, 0), "_native_batch_norm_legit_functional _batch_norm_no_update"),
    **_rows((0, 1, 1, 1, 1, 0), "_native_batch_norm_legit_no_training"),
    **_rows((0, 1, 1, 1, 1, 0), "_batch_norm_with_update_functional _batch_norm_impl_index"),
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
    **_rows(GATHER, "roll flip combinations cartesian_prod tril_indices triu_indices"),
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
    **_rows((0, 1, 1, 1, 0, 0), "unique_dim _unique _unique2 unique_consecutive"),
    **_rows((0, 1, 1, 1, 0, 0), "unique_dim_consecutive isin"),
    # Scans and reductions.
    **_rows(_PRODUCT, "cumsum cumprod cummax cummin logcumsumexp _cummax_helper _cummin_helper"),
    **_rows(_PRODUCT, "cumulative_trapezoid cumprod_backward cummaxmin_backward _logcumsumexp"),
    **_rows(REDUCTION, "sum mean nansum nanmean prod norm linalg_vector_norm amax amin max min"),
    **_rows(REDUCTION, "argmax argmin all any count_nonzero trace nll_loss_forward dist equal"),
    **_rows(REDUCTION, "nll_loss2d_forward nll_loss nll_loss_nd nll_loss2d _amp_update_scale"),
    **_rows(REDUCTION, "allclose is_nonzero _is_all_true _is_any_true trapezoid"),
    **_rows((0, 0, 0, 2, 0, 0), "aminmax _aminmax _linalg_check_errors"),
    # Losses.
    **_rows(GATHER, "nll_loss_backward nll_loss2d_backward"),
    **_rows((0, 1, 1, 1, 1, 0), "mse_loss_backward"),
    **_rows((0, 1, 1, 1, 0, 0), "l1_loss_backward"),
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
    **_rows(_PRODUCT, "gelu_backward silu_backward prelu_backward _prelu_kernel_backward"),
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
    **_rows((0, 0, 1, 1, 0, 1), "upsample_linear1d_backward upsample_bilinear2d_backward"),
    **_rows((0, 0, 1, 1, 0, 1), "upsample_trilinear3d_backward upsample_bicubic2d_backward"),
    **_rows((0, 0, 1, 1, 0, 1), "_upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward"),
    **_rows((0, 0, 1, 1, 0, 1), "grid_sampler_2d_backward grid_sampler_3d_backward"),
    **_rows((0, 0, 1, 1, 0, 1), "_grid_sampler_2d_cpu_fallback_backward"),
    **_rows((0, 0, 1, 1, 0, 1), "cudnn_grid_sampler_backward"),
    **_rows(_SCATTER_SUM, "upsample_nearest1d_backward upsample_nearest2d_backward"),
    **_rows(_SCATTER_SUM, "upsample_nearest3d_backward _upsample_nearest_exact1d_backward"),
    **_rows(_SCATTER_SUM, "_upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward"),
    **_rows(_SCATTER_SUM, "reflection_pad1d_backward reflection_pad2d_backward"),
    **_rows(_SCATTER_SUM, "reflection_pad3d_backward replication_pad1d_backward"),
    **_rows(_SCATTER_SUM, "replication_pad2d_backward replication_pad3d_backward"),
    # Recurrent cells and layers.
    **_rows((0, 0, 0, 0, 6, 0), "_thnn_fused_lstm_cell _thnn_fused_gru_cell"),
    **_rows((0, 0, 0, 1, 6, 0), "_thnn_fused_lstm_cell_backward _thnn_fused_gru_cell_backward"),
    **_rows((0, 0, 0, 1, 6, 0), "_thnn_fused_lstm_cell_backward_impl"),
    **_rows(_RECURRENT, "mkldnn_rnn_layer lstm gru rnn_tanh rnn_relu _cudnn_rnn miopen_rnn"),
    **_rows(_RECURRENT, "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"),
    **_rows((0, 0, 0, 4, 12, 0), "mkldnn_rnn_layer_backward _cudnn_rnn_backward"),
    **_rows((0, 0, 0, 4, 12, 0), "miopen_rnn_backward"),
    **_rows(GATHER, "_pack_padded_sequence _pad_packed_sequence"),
    **_rows(SCATTER, "_pack_padded_sequence_backward"),
    # Optimizers: one pass over parameter, gradient and state together.
    **_rows(STREAM, "_fused_adam _fused_adamw _fused_sgd _fused_adagrad"),
    **_rows(STREAM, "_amp_foreach_non_finite_check_and_unscale"),
    # Copies. Those that keep type and order count nothing; those that may convert are a stream.
    **_rows(NOTHING, "clone cat concat concatenate stack hstack vstack dstack diag diag_embed"),
    **_rows(NOTHING, "contiguous lift lift_fresh_copy repeat tile block_diag _copy_from"),
    **_rows(NOTHING, "_copy_from_and_resize pin_memory _pin_memory _chunk_cat"),
    **_rows(NOTHING, "_local_scalar_dense item _assert_async _functional_assert_async"),
    **_rows(STREAM, "copy to _to_copy type_as constant_pad_nd pad tril triu"),
    **_rows(STREAM, "_to_dense to_dense to_mkldnn mkldnn_reorder_conv2d_weight fill_diagonal"),
    **_rows(STREAM, "clamp where cross linalg_cross complex polar cosine_similarity zero fill"),
    **_rows(STREAM, "masked_fill floor_divide normal bernoulli binomial log_sigmoid_forward"),
    **_rows(STREAM, "hardswish hardswish_backward __and__ __or__ __xor__ __lshift__ __rshift__"),
    **_rows(STREAM, "log_sigmoid_backward linspace logspace isnan isinf isclose isreal"),
    **_rows(STREAM, "_cdist_backward _pdist_forward _pdist_backward pairwise_distance"),
    **_rows(STREAM, "_make_per_tensor_quantized_tensor quantize_per_tensor dequantize"),
    **_rows(STREAM, "quantize_per_channel fake_quantize_per_tensor_affine_cachemask"),
    **_rows(STREAM, "fake_quantize_per_channel_affine_cachemask"),
    **_rows((0, 0, 0, 1, 1, 1), "_fft_r2c _fft_c2r _fft_c2c stft istft"),
}
"""Our counts by base name."""

PUBLISHED: Final[dict[str, Row]] = {
    "transpose": (1, 0, 0, 0, 0, 0),
    "maximum": (0, 0, 0, 0, 1, 0),
    "elu": (0, 0, 0, 0, 1, 0),
    "dropout": (0, 0, 0, 0, 1, 0),
    "relu_": (0, 1, 0, 0, 0, 0),
    "add_": (0, 1, 0, 0, 0, 0),
    "cat": (0, 0, 0, 0, 0, 0),
    "clone": (0, 0, 0, 0, 0, 0),
    "diag": (0, 0, 0, 0, 0, 0),
    "convolution": (0, 1, 0, 1, 1, 2),
    "conv_tbc": (1, 1, 0, 1, 1, 2),
    "conv_transpose1d": (1, 1, 0, 1, 1, 2),
    "conv_transpose2d": (1, 1, 0, 1, 2, 2),
    "conv_transpose3d": (1, 1, 0, 1, 2, 2),
    "cudnn_convolution": (0, 1, 0, 1, 2, 2),
    "cudnn_convolution_relu": (0, 1, 0, 1, 3, 2),
    "cudnn_convolution_add_relu": (0, 1, 0, 2, 3, 2),
    "cudnn_batch_norm": (0, 1, 1, 1, 1, 0),
    "avg_pool1d": (0, 0, 0, 1, 0, 1),
    "adaptive_max_pool1d": (0, 0, 0, 1, 0, 1),
    "max_pool1d": (0, 0, 0, 1, 0, 0),
    "max_pool2d": (0, 0, 0, 1, 0, 0),
    "max_pool3d": (0, 0, 0, 1, 0, 1),
    "gather_backward": (0, 1, 1, 1, 0, 0),
    "embedding_backward": (0, 1, 1, 1, 1, 0),
    "nll_loss_backward": (0, 1, 0, 0, 0, 0),
    "gelu_backward": (0, 0, 0, 1, 1, 0),
    "silu_backward": (0, 0, 0, 1, 1, 0),
    "prelu_backward": (0, 0, 0, 1, 1, 0),
    "sigmoid_backward": (0, 0, 0, 1, 1, 0),
    "tanh_backward": (0, 0, 0, 1, 1, 0),
    "mse_loss_backward": (0, 1, 1, 1, 1, 0),
    "l1_loss_backward": (0, 1, 1, 1, 0, 0),
    "col2im_backward": (1, 0, 0, 1, 1, 1),
    "im2col_backward": (1, 0, 0, 1, 1, 1),
    "fbgemm_linear_int8_weight": (0, 1, 1, 1, 1, 0),
}
"""The printed rows known to us, by the printed name (``fbgemm`` under the ATen name it means)."""

DIFFERENCES: Final[dict[str, str]] = {
    "transpose": (
        "ATen's transpose returns a view and touches no data; the operator that later reads or"
        " copies the view does the work. The _copy variant keeps the published row."
    ),
    "relu_": (
        "in place or not, A[i]=f(A[i]) is a stream by the definition of the idioms; the published"
        " gather would make every activation in place look like a lookup by index."
    ),
    "add_": (
        "in place or not, A[i]=f(A[i],B[i]) is a stream by the definition of the idioms; the"
        " published gather would count each optimizer update as a lookup by index."
    ),
}
"""Why ours departs from the published row, by the published name."""
