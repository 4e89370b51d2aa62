"""Models of transformers that are built on the meta device and given their weights in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import SMALL_PAGES, assert_same, assert_same_training, footprint_of
from safetensors.torch import save_file
from torch import nn
from torch.optim import AdamW

import dynoffload
from dynoffload.errors import ConfigError

transformers = pytest.importorskip("transformers")

from dynoffload.integrations.transformers import materialize  # noqa: E402

SEED = 5


def mixtral(**options: Any) -> nn.Module:
    """Return a stock Mixtral of two layers and four experts."""
    config = transformers.MixtralConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        experts_implementation="eager",
        **options,
    )
    return transformers.MixtralForCausalLM(config).train()


def on_meta(**options: Any) -> nn.Module:
    """Return the same without memory."""
    with torch.device("meta"):
        return mixtral(**options)


def plain(**options: Any) -> nn.Module:
    """Return it as transformers itself initialises it after the seed."""
    model = mixtral(**options)
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)  # so that it is done again
    torch.manual_seed(SEED)
    model.initialize_weights()
    return model


def train(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """Make three steps, and return their losses."""
    losses = []
    for step in range(3):
        tokens = torch.arange(step, step + 24).reshape(2, 12) % 96
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("source", ["random", "file"])
def test_a_stock_mixtral_trains_as_one_built_plainly(source: str, tmp_path: Path) -> None:
    """From the same random weights, or a file of them; buffers that are not saved included."""
    reference, path = plain(), None
    if source == "file":
        path = tmp_path / "model.safetensors"
        save_file(reference.state_dict(), path)
    model = on_meta()
    optimizer, its = (AdamW(m.parameters(), lr=1e-3) for m in (model, reference))
    torch.manual_seed(SEED)
    assert materialize(model, path) is model
    budget = footprint_of(reference) // 3
    with dynoffload.offload(
        model, optimizer, budget=budget, pilot=None, config=SMALL_PAGES
    ) as session:
        losses = train(model, optimizer)
        assert session.paging
    assert_same(losses, train(reference, its), "losses")
    assert_same_training(model, optimizer, reference, its)
    assert_same(dict(model.named_buffers()), dict(reference.named_buffers()), "buffers")


def test_a_tied_weight_is_that_of_the_embedding() -> None:
    """As where transformers ties what it has initialised; nothing of this is left on it."""
    model, untied = on_meta(tie_word_embeddings=True), plain()
    torch.manual_seed(SEED)
    materialize(model)
    with dynoffload.offload(model, budget=footprint_of(untied), pilot=None, config=SMALL_PAGES):
        pass
    embedding = model.get_input_embeddings().weight
    assert model.lm_head.weight is embedding
    assert torch.equal(embedding, untied.get_input_embeddings().weight)
    assert not hasattr(embedding, "_is_hf_initialized")


def test_what_is_no_model_of_transformers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the Linear is no PreTrainedModel .* init="):
        materialize(nn.Linear(2, 2))


@pytest.mark.parametrize("noted", [False, True], ids=["not called", "torch's materialize"])
def test_a_stock_model_without_an_initialiser_is_told_the_call_that_gives_one(noted: bool) -> None:
    """`reset_parameters()` is no way for a stock model, nor is a function of the user's own."""
    model = on_meta()
    optimizer = AdamW(model.parameters())
    if noted:
        dynoffload.materialize(model)
    with (
        pytest.raises(
            ConfigError, match=r"integrations\.transformers\.materialize\(model\)"
        ) as told,
        dynoffload.offload(model, optimizer, budget="16MB"),
    ):
        pytest.fail("the block must not begin")
    assert "init=" not in str(told.value)
