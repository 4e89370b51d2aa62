"""Writes a Qwen3-MoE of random weights, layer by layer, as a checkpoint of any size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3MoeConfig
from transformers.core_model_loading import revert_weight_conversion

from dynoffload.datasets.text import VOCABULARY

_SPREAD = 0.02  # standard deviation of the weights


def qwen3_moe(layers: int, hidden: int, experts: int) -> Qwen3MoeConfig:
    """Return the config of a network over bytes; 27 layers of 64 experts, 1,024 wide, take 8 GB."""
    return Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        moe_intermediate_size=hidden * 3 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        head_dim=64,
        num_experts=experts,
        num_experts_per_tok=min(8, experts),
        architectures=["Qwen3MoeForCausalLM"],
        dtype=torch.bfloat16,
    )


def on_meta(config: PretrainedConfig) -> torch.nn.Module:
    """Return the network without memory."""
    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def write(path: Path, config: Qwen3MoeConfig, *, fused: bool = False) -> Iterator[tuple[int, int]]:
    """Write a checkpoint, one file per layer; yield the layers and the bytes written so far.

    Args:
        path: its directory.
        config: of the network.
        fused: write all experts of a layer as the one tensor that the network has, in place of
            the tensors of each expert that `save_pretrained` writes. The values are the same.
    """
    model = on_meta(config)
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict().items():
        words = name.split(".")
        layer = f"layer-{int(words[2]):03d}" if words[1] == "layers" else "rest"
        files.setdefault(f"{layer}.safetensors", {})[name] = tensor
    path.mkdir(parents=True, exist_ok=True)
    generator, total = torch.Generator().manual_seed(0), 0
    places: dict[str, str] = {}
    for number, (file, tensors) in enumerate(files.items(), 1):
        made = {
            name: torch.ones(one.shape, dtype=one.dtype)
            if "norm" in name
            else torch.empty(one.shape, dtype=one.dtype).normal_(0, _SPREAD, generator=generator)
            for name, one in tensors.items()
        }
        if not fused:
            parts = revert_weight_conversion(model, made)
            made = {name: one.clone() for name, one in parts.items()}  # no views of one another
        save_file(made, path / file, metadata={"format": "pt"})
        places |= dict.fromkeys(made, file)
        total += sum(one.nbytes for one in made.values())
        yield number, total
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    config.save_pretrained(path)
