"""Waits that are taken away are races, by the vector clocks of the emulated accelerator."""

from __future__ import annotations

from pathlib import Path

import pytest
from emulated import Watcher, emulated
from mutants import MUTANTS, Mutant, Program, mutated

SEEDS = 16


def wrong(tmp_path: Path, seed: int) -> bool:
    """Return whether a program races, or computes what it should not."""
    try:
        with emulated(seed, delay_s=0.0003) as streams:
            program = Program(streams, tmp_path, seed)
            with Watcher(streams, lambda storage: program.device.owner(storage) >= 0).watching():
                return program.run() > 0
    except (AssertionError, RuntimeError):
        return True


def test_all_is_right(tmp_path: Path) -> None:
    assert not any(wrong(tmp_path, seed) for seed in range(SEEDS))


@pytest.mark.parametrize("mutant", [one for one in MUTANTS if one.on_emulator], ids=str)
def test_a_mutant_is_caught(tmp_path: Path, mutant: Mutant) -> None:
    with mutated(mutant):
        assert any(wrong(tmp_path, seed) for seed in range(SEEDS))
