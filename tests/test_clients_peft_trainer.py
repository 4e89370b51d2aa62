"""transformers' Trainer over an adapter of PEFT with `OffloadCallback`; which adapters stay in
memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import adapted, config, drawn, sample_loss, trained_part
from clients import assert_paged, each_backend
from exactness import SMALL_PAGES, assert_same, footprint_of, is_paged
from hazards import each_paged, hazard, trained
from peft import get_peft_model
from safetensors.torch import load_file
from trainers import EVERYTHING, assert_same_outcome, llama, trainer

from dynoffload.integrations.transformers import OffloadCallback

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def callback(base: str, kind: str, backend: str = "auto") -> OffloadCallback:
    """Return a callback with half of what the adapted model takes."""
    config = {**SMALL_PAGES, "step_aside": False, "backend": backend}
    return OffloadCallback(budget=footprint_of(adapted(base, kind)) // 2, config=config)


@each_backend
@pytest.mark.parametrize(
    ("base", "kind"),
    [("llama", "dora"), pytest.param("mixtral", "experts", marks=pytest.mark.slow)],
)
def test_a_trainer_trains_an_adapter(backend: str, base: str, kind: str, tmp_path: Path) -> None:
    """With checkpoints of the adapter alone, the best of which it loads in the end."""
    options = {**EVERYTHING, "load_best_model_at_end": True, "gradient_checkpointing": True}
    plain = trainer(adapted(base, kind), tmp_path / "plain", **options)
    plain.train()
    offload = callback(base, kind, backend)
    paged = trainer(adapted(base, kind), tmp_path / "paged", offload, **options)
    paged.train()
    assert_paged(offload.session, steps=4)
    best = [t.state.best_model_checkpoint.rpartition("/")[2] for t in (paged, plain)]
    assert best[0] == best[1]
    paged.state.best_model_checkpoint = plain.state.best_model_checkpoint
    assert_same_outcome(paged, plain)
    files = [tmp_path.glob(f"{side}/*/adapter_model.safetensors") for side in ("plain", "paged")]
    for theirs, ours in zip(*map(sorted, files), strict=True):
        assert_same(load_file(ours), load_file(theirs), str(ours))
    assert len(list(tmp_path.glob("paged/*/adapter_model.safetensors"))) == 2


@pytest.mark.slow
def test_a_trainer_resumes_an_adapter(tmp_path: Path) -> None:
    options = {**EVERYTHING, "max_steps": 2}
    trainer(adapted("llama", "lora"), tmp_path, callback("llama", "lora"), **options).train()
    sides = []
    for ours in ([], [callback("llama", "lora")]):
        sides.append(
            trainer(adapted("llama", "lora"), tmp_path / str(len(sides)), *ours, **EVERYTHING)
        )
        sides[-1].train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_outcome(sides[1], sides[0])


@each_paged
@pytest.mark.parametrize("resident", [True, False])
def test_adapters_stay_while_they_are_a_small_part_of_the_budget(
    backend: str, resident: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a size at which frozen weights are paged; to the same bits either way."""
    if not resident:
        monkeypatch.setattr("dynoffload.runtime.sizing._RESIDENT_TRAINED", 1 << 30)
    seen: list[set[tuple[bool, bool]]] = []

    def each(side: Any, model: Any, optimizer: Any, step: int) -> None:
        side.step(sample_loss(model, step), optimizer)
        for session, _ in side.sessions:
            large = [p for p in model.parameters() if p.nbytes >= 8192]
            seen.append({(p.requires_grad, is_paged(session, p)) for p in large})

    def make() -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            base = llama(hidden_size=128, intermediate_size=512)
            return drawn(get_peft_model(base, config("lora", r=16)))

    side = hazard(
        backend,
        trained(
            make,
            each,
            optimizer=trained_part,
            share=0.6,
            page_bytes=4096,
            min_paged_bytes=None,
        ),
    )
    assert side.sessions
    assert all(found == {(True, not resident), (False, True)} for found in seen)
