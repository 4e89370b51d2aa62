"""The system's paging as a policy: plain bits in a real cgroup, a clear word where it cannot be.

What joins a group runs in a process of its own, as the kernel may end it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dynoffload
from dynoffload.errors import BudgetError, ConfigError
from dynoffload.memory.cgroup import LimitError, swap_file, why_unavailable
from dynoffload.memory.recharge import recharge
from dynoffload.runtime import swapping
from dynoffload.units import MiB

limited = pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable())

SCRIPT = """
    import json, sys
    import torch
    from pathlib import Path
    from torch import nn
    import dynoffload

    def train(model, optimizer):
        torch.manual_seed(1)
        losses = []
        for _ in range(2):
            loss = model(torch.randn(8, 1024)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def home():
        return Path("/proc/self/cgroup").read_text()

    results = []
    for policy in (None, "os-paging"):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(9)))
        view, address = model[0].weight[3:5], model[0].weight.data_ptr()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        before = home()
        if policy is None:
            losses = train(model, optimizer)
        else:
            with dynoffload.offload(
                model, optimizer, budget="100MiB", spill_dir=sys.argv[1], config={"policy": policy}
            ) as session:
                group = session._group
                charged, inside = group.usage_bytes, home() != before
                losses = train(model, optimizer)
                usage = group.usage()
            files = session.report(Path(sys.argv[1]) / "run.html")
            said = dict(
                charged=charged,
                inside=inside,
                back=home() == before,
                gone=not group.path.exists(),
                swaps=Path("/proc/swaps").read_text(),
                steps=session.stats.to_dict("list"),
                limit=group.limit_bytes,
                kills=usage.oom_kills,
                log=[session.log.policy, session.log.backend],
                named="os-paging" in files.page.read_text(),
            )
        assert model[0].weight.data_ptr() == address
        assert torch.equal(view, model[0].weight[3:5])
        results.append((losses, [p.detach().clone() for p in model.parameters()]))
    (losses, weights), (ours, theirs) = results
    said["equal"] = losses == ours and all(map(torch.equal, weights, theirs))
    print(json.dumps(said))
"""


@pytest.fixture
def disk() -> Iterator[Path]:
    """Return a directory on a disk where swap can be switched on; skip where it cannot."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        try:
            with swap_file(Path(name), 2 * MiB):
                pass
        except LimitError as error:
            pytest.skip(str(error))
        yield Path(name)


@limited
@pytest.mark.alone
@pytest.mark.timeout(240)
def test_a_model_larger_than_its_group_trains_to_the_same_bits(disk: Path) -> None:
    """The model's tensors are in the group, at their addresses; it pages, and stays within its
    limit; afterwards the process is back where it was, and neither group nor swap is left."""
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(SCRIPT), str(disk)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != -signal.SIGKILL:
            break
        # The kernel ends what is in a group where a busy disk takes pages too slowly.
        for left in disk.iterdir():
            subprocess.run(["swapoff", str(left)], check=False)
            left.unlink()
    assert done.returncode == 0, done.stderr[-2000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert said["equal"], "the bits are others"
    assert said["inside"]
    assert said["back"]
    assert said["gone"]
    assert str(disk) not in said["swaps"]
    assert said["charged"] > 34 * MiB, "the model's tensors are not charged to the group"
    assert said["kills"] == 0
    steps = said["steps"]
    assert len(steps["seconds"]) == 2
    assert max(steps["peak_fast_bytes"]) <= said["limit"] == 100 * MiB
    assert sum(steps["bytes_out"]) > 0, "nothing was paged"
    assert sum(steps["stalls"]) > 0
    assert said["log"] == ["os-paging", "swap"]
    assert said["named"], "the report does not say by which policy"


def model() -> nn.Module:
    """Return a network of a few kilobytes."""
    return nn.Linear(8, 8)


def enter(**options: Any) -> Any:
    """Enter a block of this policy."""
    config = {"policy": "os-paging", **options.pop("config", {})}
    return dynoffload.offload(model(), budget="1GiB", config=config, **options).__enter__()


def test_where_no_group_can_be_made_it_says_what_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swapping, "why_no_group", lambda: "it is mounted read-only")
    words = "cannot make a memory cgroup for this process: it is mounted read-only; run as root"
    with pytest.raises(LimitError, match=words):
        enter()


def test_where_there_is_no_swap_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    @contextlib.contextmanager
    def none(directory: Path, nbytes: int) -> Iterator[Path]:
        raise LimitError(f"no swapon for {directory}")
        yield directory

    monkeypatch.setattr(swapping, "why_unavailable", lambda: "")
    monkeypatch.setattr(swapping, "_free_swap", lambda: 0)
    monkeypatch.setattr(swapping, "swap_file", none)
    with pytest.raises(
        LimitError, match=f"no swapon for {tmp_path}; add swap .* or pass spill_dir"
    ):
        enter(spill_dir=tmp_path)


def test_options_and_budgets_that_it_cannot_serve_are_refused() -> None:
    with pytest.raises(ConfigError, match="undoes no step"):
        enter(config={"rollback": True})
    with pytest.raises(BudgetError, match=r"at least 96\.00 MiB"):
        dynoffload.offload(model(), budget="95MiB", config={"policy": "os-paging"}).__enter__()


def test_a_pilot_is_not_used_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Pilot:
        vocabulary = None

    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError):
        enter(pilot=Pilot(), config={"rollback": True})
    assert "the pilot is not used" in caplog.text


def test_memory_is_charged_anew_where_it_lies() -> None:
    """Content and address stay; what lies beside whole pages, or is shared, is left alone."""
    owned = torch.arange(3 << 20, dtype=torch.int32)  # 12 MiB: three pieces
    small = torch.arange(10)
    shared = torch.arange(1 << 18, dtype=torch.int64).share_memory_()
    expected = [t.clone() for t in (owned, small, shared)]
    ranges = [(t.data_ptr(), t.nbytes) for t in (owned, small, shared)]
    done, left = recharge(ranges)
    assert owned.nbytes - 8192 <= done <= owned.nbytes
    assert shared.nbytes - 8192 <= left <= shared.nbytes
    assert [t.data_ptr() for t in (owned, small, shared)] == [a for a, _ in ranges]
    for now, before in zip((owned, small, shared), expected, strict=True):
        assert torch.equal(now, before)
