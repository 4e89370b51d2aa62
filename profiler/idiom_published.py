"""The rows of the idiom table that the paper prints, and where ours depart from them.

What it is: data, and the two look-ups by which docs/idioms.md compares. The paper is Ren et al.,
"Enabling Large Dynamic Neural Network Training with Learning-based Memory Management", HPCA 2024,
which introduced the encoding. What it is not: our rows (`dynoffload.profiler.idiom_rows`).
"""

from __future__ import annotations

from typing import Final

import torch

from dynoffload.profiler.idiom_rows import ROWS, Row
from dynoffload.profiler.idioms import Idioms, idioms_of

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

STAND_INS: Final[dict[str, tuple[str, ...]]] = {
    "dropout": ("bernoulli_", "div_", "mul"),
    "conv_transpose1d": ("convolution",),
    "conv_transpose2d": ("convolution",),
    "conv_transpose3d": ("convolution",),
    "avg_pool1d": ("avg_pool2d",),
    "adaptive_max_pool1d": ("adaptive_max_pool2d",),
    "max_pool1d": ("max_pool2d_with_indices",),
    "max_pool2d": ("max_pool2d_with_indices",),
    "max_pool3d": ("max_pool3d_with_indices",),
    "gather_backward": ("new_zeros", "scatter_add"),
    "embedding_backward": ("embedding_dense_backward",),
    "prelu_backward": ("_prelu_kernel_backward",),
    "l1_loss_backward": ("sgn", "mul"),
    "col2im_backward": ("im2col",),
    "im2col_backward": ("col2im",),
}
"""What training on a CPU executes in place of a printed operator: torch makes it of these, or has
no operator of that name any more. The tests run each of them."""

STAND_IN_DIFFERENCES: Final[dict[str, str]] = {
    "dropout": (
        "the printed row is one fused pass; on a CPU a mask is drawn, scaled and multiplied, and"
        " each of the three passes is executed as an operator of its own."
    ),
    "conv_transpose1d": (
        "torch executes it as a convolution with an argument that says so, and counts are by"
        " operator, not by argument."
    ),
    "conv_transpose2d": "the same, and the bias is not counted apart.",
    "conv_transpose3d": "the same, and the bias is not counted apart.",
    "gather_backward": (
        "scatter_add reads the index as it scatters, which is no gather of data; the zeros that it"
        " adds to are a stream."
    ),
    "l1_loss_backward": (
        "autograd multiplies by the sign, element by element; nothing is looked up or summed."
    ),
    "col2im_backward": (
        "autograd runs im2col, which reads each window by computed positions and sums nothing."
    ),
    "im2col_backward": (
        "autograd runs col2im, which adds each window to its place: a scatter with accumulation."
    ),
}
"""Why what is executed instead does not count as printed, by the published name."""


def ours(name: str) -> Idioms:
    """Return our counts for a printed name: of torch's operator, or of the row kept under it."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return Idioms(*ROWS[name])
    return idioms_of(getattr(packet, packet.overloads()[0]))


def stand_in(name: str) -> Idioms:
    """Return what the operators that are executed in place of ``name`` count together."""
    total = Idioms()
    for operator in STAND_INS[name]:
        total = total.plus(ours(operator))
    return total
