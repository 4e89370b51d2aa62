"""Tiny models of transformers under PEFT's adapters, for tests: no tests here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from fused_networks import mixtral, mixtral_loss
from test_moe_transformers import built
from torch import Tensor, nn
from torch.optim import AdamW
from trainers import llama

peft = pytest.importorskip("peft")

from peft import IA3Config, LoraConfig, get_peft_model  # noqa: E402

ATTENTION = ["q_proj", "v_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]

BASES: dict[str, Callable[..., nn.Module]] = {
    "llama": llama,
    "mixtral": mixtral,
    "qwen3-moe": lambda: built("qwen3-moe", "eager"),
}

CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "lora": (LoraConfig, {"r": 4, "target_modules": ATTENTION, "lora_dropout": 0.1}),
    "dora": (LoraConfig, {"r": 4, "target_modules": ATTENTION, "use_dora": True}),
    "ia3": (IA3Config, {"target_modules": ["k_proj", "v_proj"], "feedforward_modules": []}),
    "saved": (LoraConfig, {"r": 4, "target_modules": ATTENTION, "modules_to_save": ["lm_head"]}),
    "experts": (LoraConfig, {"r": 2, "target_modules": ATTENTION, "target_parameters": EXPERTS}),
}
"""By name: LoRA and its kind on attention, a head trained with it, LoRA on fused experts."""


def config(kind: str, **changes: Any) -> Any:
    """Return PEFT's configuration of a kind."""
    make, options = CONFIGS[kind]
    return make(**{**options, **changes})


def drawn(model: nn.Module) -> nn.Module:
    """Draw the factors that PEFT leaves at zero, so that each adapter changes results."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 20)
    return model


def adapted(base: str, kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a base under an adapter, in training mode; the adapter is in fp32, as by default."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = drawn(get_peft_model(BASES[base]().to(dtype), config(kind)))
    return model.train()


def trained_part(parameters: Iterable[nn.Parameter]) -> AdamW:
    """Return an optimizer of what trains."""
    return AdamW([p for p in parameters if p.requires_grad], lr=1e-2)


def sample_loss(model: nn.Module, step: int) -> Tensor:
    """Return the loss of one sample, of two to seven tokens."""
    return mixtral_loss(model, step)
