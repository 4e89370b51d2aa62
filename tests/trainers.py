"""transformers' Trainers for tests: no tests here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from clients import samples, without_times
from exactness import assert_ordinary, assert_same, assert_same_training
from torch import nn

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: E402


def trainer(model: nn.Module | None, out: Path, *callbacks: Any, **options: Any) -> Trainer:
    """Return a Trainer of four steps that logs each."""
    given: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    extras = {k: options.pop(k) for k in ("optimizers", "model_init", "data") if k in options}
    data = extras.pop("data", samples())
    return Trainer(
        model,
        TrainingArguments(output_dir=str(out), **{**given, **options}),
        train_dataset=data,
        eval_dataset=samples()[:4],
        callbacks=list(callbacks),
        **extras,
    )


def optimizer_of(client: Trainer) -> torch.optim.Optimizer:
    """Return the optimizer that accelerate has wrapped."""
    inner: torch.optim.Optimizer = client.optimizer.optimizer
    return inner


def assert_same_outcome(actual: Trainer, expected: Trainer) -> None:
    """Assert that two Trainers logged the same and left the same."""
    assert_ordinary(actual.model, optimizer_of(actual))
    logged = [[without_times(row) for row in t.state.log_history] for t in (actual, expected)]
    assert_same(*logged, "log")
    assert_same_training(actual.model, optimizer_of(actual), expected.model, optimizer_of(expected))


EVERYTHING: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.05,
    "lr_scheduler_type": "cosine",
    "learning_rate": 1e-3,
    "warmup_steps": 1,
    "bf16": True,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
}
"""Accumulation, clipping, a schedule, autocast, evaluation and checkpoints in mid-training."""


def llama(**options: Any) -> LlamaForCausalLM:
    """Return a Llama of two layers."""
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**{**sizes, **options}))
