"""`MoE`, the layer: router, losses, shared expert, and its ways in a session."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moe_reference import assert_close, loop
from torch.nn import functional as F
from torch.optim import AdamW
from torch.profiler import ProfilerActivity, profile

import dynoffload
from dynoffload.errors import ConfigError
from dynoffload.moe import MoE


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


def test_importing_it_imports_no_transformers() -> None:
    import subprocess
    import sys

    code = (
        "import dynoffload.moe, sys; "
        "assert not {'transformers', 'triton', 'torch.distributed.fsdp'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
