# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Triton kernels for experts: rows are gathered when loaded; one program owns each sum.

`up_kernel` gathers tokens inside the first product and computes gate and up from one load.
`combine_kernel` fuses a second product with the sum over a token's choices; it ends forward and
computes the gradient of tokens. `back_kernel` is dY·W3ᵀ with the derivatives of the activation and
of gates; `weights_kernel` is the gradient of matrices.

[Note: combine]  A program owns a tile of tokens and columns and accumulates it in registers. So
there are no atomics, no (L·k, d) tensor, and one order of sums: through experts in order. Each
expert's tokens are sorted, so a tile's tokens are one run of its rows (`bounds_of`), which `tl.dot`
loads densely. A product with a matrix of 0 and 1 adds the run's results to their tokens; its cost
relative to the first is (tokens of a tile) / (inner width). As 0 times infinity is NaN, non-finite
results are left out there, and their token's columns are set to NaN at the end.

Source: MoEBlaze (arXiv 2601.05296), section 3. On an H200 they are slower than products of
cuBLAS (docs/moe.md). Sums are in float32, or float64 for float64. Block sizes are autotuned once
for each width; they determine the order of sums, and so the bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether the kernels run as Python on the host."""

SPLIT = 64
"""Columns per program of `back_kernel`; each program adds one partial sum to a row's gate."""


def _configs(*blocks: dict[str, int]) -> list[triton.Config]:
    """Return the configurations to autotune; only the first in the interpreter."""
    return [
        triton.Config(one, num_warps=4 if stages == 3 else 8, num_stages=stages)
        for one in blocks[: 1 if INTERPRETED else None]
        for stages in (3, 4)[: 1 if INTERPRETED else None]
    ]


@triton.jit
def _rows_of(offsets, experts, pid, EP: tl.constexpr, BM: tl.constexpr):
    """Return a row tile's expert, its first row and the expert's end; an expert >= EP: none."""
    e = tl.arange(0, EP)
    low = tl.load(offsets + e, mask=e < experts, other=0)
    high = tl.load(offsets + e + 1, mask=e < experts, other=0)
    tiles = (high - low + BM - 1) // BM
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= pid).to(tl.int64), 0)
    here = e == expert
    first = tl.sum(tl.where(here, low + (pid - ends + tiles) * BM, 0), 0)
    return expert, first, tl.sum(tl.where(here, high, 0), 0)


@triton.jit
def _product(left, right, onto, AS: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr):
    """Return ``onto + left @ right``, with operands in dtype ``AS``."""
    return tl.dot(left.to(AS), right.to(AS), onto, input_precision=PRECISION, out_dtype=ACC)


