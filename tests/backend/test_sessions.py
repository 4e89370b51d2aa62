"""Training on the backend through `torch.accelerator`, bit for bit as plain PyTorch there."""

from __future__ import annotations

import gc
from typing import Any

import hazards
import pytest
import torch
from accelerator import DEVICE, late
from torch import nn

import dynoffload
from dynoffload.experiments import gpu_check_training
from dynoffload.experiments.gpu_check_cases import Case, cases
from dynoffload.experiments.gpu_check_training import train_case
from dynoffload.memory.accelerator.workspace import WorkspaceEstimate
from dynoffload.units import KiB, MiB

CASES = {case.describe(): case for case in cases(steps=3)}
IN_TIME = {
    "transformers:mixtral: AdamW foreach; no race, late queues 2, lying pilot 2",
    "transformers:qwen3-moe: AdamW fused; a file below host memory, from the accelerator",
    "moe: SGD momentum, clipping by norm, float16; host memory, from the accelerator",
    "moe: AdamW fused; the optimizer in backward, a file",
    "transformers:llama: AdamW foreach, checkpointing, not reentrant; host memory",
    "moe: AdamW fused, bfloat16 weights; the optimizer on the host, a file",
}
"""Those of `make test`; the others are slow."""


@pytest.fixture(autouse=True)
def few_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check_training, "SCRATCH", 4 * KiB)
    monkeypatch.setattr("dynoffload.experiments.late.WIDTH", 16)


def trained(case: Case, seed: int) -> dict[str, Any]:
    """Return the row of a case."""
    with late(seed):
        return train_case(case, DEVICE)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in IN_TIME else [pytest.mark.slow]) for name in CASES],
)
def test_cases_of_gpu_check(name: str) -> None:
    """On a real backend of torch, those of a machine with a GPU."""
    row = trained(CASES[name], list(CASES).index(name))
    assert row["verdict"] == "exact", row


def test_the_cases_of_each_run_are_there() -> None:
    assert set(CASES) >= IN_TIME


def test_hooks_of_parameters_are_called_in_each_session_of_a_model_from_the_cpu() -> None:
    """Torch swaps its tensors here, to and from: user hooks, and those that page gradients, without
    which the second session passes its budget."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(16)))
    optimizer, seen = torch.optim.AdamW(model.parameters(), lr=1e-3), list[str]()
    model[3][0].weight.register_post_accumulate_grad_hook(lambda _: seen.append("made"))
    model[3][0].weight.register_hook(lambda _: seen.append("before"))
    for _ in range(2):
        gc.collect()
        budget = torch.accelerator.memory_allocated() + MiB
        with dynoffload.offload(
            model, optimizer, budget=budget, pilot=None, device=DEVICE, config=hazards.SMALL_PAGES
        ) as session:
            for _ in range(4):
                model(torch.ones(4, 128, device=DEVICE)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert max(session.stats.peak_allocated_bytes[2:]) <= budget
    assert seen == ["before", "made"] * 8


def test_a_session_leaves_nothing_on_the_accelerator() -> None:
    gc.collect()
    before = torch.accelerator.memory_allocated()
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4))).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    budget = torch.accelerator.memory_allocated() + MiB
    with dynoffload.offload(
        model, optimizer, budget=budget, pilot=None, device=DEVICE, config=hazards.SMALL_PAGES
    ):
        for _ in range(3):
            model(torch.ones(4, 128, device=DEVICE)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert model[0].weight.data_ptr()
    del model, optimizer
    gc.collect()
    assert torch.accelerator.memory_allocated() == before


def test_hazards_find_a_pool_that_leaves_no_room_for_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hazards.hazard("torch", hazards.trained())
    monkeypatch.setattr(WorkspaceEstimate, "after", lambda self, peak, regions: self._most)
    with pytest.raises(AssertionError, match="were allocated under"):
        hazards.hazard("torch", hazards.trained())
