"""Mixtures of experts without routed buffers: index structures, results, gradients, memory.

The reference is the loop over experts that everybody writes, under autograd, in float64.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dynoffload
from dynoffload.errors import ConfigError
from dynoffload.moe import MoE, computation, experts, route
from dynoffload.moe.activations import SiLU, SwiGLU, Traced
from dynoffload.moe.slices import slices_of


def choice(length: int, count: int, k: int, seed: int = 0) -> Tensor:
    """Return ``k`` of ``count`` experts for each token."""
    drawn = torch.Generator().manual_seed(seed)
    if not length:
        return torch.zeros(0, k, dtype=torch.int64)
    return torch.stack([torch.randperm(count, generator=drawn)[:k] for _ in range(length)])


def loop(
    x: Tensor,
    chosen: Tensor,
    gates: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    between: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return what `experts` is to return."""
    out = torch.zeros_like(x)
    for expert in range(len(up)):
        token, place = torch.where(chosen == expert)
        first = F.linear(x[token], up[expert], None if up_bias is None else up_bias[expert])
        if between is None:
            a, b = first.chunk(2, -1)
            made = F.silu(a) * b
        else:
            made = between(first)
        last = F.linear(made, down[expert], None if down_bias is None else down_bias[expert])
        out = out.index_add(0, token, last * gates[token, place, None])
    return out


def inputs(
    length: int = 40, d: int = 12, h: int = 20, count: int = 5, k: int = 2, parts: int = 2
) -> list[Tensor]:
    """Return tokens, gates, and both matrices, in float64."""
    torch.manual_seed(1)
    shapes = [(length, d), (length, k), (count, parts * h, d), (count, d, h)]
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]


