"""Models of transformers on the meta device get the weights that `save_pretrained` wrote.

They are those of `from_pretrained`, bit for bit, also where the files have other tensors than the
model: one per expert, say.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import DEVICE, accelerated
from exactness import (
    SMALL_PAGES,
    assert_same,
    assert_same_training,
    bits,
    footprint_of,
    least_budget,
    needs_pager,
)
from safetensors.torch import load_file, save_file
from torch.optim import AdamW

import dynoffload
from dynoffload.errors import ConfigError
from dynoffload.experiments.architectures import ARCHITECTURES
from dynoffload.runtime.file_parts import Conversion
from dynoffload.runtime.weight_files import WeightFiles
from dynoffload.tiling.splitting import whole_state_dict

transformers = pytest.importorskip("transformers")

from test_materialize_transformers import SEED, given, named, on_meta  # noqa: E402
from transformers import conversion_mapping  # noqa: E402
from transformers.core_model_loading import (  # noqa: E402
    Chunk,
    ConversionOps,
    PermuteForRope,
    Transpose,
    WeightConverter,
)

from dynoffload.integrations.constructing import PlainWeights  # noqa: E402
from dynoffload.integrations.transformers import materialize  # noqa: E402

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
MOE = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEPSEEK = {**SIZES, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
DEEPSEEK |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
DEEPSEEK |= {"q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8}
DEEPSEEK |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
SAVED: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 4}),
    "qwen3-moe": ("Qwen3Moe", {**MOE, "tie_word_embeddings": True}),
    "qwen2-moe": ("Qwen2Moe", {**MOE, "shared_expert_intermediate_size": 32}),
    "olmoe": ("Olmoe", {**SIZES, "num_experts": 4, "num_experts_per_tok": 2}),
    "deepseek-v3": ("DeepseekV3", DEEPSEEK),
    "gpt-oss": ("GptOss", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama": ("Llama", SIZES),
}


def saved(
    name: str, path: Path, dtype: torch.dtype = torch.float32, shard: str = "1GB", **sizes: int
) -> Any:
    """Write random weights of a network to ``path``, and return its class and config."""
    kind, usual = SAVED[name]
    stock = getattr(transformers, f"{kind}ForCausalLM")
    config = getattr(transformers, f"{kind}Config")(**{**usual, **sizes})
    torch.manual_seed(SEED)
    stock(config).to(dtype).save_pretrained(path, max_shard_size=shard)
    return stock, config


def built(stock: Any, config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Return the network on the meta device."""
    with torch.device("meta"):
        return stock._from_config(config, dtype=dtype)


