"""Adapters on a model from the meta device: the base is paged from its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import SMALL_PAGES, assert_same, least_budget, needs_pager
from fused_networks import paging_of
from safetensors.torch import load_file
from test_materialize_paged import IDS, paged, trains
from test_materialize_saved import built, saved
from torch.optim import AdamW

import dynoffload
from dynoffload.errors import ConfigError
from dynoffload.integrations.transformers import materialize
from dynoffload.memory.pager import Pager

peft = pytest.importorskip("peft")

CONFIG: dict[str, Any] = {**SMALL_PAGES, "step_aside": False}
ATTENTION = {"target_modules": ["q_proj", "v_proj"]}
EXPERTS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
ADAPTERS: dict[str, Any] = {
    "lora": lambda: peft.LoraConfig(r=4, **ATTENTION),
    "gaussian": lambda: peft.LoraConfig(r=4, init_lora_weights="gaussian", **ATTENTION),
    "lora, a copy of the head": lambda: peft.LoraConfig(
        r=4, modules_to_save=["lm_head"], **ATTENTION
    ),
    "lora on embeddings": lambda: peft.LoraConfig(r=4, target_modules=["embed_tokens", "o_proj"]),
    "lora on experts": lambda: peft.LoraConfig(r=4, **ATTENTION, **EXPERTS),
    "ia3": lambda: peft.IA3Config(**ATTENTION, feedforward_modules=[]),
}


def trained(model: Any) -> dict[str, Any]:
    """Return copies of what trains."""
    named = model.named_parameters()
    return {name: p.detach().clone() for name, p in named if p.requires_grad}


@needs_pager
@pytest.mark.parametrize(
    ("name", "network"),
    [(name, "qwen3-moe" if "experts" in name else "llama") for name in ADAPTERS],
)
def test_adapters_train_as_on_a_loaded_base(
    name: str, network: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of the base is written; adapters begin as PEFT lets them."""
    stock, config = saved(network, tmp_path, torch.bfloat16, tie_word_embeddings=False)
    model = peft.get_peft_model(built(stock, config, torch.bfloat16), ADAPTERS[name]()).train()
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with caplog.at_level("WARNING"):
        materialize(model, tmp_path)
    assert "begin anew" in caplog.text
    nbytes = sum(p.nbytes for p in model.parameters())
    budget, _ = least_budget(model, optimizer, nbytes // 2, CONFIG)
    with dynoffload.offload(model, optimizer, budget=budget, config=CONFIG) as session:
        assert session.paging
        first = trained(model)
        losses = trains(model, optimizer)
        device, regions = paging_of(session).device, paged(session, model)
        assert isinstance(device, Pager)
        assert len(regions) > 8
        assert all(map(device.is_sourced, regions))
    loaded = stock.from_pretrained(tmp_path, dtype=torch.bfloat16)
    loaded = peft.get_peft_model(loaded, ADAPTERS[name]()).train()
    begun = trained(loaded)
    assert begun.keys() == first.keys()
    for key, value in begun.items():
        if value.unique().numel() == 1 or "head" in key:  # zeros, ones, copies of the base
            assert_same(first[key], value, key)
        else:  # other draws of the same
            assert 0.5 < float(first[key].float().std() / value.float().std()) < 2.0
    its = dict(loaded.named_parameters())
    with torch.no_grad():
        for key, value in first.items():
            its[key].copy_(value)
    by = AdamW([p for p in loaded.parameters() if p.requires_grad], lr=1e-2)
    assert trains(loaded, by) == losses
    assert_same(dict(model.named_parameters()), its, "after")


@needs_pager
def test_a_saved_adapter_is_loaded_in_the_block(tmp_path: Path) -> None:
    stock, config = saved("llama", tmp_path / "base")
    loaded = stock.from_pretrained(tmp_path / "base")
    loaded = peft.get_peft_model(loaded, ADAPTERS["lora"]()).train()
    trains(loaded, AdamW([p for p in loaded.parameters() if p.requires_grad], lr=1e-2))
    loaded.save_pretrained(tmp_path / "adapter")
    model = peft.get_peft_model(built(stock, config), ADAPTERS["lora"]()).train()
    materialize(model, tmp_path / "base")
    budget = sum(p.nbytes for p in model.parameters()) // 2
    with dynoffload.offload(model, budget=budget, config=CONFIG), torch.no_grad():
        state = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        peft.set_peft_model_state_dict(model, state)
        ours, theirs = (one(input_ids=IDS).logits for one in (model, loaded))
        assert torch.equal(ours, theirs)


def test_an_adapter_that_was_loaded_to_the_meta_device_is_refused(tmp_path: Path) -> None:
    stock, config = saved("llama", tmp_path / "base")
    loaded = peft.get_peft_model(stock.from_pretrained(tmp_path / "base"), ADAPTERS["lora"]())
    loaded.save_pretrained(tmp_path / "adapter")
    model = peft.PeftModel.from_pretrained(built(stock, config), tmp_path / "adapter")
    with pytest.raises(ConfigError, match="the meta device has lost its values"):
        materialize(model, tmp_path / "base")


@pytest.mark.parametrize(
    "adapter",
    [
        lambda: peft.LoraConfig(use_dora=True, **ATTENTION),
        lambda: peft.LoraConfig(init_lora_weights="pissa", **ATTENTION),
        lambda: peft.LoHaConfig(**ATTENTION),
    ],
)
def test_adapters_that_begin_otherwise_are_refused(adapter: Any, tmp_path: Path) -> None:
    stock, config = saved("llama", tmp_path)
    model = built(stock, config)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    made = adapter()
    if getattr(made, "init_lora_weights", None) == "pissa":  # PEFT reads the base to begin it
        made.init_lora_weights = True
        model = peft.get_peft_model(model, made)
        made.init_lora_weights = "pissa"
    else:
        model = peft.get_peft_model(model, made)
    with pytest.raises(ConfigError, match="the adapter 'default' begins from the weights under it"):
        materialize(model, tmp_path)