def assert_close(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-11)


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


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("tile", [3, 1024])
def test_results_and_gradients_are_the_loops(
    k: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynoffload.moe.computation.TILE", tile)
    given = inputs(k=k)
    x, gates, up, down = given
    chosen = choice(40, 5, k)
    found, wanted = experts(x, chosen, gates, up, down), loop(x, chosen, gates, up, down)
    weights = torch.randn_like(found)
    assert_close([found], [wanted])
    assert_close(
        torch.autograd.grad((found * weights).sum(), given),
        torch.autograd.grad((wanted * weights).sum(), given),
    )


@pytest.mark.parametrize("kind", ["silu", "gelu", "clamped"])
def test_other_activations(kind: str) -> None:
    def clamped(first: Tensor) -> Tensor:
        gate, other = first[..., ::2].clamp(max=1.0), first[..., 1::2].clamp(-1.0, 1.0)
        return (other + 1) * gate * torch.sigmoid(gate * 1.702)

    function = {"silu": F.silu, "gelu": F.gelu, "clamped": clamped}[kind]
    parts = 2 if kind == "clamped" else 1
    given = inputs(parts=parts)
    x, gates, up, down = given
    chosen = choice(40, 5, 2)
    activation = SiLU() if kind == "silu" else Traced(function, parts)
    found = experts(x, chosen, gates, up, down, activation=activation)
    wanted = loop(x, chosen, gates, up, down, between=function)
    assert_close([found], [wanted])
    assert_close(
        torch.autograd.grad(found.square().sum(), given),
        torch.autograd.grad(wanted.square().sum(), given),
    )


@pytest.mark.parametrize("transposed", [False, True])
def test_biases_and_transposed_matrices(transposed: bool) -> None:
    x, gates, up, down = inputs()
    biases = [torch.randn(5, n, dtype=torch.float64, requires_grad=True) for n in (40, 12)]
    chosen = choice(40, 5, 2)
    chosen[7, 1] = chosen[9, 0] = 5  # no expert
    given = [x, gates, up, down, *biases]
    wanted = loop(x, chosen, gates, up, down, *biases)
    ours = [up, down]
    if transposed:
        ours = [one.transpose(1, 2).contiguous().detach().requires_grad_() for one in ours]
    found = experts(
        x, chosen, gates, *ours, up_bias=biases[0], down_bias=biases[1], transposed=transposed
    )
    assert_close([found], [wanted])
    slopes = torch.autograd.grad(found.square().sum(), [x, gates, *ours, *biases])
    if transposed:
        slopes = [one.transpose(1, 2) if one.dim() == 3 else one for one in slopes]
    assert_close(slopes, torch.autograd.grad(wanted.square().sum(), given))


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


class _Allocations(TorchDispatchMode):
    """Notes the rows of every matrix that has as many columns as tokens have, and the most
    elements of any tensor of numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.most, self.elements = width, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor) and one.dim() == 2 and one.shape[1] == self.width:
                self.most = max(self.most, len(one))
            if isinstance(one, Tensor) and one.is_floating_point():
                self.elements = max(self.elements, one.numel())
        return result


@pytest.mark.parametrize("skewed", [False, True])
def test_no_tensor_is_as_long_as_all_choices(skewed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In forward and backward; of 600 tokens with 4 experts each, also where one has them all."""
    monkeypatch.setattr("dynoffload.moe.computation.TILE", 128)
    length, k, d = 600, 4, 12
    given = inputs(length, d, h=4, count=8, k=k)
    chosen = torch.arange(k).expand(length, k) if skewed else choice(length, 8, k)
    with _Allocations(d) as seen:
        experts(given[0], chosen, *given[1:]).square().sum().backward()
    assert seen.most == length
    assert seen.elements == length * d, "in whatever form"
    with _Allocations(d) as plain:
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


# The layer


def test_the_layer_is_what_it_says() -> None:
    torch.manual_seed(0)
    layer = MoE(16, 24, 6, 2, shared=8, bias=True, dtype=torch.float64)
    x = torch.randn(3, 5, 16, dtype=torch.float64, requires_grad=True)
    found = layer(x)
    flat = x.reshape(-1, 16)
    scores = (flat @ layer.router.t()).softmax(-1)
    top = scores.topk(2, -1)
    gates = top.values / top.values.sum(-1, keepdim=True)
    biases = (layer.up_bias, layer.down_bias)
    wanted = loop(flat, top.indices, gates, layer.up, layer.down, *biases)
    a, b = (flat @ layer.shared_up[0].t()).chunk(2, -1)  # type: ignore[index]
    wanted = wanted + (F.silu(a) * b) @ layer.shared_down[0].t()  # type: ignore[index]
    assert_close([found.hidden.reshape(-1, 16)], [wanted])
    share = torch.bincount(top.indices.reshape(-1), minlength=6) / 30
    assert_close([found.balance], [6 * (share * scores.mean(0)).sum()])
    logits = flat @ layer.router.t()
    assert_close([found.z], [logits.exp().sum(-1).log().square().mean()])
    total = found.hidden.square().sum() + found.balance + found.z
    slopes = torch.autograd.grad(total, [x, *layer.parameters()])
    assert all(bool(one.abs().sum() > 0) for one in slopes)
    assert torch.autograd.gradcheck(lambda x: layer(x).hidden, (x[:1].detach().requires_grad_(),))


def test_the_bias_on_the_choice_balances() -> None:
    torch.manual_seed(0)
    layer = MoE(16, 8, 4, 1)
    with torch.no_grad():
        layer.router[0] += 0.5
    x = torch.randn(512, 16) + 0.3

    def spread() -> float:
        return max(torch.tensor(layer(x).routing.starts).diff().tolist()) / 128

    before = spread()
    for _ in range(300):
        layer.balance(layer(x).routing, 1e-2)
    assert before > 1.8
    assert spread() < 1.3


def test_the_bias_on_the_choice_stays_float32() -> None:
    """A step of 1e-3 from 0.5 is none in bfloat16."""
    layer = MoE(16, 8, 4, 2)
    layer.choice_bias.fill_(0.5001)
    layer.bfloat16()
    assert layer.up.dtype == torch.bfloat16
    assert layer.choice_bias.dtype == torch.float32
    assert (layer.choice_bias == torch.tensor(0.5001)).all()
    layer.balance(layer(torch.randn(3, 16, dtype=torch.bfloat16)).routing)
    assert (layer.choice_bias != torch.tensor(0.5001)).any()
    assert MoE(16, 8, 4, 2, device="meta").to_empty(device="cpu").choice_bias.dtype == torch.float32


def test_the_router_of_one_expert_learns_from_the_result() -> None:
    layer = MoE(12, 8, 4, 1)
    layer(torch.randn(5, 12)).hidden.square().sum().backward()
    assert layer.router.grad is not None
    assert layer.router.grad.any()


def test_tokens_on_the_meta_device_are_refused() -> None:
    with pytest.raises(ConfigError, match="meta device"):
        MoE(12, 8, 4, device="meta")(torch.zeros(3, 12, device="meta"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 5}, "k=5 is not from 1 to experts=4"),
        ({"activation": "tanh"}, "activation='tanh' is not one of"),
        ({"shared": -1}, "must be sizes"),
    ],
)
def test_sizes_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MoE(8, 8, 4, **options)
    with pytest.raises(ConfigError, match="tokens are 9 wide"):
        MoE(8, 8, 4)(torch.zeros(2, 9))


