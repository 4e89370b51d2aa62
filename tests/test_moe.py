"""Mixtures of experts without routed buffers: index structures, results, gradients, memory.

The reference is the loop over experts that everybody writes, under autograd, in float64.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_reference import Allocations, assert_close, choice, inputs, loop
from torch import Tensor, nn
from torch.nn import functional as F

from dynoffload.errors import ConfigError
from dynoffload.moe import MoE, experts, route
from dynoffload.moe.activations import SiLU, SwiGLU, Traced
from dynoffload.moe.slices import slices_of

# Index structures


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_choice_has_its_place(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 9))
    k = data.draw(st.integers(1, count))
    length = data.draw(st.integers(0, 40))
    chosen = choice(length, count, k, data.draw(st.integers(0, 99))).reshape(length, k)
    none = torch.rand(chosen.shape) < data.draw(st.sampled_from([0.0, 0.4, 1.0]))
    chosen[none] = count
    found = route(chosen, count)
    for expert in range(count):
        wanted = [t for t in range(length) if expert in chosen[t].tolist()]
        assert found.expert_token_indices[found.of(expert)].tolist() == wanted
    assert found.starts == tuple(found.expert_token_offsets.tolist())
    assert found.starts[-1] == int((~none).sum())
    order = found.expert_token_indices
    assert torch.equal(
        order[found.token_index_map], torch.arange(length).unsqueeze(1).expand(length, k)
    )
    assert sorted(found.token_index_map.reshape(-1).tolist()) == list(range(length * k))


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (torch.tensor([[0, 0]]), "twice for one token"),
        (torch.tensor([[0, 5]]), "names expert 5, and there are 4"),
        (torch.tensor([[-1, 2]]), "names expert -1"),
        (torch.zeros(4, 2), "integers of shape"),
        (torch.tensor([1, 2]), "integers of shape"),
    ],
)
def test_a_choice_that_is_none_is_refused(chosen: Tensor, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        route(chosen, 4)


# Results and gradients


def clamped(first: Tensor) -> Tensor:
    """Return what an activation of two parts makes that is neither of the layer's."""
    gate, other = first[..., ::2].clamp(max=1.0), first[..., 1::2].clamp(-1.0, 1.0)
    return (other + 1) * gate * torch.sigmoid(gate * 1.702)


ACTIVATIONS: dict[str, tuple[Any, Any]] = {
    "swiglu": (SwiGLU(), None),
    "silu": (SiLU(), F.silu),
    "gelu": (Traced(F.gelu, 1), F.gelu),
    "clamped": (Traced(clamped, 2), clamped),
}


@pytest.mark.parametrize(
    ("kind", "k", "tile", "biased", "transposed"),
    [
        ("swiglu", 1, 3, False, False),
        ("swiglu", 2, 1024, True, False),
        ("swiglu", 4, 3, True, True),
        ("silu", 2, 1024, False, False),
        ("gelu", 2, 3, False, False),
        ("clamped", 2, 1024, False, False),
    ],
)
def test_results_and_gradients_are_the_loops(
    kind: str, k: int, tile: int, biased: bool, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynoffload.moe.computation.TILE", tile)
    activation, function = ACTIVATIONS[kind]
    given = inputs(k=k, parts=activation.parts)
    x, gates, up, down = given
    chosen = choice(40, 5, k)
    chosen[7, 0] = chosen[9, 0] = 5  # no expert
    biases = [torch.randn(5, n, dtype=torch.float64, requires_grad=True) for n in (40, 12)]
    biases = biases if biased else []
    wanted = loop(x, chosen, gates, up, down, *biases, between=function)
    ours = [up, down]
    if transposed:
        ours = [one.transpose(1, 2).contiguous().detach().requires_grad_() for one in ours]
    named = dict(zip(("up_bias", "down_bias"), biases, strict=False))
    found = experts(x, chosen, gates, *ours, activation=activation, transposed=transposed, **named)
    assert_close([found], [wanted])
    slopes = torch.autograd.grad(found.sin().sum(), [x, gates, *ours, *biases])
    if transposed:
        slopes = tuple(one.transpose(1, 2) if one.dim() == 3 else one for one in slopes)
    assert_close(slopes, torch.autograd.grad(wanted.sin().sum(), [*given, *biases]))


def test_backward_twice_and_parts_that_need_no_gradient() -> None:
    x, gates, up, down = inputs()
    chosen = choice(40, 5, 2)
    loss = experts(x, chosen, gates, up, down).square().sum()
    first = torch.autograd.grad(loss, [x, up], retain_graph=True)
    assert_close(torch.autograd.grad(loss, [x, up]), first)
    frozen = experts(x.detach(), chosen, gates.detach(), up, down.detach()).square().sum()
    assert_close(torch.autograd.grad(frozen, [up]), [first[1]])
    with torch.no_grad():
        assert torch.equal(experts(x, chosen, gates, up, down), experts(x, chosen, gates, up, down))


def test_no_expert_that_is_hit_is_no_end_of_the_graph() -> None:
    given = inputs()
    out = experts(given[0], torch.full((40, 2), 5), *given[1:])
    for one in torch.autograd.grad(out.sum(), given[:2]):
        assert not one.any()
    layer = MoE(12, 8, 4, 2)
    found = layer(torch.zeros(0, 12))
    assert found.balance == 0
    assert found.z == 0
    (found.hidden.sum() + found.balance + found.z).backward()
    assert layer.router.grad is not None
    assert not layer.router.grad.any()


def test_an_exception_in_backward_leaves_no_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs()
    out = experts(given[0], choice(40, 5, 2), *given[1:])
    call = out.grad_fn.call  # type: ignore[union-attr]
    wanted = torch.autograd.grad(out.sum(), given, retain_graph=True)

    def fail(*args: Any) -> None:
        raise ValueError("on purpose")

    with monkeypatch.context() as broken:
        broken.setattr(SwiGLU, "backward", fail)
        with pytest.raises(ValueError, match="on purpose"):
            out.sum().backward(retain_graph=True)
    assert not call.sums
    again = torch.autograd.grad(out.sum(), given)
    assert all(torch.equal(one, two) for one, two in zip(again, wanted, strict=True))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("up", (4, 40, 12)),
        ("up", (5, 2, 12)),
        ("down", (4, 12, 20)),
        ("down", (5, 12, 10)),
        ("up_bias", (5, 1)),
        ("down_bias", (1, 12)),
    ],
)
def test_matrices_that_do_not_fit_are_refused(name: str, shape: tuple[int, ...]) -> None:
    x, gates, up, down = inputs()
    weights: dict[str, Any] = {"up": up, "down": down, name: torch.zeros(shape, dtype=x.dtype)}
    wrong = "up" if name == "down" and shape[0] == 5 else name  # hidden is what down says
    with pytest.raises(ConfigError, match=rf"^{wrong} is \("):
        experts(x, route(choice(40, 5, 2), 5), gates, **weights)
    with pytest.raises(ConfigError, match="for choices of"):
        experts(x, route(choice(30, 5, 2), 5), gates, up, down)


