"""Experts by Triton's kernels, against float64: in its interpreter where there is no GPU.

Tolerances are relative to the largest element: 1e-11 for float64, 2e-6 for float32 (sums of up to
150 products), 2e-2 for bfloat16 and 4e-3 for float16 (a few roundings of what is saved).
"""

from __future__ import annotations

import os

import pytest
import torch
from moe_reference import Allocations, choice, inputs, loop

from dynoffload.errors import ConfigError
from dynoffload.moe import experts, kernels, route
from dynoffload.moe.activations import Activation, SiLU, SwiGLU, Traced

pytest.importorskip("triton")

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
pytestmark = pytest.mark.skipif(
    not CUDA and os.environ.get("TRITON_INTERPRET") != "1", reason="neither GPU nor interpreter"
)

TOLERANCES = {
    torch.float64: 1e-11,
    torch.float32: 2e-6,
    torch.bfloat16: 2e-2,
    torch.float16: 4e-3,
}


def _choice(length: int, count: int, k: int) -> torch.Tensor:
    """Return a choice of (L, k)."""
    return choice(length, count, k).to(DEVICE)


def _inputs(
    chosen: torch.Tensor,
    count: int,
    width: int,
    hidden: int,
    dtype: torch.dtype = torch.float32,
    *,
    parts: int = 2,
    transposed: bool = False,
) -> list[torch.Tensor]:
    """Return tokens, gates and both matrices."""
    given = inputs(len(chosen), width, hidden, count, chosen.shape[1], parts)
    tokens, gates, up, down = (one.detach() for one in given)
    matrices = [up * width**-0.5, down * hidden**-0.5]
    if transposed:
        matrices = [one.transpose(1, 2).contiguous() for one in matrices]
    return [one.to(DEVICE, dtype) for one in (tokens, gates, *matrices)]


def _close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    """Compare by the tolerance of a dtype."""
    assert found.shape == wanted.shape
    largest = float(wanted.detach().abs().max()) or 1.0
    off = float((found.detach().double() - wanted.detach()).abs().max()) / largest
    assert off <= TOLERANCES[dtype], off


def _check(
    chosen: torch.Tensor,
    inputs: list[torch.Tensor],
    activation: Activation | None = None,
    transposed: bool = False,
) -> list[torch.Tensor]:
    """Compare the result and all gradients with those of float64; return what was found."""
    activation = activation or SwiGLU()
    dtype = inputs[0].dtype
    own = [one.clone().requires_grad_() for one in inputs]
    tokens, gates, up, down = own
    how = {"activation": activation, "transposed": transposed, "kernels": True}
    out = experts(tokens, chosen, gates, up, down, **how)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(9)
    d_out = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)
    found = [out, *torch.autograd.grad(out, own, d_out)]
    exact = [one.double().requires_grad_() for one in inputs]
    x, weights, *matrices = exact
    if transposed:
        matrices = [one.transpose(1, 2) for one in matrices]
    between = None if activation.parts == 2 else torch.nn.functional.silu
    wanted = loop(x, chosen, weights, *matrices, between=between)
    for one, other in zip(
        found, [wanted, *torch.autograd.grad(wanted, exact, d_out.double())], strict=True
    ):
        assert one.dtype == dtype
        _close(one, other.detach(), dtype)
    return found


@pytest.mark.parametrize(
    ("sizes", "count", "k", "dtype", "gated", "transposed"),
    [
        ((64, 64, 64), 4, 1, torch.float32, True, False),
        ((64, 64, 64), 4, 2, torch.float32, False, False),
        ((1, 1, 1), 3, 2, torch.float32, True, False),  # sizes that no block divides
        ((67, 37, 43), 3, 2, torch.float32, True, True),
        ((70, 80, 70), 3, 2, torch.float32, True, False),
        ((129, 5, 66), 3, 2, torch.float32, False, True),
        ((50, 48, 72), 4, 2, torch.bfloat16, True, False),
        ((50, 48, 72), 4, 2, torch.bfloat16, False, False),
        ((50, 48, 72), 4, 2, torch.float16, True, False),
        ((9, 20, 24), 12, 1, torch.float32, True, False),  # experts without tokens
    ],
)
def test_results_and_gradients(
    sizes: tuple[int, int, int],
    count: int,
    k: int,
    dtype: torch.dtype,
    gated: bool,
    transposed: bool,
) -> None:
    """Some choices are of no expert, and add nothing."""
    length, width, hidden = sizes
    chosen = _choice(length, count, k)
    chosen[torch.rand(length, k, generator=torch.Generator().manual_seed(0)) < 0.3] = count
    chosen[0] = torch.arange(k)
    activation = SwiGLU() if gated else SiLU()
    parts = activation.parts
    given = _inputs(chosen, count, width, hidden, dtype, parts=parts, transposed=transposed)
    *_, d_gates, d_up, d_down = _check(chosen, given, activation, transposed)
    assert not d_gates[chosen == count].any()
    for expert in set(range(count)) - set(chosen.flatten().tolist()):
        assert not d_up[expert].any()
        assert not d_down[expert].any()


