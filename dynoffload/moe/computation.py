"""Computes the experts of a mixture for a routing decision, without a routed copy of the tokens.

Source: MoEBlaze (arXiv 2601.05296), section 3. The first product gathers tokens by index, and the
second adds results to their tokens, so no tensor of (L·k, d) exists in forward or backward. Only
the first product is saved, A and B of SwiGLU. The paper also saves the activation's result, which
here is recomputed by one multiplication, as ``silu`` is recomputed anyway. For gate g, dY·W3ᵀ is
computed once: its product with that result gives dg, and g times it is propagated.

[Note: chain]  Each expert with tokens is one autograd node, which adds its part to the result in
place. So backward runs the experts one by one, from last to first. The gradients of tokens and
gates are summed in one tensor each. Those of an expert's matrices are complete, and can be
released, before the next expert's are computed. Each token's sum goes through the experts in order,
so the bits do not depend on what is resident.

[Note: tiles]  An expert's tokens are processed `TILE` at a time, so that gathered rows stay small
compared with (L·k, d) even if all tokens go to one expert.

[Note: compiled]  torch.compile traces custom autograd nodes one by one and loses the gradients of
slices. So it must not compile this code.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from dynoffload.errors import ConfigError
from dynoffload.moe import kernels as gpu
from dynoffload.moe.activations import Activation, SwiGLU
from dynoffload.moe.indices import Routing, route
from dynoffload.moe.slices import Gathering, Sliced, Slices, slices_of

TILE = 1024
"""Number of an expert's rows gathered at a time."""
_SIGNED_ZERO_ROWS = 8  # products of so few rows may contain -0; larger ones accumulate from +0

Function = TypeVar("Function", bound=Callable[..., Any])
_Weight = torch.Tensor | Sliced
Weights = tuple[_Weight, _Weight, _Weight | None, _Weight | None]
"""Up, down, and the biases of both."""


@dataclass(eq=False)
class _Call:
    """State shared by the autograd nodes of one call.

    Attributes:
        routing: of the tokens.
        activation: between the products.
        transposed: whether matrices are (in, out), not (out, in).
        first: the expert whose node runs last in backward.
        last: the expert whose node runs first in backward.
        places: collectors for the gradients of the first and of the second matrices, where known.
            They do not include the matrices, so the graph does not keep these alive.
        sums: gradients of tokens and gates, accumulated in backward.
    """

    routing: Routing
    activation: Activation
    transposed: bool
    first: int
    last: int
    places: tuple[Gathering | None, ...] = ()
    sums: list[torch.Tensor | None] = field(default_factory=list)

    def place(self, which: int, expert: int, matrix: torch.Tensor) -> torch.Tensor:
        """Return memory for the gradient of an expert's first or second matrix."""
        own = self.places[which]
        found = None if own is None else own.offer(expert, matrix)
        return torch.empty_like(matrix) if found is None else found

    def rows(self, expert: int) -> list[tuple[slice, torch.Tensor]]:
        """Return the tiles of an expert: a slice of its rows, and the indices of their tokens."""
        tokens = self.routing.expert_token_indices[self.routing.of(expert)]
        count = len(tokens)
        starts = range(0, count, TILE)
        return [
            (slice(start, min(start + TILE, count)), tokens[start : start + TILE])
            for start in starts
        ]