def test_an_activation_that_is_trained_or_of_another_shape_is_refused() -> None:
    given = inputs(parts=1)
    chosen = choice(40, 5, 2)
    slope = nn.PReLU(dtype=torch.float64)
    loss = experts(given[0], chosen, *given[1:], activation=Traced(slope, 1)).sum()
    with pytest.raises(ConfigError, match="PReLU computes with a tensor that is trained"):
        loss.backward()
    slope.requires_grad_(False)
    experts(given[0], chosen, *given[1:], activation=Traced(slope, 1)).sum().backward()
    shorter = Traced(lambda first: first.mean(1, keepdim=True), 1)
    with pytest.raises(ConfigError, match="second product takes"):
        experts(given[0], chosen, *given[1:], activation=shorter)


@pytest.mark.filterwarnings("ignore")
def test_compiled_models_have_all_gradients() -> None:
    given = inputs()
    routing = route(choice(40, 5, 2), 5)
    wanted = torch.autograd.grad(experts(given[0], routing, *given[1:]).square().sum(), given)

    def run(x: Tensor, gates: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return experts(2 * x / 2, routing, gates, up, down).square().sum()

    try:
        torch.compile(run, backend="eager")(*given).backward()
    finally:
        torch.compiler.reset()
    for one, other in zip(given, wanted, strict=True):
        assert one.grad is not None
        assert torch.equal(one.grad, other)


def test_a_write_into_what_backward_needs_is_refused() -> None:
    x, gates, up, down = inputs()
    loss = experts(x, choice(40, 5, 2), gates, up, down).sum()
    with torch.no_grad():
        up.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
        loss.backward()


def test_gates_count_in_their_own_precision() -> None:
    """Results are the loop's bits where no sum has another order; gradients are of gates' dtype."""
    x, gates, up, down = (one.detach().bfloat16() for one in inputs())
    gates = inputs()[1].detach().float().requires_grad_()
    chosen = choice(40, 5, 1)
    found, out = experts(x, chosen, gates[:, :1], up, down), torch.zeros_like(x)
    for expert in range(5):
        token, _ = torch.where(chosen == expert)
        a, b = F.linear(x[token], up[expert]).chunk(2, -1)
        last = F.linear(F.silu(a) * b, down[expert]) * gates[token, 0, None]
        out[token] = last.detach().bfloat16()
    assert torch.equal(found, out)
    (slope,) = torch.autograd.grad(found.sum(), gates)
    assert slope.dtype == torch.float32
    assert not torch.equal(slope, slope.bfloat16().float()), "it went through bfloat16"


def test_backward_within_autocast_is_that_of_its_forward() -> None:
    given = [one.detach().float().requires_grad_() for one in inputs(parts=1)]
    chosen = choice(40, 5, 2)
    for activation in (SiLU(), Traced(F.gelu, 1)):
        loss = experts(given[0], chosen, *given[1:], activation=activation).square().sum()
        wanted = torch.autograd.grad(loss, given, retain_graph=True)
        with torch.autocast("cpu", torch.bfloat16):
            found = torch.autograd.grad(loss, given)
        assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))


