"""Training on the backend through `torch.accelerator`, bit for bit as plain PyTorch there."""

from __future__ import annotations

from typing import Any

import hazards
import pytest
from accelerator import DEVICE, late

from dynoffload.experiments import gpu_check_training
from dynoffload.experiments.gpu_check_cases import Case, cases
from dynoffload.experiments.gpu_check_training import train_case
from dynoffload.memory.accelerator.workspace import WorkspaceEstimate
from dynoffload.units import KiB

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


def test_hazards_find_a_pool_that_leaves_no_room_for_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hazards.hazard("torch", hazards.trained())
    monkeypatch.setattr(WorkspaceEstimate, "after", lambda self, peak, regions: self._most)
    with pytest.raises(AssertionError, match="were allocated under"):
        hazards.hazard("torch", hazards.trained())
