"""A budget that is larger than memory: lowered with a warning, refused where that is too little."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from exactness import SMALL_PAGES, Loop, footprint_of, small, small_loss, small_samples
from torch import nn

import dynoffload
from dynoffload.errors import BudgetError
from dynoffload.experiments.cgroup import memory_group, why_unavailable
from dynoffload.memory.limits import available_bytes
from dynoffload.units import GiB, MiB

PIB = 1 << 50


def test_a_budget_larger_than_memory_is_lowered(caplog: pytest.LogCaptureFixture) -> None:
    """The model fits, so it trains, and the message says what there is."""
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())
    with (
        caplog.at_level(logging.WARNING),
        dynoffload.offload(model, optimizer, budget=PIB, config=SMALL_PAGES) as session,
    ):
        Loop(steps=2).run(model, optimizer, small_samples(2), small_loss)
        assert footprint_of(model) < session.sizing.budget < PIB // 64
    assert "control group, can give" in caplog.text


def test_a_budget_that_is_there_is_taken_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """Without a word."""
    model = small()
    with caplog.at_level(logging.WARNING), dynoffload.offload(model, budget=8 * MiB) as session:
        assert session.sizing.budget == 8 * MiB
    assert "control group" not in caplog.text


def test_what_does_not_fit_in_memory_is_refused() -> None:
    """By the name of what is too large, although the user allows more than enough."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(1 << 22, 1 << 22, bias=False))
    with (
        pytest.raises(BudgetError, match=r"more than the .* control group, can give") as caught,
        dynoffload.offload(model, budget=PIB),
    ):
        pytest.fail("the block must not begin")
    told = str(caught.value)
    assert re.search(r"at least [0-9.]+ GiB", told), told
    assert "1.weight needs" in told
    assert "end other programs" in told


SCRIPT = """
    import logging, sys
    logging.basicConfig(level=logging.WARNING)
    import torch
    import dynoffload
    from dynoffload.memory.limits import available_bytes
    model = torch.nn.Linear(256, 256)
    cache = open(sys.argv[1], "wb")
    for _ in range(400):  # the page cache is charged to the group, and given up for others
        cache.write(bytes(1 << 20))
    cache.flush()
    print(available_bytes())
    with dynoffload.offload(model, budget="64GiB") as session:
        model(torch.ones(1, 256)).sum().backward()
        print(session.sizing.budget)
"""


@pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable() or "never")
def test_the_limit_of_the_control_group_counts(tmp_path: Path) -> None:
    """And what files take of it does not."""
    limit = GiB  # the process itself takes some 300 MiB with torch
    before = available_bytes()
    with memory_group(limit) as group:
        command = group.command(
            [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path / "file")]
        )
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    available, budget = map(int, done.stdout.split())
    assert 256 * MiB < available < limit or before < GiB
    assert 256 * MiB < budget < limit or before < GiB
    assert "control group, can give" in done.stderr
