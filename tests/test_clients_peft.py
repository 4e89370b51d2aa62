"""PEFT's adapters on frozen weights that are paged, to the bits of PEFT without a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import (
    BASES,
    CONFIGS,
    adapted,
    config,
    drawn,
    sample_loss,
    trained_part,
)
from exactness import assert_same
from hazards import Side, each_paged, each_with_slices_in_time, hazard, trained
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

USUAL = [("llama", "dora"), ("mixtral", "experts"), ("qwen3-moe", "saved")]
CASES = [
    pytest.param(base, kind, marks=[] if (base, kind) in USUAL else [pytest.mark.slow])
    for base in BASES
    for kind in CONFIGS
    if base != "llama" or kind != "experts"
]


def runs(backend: str, base: str, kind: str, each: Any = None, **options: Any) -> Side:
    """Train an adapter on both sides, by default under a third of the footprint."""
    # On an accelerator, all slices that `baddbmm` gathers are in the pool at once.
    share = 0.7 if (backend, kind) == ("emulated", "experts") else 0.33
    given: dict[str, Any] = {"loss": sample_loss, "optimizer": trained_part, "share": share}
    dtype = options.pop("dtype", torch.float32)
    make = lambda: adapted(base, kind, dtype)  # noqa: E731
    budgeted = options.pop("budgeted", True)
    return hazard(backend, trained(make, each, **{**given, **options}), budgeted=budgeted)


@each_with_slices_in_time
@pytest.mark.parametrize(("base", "kind"), CASES)
def test_adapters_train_to_the_same_bits(backend: str, base: str, kind: str) -> None:
    runs(backend, base, kind)


@each_with_slices_in_time
@pytest.mark.parametrize(("base", "kind"), CASES)
def test_a_base_in_bfloat16_under_adapters_in_single_precision(
    backend: str, base: str, kind: str
) -> None:
    side = runs(backend, base, kind, dtype=torch.bfloat16)
    (session, _), *_ = side.sessions
    kinds = {(p.dtype, p.requires_grad) for p in session.model.parameters()}
    assert (torch.bfloat16, False) in kinds
    assert (torch.float32, True) in kinds


@each_paged
@pytest.mark.parametrize("base", ["mixtral", "qwen3-moe"])
def test_experts_larger_than_the_budget(backend: str, base: str) -> None:
    """PEFT makes the fused weight anew in each forward, beside the pool."""
    runs(backend, base, "experts", share=0.0)


# Several adapters


def joins(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer step what trains and is new."""
    known = {p for group in optimizer.param_groups for p in group["params"]}
    new = [p for p in model.parameters() if p.requires_grad and p not in known]
    if new:
        optimizer.add_param_group({"params": new})


@each_with_slices_in_time
@pytest.mark.parametrize("kind", ["lora", "saved", "experts"])
def test_adapters_are_added_chosen_and_deleted_in_mid_run(backend: str, kind: str) -> None:
    """A second one joins the optimizer, both train in turn and, where PEFT can, together."""

    def each(side: Side, model: Any, optimizer: Any, step: int) -> None:
        if step == 1:
            model.add_adapter("other", config(kind))
            model.set_adapter("other")
            drawn(model)
            joins(model, optimizer)
        if step == 3:
            model.set_adapter("default")
        if step == 4 and kind != "saved":
            model.base_model.set_adapter(["default", "other"])
            joins(model, optimizer)
        if step == 6:
            model.set_adapter("other")
            model.delete_adapter("default")
        side.step(sample_loss(model, step), optimizer)

    runs(backend, "mixtral", kind, each, steps=8)


@each_with_slices_in_time
@pytest.mark.parametrize(("base", "kind"), [("llama", "dora"), ("mixtral", "experts")])
@pytest.mark.parametrize("how", ["peft", "transformers"])
def test_injected_in_mid_run(backend: str, base: str, kind: str, how: str) -> None:
    """Under an optimizer that has stepped the head alone. What is frozen then has updates left."""

    def program(side: Side) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = whole = BASES[base]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with side.offload(model, optimizer, share=0.4):
            for step in range(6):
                if step == 2:
                    if how == "peft":
                        whole = get_peft_model(model, config(kind))
                    else:
                        model.add_adapter(config(kind))
                    drawn(model)
                    joins(model, optimizer)
                side.step(sample_loss(whole, step), optimizer)
            side.see("its names", list(dict(whole.named_parameters())))

    hazard(backend, program)


