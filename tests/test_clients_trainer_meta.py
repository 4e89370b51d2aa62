"""A Trainer's model that is built on the meta device, as it is larger than memory."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from clients import assert_paged, quarter
from torch import nn
from trainers import EVERYTHING, assert_same_outcome, llama, trainer

import dynoffload
from dynoffload.errors import BackendError, ConfigError
from dynoffload.integrations.transformers import OffloadCallback

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def give(module: nn.Module) -> None:
    """Initialise a module of the Llama; what it draws depends on its sizes alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sum(p.numel() for p in module.parameters(recurse=False)))
        for parameter in module.parameters(recurse=False):
            torch.nn.init.normal_(parameter, 0.0 if parameter.dim() > 1 else 1.0, 0.02)
        if hasattr(module, "inv_freq"):
            frequencies, _ = type(module).compute_default_rope_parameters(module.config)
            module.inv_freq.copy_(frequencies)
            module.original_inv_freq.copy_(frequencies)


@torch.no_grad()
def given() -> nn.Module:
    """Return a Llama in memory."""
    model = llama()
    for module in model.modules():
        give(module)
    return model


def on_meta() -> nn.Module:
    """Return the same Llama on the meta device, its weights still to be given."""
    with torch.device("meta"):
        model = llama()
    return dynoffload.materialize(model, give)


@pytest.mark.parametrize("by", ["model", "model_init"])
def test_a_model_on_the_meta_device_is_given_its_weights_in_the_block(
    by: str, tmp_path: Path
) -> None:
    """`materialize` before the Trainer, or in what makes the model for it."""
    plain = trainer(given(), tmp_path / "plain", **EVERYTHING)
    plain.train()
    offload = OffloadCallback(**quarter(make=llama))
    if by == "model":
        paged = trainer(on_meta(), tmp_path / "paged", offload, **EVERYTHING)
    else:
        paged = trainer(None, tmp_path / "paged", offload, model_init=on_meta, **EVERYTHING)
    assert paged.model.device.type == "meta"
    paged.train()
    assert_paged(offload.session)
    assert_same_outcome(paged, plain)


def test_a_model_on_the_meta_device_resumes_inside_a_block(tmp_path: Path) -> None:
    """The callback refuses, as the Trainer loads before it; its remedy works."""
    reference = given()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    plain = trainer(reference, tmp_path / "plain", optimizers=(optimizer, None), **EVERYTHING)
    plain.train()
    checkpoint = str(tmp_path / "plain" / "checkpoint-2")
    offload = OffloadCallback(**quarter(make=llama))
    model = on_meta()
    optimizers = (torch.optim.AdamW(model.parameters(), lr=1e-3), None)
    refused = trainer(model, tmp_path, offload, optimizers=optimizers, **EVERYTHING)
    with pytest.raises(ConfigError, match=r"weights were not loaded.* around Trainer\("):
        refused.train(resume_from_checkpoint=checkpoint)

    model = on_meta()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with dynoffload.offload(model, optimizer, **quarter(make=llama)):
        paged = trainer(model, tmp_path / "paged", optimizers=(optimizer, None), **EVERYTHING)
        paged.train(resume_from_checkpoint=checkpoint)
    for client in (paged, plain):
        del client.state.log_history[-1]["train_loss"]  # of the steps since it was resumed
    assert_same_outcome(paged, plain)


def test_a_model_on_the_meta_device_is_evaluated_in_a_block(tmp_path: Path) -> None:
    """The callback refuses it before, and names the ways."""
    plain = trainer(given(), tmp_path / "plain", **{**EVERYTHING, "eval_on_start": True})
    expected = plain.evaluate()
    paged = trainer(on_meta(), tmp_path, OffloadCallback(**quarter(make=llama)), **EVERYTHING)
    for call in (paged.evaluate, lambda: paged.predict(paged.eval_dataset)):
        with pytest.raises(ConfigError, match=r"eval_on_start=True\), or evaluate inside 'with"):
            call()
    with dynoffload.offload(paged.model, **quarter(make=llama)) as session:
        found = paged.evaluate()
        assert session.paging
    assert found["eval_loss"] == expected["eval_loss"]
    plain.train()
    offload = OffloadCallback(**quarter(make=llama))
    paged = trainer(on_meta(), tmp_path / "paged", offload, **{**EVERYTHING, "eval_on_start": True})
    paged.train()
    assert_paged(offload.session)
    assert_same_outcome(paged, plain)


def test_a_noted_model_stays_where_it_is() -> None:
    """Its ``to`` takes the dtype, and notes the device, where the block then trains it; copies have
    one of their own."""
    model = on_meta()
    assert model.to("cpu") is model
    assert model.to(torch.bfloat16).lm_head.weight.dtype == torch.bfloat16
    twin = copy.deepcopy(model)
    assert twin.to("cpu") is twin
    optimizer = torch.optim.AdamW(model.parameters())
    assert model.to("xpu:3") is model
    assert twin.to("cuda:1") is twin
    with (
        pytest.raises(BackendError, match="parameters are to be on 'xpu:3'"),
        dynoffload.offload(model, optimizer, budget="1GiB"),
    ):
        pass