@triton.autotune(
    configs=_configs(
        {"BM": 64, "BN": 64, "BK": 32},
        {"BM": 128, "BN": 64, "BK": 32},
        {"BM": 128, "BN": 128, "BK": 32},
        {"BM": 32, "BN": 64, "BK": 64},
    ),
    key=["width", "hidden", "experts"],
)
@triton.jit
def up_kernel(
    tokens,
    order,
    offsets,
    up,
    first,
    between,
    experts,
    width,
    hidden,
    up_e,
    up_r,
    up_c,
    EP: tl.constexpr,
    GATED: tl.constexpr,
    AS: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Fill first (N, p·h), tokens (L, d) by up (E, p·h, d), and between (N, h), its activation."""
    expert, start, stop = _rows_of(offsets, experts, tl.program_id(0), EP, BM)
    if expert >= experts:
        return
    rows = start + tl.arange(0, BM)
    inside = rows < stop
    own = tl.load(order + rows, mask=inside, other=0)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    kept = columns < hidden
    weight = up + expert * up_e + columns[None, :].to(tl.int64) * up_r
    a = tl.zeros((BM, BN), dtype=ACC)
    b = tl.zeros((BM, BN), dtype=ACC)
    for begin in range(0, width, BK):
        k = begin + tl.arange(0, BK)
        x = tl.load(
            tokens + own[:, None] * width + k[None, :],
            mask=inside[:, None] & (k[None, :] < width),
            other=0.0,
        )
        within = (k[:, None] < width) & kept[None, :]
        w = tl.load(weight + k[:, None].to(tl.int64) * up_c, mask=within, other=0.0)
        a = _product(x, w, a, AS, ACC, PRECISION)
        if GATED:
            w = tl.load(
                weight + tl.cast(hidden, tl.int64) * up_r + k[:, None].to(tl.int64) * up_c,
                mask=within,
                other=0.0,
            )
            b = _product(x, w, b, AS, ACC, PRECISION)
    both = inside[:, None] & kept[None, :]
    made = a / (1 + tl.exp(-a))
    if GATED:
        made = made * b
        to = first + rows[:, None] * (2 * hidden) + columns[None, :]
        tl.store(to, a.to(first.dtype.element_ty), mask=both)
        tl.store(to + hidden, b.to(first.dtype.element_ty), mask=both)
    else:
        to = first + rows[:, None] * hidden + columns[None, :]
        tl.store(to, a.to(first.dtype.element_ty), mask=both)
    to = between + rows[:, None] * hidden + columns[None, :]
    tl.store(to, made.to(between.dtype.element_ty), mask=both)


@triton.autotune(
    configs=_configs(
        {"BT": 64, "BM": 32, "BN": 64, "BK": 64},
        {"BT": 128, "BM": 32, "BN": 64, "BK": 64},
        {"BT": 128, "BM": 64, "BN": 64, "BK": 32},
        {"BT": 128, "BM": 16, "BN": 128, "BK": 32},
    ),
    key=["inner", "width", "experts"],
)
@triton.jit
def combine_kernel(
    given,
    order,
    bounds,
    gates,
    weight,
    out,
    length,
    experts,
    inner,
    width,
    tiles,
    w_e,
    w_k,
    w_n,
    GATE: tl.constexpr,
    TILE: tl.constexpr,
    AS: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    PLACING: tl.constexpr,
    BT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Out (L, width): sums over choices of given (N, inner) times weight (E, inner, width)."""
    tile = tl.program_id(0)
    mine = tile * BT + tl.arange(0, BT)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    kept = columns < width
    low_at = bounds + tile * (BT // TILE) * experts
    high_at = bounds + tl.minimum((tile + 1) * (BT // TILE), tiles) * experts
    total = tl.zeros((BT, BN), dtype=ACC)
    broken = tl.zeros((BT,), dtype=tl.int32)
    for expert in range(experts):
        high = tl.load(high_at + expert)
        matrix = weight + tl.cast(expert, tl.int64) * w_e + columns[None, :].to(tl.int64) * w_n
        for start in range(tl.load(low_at + expert), high, BM):
            rows = (start + tl.arange(0, BM)).to(tl.int64)
            inside = rows < high
            part = tl.zeros((BM, BN), dtype=ACC)
            for begin in range(0, inner, BK):
                at = begin + tl.arange(0, BK)
                row = tl.load(
                    given + rows[:, None] * inner + at[None, :],
                    mask=inside[:, None] & (at[None, :] < inner),
                    other=0.0,
                )
                w = tl.load(
                    matrix + at[:, None].to(tl.int64) * w_k,
                    mask=(at[:, None] < inner) & kept[None, :],
                    other=0.0,
                )
                part = _product(row, w, part, AS, ACC, PRECISION)
            if GATE:
                part *= tl.load(gates + rows, mask=inside, other=0.0).to(ACC)[:, None]
            own = tl.load(order + rows, mask=inside, other=-1)
            chosen = mine[:, None] == own[None, :]
            finite = tl.abs(part) < float("inf")
            bad = tl.max((finite == 0).to(tl.int32), 1)
            broken = tl.maximum(broken, tl.max(chosen.to(tl.int32) * bad[None, :], 1))
            part = tl.where(finite, part, 0.0)
            total = tl.dot(chosen.to(ACC), part, total, input_precision=PLACING, out_dtype=ACC)
    total = tl.where(broken[:, None] > 0, float("nan"), total)
    tl.store(
        out + mine[:, None].to(tl.int64) * width + columns[None, :],
        total.to(out.dtype.element_ty),
        mask=(mine[:, None] < length) & kept[None, :],
    )


@triton.autotune(
    configs=_configs(
        {"BM": 64, "BK": 32},
        {"BM": 128, "BK": 32},
        {"BM": 128, "BK": 64},
        {"BM": 32, "BK": 64},
    ),
    key=["width", "hidden", "experts"],
)
@triton.jit
def back_kernel(
    d_out,
    order,
    offsets,
    gates,
    down,
    first,
    between,
    d_first,
    shares,
    total,
    experts,
    width,
    hidden,
    down_e,
    down_r,
    down_c,
    EP: tl.constexpr,
    GATED: tl.constexpr,
    AS: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """Gradient (N, p·h) of the first product, and partial sums (h / BN, N) of gates' gradients."""
    expert, start, stop = _rows_of(offsets, experts, tl.program_id(0), EP, BM)
    if expert >= experts:
        return
    rows = start + tl.arange(0, BM)
    inside = rows < stop
    own = tl.load(order + rows, mask=inside, other=0)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    kept = columns < hidden
    weight = down + expert * down_e + columns[None, :].to(tl.int64) * down_c
    back = tl.zeros((BM, BN), dtype=ACC)
    for begin in range(0, width, BK):
        k = begin + tl.arange(0, BK)
        dy = tl.load(
            d_out + own[:, None] * width + k[None, :],
            mask=inside[:, None] & (k[None, :] < width),
            other=0.0,
        )
        w = tl.load(
            weight + k[:, None].to(tl.int64) * down_r,
            mask=(k[:, None] < width) & kept[None, :],
            other=0.0,
        )
        back = _product(dy, w, back, AS, ACC, PRECISION)
    both = inside[:, None] & kept[None, :]
    at = rows[:, None] * hidden + columns[None, :]
    y = tl.load(between + at, mask=both, other=0.0).to(ACC)
    share = shares + tl.program_id(1).to(tl.int64) * total + rows
    tl.store(share, tl.sum(back * y, 1), mask=inside)
    back *= tl.load(gates + rows, mask=inside, other=0.0).to(ACC)[:, None]
    if GATED:
        at = rows[:, None] * (2 * hidden) + columns[None, :]
        b = tl.load(first + at + hidden, mask=both, other=0.0).to(ACC)
    a = tl.load(first + at, mask=both, other=0.0).to(ACC)
    sigmoid = 1 / (1 + tl.exp(-a))
    if GATED:
        tl.store(
            d_first + at + hidden, (back * a * sigmoid).to(d_first.dtype.element_ty), mask=both
        )
        back *= b
    d_a = back * sigmoid * (1 + a * (1 - sigmoid))
    tl.store(d_first + at, d_a.to(d_first.dtype.element_ty), mask=both)


@triton.autotune(
    configs=_configs(
        {"BM": 64, "BN": 64, "BK": 32},
        {"BM": 128, "BN": 64, "BK": 32},
        {"BM": 128, "BN": 128, "BK": 32},
        {"BM": 64, "BN": 64, "BK": 64},
    ),
    key=["height", "width", "experts"],
)
@triton.jit
def weights_kernel(
    left,
    right,
    order,
    offsets,
    gates,
    out,
    experts,
    height,
    width,
    out_e,
    out_m,
    out_n,
    GATE: tl.constexpr,
    AS: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Out (E, m, n): per expert, left (N, m) transposed times gathered right (L, n) with gates."""
    blocks = tl.cdiv(height, BM)
    expert = tl.program_id(0) // blocks
    m = (tl.program_id(0) % blocks) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    stop = tl.load(offsets + expert + 1)
    made = tl.zeros((BM, BN), dtype=ACC)
    for start in range(tl.load(offsets + expert), stop, BK):
        rows = start + tl.arange(0, BK)
        inside = rows < stop
        own = tl.load(order + rows, mask=inside, other=0)
        one = tl.load(
            left + rows[None, :] * height + m[:, None],
            mask=inside[None, :] & (m[:, None] < height),
            other=0.0,
        )
        two = tl.load(
            right + own[:, None] * width + n[None, :],
            mask=inside[:, None] & (n[None, :] < width),
            other=0.0,
        )
        if GATE:
            gate = tl.load(gates + rows, mask=inside, other=0.0).to(ACC)
            two = (two.to(ACC) * gate[:, None]).to(right.dtype.element_ty)
        made = _product(one, two, made, AS, ACC, PRECISION)
    tl.store(
        out
        + expert.to(tl.int64) * out_e
        + m[:, None].to(tl.int64) * out_m
        + n[None, :].to(tl.int64) * out_n,
        made.to(out.dtype.element_ty),
        mask=(m[:, None] < height) & (n[None, :] < width),
    )