def test_in_a_session_no_gradient_of_all_experts_is_made_at_once() -> None:
    """The layer's matrices are larger than the whole budget, as their gradients would be."""
    from exactness import Twin, footprint_of

    torch.manual_seed(0)
    twin = Twin(MoE(32, 64, 16, 1), lambda p: AdamW(p, lr=1e-2))
    budget = footprint_of(twin.model) // 8
    assert budget < twin.model.up.nbytes  # type: ignore[operator]
    config = {"page_bytes": 4096, "min_paged_bytes": 1024, "step_aside": False}
    with twin.paged(budget, config=config):
        for step in range(4):
            x = torch.randn(2, 32, generator=torch.Generator().manual_seed(step))
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
                twin.model(x).hidden.square().sum().backward()
            events = recorded.profiler.kineto_results.events()
            sizes = [one.nbytes() for one in events if one.name() == "[memory]"]
            assert sizes
            assert max(sizes) < twin.model.down.nbytes  # type: ignore[operator]
            twin.reference(x).hidden.square().sum().backward()
            for optimizer in (twin.optimizer, twin.its):
                optimizer.step()
                optimizer.zero_grad()
    twin.assert_same()


def test_the_layer_comes_from_the_meta_device() -> None:
    torch.manual_seed(3)
    plain = MoE(32, 64, 8, 2, shared=8, bias=True)
    layer = MoE(32, 64, 8, 2, shared=8, bias=True, device="meta")
    dynoffload.materialize(layer)
    torch.manual_seed(3)
    config = {"page_bytes": 4096, "min_paged_bytes": 1024, "step_aside": False}
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    with dynoffload.offload(layer, None, budget=2**18, config=config):
        found = layer(x).hidden
    assert torch.equal(found, plain(x).hidden)
    for name, one in layer.state_dict().items():
        assert torch.equal(one, plain.state_dict()[name]), name


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


def test_checkpointed() -> None:
    from torch.utils.checkpoint import checkpoint

    given = inputs()
    chosen = choice(40, 5, 2)
    plain = experts(given[0], chosen, *given[1:]).square().sum()
    wanted = torch.autograd.grad(plain, given)
    again = checkpoint(experts, given[0], chosen, *given[1:], use_reentrant=False)
    assert_close(torch.autograd.grad(again.square().sum(), given), wanted)


def test_importing_it_imports_no_transformers() -> None:
    import subprocess
    import sys

    code = (
        "import dynoffload.moe, sys; "
        "assert not {'transformers', 'triton', 'torch.distributed.fsdp'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_products_of_several_rows_have_no_negative_zero(dtype: torch.dtype) -> None:
    """All their terms are negative zeros; of one row torch's own may have them."""
    for rows in (1, 2, 9, 64):
        for width, height in ((1, 8), (8, 1), (7, 33), (64, 128)):
            ones, zeros = (
                -torch.ones(rows, width, dtype=dtype),
                torch.zeros(rows, height, dtype=dtype),
            )
            for transposed in (False, True):
                into = torch.full((width, height), torch.nan, dtype=dtype)
                given = (ones, zeros) if transposed else (zeros, ones)
                computation._add_product(into, *given, transposed, is_first=True)
                assert not into.signbit().any(), (rows, width, height)
                assert not into.any()
