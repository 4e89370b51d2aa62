"""torchrun: the example of two processes with and without a budget; files that ranks do not share;
and the experiment about both."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import needs_pager
from gloo_ranks import run_script

import dynoffload
from dynoffload.errors import ConfigError
from dynoffload.experiments import ranks
from dynoffload.host_optimizer import HostOptimizer
from dynoffload.launch import own_file, own_folder, said_by

ROOT = Path(__file__).parents[1]
TINY = ["--preset", "tiny", "--steps", "2", "--tokens", "32"]
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]


def launched(*words: str) -> tuple[str, str]:
    """Run a program in two processes; return what both streams hold."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [*LAUNCH, *words], capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, done.stderr


@needs_pager
def test_the_example_trains_to_the_same_bits_under_the_launcher(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "two_processes.py")
    expected = run_script(tmp_path, script, *TINY)
    report = ["--report", str(tmp_path / "run.html")]
    run = ["-m", "dynoffload", "run", "--budget", "2MB", *report, script]
    printed, said = launched(*run, *TINY, "--offload")
    lines = printed.splitlines()
    assert [line for line in expected.splitlines() if line not in lines] == []
    assert len(expected.splitlines()) == 3
    told = [line for line in said.splitlines() if "of parameters, gradients and optimizer" in line]
    assert len(told) == 1, "one plan line, of the first rank"
    assert "1.19 MiB of buckets of gradients" in told[0]
    for rank in range(2):
        assert (tmp_path / f"run-rank{rank}.html").exists()
        assert f"rank {rank}: MoELM, 2 steps" in said + printed
    assert not (tmp_path / "run.html").exists()


@pytest.mark.slow
@needs_pager
def test_a_script_that_knows_nothing_of_it_is_wrapped() -> None:
    script = str(ROOT / "examples" / "two_processes.py")
    expected, _ = launched(script, *TINY)
    printed, said = launched("-m", "dynoffload", "run", "--wrap", "--budget", "2MB", script, *TINY)
    assert [line for line in expected.splitlines() if line not in printed.splitlines()] == []
    assert "rank 1: MoELM, 2 steps" in said + printed


def test_names_that_ranks_do_not_share(monkeypatch: pytest.MonkeyPatch) -> None:
    page, folder = Path("out/run.html"), Path("traces")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert (own_file(page), own_folder(folder), said_by()) == (page, folder, "")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert (own_file(page), own_folder(folder), said_by()) == (page, folder, "")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert own_file(page) == Path("out/run-rank0.html")
    assert (own_folder(folder), said_by()) == (folder, "rank 0: ")
    monkeypatch.setenv("RANK", "1")
    assert own_file(page) == Path("out/run-rank1.html")
    assert (own_folder(folder), said_by()) == (folder / "rank1", "rank 1: ")


@pytest.mark.parametrize("rank", ["", "first"])
@pytest.mark.parametrize("kind", ["session", "host optimizer"])
def test_a_rank_that_is_no_number_is_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, rank: str
) -> None:
    """Job scripts export ``RANK=`` where there is one process: it says its plan like any other."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "")
    caplog.set_level("INFO", "dynoffload")
    model = torch.nn.Linear(64, 64)
    if kind == "session":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with dynoffload.offload(model, optimizer, budget="1MiB"):
            pass
    else:
        HostOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    assert "Linear" in caplog.text or "HostOptimizer: " in caplog.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ways": ["both"]}, "ways names 'both'; there are ddp"),
        ({"networks": ["all"]}, "networks names 'all'; there are layerdrop, moe"),
        ({"ranks": 1}, "ranks=1 and steps=200 must be at least 2"),
    ],
)
def test_what_the_experiment_refuses(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ranks.Params(**options)
