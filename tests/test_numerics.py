"""The first call of a function by several threads at once: right in every process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from dynoffload.numerics import settle_kernels

_ENTERED = """
import torch
import dynoffload
from dynoffload.numerics import settle_kernels
model = torch.nn.Linear(8, 8)
block = dynoffload.offload(model, torch.optim.SGD(model.parameters()), budget="64MiB", pilot=None)
before = settle_kernels.cache_info().misses
with block:
    print(before, settle_kernels.cache_info().misses)
"""

_STORM = """
import json, os, sys
from pathlib import Path
import numpy as np
import torch
from dynoffload.numerics import settle_kernels

torch.set_num_threads(2)
folder = Path(torch.__file__).parent / "lib"
libraries = [os.open(path, os.O_RDONLY) for path in folder.glob("*cpu*")]
angles = np.outer(np.arange(512), 1e4 ** (-np.arange(0, 32, 2) / 32)).astype(np.float32)
right = np.cos(angles.astype(np.float64))
wrong = 0
for _ in range(int(sys.argv[1])):
    for library in libraries:  # so that its code comes from disk, and threads meet in it
        os.posix_fadvise(library, 0, 0, os.POSIX_FADV_DONTNEED)
    child = os.fork()
    if not child:
        torch.zeros(1 << 20).add_(1)  # the threads are there
        if sys.argv[2] == "settled":
            settle_kernels()
        error = np.abs(torch.from_numpy(angles).cos().numpy() - right).max()
        os._exit(int(error > 1e-5))
    wrong += os.waitpid(child, 0)[1] != 0
print(json.dumps(wrong))
"""


def _run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kernels_are_settled_as_a_block_is_entered() -> None:
    assert _run(_ENTERED).split() == ["0", "1"]


def test_settling_changes_no_state() -> None:
    settle_kernels.cache_clear()
    torch.manual_seed(3)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        settle_kernels()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


@pytest.mark.slow
def test_no_process_has_a_first_cosine_of_half_the_digits() -> None:
    """Five hundred processes; where they are not settled, some five of them are wrong."""
    assert json.loads(_run(_STORM, "500", "settled")) == 0
