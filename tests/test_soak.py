"""Nothing grows while it trains: descriptors, threads, the spill file, memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from exactness import needs_pager
from soaking import NETWORKS, Taken, soak

from dynoffload.units import MiB

BACKENDS = [pytest.param("pager", marks=needs_pager), "mapped"]

GROWTH = 24 * MiB
"""Of the resident set in the second half of a long run. The log keeps some 20 MB of single
transfers, however long the run is, and 0.5 KB of totals for each step; the rest is the allocator's.
"""


def assert_constant(rows: Sequence[Taken]) -> None:
    """Assert that after the first rows, when every sample was seen, nothing is opened or grows."""
    settled = rows[2]
    for row in rows[3:]:
        assert row.descriptors == settled.descriptors, rows
        assert row.threads == settled.threads, rows
        assert row.spill == settled.spill, rows
        assert row.spill_blocks <= settled.spill_blocks * 1.01, rows


@pytest.mark.parametrize("backend", BACKENDS)
def test_descriptors_threads_and_spill_file_stay_as_they_are(backend: str) -> None:
    """Over 200 steps of a network that takes another path for each sample."""
    rows = list(soak("small", backend, 200, layers=1, policy="repeat"))
    assert [row.steps for row in rows] == list(range(20, 201, 20))
    assert_constant(rows)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("network", NETWORKS)
def test_a_long_run_takes_no_more_than_a_short_one(network: str, backend: str) -> None:
    """Over 2,000 steps, in a process of its own, where memory can be measured."""
    script = Path(__file__).with_name("soaking.py")
    done = subprocess.run(
        [sys.executable, str(script), network, backend, "2000"],
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [Taken(*json.loads(line)) for line in done.stdout.splitlines()]
    assert_constant(rows)
    assert max(row.resident for row in rows[5:]) <= rows[4].resident + GROWTH, rows
