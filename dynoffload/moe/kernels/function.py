"""Experts on a GPU as one autograd node.

`Fused` launches `dynoffload.moe.kernels.products`. No tensor of (L·k, d) exists in forward or
backward; saved are the first product, (L·k, p·h), and the activation's result, (L·k, h).
``torch.use_deterministic_algorithms`` fixes the kernels' block sizes, and so the bits across
processes. Within one process, a shape has the same bits in each run once block sizes are chosen.

On an H200 they are slower than products of cuBLAS (docs/moe.md).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

from dynoffload.moe.indices import Routing
from dynoffload.moe.kernels import products

_TILE = 32  # tokens; the tiles of `combine_kernel` are multiples of it


def bounds_of(routing: Routing) -> torch.Tensor:
    """Return where each tile of `_TILE` tokens begins among the sorted tokens of each expert.

    Returns:
        int32, (tiles + 1, E), positions in ``expert_token_indices``; a row ends at the next one.
    """
    order, length = routing.expert_token_indices, routing.tokens
    device, offsets = order.device, routing.expert_token_offsets
    experts = torch.arange(routing.experts + 1, device=device)
    ends = torch.cat((offsets[1:], offsets.new_tensor([len(order)])))
    of = experts.repeat_interleave(ends - offsets, output_size=len(order))
    tiles = torch.arange(0, length + _TILE, _TILE, device=device).clamp_(max=length)
    # Each expert's tokens are sorted, so (expert, token) pairs are sorted too.
    wanted = tiles.unsqueeze(1) + experts[:-1] * length
    return torch.searchsorted(of * length + order, wanted).int()


def _device_context(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which kernels are launched on ``device``."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _launch(kernel: Any, grid: Any, *arguments: Any, **settings: Any) -> None:
    """Launch with autotuned block sizes, or with the first if the choice must be deterministic."""
    if products.INTERPRETED or torch.are_deterministic_algorithms_enabled():
        first = kernel.configs[0]
        settings |= first.kwargs
        settings |= {"num_warps": first.num_warps, "num_stages": first.num_stages}
        kernel.fn[grid](*arguments, **settings)
    else:
        kernel[grid](*arguments, **settings)


def _exactness(dtype: torch.dtype) -> dict[str, Any]:
    """Return how products of a dtype are summed; TF32 if torch's own products use it."""
    kinds = {
        torch.float64: tl.float64,
        torch.float32: tl.float32,
        torch.bfloat16: tl.float32 if products.INTERPRETED else tl.bfloat16,  # lacks a bf16 dot
        torch.float16: tl.float16,
    }
    loose = torch.get_float32_matmul_precision() != "highest"
    return {
        "AS": kinds[dtype],
        "ACC": tl.float64 if dtype == torch.float64 else tl.float32,
        "PRECISION": "tf32" if loose and dtype == torch.float32 else "ieee",
    }


def _placing(dtype: torch.dtype) -> str:
    """Return the precision for placing results: no less than that of ``dtype``."""
    if dtype in (torch.float32, torch.float64):
        return str(_exactness(dtype)["PRECISION"])
    return "tf32" if dtype == torch.bfloat16 else "tf32x3"


