"""Nothing grows while it trains: descriptors, threads, the spill file, memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from exactness import needs_pager
from soaking import NETWORKS, Taken, soak

from dynoffload.pilot.online import WINDOW
from dynoffload.units import KiB, MiB

BACKENDS = [pytest.param("pager", marks=needs_pager), "mapped"]

GROWTH = 4 * KiB
"""Of the resident set in a step. Heap that is free was handed back, so this is no allocator's; what
is measured is 0.1 to 0.8 KB, the totals that the log keeps of each step."""
WHILE_LEARNING = 24 * MiB
"""Of the resident set, from the last row at which the pilot has fewer examples than it keeps."""
OBJECTS = 1.5
"""More in a step; those totals are one."""


def assert_constant(rows: Sequence[Taken]) -> None:
    """Assert that after the first rows, when every sample was seen, nothing is opened or grows."""
    settled = rows[2]
    for row in rows[3:]:
        assert row.descriptors == settled.descriptors, rows
        assert row.threads == settled.threads, rows
        assert row.spill == settled.spill, rows
        assert row.spill_blocks <= settled.spill_blocks * 1.01, rows


def assert_level(rows: Sequence[Taken]) -> None:
    """Assert that memory takes no more in the end than before, by the least of three rows each."""
    steps = rows[-1].steps - rows[2].steps
    for name, growth in (("resident", GROWTH), ("objects", OBJECTS)):
        before = min(getattr(row, name) for row in rows[:3])
        after = min(getattr(row, name) for row in rows[-3:])
        assert after - before <= growth * steps, f"{name} in {steps} steps: {rows}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_grows_in_some_hundred_steps(backend: str) -> None:
    """Of a network that takes another path for each sample."""
    rows = list(soak("small", backend, 200, layers=1, policy="repeat"))
    assert [row.steps for row in rows] == list(range(20, 201, 20))
    assert_constant(rows)
    assert_level(rows[2:])


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("network", NETWORKS)
def test_a_long_run_takes_no_more_than_a_short_one(network: str, backend: str) -> None:
    """Over 2,000 steps with a pilot, once it has as many examples as it keeps."""
    script = Path(__file__).with_name("soaking.py")
    path = [str(script.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(script), network, backend, "2000"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [Taken(*json.loads(line)) for line in done.stdout.splitlines()]
    assert_constant(rows)
    before, after = rows[4], rows[5:]
    assert before.steps <= WINDOW < after[0].steps
    assert max(row.resident for row in after) <= before.resident + WHILE_LEARNING, rows
    assert_level(after)
