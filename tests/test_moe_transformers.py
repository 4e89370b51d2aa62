"""``experts_implementation="dynoffload"``: the mixtures of transformers, beside their own loop.

In float64 results and gradients are those of ``"eager"`` within its rounding; within a session the
bits are those without one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exactness import Twin, assert_same, footprint_of
from torch import Tensor, nn
from torch.optim import AdamW

import dynoffload.moe
from dynoffload.moe import computation

transformers = pytest.importorskip("transformers")

_COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen3-moe": (
        "Qwen3Moe",
        {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8, "decoder_sparse_step": 1},
    ),
    "olmoe": ("Olmoe", {"num_experts": 4}),
    "deepseek-v3": (
        "DeepseekV3",
        {
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
        },
    ),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "head_dim": 8, "sliding_window": 16}),
}


def built(family: str, implementation: str) -> nn.Module:
    """Return a small model of a family, its weights drawn by a seed."""
    name, sizes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**_COMMON, **sizes})
    dynoffload.moe.register()
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.1)
    model.set_experts_implementation(implementation)
    return model


def loss_of(model: nn.Module, seed: int) -> Tensor:
    """Return the loss of one sample."""
    drawn = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 64, (2, 12), generator=drawn)
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


@pytest.mark.parametrize("family", FAMILIES)
def test_results_and_gradients_are_those_of_the_own_loop(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    own = computation._Expert.forward

    def counted(ctx: Any, *args: Any) -> Tensor:
        ran.append(args[-1])
        return own(ctx, *args)

    monkeypatch.setattr(computation._Expert, "forward", staticmethod(counted))
    models = [built(family, how).double() for how in ("eager", "dynoffload")]
    losses = [loss_of(model, 1) for model in models]
    assert ran, "another implementation ran"
    assert torch.allclose(losses[0], losses[1], rtol=1e-12)
    for loss in losses:
        loss.backward()
    for (name, one), two in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None), name
        if one.grad is not None and two.grad is not None:
            assert torch.allclose(one.grad, two.grad, rtol=1e-9, atol=1e-13), name


@pytest.mark.parametrize("family", FAMILIES)
def test_it_trains_under_a_budget_to_the_bits_that_it_has_without(family: str) -> None:
    twin = Twin(built(family, "dynoffload"), lambda p: AdamW(p, lr=1e-2))
    with twin.paged(footprint_of(twin.model) // 2) as session:
        twin.train(loss_of, range(3))
        assert session.stats["bytes_in"].sum() > 0
    twin.assert_same()


def test_an_activation_that_is_trained_goes_by_the_own_loop() -> None:
    models = [built("mixtral", how) for how in ("eager", "dynoffload")]
    for model in models:
        for layer in model.model.layers:  # type: ignore[union-attr]
            layer.mlp.experts.act_fn = nn.PReLU()
        loss_of(model, 1).backward()
    ours, theirs = ({n: p.grad for n, p in one.named_parameters()} for one in models)
    assert None not in ours.values()
    assert_same(ours, theirs, "gradients")


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["eager", "dynoffload"])
def test_a_compiled_mixture_has_the_same_bits_in_a_session(implementation: str) -> None:
    """The loop on parts, of which pieces would be compiled that are not without a session."""
    twin = Twin(built("mixtral", implementation), lambda p: AdamW(p, lr=1e-2))
    sides = twin.sides
    compiled = [torch.compile(model, backend="aot_eager") for model, _ in sides]
    with twin.paged(footprint_of(twin.model) // 2) as session:
        for step in range(3):
            for model, (_, optimizer) in zip(compiled, sides, strict=True):
                loss_of(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert session.stats["bytes_in"].sum() > 0
    twin.assert_same()
