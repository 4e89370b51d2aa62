"""The first call of a function by several threads at once: right in every process."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import dynoffload
from dynoffload import numerics
from dynoffload.numerics import FUNCTIONS, settle_kernels

ROUTED = {
    *("acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "expm1", "log", "log10"),
    *("log1p", "log2", "sin", "sqrt", "tan", "tanh", "trunc"),
}
"""What ATen gives to oneMKL's function library in single and double precision (ATen/cpu/vml.h)."""

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
assert libraries
wrong = {"as it is": 0, "settled": 0}
for number in range(2 * int(sys.argv[1])):
    way = ("as it is", "settled")[number % 2]
    for library in libraries:  # so that its code comes from disk, and threads meet in it
        os.posix_fadvise(library, 0, 0, os.POSIX_FADV_DONTNEED)
    child = os.fork()
    if not child:
        torch.zeros(1 << 20).add_(1)  # the threads are there
        if way == "settled":
            settle_kernels()
        error = np.abs(torch.from_numpy(angles).cos().numpy() - right).max()
        os._exit(int(error > 1e-5))
    wrong[way] += os.waitpid(child, 0)[1] != 0
print(json.dumps(wrong))
"""


def _run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: set[tuple[str, torch.dtype, int]] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if args and isinstance(args[0], torch.Tensor):
            name = func.overloadpacket.__name__
            self.calls.add((name, args[0].dtype, args[0].numel()))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def unsettled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "_settled", False)


@pytest.mark.usefixtures("unsettled")
def test_every_function_is_called_on_one_element(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _Seen()
    monkeypatch.setattr(numerics, "_disable_current_modes", lambda: seen)
    settle_kernels()
    floats = (torch.float32, torch.float64)
    assert {(name, dtype, 1) for name in ROUTED for dtype in floats} <= seen.calls
    assert set(FUNCTIONS) >= ROUTED


@pytest.mark.usefixtures("unsettled")
def test_kernels_are_settled_as_a_block_is_entered() -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    block = dynoffload.offload(model, optimizer, budget="64MiB", pilot=None)
    assert not numerics._settled
    with block:
        assert numerics._settled


def _let_go_of_code() -> None:
    """Have this process hold no page of torch's code, so that it can leave the page cache."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if "libtorch_cpu" in line and " r-xp " in line:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            assert madvise(start, end - start, 4) == 0  # MADV_DONTNEED: read again when needed


@pytest.mark.slow
def test_no_process_has_a_first_cosine_of_half_the_digits() -> None:
    _let_go_of_code()
    wrong = json.loads(_run(_STORM, "600"))
    assert wrong["settled"] == 0
    if not wrong["as it is"]:
        pytest.skip("this build of PyTorch, or this machine, has no such race")
