"""Models of transformers on the meta device get the random weights that transformers gives.

The bits are those of transformers' own way of initialising a model after it was built
(`_finalize_model_loading`), as its constructor's own draws are not repeated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import SMALL_PAGES, assert_same, assert_same_training, footprint_of, least_budget
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import AdamW

import dynoffload
from dynoffload.errors import ConfigError
from dynoffload.experiments.architectures import ARCHITECTURES, Architecture
from dynoffload.runtime import paging

transformers = pytest.importorskip("transformers")

from dynoffload.integrations.transformers import materialize  # noqa: E402

SEED = 5
KINDS = ("t5", "gpt2", "whisper", "wav2vec2", "clip", "mamba", "mixtral", "bert", "modernbert")
ARCHITECTURE = [
    pytest.param(name, marks=() if name in KINDS else pytest.mark.slow) for name in ARCHITECTURES
]
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}


def named(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by all of their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def ties(model: nn.Module) -> set[tuple[str, ...]]:
    """Return the names that share a tensor."""
    groups: dict[int, list[str]] = {}
    for name, tensor in named(model).items():
        groups.setdefault(id(tensor), []).append(name)
    return {tuple(names) for names in groups.values() if len(names) > 1}


def initialised(architecture: Architecture) -> tuple[nn.Module, set[str]]:
    """Return the network as transformers initialises one that was built before, after `SEED`, and
    the names of what it leaves to the constructor."""
    from transformers.initialization import no_tie_weights

    with no_tie_weights():
        model: Any = architecture.build()
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    model.mark_tied_weights_as_initialized(None)
    before = {name: (tensor, tensor._version) for name, tensor in named(model).items()}
    torch.manual_seed(SEED)
    model.initialize_weights()
    after = named(model)
    left = {name for name, was in before.items() if was == (after[name], after[name]._version)}
    model.tie_weights()
    return model, left & {name for name, _ in model.named_parameters()}


def on_meta(architecture: Architecture) -> nn.Module:
    """Return the network without memory."""
    with torch.device("meta"):
        return architecture.build()


def given(model: nn.Module, path: Path | None = None, **options: Any) -> nn.Module:
    """Return ``model`` after a block under half of its parameters, in which it got its weights."""
    config = {**SMALL_PAGES, "step_aside": False, **options}
    budget, _ = least_budget(model, None, sum(p.nbytes for p in model.parameters()) // 2, config)
    materialize(model, path)
    torch.manual_seed(SEED)
    with dynoffload.offload(model, budget=budget, pilot=None, config=config) as session:
        assert session.paging
    return model


@pytest.mark.parametrize("name", ARCHITECTURE)
def test_random_weights_are_those_that_transformers_gives(name: str) -> None:
    """Of every kind of network that transformers has."""
    architecture = ARCHITECTURES[name]
    reference, left = initialised(architecture)
    if left:  # as CLIP's scale, and weights under weight norm: what only the constructor makes
        with pytest.raises(ConfigError, match=r"got no value: _init_weights\(\) .* file"):
            given(on_meta(architecture))
        return
    model = given(on_meta(architecture))
    values, expected = named(model), named(reference)
    assert list(values) == list(expected)
    assert ties(model) == ties(reference)
    for key, value in values.items():
        assert not hasattr(value, "_is_hf_initialized"), key
        assert value.requires_grad == expected[key].requires_grad, key
        assert_same(value.detach(), expected[key].detach(), key)


def train(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Make three steps, and return their losses."""
    losses = []
    for step in range(3):
        architecture = ARCHITECTURES["mixtral"]
        loss = architecture.loss(model(**architecture.sample(model, step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("source", ["random", "file"])
def test_a_mixtral_trains_as_one_built_plainly(source: str, tmp_path: Path) -> None:
    """From the same random weights, or a file of them; buffers that are not saved included."""
    reference, path = initialised(ARCHITECTURES["mixtral"])[0], None
    if source == "file":
        path = tmp_path / "model.safetensors"
        save_file(reference.state_dict(), path)
    model = on_meta(ARCHITECTURES["mixtral"])
    optimizer, its = (AdamW(m.parameters(), lr=1e-3) for m in (model, reference))
    torch.manual_seed(SEED)
    assert materialize(model, path) is model
    options = {"budget": footprint_of(reference) // 3, "pilot": None, "config": SMALL_PAGES}
    with dynoffload.offload(model, optimizer, **options) as session:
        losses = train(model, optimizer)
        assert session.paging
    assert_same(losses, train(reference, its), "losses")
    assert_same_training(model, optimizer, reference, its)
    assert_same(dict(model.named_buffers()), dict(reference.named_buffers()), "buffers")


class Watched(transformers.T5ForConditionalGeneration):
    """A T5 that looks how much of it is in memory whenever a module of it was initialised."""

    resident: list[int]
    watched: Any

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if not self.shared.weight.is_meta:
            self.resident.append(self.watched.resident_bytes())


def test_no_more_is_in_memory_than_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """At any time while modules write into their parts, and those into theirs."""
    with torch.device("meta"):
        model = Watched(transformers.T5Config(**{**T5, "num_layers": 12}))
    model.resident = []
    config = {**SMALL_PAGES, "step_aside": False}
    whole = sum(p.nbytes for p in model.parameters())
    budget, _ = least_budget(model, None, whole // 4, config)
    materialize(model)
    opened = paging.open_device

    def watched(*arguments: Any) -> Any:
        model.watched = opened(*arguments)
        return model.watched

    monkeypatch.setattr(paging, "open_device", watched)
    with dynoffload.offload(model, budget=budget, pilot=None, config=config):
        pass
    assert 0 < max(model.resident) <= budget < whole / 2


GPT2 = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)


def test_what_nobody_gives_a_value_is_named() -> None:
    """What transformers' walk leaves to the constructor, too."""
    with torch.device("meta"):
        changed = transformers.GPT2LMHeadModel(GPT2)
        changed.added = nn.Parameter(torch.empty(64, 64))
    with pytest.raises(ConfigError, match=r"added got no value: _init_weights\(\) of its module"):
        given(changed)


def test_what_has_its_values_keeps_them() -> None:
    """Parts that were built in memory, between others on the meta device; they are not drawn."""
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(GPT2)
    model.transformer.h[0] = type(model.transformer.h[0])(GPT2, layer_idx=0)
    norm = model.transformer.h[1].ln_1
    norm.bias = nn.Parameter(torch.full((32,), 7.0))
    before = {n: t.detach().clone() for n, t in model.transformer.h[0].state_dict().items()}
    values = named(given(model))
    for name, value in before.items():
        assert_same(values[f"transformer.h.0.{name}"].detach(), value, name)
    assert values["transformer.h.1.ln_1.bias"].tolist() == [7] * 32
    assert values["transformer.h.1.ln_1.weight"].tolist() == [1] * 32
    scaled = values["transformer.h.1.mlp.c_proj.weight"].std()
    assert scaled < 0.75 * values["transformer.h.1.mlp.c_fc.weight"].std()


@pytest.mark.parametrize("before", [True, False])
def test_a_module_that_was_replaced_gets_its_weights_too(before: bool) -> None:
    """Between `materialize` and the block, or before both."""
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(GPT2)
    if not before:
        materialize(model)
    with torch.device("meta"):
        model.lm_head = nn.Linear(32, 64, bias=False)
    if before:
        materialize(model)
    config = {**SMALL_PAGES, "step_aside": False}
    with dynoffload.offload(model, budget="1MiB", pilot=None, config=config):
        model(input_ids=torch.arange(5)[None])
    assert 0.015 < model.lm_head.weight.std() < 0.025


def test_a_model_that_was_converted_on_the_meta_device() -> None:
    """It is initialised in its own type, as `from_pretrained` does."""
    model = given(on_meta(ARCHITECTURES["gpt2"]).to(torch.bfloat16))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_what_is_no_path_or_no_model_of_transformers_is_refused() -> None:
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(GPT2)
    with pytest.raises(ConfigError, match=r"path=5 is no path: .* safetensors file, or None"):
        materialize(model, 5)
    with pytest.raises(ConfigError, match=r"the Linear is no PreTrainedModel .* init="):
        materialize(nn.Linear(2, 2))


@pytest.mark.parametrize("noted", [False, True], ids=["not called", "torch's materialize"])
def test_a_stock_model_without_an_initialiser_is_told_the_call_that_gives_one(noted: bool) -> None:
    """`reset_parameters()` is no way for a stock model, nor is a user's function."""
    model = on_meta(ARCHITECTURES["mixtral"])
    if noted:
        dynoffload.materialize(model)
    remedy = r"integrations\.transformers\.materialize\(model\)"
    with pytest.raises(ConfigError, match=remedy) as told, dynoffload.offload(model, budget="16MB"):
        pytest.fail("the block must not begin")
    assert "init=" not in str(told.value)