def assert_trains_as_loaded(model: Any, path: Path) -> None:
    """Assert that ``model`` has the bits of `from_pretrained` in a block, and after a step."""
    loaded = type(model).from_pretrained(path, dtype=model.dtype).train()
    optimizer, its = (AdamW(m.parameters(), lr=1e-3) for m in (model, loaded))
    config = {**SMALL_PAGES, "step_aside": False}
    budget, _ = least_budget(model, optimizer, footprint_of(model) // 3, config)
    assert materialize(model.train(), path) is model
    ids = torch.randint(64, (2, 7), generator=torch.Generator().manual_seed(SEED))
    with dynoffload.offload(model, optimizer, budget=budget, pilot=None, config=config) as session:
        assert session.paging
        for key, value in named(model).items():
            assert_same(value.detach().clone(), named(loaded)[key].detach(), key)
        for one, by in ((model, optimizer), (loaded, its)):
            one(input_ids=ids, labels=ids).loss.backward()
            by.step()
    assert_same_training(model, optimizer, loaded, its)


@pytest.mark.parametrize("shards", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize("name", SAVED)
def test_files_of_save_pretrained(name: str, shards: bool, tmp_path: Path) -> None:
    """With the names of `save_pretrained`, as one tensor per expert; without the config, too."""
    stock, config = saved(name, tmp_path, shard="20KB" if shards else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == shards
    assert_trains_as_loaded(built(stock, config), tmp_path)
    if not shards:
        (tmp_path / "config.json").unlink()
        given(built(stock, config), tmp_path / "model.safetensors")


@pytest.mark.parametrize("held", [torch.bfloat16, torch.float32])
def test_files_of_another_type(held: torch.dtype, tmp_path: Path) -> None:
    """Are converted as `from_pretrained` converts them."""
    stock, config = saved("mixtral", tmp_path, held)
    assert_trains_as_loaded(built(stock, config, torch.bfloat16), tmp_path)


@pytest.mark.parametrize("backend", [pytest.param("pager", marks=needs_pager), "mapped", DEVICE])
def test_a_fused_parameter_larger_than_the_budget(backend: Any, tmp_path: Path) -> None:
    """It gets its experts one after the other."""
    stock, config = saved("mixtral", tmp_path, num_local_experts=32)
    model, expected = built(stock, config), named(stock.from_pretrained(tmp_path))
    budget = model.model.layers[0].mlp.experts.gate_up_proj.nbytes // 2
    options: dict[str, Any] = {**SMALL_PAGES, "step_aside": False}
    place = {"device": backend} if backend == DEVICE else {}
    options |= {} if place else {"backend": backend}
    materialize(model, tmp_path)
    with contextlib.ExitStack() as stack:
        if place:
            stack.enter_context(accelerated())
        block = dynoffload.offload(model, budget=budget, pilot=None, config=options, **place)
        paging = stack.enter_context(block)._paging
        assert paging is not None
        assert paging.device.resident_bytes() <= budget
    for key, value in named(model).items():
        assert_same(value.detach(), expected[key].detach(), key)


def test_what_a_class_lets_files_lack_is_initialised(tmp_path: Path) -> None:
    """As a Marian's positions, which are not written."""
    architecture = ARCHITECTURES["marian"]
    architecture.build().save_pretrained(tmp_path)
    model = given(on_meta(architecture), tmp_path)
    expected = named(type(model).from_pretrained(tmp_path))
    for key, value in named(model).items():
        assert_same(value.detach(), expected[key].detach(), key)


def test_a_base_model_reads_its_names_without_their_prefix(tmp_path: Path) -> None:
    """And those of its own."""
    stock, config = saved("mixtral", tmp_path)
    base = stock.from_pretrained(tmp_path).model
    base.save_pretrained(tmp_path / "base")
    model = given(built(type(base), config), tmp_path / "base")
    for key, value in named(model).items():
        assert_same(value.detach(), named(base)[key].detach(), key)


def test_a_tiled_mixture(tmp_path: Path) -> None:
    """Its tiles are pieces of what the files have."""
    stock, config = saved("mixtral", tmp_path)
    model = built(stock, config)
    assert dynoffload.tile(model, max_bytes="2KiB")
    weights = whole_state_dict(given(model, tmp_path))
    assert_same(weights, dict(stock.from_pretrained(tmp_path).state_dict()), "weights")


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_slices_of_fused_parameters_are_rows_of_the_files(name: str, tmp_path: Path) -> None:
    """In order: what a slice has is one run of bytes after the other."""
    loaded = saved(name, tmp_path)[0].from_pretrained(tmp_path)
    files = WeightFiles(tmp_path, loaded, PlainWeights().values)
    written = load_file(tmp_path / "model.safetensors")
    for key, parameter in loaded.named_parameters():
        if parameter.dim() == 3:
            value = files.values[key]
            for number, (row, expected) in enumerate(zip(value.rows(), parameter, strict=True)):
                assert row == value.narrowed(0, number, number + 1)
                runs = [written[part.source][part.piece] for part in row.parts]
                assert all(one.is_contiguous() for one in runs)
                assert b"".join(map(bits, runs)) == bits(expected), key


class Negated(ConversionOps):
    """Negates what it gets, through a view."""

    def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **_: Any) -> Any:
        (tensors,) = input_dict.values()
        tensor = tensors[0]
        tensor[:].neg_()
        return {target_patterns[0]: tensor}

    @property
    def reverse_op(self) -> Negated:
        return self


def test_what_transformers_converts_otherwise_than_by_moving_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It converts itself: what is negated or transposed, and heads in another order."""
    heads = [f"self_attn.{one}_proj.weight" for one in "qkv"]
    permutes = PermuteForRope(permute_layer_names=["q_proj", "k_proj"])
    conversions = [
        WeightConverter("mlp.w1.weight", "mlp.gate_proj.weight", [Negated()]),
        WeightConverter("mlp.w2.weight", "mlp.down_proj.weight", [Transpose(0, 1)]),
        WeightConverter("attn.in_proj.weight", heads, [Chunk(dim=0), permutes]),
    ]
    conversion_mapping.get_checkpoint_conversion_mapping("llama")  # fills what is patched
    known = conversion_mapping._checkpoint_conversion_mapping_cache
    monkeypatch.setitem(known, "LlamaForCausalLM", conversions)
    stock, config = saved("llama", tmp_path, shard="20KB")
    files = WeightFiles(tmp_path, built(stock, config), PlainWeights().values)
    assert "model.layers.0.attn.in_proj.weight" in files.shapes
    made = {n for n, v in files.values.items() if isinstance(v.parts[0].source, Conversion)}
    whole = {"mlp.gate_proj", "mlp.down_proj", "self_attn.q_proj", "self_attn.k_proj"}
    assert made == {f"model.layers.{number}.{one}.weight" for number in (0, 1) for one in whole}
    assert_trains_as_loaded(built(stock, config), tmp_path)


@pytest.mark.parametrize("backend", [pytest.param("pager", marks=needs_pager), "mapped"])
def test_a_model_in_memory_is_overwritten_and_told(
    backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By the file's values, as `from_pretrained` reads them."""
    stock, config = saved("mixtral", tmp_path)
    torch.manual_seed(SEED + 1)
    model = stock(config)
    before = model.lm_head.weight.detach().clone()
    materialize(model, tmp_path)
    assert re.search(r"this Mixtral.* is in memory: .* overwrites it .*'meta'\)", caplog.text)
    assert_same(model.lm_head.weight.detach(), before, "as yet")
    loaded = stock.from_pretrained(tmp_path)
    options = {**SMALL_PAGES, "step_aside": False, "backend": backend}
    budget, _ = least_budget(model, None, footprint_of(model) // 4, options)
    with dynoffload.offload(model, budget=budget, config=options):
        for key, value in named(model).items():
            assert_same(value.detach().clone(), named(loaded)[key].detach(), key)


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """By file, tensor and remedy; nothing of the model has changed."""
    stock, config = saved("mixtral", tmp_path)
    path = tmp_path / "model.safetensors"
    right = load_file(path)
    expert = "model.layers.1.block_sparse_moe.experts.3.w3.weight"
    files = {
        rf"{path} has no tensor '{expert}', a part of .*gate_up_proj: give": {
            name: tensor for name, tensor in right.items() if name != expert
        },
        rf"{path} has no tensor 'model.norm.weight': give": {
            name: tensor for name, tensor in right.items() if name != "model.norm.weight"
        },
        rf"'{expert}' of {path} has shape \[8, 8\] but the model's has \[64, 32\], as": {
            **right,
            expert: torch.zeros(8, 8),
        },
        rf"'model.norm.weight' of {path} has shape \[8\] but the model's has \[32\]: give": {
            **right,
            "model.norm.weight": torch.zeros(8),
        },
        rf"{path} has a tensor '{expert}_scale' that is not of this Mixtral.*: build": {
            **right,
            f"{expert}_scale": torch.zeros(8),
        },
    }
    for message, tensors in files.items():
        save_file(tensors, path)
        model = built(stock, config)
        with pytest.raises(ConfigError, match=message):
            materialize(model, tmp_path)
        assert all(tensor.is_meta for tensor in named(model).values())
        assert "to" not in vars(model)
    save_file(right, path)
    remedy = r"call dynoffload\.integrations\.transformers\.materialize\(model, path\)"
    with pytest.raises(ConfigError, match=rf"has no tensor 'model.layers.0.mlp.*: {remedy}"):
        dynoffload.materialize(built(stock, config), init=tmp_path)


def test_two_values_of_a_tied_weight_are_refused(tmp_path: Path) -> None:
    """`from_pretrained` unties them; the model here is tied already."""
    stock, config = saved("llama", tmp_path)
    config.tie_word_embeddings = True
    model = built(stock, config)
    materialize(model, tmp_path)
    with (
        pytest.raises(
            ConfigError, match=r"other values for 'lm_head.weight' than for 'model.embed"
        ),
        dynoffload.offload(model, budget="64MB"),
    ):
        pass
    assert model.lm_head.weight.is_meta
