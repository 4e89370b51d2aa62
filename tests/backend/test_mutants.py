"""Waits that are taken away are missed, on streams of torch that are late."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerator import DEVICE, late
from mutants import MUTANTS, Mutant, Program, mutated

from dynoffload.memory.accelerator.torch_streams import TorchStreams

SEEDS = 40


def wrong(tmp_path: Path, seed: int) -> bool:
    """Return whether a program computes what it should not, or fails."""
    with late(seed, delay_us=3000):
        try:
            other = torch.Stream(DEVICE) if seed % 3 else None
            return Program(TorchStreams(DEVICE), tmp_path, seed, other).run() > 0
        except (AssertionError, RuntimeError):
            return True


def test_all_is_right(tmp_path: Path) -> None:
    assert not any(wrong(tmp_path, seed) for seed in range(SEEDS))


@pytest.mark.parametrize("mutant", [one for one in MUTANTS if one.on_backend], ids=str)
def test_a_mutant_is_caught(tmp_path: Path, mutant: Mutant) -> None:
    with mutated(mutant):
        assert any(wrong(tmp_path, seed) for seed in range(SEEDS))


def test_memory_is_not_taken_from_another_stream() -> None:
    """What one stream still reads is free on another, whose later work is to come after that."""
    streams, other = TorchStreams(DEVICE), torch.Stream(DEVICE)
    storage = torch.UntypedStorage(0, device=DEVICE)
    streams.fill(storage, 4096)
    whole = torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(storage)
    whole.fill_(7)
    with other:
        streams.now()
        busy = torch.ones(700, 700, device=DEVICE)
        for _ in range(4):
            busy = busy @ busy
        copied = whole.clone()
    streams.empty(storage)
    torch.accelerator.synchronize()
    assert copied.cpu().eq(7).all()
