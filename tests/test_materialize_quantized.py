"""Files with quantized weights: never read as if they were the weights, and refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import SMALL_PAGES, assert_same
from safetensors.torch import load_file, save_file
from test_clients_quantized import nf4, of_bitsandbytes, of_torchao
from test_materialize_saved import built, named, saved
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

import dynoffload
from dynoffload.errors import ConfigError
from dynoffload.integrations.transformers import materialize

FP8 = torch.float8_e4m3fn


def assert_refused(model: Any, path: Path, words: str) -> None:
    """Assert that files are refused, and that nothing of the model has changed."""
    with pytest.raises(ConfigError, match=words):
        materialize(model, path)
    assert all(tensor.is_meta for tensor in named(model).values())
    assert "to" not in vars(model)


@pytest.mark.parametrize(
    "quantized",
    [
        nf4,
        lambda: of_bitsandbytes(load_in_8bit=True),
        lambda: of_torchao(8),
        lambda: of_torchao(4),
    ],
    ids=["nf4", "int8", "torchao's int8", "torchao's int4"],
)
def test_snapshots_of_quantizers_are_refused(quantized: Any, tmp_path: Path) -> None:
    stock, _ = saved("llama", tmp_path / "plain")
    AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=quantized(), device_map="cpu"
    ).save_pretrained(tmp_path / "quantized")
    config = AutoConfig.from_pretrained(tmp_path / "quantized")
    words = r"config.json says that the weights of .*quantized.* are quantized \(.*\): "
    assert_refused(built(stock, config), tmp_path / "quantized", words)
    (file,) = (tmp_path / "quantized").glob("*.safetensors")
    del config.quantization_config
    assert_refused(built(stock, config), file, words)
    file.rename(tmp_path / file.name)
    assert_refused(built(stock, config), tmp_path / file.name, "which stand for others|is not of")


def test_float8_with_scales_is_refused(tmp_path: Path) -> None:
    """As DeepSeek's: with a config that says so, without it, and without scales."""
    stock, config = saved("deepseek-v3", tmp_path)
    right = load_file(tmp_path / "model.safetensors")
    scales = {f"{name}_scale_inv": torch.ones(1, 1) for name in right if "proj" in name}
    small = {name: one.to(FP8) if "proj" in name else one for name, one in right.items()}
    save_file({**small, **scales}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_refused(built(stock, config), tmp_path, "_scale_inv' that is not of this Deepseek")
    save_file(small, tmp_path / "model.safetensors", metadata={"format": "pt"})
    words = r"proj.weight' of .*model.safetensors has values of F8_E4M3, which stand for others"
    assert_refused(built(stock, config), tmp_path, words)
    listed = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    listed["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(listed), encoding="utf-8")
    words = r"config.json says that the weights of .* are quantized \(fp8\): "
    assert_refused(built(stock, config), tmp_path, words)


class Narrow(nn.Module):
    """Multiplies by frozen weights of eight bits."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        weights = (torch.randn(64, 64).mul(30).to(dtype) for _ in range(6))
        self.weights = nn.ParameterList(nn.Parameter(one, requires_grad=False) for one in weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(F.linear(x, weight.float() / 99))
        return x


@pytest.mark.parametrize("dtype", [FP8, torch.float8_e5m2, torch.int8])
def test_weights_of_the_dtype_in_the_file_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    model, x = Narrow(dtype), torch.randn(4, 64)
    expected = model(x)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    empty = Narrow(dtype).to("meta")
    dynoffload.materialize(empty, tmp_path / "weights.safetensors")
    config = {**SMALL_PAGES, "step_aside": False}
    with dynoffload.offload(empty, budget="30kB", config=config) as session:
        assert_same(empty(x), expected, "output")
        assert session.paging
    wide = Narrow(torch.float32).to("meta")
    with pytest.raises(ConfigError, match=r"weights.0' of .* has values of .*, which stand for"):
        dynoffload.materialize(wide, tmp_path / "weights.safetensors")
