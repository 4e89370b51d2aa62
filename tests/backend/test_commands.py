"""The commands for machines with a GPU, from end to end in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from accelerator import inherited


def made(folder: Path, *words: str) -> tuple[str, Any]:
    """Return what a command printed, and the JSON that it wrote."""
    (folder / "autoload").mkdir()
    result = folder / "result.json"
    done = subprocess.run(
        [sys.executable, "-P", "-m", *words, "--json", str(result), "--spill-dir", str(folder)],
        env=inherited(folder / "autoload"),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout, json.loads(result.read_text())


def test_gpu_check_passes(tmp_path: Path) -> None:
    printed, result = made(
        tmp_path, "dynoffload.experiments.gpu_check", "--only", "qwen3-moe: AdamW fused; a file"
    )
    assert "1 exact, 0 FAILED" in printed
    assert result["passed"]


@pytest.mark.slow
def test_the_experiment_measures_ours_and_its_peers(tmp_path: Path) -> None:
    """At half of what plain training takes, only ours fits, and its losses are those of plain."""
    _, result = made(
        tmp_path,
        *("dynoffload", "experiment", "gpu", "--preset", "tiny", "--networks", "moe"),
        *("--budgets", "1/2", "--ways", "plain,ours,checkpoint", "--cap", "0B"),
        *("--steps", "2", "--warmup", "2"),
    )
    rows = {row["way"]: row for row in result["rows"]}
    assert rows["ours"]["losses"] == rows["plain"]["losses"]
    assert rows["ours"]["peak_reserved"] <= rows["ours"]["cap_bytes"]
    assert rows["ours"]["bytes_in"] > 0
    assert "OutOfMemoryError" in rows["checkpoint"]["why"]
