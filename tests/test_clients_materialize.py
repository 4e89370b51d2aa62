"""Models of transformers that are built on the meta device and given their weights in one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exactness import SMALL_PAGES, footprint_of
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