def _product(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``rows`` times ``matrix``, (in, out), plus the bias."""
    return torch.mm(rows, matrix) if bias is None else torch.addmm(bias, rows, matrix)


def _add_product(
    into: torch.Tensor, rows: torch.Tensor, gradient: torch.Tensor, transposed: bool, is_first: bool
) -> None:
    """Add a matrix's gradient in the matrix's layout; the first overwrites uninitialized memory."""
    left, right = (rows, gradient) if transposed else (gradient, rows)
    torch.addmm(into, left.t(), right, beta=0 if is_first else 1, out=into)
    if len(rows) <= _SIGNED_ZERO_ROWS:
        into += 0.0


class _Expert(torch.autograd.Function):
    """Adds one expert's contribution to the result; see [Note: chain]."""

    @staticmethod
    def forward(
        ctx: Any,
        out: torch.Tensor,
        tokens: torch.Tensor,
        gates: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        call: _Call,
        expert: int,
    ) -> torch.Tensor:
        tiles = call.rows(expert)
        own = call.routing.of(expert)
        w_up, w_down = (up, down) if call.transposed else (up.t(), down.t())
        first = tokens.new_empty(own.stop - own.start, w_up.shape[1])
        for rows, index in tiles:
            given = tokens.index_select(0, index)
            if up_bias is None:
                torch.mm(given, w_up, out=first[rows])
            else:
                torch.addmm(up_bias, given, w_up, out=first[rows])
            between = tokens.new_empty(len(index), w_down.shape[0])
            call.activation.forward(first[rows], between)
            made = _product(between, w_down, down_bias)
            made *= gates[own][rows].unsqueeze(1)  # gates in their own dtype, rounded once
            out.index_add_(0, index, made.to(out.dtype))
        ctx.call, ctx.expert = call, expert
        ctx.save_for_backward(tokens, gates, up, down, down_bias, first)
        ctx.has_up_bias = up_bias is not None
        ctx.mark_dirty(out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        with torch.autocast(gradients[0].device.type, enabled=False):
            try:
                return _Expert._backward(ctx, *gradients)
            except BaseException:
                ctx.call.sums = []
                raise

    @staticmethod
    def _backward(ctx: Any, d_out: torch.Tensor) -> tuple[Any, ...]:
        tokens, gates, up, down, down_bias, first = ctx.saved_tensors
        call, expert = ctx.call, ctx.expert
        needs = dict(
            zip(("out", "tokens", "gates", "up", "down"), ctx.needs_input_grad, strict=False)
        )
        own = call.routing.of(expert)
        w_up, w_down = (up, down) if call.transposed else (up.t(), down.t())
        if expert == call.last:
            call.sums = [
                torch.zeros_like(tokens) if needs["tokens"] else None,
                torch.zeros_like(gates) if needs["gates"] else None,
            ]
        d_tokens, d_gates = call.sums
        d_up = call.place(0, expert, up) if needs["up"] else None
        d_down = call.place(1, expert, down) if needs["down"] else None
        d_up_bias = up.new_zeros(w_up.shape[1]) if ctx.has_up_bias else None
        d_down_bias = None if down_bias is None else torch.zeros_like(down_bias)
        for rows, index in call.rows(expert):
            d_made = d_out.index_select(0, index).to(tokens.dtype)
            g = gates[own][rows].unsqueeze(1)
            back = torch.mm(d_made, w_down.t())
            between, made = call.activation.again(first[rows])
            if d_gates is not None:
                d_g = (back * between).sum(1, dtype=gates.dtype)
                if down_bias is not None:
                    d_g += d_made @ down_bias
                d_gates[own][rows] = d_g
            d_made *= g
            back *= g
            if d_down is not None:
                _add_product(d_down, between, d_made, call.transposed, is_first=not rows.start)
            if d_down_bias is not None:
                d_down_bias += d_made.sum(0)
            del between
            d_first = call.activation.backward(first[rows], back, made)
            del back, made
            if d_up is not None:
                given = tokens.index_select(0, index)
                _add_product(d_up, given, d_first, call.transposed, is_first=not rows.start)
            if d_up_bias is not None:
                d_up_bias += d_first.sum(0)
            if d_tokens is not None:
                d_tokens.index_add_(0, index, torch.mm(d_first, w_up.t()))
        if expert == call.first:
            call.sums = []
        else:
            d_tokens = d_gates = None
        return (
            d_out,
            d_tokens,
            d_gates,
            d_up,
            d_down,
            d_up_bias,
            d_down_bias,
            None,
            None,
        )


def _uncompiled(function: Function) -> Function:
    """Exclude a function from torch.compile; see [Note: compiled]."""
    disabled = torch._disable_dynamo(function)  # type: ignore[attr-defined]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        compiles = "torch._dynamo" in sys.modules
        return (disabled if compiles else function)(*args, **kwargs)

    return call  # type: ignore[return-value]


@_uncompiled
def experts(
    tokens: torch.Tensor,
    chosen: torch.Tensor | Routing,
    gates: torch.Tensor,
    up: torch.Tensor | Sliced,
    down: torch.Tensor | Sliced,
    *,
    up_bias: torch.Tensor | Sliced | None = None,
    down_bias: torch.Tensor | Sliced | None = None,
    activation: Activation | None = None,
    transposed: bool = False,
    count: int | None = None,
    kernels: bool | None = None,
) -> torch.Tensor:
    """Return the sum of each token's experts, weighted by their gates.

    Args:
        tokens: (L, d).
        chosen: the experts of each token, integers of (L, k), or the `Routing` made from them.
        gates: weight of each choice, (L, k).
        up: the first matrices, (E, p·h, d), with p = 2 parts (gate, then up) for SwiGLU.
        down: the second matrices, (E, d, h).
        up_bias: (E, p·h).
        down_bias: (E, d).
        activation: SwiGLU by default.
        transposed: ``up`` is (E, d, p·h) and ``down`` (E, h, d).
        count: E, if ``up`` is not a tensor.
        kernels: whether to use Triton's kernels, which support SwiGLU and SiLU without biases, with
            matrices that are tensors. By default they are used on a GPU where supported.

    Returns:
        (L, d), in the dtype of ``tokens``.

    Raises:
        ConfigError: shapes do not match, or kernels were requested for an unsupported call.
    """
    activation = activation or SwiGLU()
    weights: Weights = (up, down, up_bias, down_bias)
    if not isinstance(chosen, Routing):
        if count is None:
            if not isinstance(up, torch.Tensor):
                raise ConfigError("experts() needs count= where matrices are no tensors")
            count = len(up)
        chosen = route(chosen, count)
    shape = chosen.token_expert_indices.shape
    if tokens.dim() != 2 or len(tokens) != shape[0] or gates.shape != shape:
        raise ConfigError(
            f"tokens are (L, d) and gates (L, k): not {tuple(tokens.shape)} and "
            f"{tuple(gates.shape)}, for choices of {tuple(shape)}"
        )
    _check_shapes(tokens, chosen, weights, activation, transposed)
    hit = chosen.hit()
    if not hit:
        # Zeros, with zero gradients for tokens and gates.
        return torch.zeros_like(tokens) + (tokens[:0].sum() + gates[:0].sum())
    out = torch.zeros_like(tokens)
    kind = tokens.device.type
    if torch.is_autocast_enabled(kind) and tokens.dtype != torch.float64:  # as torch does
        tokens = tokens.to(torch.get_autocast_dtype(kind))
    if isinstance(up, torch.Tensor) and isinstance(down, torch.Tensor):
        wanted = gpu.suits(tokens, gates, up, down) if kernels is None else kernels
        biases = up_bias is not None or down_bias is not None
        why = wanted and gpu.refusal(tokens, up, down, biases=biases, activation=activation)
        if wanted and not why:
            return gpu.fused(tokens, gates, up, down, chosen, transposed, activation, out.dtype)
    else:
        why = "matrices are no tensors"
    if kernels:
        raise ConfigError(f"kernels cannot compute these experts: {why}")
    sliced = [slices_of(one) for one in weights]
    call = _Call(chosen, activation, transposed, hit[0], hit[-1])
    own = torch.empty_like(gates.reshape(-1)).index_copy(
        0, chosen.token_index_map.reshape(-1), gates.reshape(-1)
    )
    own = own.to(torch.promote_types(own.dtype, tokens.dtype))
    for expert in hit:
        parts = [None if one is None else one[expert].to(tokens.dtype) for one in sliced]
        with torch.autocast(kind, enabled=False):
            out = _Expert.apply(out, tokens, own, *parts, call, expert)  # type: ignore[no-untyped-call]
    call.places = tuple(one.gathering if isinstance(one, Slices) else None for one in sliced[:2])
    return out


def _check_shapes(
    tokens: torch.Tensor,
    routing: Routing,
    weights: Weights,
    activation: Activation,
    transposed: bool,
) -> None:
    """Check tensor shapes; mismatches could be broadcast silently or skip experts."""
    down = weights[1]
    if not isinstance(down, torch.Tensor):
        return
    count, width = routing.experts, tokens.shape[1]
    hidden = down.shape[1 if transposed else 2] if down.dim() == 3 else 0
    first = activation.parts * hidden
    matrices = (
        ((width, first), (hidden, width)) if transposed else ((first, width), (width, hidden))
    )
    for name, one, wanted in zip(
        ("up", "down", "up_bias", "down_bias"),
        weights,
        (*matrices, (first,), (width,)),
        strict=True,
    ):
        if isinstance(one, torch.Tensor) and one.shape != (count, *wanted):
            raise ConfigError(
                f"{name} is {tuple(one.shape)} and not {(count, *wanted)}, for {count} experts of "
                f"tokens {width} wide, with {hidden} columns between the products"
            )