def test_bits_are_the_same_in_each_run() -> None:
    chosen = _choice(70, 4, 2)
    inputs = _inputs(chosen, 4, 40, 40)
    for one, other in zip(_check(chosen, inputs), _check(chosen, inputs), strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # the interpreter's numpy
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_token_that_is_not_finite_leaves_others_as_they_are(value: float) -> None:
    chosen = _choice(20, 3, 2)
    tokens, gates, up, down = _inputs(chosen, 3, 8, 8)
    wanted = experts(tokens, chosen, gates, up, down, kernels=True)
    tokens[7, 3] = value
    found = experts(tokens, chosen, gates, up, down, kernels=True)
    others = torch.arange(20, device=DEVICE) != 7
    assert torch.equal(found[others], wanted[others])
    assert found[7].isnan().all()


def test_no_tensor_is_as_large_as_routed_tokens() -> None:
    chosen = _choice(128, 4, 4)
    tokens, gates, up, down = (one.requires_grad_() for one in _inputs(chosen, 4, 96, 4))
    with Allocations(96) as sizes:
        experts(tokens, chosen, gates, up, down, kernels=True).sum().backward()
    assert sizes.elements == 128 * 96


def test_autocast_and_the_dtype_of_tokens() -> None:
    chosen = _choice(20, 3, 2)
    tokens, gates, up, down = (one.requires_grad_() for one in _inputs(chosen, 3, 16, 16))
    with torch.autocast(DEVICE.type, torch.bfloat16):
        out = experts(tokens, chosen, gates, up, down, kernels=True)
    out.sum().backward()
    assert out.dtype == torch.float32
    assert up.grad is not None
    assert up.grad.dtype == torch.float32
    _close(out, loop(tokens, chosen, gates, up, down), torch.bfloat16)


def test_what_kernels_cannot_take_is_refused_with_a_reason() -> None:
    chosen = _choice(10, 3, 2)
    tokens, gates, up, down = _inputs(chosen, 3, 8, 8)
    cases = [
        ({"activation": Traced(torch.nn.functional.glu, 2)}, "neither SwiGLU nor SiLU"),
        ({"up_bias": up.new_zeros(3, 16)}, "biases"),
        ({"activation": SiLU()}, "up is"),
        ({"transposed": True}, "up is"),
    ]
    for given, said in cases:
        with pytest.raises(ConfigError, match=said):
            experts(tokens, chosen, gates, up, down, kernels=True, **given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no tensors"):
        experts(tokens, chosen, gates, list(up), list(down), kernels=True, count=3)


@pytest.mark.skipif(CUDA, reason="kernels run")
def test_kernels_asked_for_on_the_host_without_an_interpreter_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import triton

    chosen = _choice(10, 3, 2)
    tokens, gates, up, down = _inputs(chosen, 3, 8, 8)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ConfigError, match=r"cannot compute these experts: .*interpreter"):
        experts(tokens, route(chosen, 3), gates, up, down, kernels=True)


def test_only_plain_tensors_on_a_gpu_that_no_mode_watches_are_taken_unasked() -> None:
    given = torch.zeros(3, device=DEVICE)
    assert kernels.suits(given, torch.nn.Parameter(given)) == CUDA
    assert not kernels.suits(torch.zeros(3))
    with torch.utils._python_dispatch.TorchDispatchMode():
        assert kernels.watched()
        assert not kernels.suits(given)
    assert not kernels.watched()


def test_that_triton_is_missing_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    kernels.available.cache_clear()
    try:
        chosen = _choice(10, 3, 2)
        tokens, gates, up, down = _inputs(chosen, 3, 8, 8)
        for _ in range(2):
            assert not kernels.available()
            with pytest.raises(ConfigError, match="triton is not installed"):
                experts(tokens, route(chosen, 3), gates, up, down, kernels=True)
    finally:
        kernels.available.cache_clear()
    assert [record.message for record in caplog.records].count(caplog.records[0].message) == 1