# Merged


@each_with_slices_in_time
@pytest.mark.parametrize(("base", "kind"), CASES)
def test_merged_and_unmerged_between_steps(backend: str, base: str, kind: str) -> None:
    """The merge writes frozen weights; to take it back leaves rounding in them."""

    def each(side: Side, model: Any, optimizer: Any, step: int) -> None:
        if step in (1, 2):
            model.merge_adapter(safe_merge=step == 2)
            with torch.no_grad():
                side.see("merged", sample_loss(model.eval(), step))
            model.unmerge_adapter()
            model.train()
        with torch.no_grad(), model.disable_adapter():
            side.see("without", sample_loss(model, step))
        side.step(sample_loss(model, step), optimizer)

    # A safe merge gives weights memory of its own, which is paged at their next use.
    side = runs(backend, base, kind, each, steps=4, budgeted=False)
    (session, budget), *_ = side.sessions
    assert session.log.steps[-1].peak_fast_bytes <= budget


@each_with_slices_in_time
@pytest.mark.parametrize(("base", "kind"), [("llama", "dora"), ("mixtral", "experts")])
def test_merged_for_good(backend: str, base: str, kind: str) -> None:
    """The base is called from then on, with the adapters' modules gone, and trains on."""

    def each(side: Side, model: Any, optimizer: Any, step: int) -> None:
        whole = model
        if step == 2:
            model.merged = [model.merge_and_unload()]
            model.merged[0].lm_head.requires_grad_(True)
            optimizer.add_param_group({"params": [model.merged[0].lm_head.weight]})
        if step >= 2:
            (whole,) = model.merged
        side.step(sample_loss(whole, step), optimizer)

    runs(backend, base, kind, each, share=0.5)


# Saved


@each_with_slices_in_time
@pytest.mark.parametrize(("base", "kind"), CASES)
def test_saved_and_loaded_in_the_block(backend: str, base: str, kind: str, tmp_path: Path) -> None:
    """The adapter's files alone, into another adapter, which trains on, and into a new model."""

    def save(side: Side, model: Any, at: Path, **given: Any) -> None:
        if side.backend == "emulated":  # a CPU: safetensors copies nothing from it before it reads
            given["state_dict"] = {name: one.clone() for name, one in model.state_dict().items()}
        model.save_pretrained(at, **given)

    def each(side: Side, model: Any, optimizer: Any, step: int) -> None:
        at = tmp_path / str(side.backend)
        if step == 1:
            save(side, model, at)
            side.see("file", load_file(at / "adapter_model.safetensors"))
            side.see("state", get_peft_model_state_dict(model))
            model.load_adapter(at, "again", is_trainable=True)
            model.set_adapter("again")
            joins(model, optimizer)
        side.step(sample_loss(model, step), optimizer)
        if step == 3:
            save(side, model, at, selected_adapters=["again"])
            new = PeftModel.from_pretrained(BASES[base](), at / "again").eval()
            side.see("in a new model", sample_loss(new, 0))
            assert_same(
                load_file(at / "again" / "adapter_model.safetensors"),
                get_peft_model_state_dict(model, adapter_name="again"),
                "file",
            )

    runs(backend, base, kind, each, share=0.6)


# Loops


@each_with_slices_in_time
@pytest.mark.parametrize(("base", "kind"), USUAL)
@pytest.mark.parametrize("reentrant", [pytest.param(False, marks=pytest.mark.slow), True])
def test_checkpointed(backend: str, base: str, kind: str, reentrant: bool) -> None:
    """Layers are computed again in backward, and inputs of a frozen embedding require grad."""

    def each(side: Side, model: Any, optimizer: Any, step: int) -> None:
        if step == 0:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        side.step(sample_loss(model, step), optimizer)

    runs(backend, base, kind, each)


@each_with_slices_in_time
@pytest.mark.parametrize(("base", "kind"), CASES)
def test_autocast(backend: str, base: str, kind: str) -> None:
    def each(side: Side, model: Any, optimizer: Any, step: int) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = sample_loss(model, step)
        side.step(loss, optimizer)

    runs(backend, base, kind, each, dtype=torch.bfloat16)