def test_autocast_leaves_float64_as_torch_does() -> None:
    x, gates, up, down = inputs()
    chosen = choice(40, 5, 2)
    with torch.autocast("cpu", torch.bfloat16):
        found = experts(x, chosen, gates, up, down)
    assert torch.equal(found, experts(x, chosen, gates, up, down))


def test_autocast() -> None:
    x, gates, up, down = (one.detach().float().requires_grad_() for one in inputs())
    chosen = choice(40, 5, 2)
    with torch.autocast("cpu", torch.bfloat16):
        found = experts(x, chosen, gates, up, down)
    wanted = loop(x, chosen, gates, up, down)
    assert found.dtype == torch.float32
    assert float((found - wanted).detach().norm() / wanted.detach().norm()) < 0.03
    found.sum().backward()
    assert up.grad is not None
    assert up.grad.dtype == torch.float32


# Memory


@pytest.mark.parametrize("skewed", [False, True])
def test_no_tensor_is_as_long_as_all_choices(skewed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In forward and backward; of 600 tokens with 4 experts each, also where one has them all."""
    monkeypatch.setattr("dynoffload.moe.computation.TILE", 128)
    length, k, d = 600, 4, 12
    given = inputs(length, d, h=4, count=8, k=k)
    chosen = torch.arange(k).expand(length, k) if skewed else choice(length, 8, k)
    with Allocations(d) as seen:
        experts(given[0], chosen, *given[1:]).square().sum().backward()
    assert seen.most == length
    assert seen.elements == length * d, "in whatever form"
    with Allocations(d) as plain:
        token = chosen.reshape(-1).argsort() // k
        given[0][token].sum()
    assert plain.most == length * k, "what others make is seen"


def test_what_is_saved_is_two_parts_of_each_choice() -> None:
    """A and B, beside tokens and gates: (2·h)·L·k elements."""
    length, k, d, h = 256, 2, 16, 64
    given = inputs(length, d, h, count=4, k=k)
    saved: dict[int, int] = {}

    def pack(one: Tensor) -> Tensor:
        saved[one.untyped_storage()._cdata] = one.untyped_storage().nbytes()
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        out = experts(given[0], choice(length, 4, k), *given[1:])
    known = {one.untyped_storage()._cdata for one in given}
    made = sum(size for key, size in saved.items() if key not in known)
    assert 2 * h * length * k * 8 <= made <= 2 * h * length * k * 8 + 4 * length * k * 8
    assert out.requires_grad


def test_a_graph_leaves_nothing_behind() -> None:
    """Nothing waits for the collector of cycles either."""
    given = inputs()
    chosen = choice(40, 5, 2)
    gc.collect()
    gc.disable()
    try:
        out = experts(given[0], chosen, *given[1:])
        call = weakref.ref(out.grad_fn.call)  # type: ignore[union-attr]
        out.sum().backward()
        assert call() is not None
        del out
        assert call() is None
    finally:
        gc.enable()


def test_zeros_have_the_sign_that_torchs_have() -> None:
    for hit in ([1], [2, 0]):
        own, plain = (torch.zeros(4, 3, requires_grad=True) for _ in range(2))
        slices = slices_of(own)
        assert slices is not None
        sum((slices[e] * -0.0).sum() for e in hit).backward()  # type: ignore[union-attr]
        sum((plain[e] * -0.0).sum() for e in hit).backward()  # type: ignore[union-attr]
        assert own.grad is not None
        assert plain.grad is not None
        assert torch.equal(own.grad.signbit(), plain.grad.signbit())


def test_a_backward_that_does_not_end_at_the_matrices_leaves_nothing_in_them() -> None:
    """The gradient of tokens alone, of some other experts; then all of them."""
    given = inputs(64, 16, 32, count=4, k=2)
    chosen = choice(64, 4, 2)
    out = experts(given[0], chosen, *given[1:])
    torch.autograd.grad(out.sin().sum(), given[:2], retain_graph=True)
    torch.autograd.grad(out[:3].sum(), given[0], retain_graph=True)
    found = torch.autograd.grad(out.square().sum(), given, retain_graph=True)
    again = torch.autograd.grad(out.square().sum(), given)
    fresh = experts(given[0], chosen, *given[1:])
    wanted = torch.autograd.grad(fresh.square().sum(), given)
    for one, two, three in zip(found, again, wanted, strict=True):
        assert torch.equal(one, three)
        assert torch.equal(two, three)