def _combine(
    given: torch.Tensor,
    weight: torch.Tensor,
    gates: torch.Tensor | None,
    routing: Routing,
    bounds: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return (L, n): sums over choices of gate · ``given``, (N, m), times ``weight``, (E, m, n)."""
    inner, width = weight.shape[1:]
    out = given.new_empty(routing.tokens, width, dtype=dtype)
    _launch(
        products.combine_kernel,
        lambda meta: (triton.cdiv(routing.tokens, meta["BT"]), triton.cdiv(width, meta["BN"])),
        given,
        routing.expert_token_indices,
        bounds,
        given if gates is None else gates,
        weight,
        out,
        routing.tokens,
        routing.experts,
        inner,
        width,
        len(bounds) - 1,
        *weight.stride(),
        GATE=gates is not None,
        TILE=_TILE,
        PLACING=_placing(given.dtype),
        **_exactness(given.dtype),
    )
    return out


def _weights(
    left: torch.Tensor,
    right: torch.Tensor,
    gates: torch.Tensor | None,
    routing: Routing,
    out: torch.Tensor,
) -> None:
    """Fill ``out``, (E, m, n): ``left``ᵀ, (N, m), times gathered ``right``, (L, n), with gates."""
    height, width = out.shape[1:]
    _launch(
        products.weights_kernel,
        lambda meta: (
            routing.experts * triton.cdiv(height, meta["BM"]),
            triton.cdiv(width, meta["BN"]),
        ),
        left,
        right,
        routing.expert_token_indices,
        routing.expert_token_offsets,
        left if gates is None else gates,
        out,
        routing.experts,
        height,
        width,
        *out.stride(),
        GATE=gates is not None,
        **_exactness(left.dtype),
    )


class Fused(torch.autograd.Function):
    """Sum of each token's experts weighted by gates; see `dynoffload.moe.computation.experts`."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: torch.Tensor,
        gates: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        routing: Routing,
        transposed: bool,
        gated: bool,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return (L, d) of ``dtype``.

        Args:
            ctx: autograd's context.
            tokens: (L, d); they, up and down have the dtype in which products are computed.
            gates: (L, k).
            up: (E, p·h, d), or (E, d, p·h) if ``transposed``.
            down: (E, d, h), or (E, h, d).
            routing: with at least one choice of an expert.
            transposed: the layout of matrices.
            gated: SwiGLU, else SiLU.
            dtype: of the result.
        """
        tokens = tokens.contiguous()
        w_up = up.transpose(1, 2) if transposed else up
        w_down = down.transpose(1, 2) if transposed else down
        count, (width, hidden) = routing.token_index_map.numel(), w_down.shape[1:]
        own = torch.empty_like(gates.reshape(-1))
        own[routing.token_index_map.reshape(-1)] = gates.reshape(-1)
        first = tokens.new_empty(count, w_up.shape[1])
        between = tokens.new_empty(count, hidden)
        with _device_context(tokens.device):
            bounds = bounds_of(routing)
            _launch(
                products.up_kernel,
                lambda meta: (
                    triton.cdiv(count, meta["BM"]) + routing.experts,
                    triton.cdiv(hidden, meta["BN"]),
                ),
                tokens,
                routing.expert_token_indices,
                routing.expert_token_offsets,
                w_up,
                first,
                between,
                routing.experts,
                width,
                hidden,
                *w_up.stride(),
                EP=triton.next_power_of_2(routing.experts),
                GATED=gated,
                **_exactness(tokens.dtype),
            )
            out = _combine(between, w_down.transpose(1, 2), own, routing, bounds, dtype)
        ctx.save_for_backward(tokens, own, up, down, first, between, bounds)
        ctx.routing, ctx.transposed, ctx.gated = routing, transposed, gated
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients of tokens, gates and matrices."""
        tokens, own, up, down, first, between, bounds = ctx.saved_tensors
        routing: Routing = ctx.routing
        need_tokens, need_gates, need_up, need_down = ctx.needs_input_grad[:4]
        d_out = gradients[0].to(tokens.dtype).contiguous()
        w_up = up.transpose(1, 2) if ctx.transposed else up
        w_down = down.transpose(1, 2) if ctx.transposed else down
        count, (width, hidden) = len(first), w_down.shape[1:]
        exactness = _exactness(tokens.dtype)
        shares = torch.zeros(
            triton.cdiv(hidden, products.SPLIT),
            count,
            dtype=torch.promote_types(tokens.dtype, torch.float32),
            device=tokens.device,
        )
        d_first = torch.empty_like(first)
        d_tokens = d_gates = d_up = d_down = None
        with _device_context(tokens.device):
            _launch(
                products.back_kernel,
                lambda meta: (
                    triton.cdiv(count, meta["BM"]) + routing.experts,
                    triton.cdiv(hidden, products.SPLIT),
                ),
                d_out,
                routing.expert_token_indices,
                routing.expert_token_offsets,
                own,
                w_down,
                first,
                between,
                d_first,
                shares,
                count,
                routing.experts,
                width,
                hidden,
                *w_down.stride(),
                EP=triton.next_power_of_2(routing.experts),
                GATED=ctx.gated,
                BN=products.SPLIT,
                **exactness,
            )
            if need_gates:
                d_gates = shares.sum(0).to(own.dtype)[routing.token_index_map]
            if need_down:
                d_down = torch.empty_like(down, memory_format=torch.contiguous_format)
                made = d_down if ctx.transposed else d_down.transpose(1, 2)
                _weights(between, d_out, own, routing, made)
            if need_up:
                d_up = torch.empty_like(up, memory_format=torch.contiguous_format)
                made = d_up.transpose(1, 2) if ctx.transposed else d_up
                _weights(d_first, tokens, None, routing, made)
            if need_tokens:
                d_tokens = _combine(d_first, w_up, None, routing, bounds, tokens.dtype)
        return d_tokens, d_gates, d_up, d_down, None, None, None, None
