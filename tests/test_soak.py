"""Nothing grows while it trains: descriptors, threads, the spill file, memory."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from devices import needs_pager, script
from soaking import Taken

from dynoffload.pilot.evidence import MEMORY
from dynoffload.runtime import recording
from dynoffload.units import KiB, MiB

BACKENDS = [pytest.param("pager", marks=needs_pager), "mapped"]

GROWTH = 4 * KiB
"""Of the resident set in a step. Heap that is free was handed back, so this is no allocator's; what
is measured is 0.1 to 0.8 KB, the totals that the log keeps of each step."""
ONCE = 4 * MiB
"""Of the resident set, besides: a huge page that the kernel puts together, or part of a library
that is read at last, comes once; what was seen is 2.4 MB between two rows, little in the others."""
WHILE_LEARNING = 24 * MiB
"""Of the resident set, once the pilot's memory is full."""
OBJECTS = 1.5
"""More in a step; those totals are one."""
SETTLING = 16 * KiB
"""Of the resident set in a step, once a log is full, whose records come and go in a heap that is
not theirs alone: what is measured is 10 KB from step 1,200 to 1,600, and 2 KB from 3,000 on."""


def assert_constant(rows: Sequence[Taken]) -> None:
    """Assert that after the first rows, when every sample was seen, nothing is opened or grows."""
    settled = rows[2]
    for row in rows[3:]:
        assert row.descriptors == settled.descriptors, rows
        assert row.threads == settled.threads, rows
        assert row.spill == settled.spill, rows
        assert row.spill_blocks <= settled.spill_blocks * 1.01, rows


def assert_level(rows: Sequence[Taken], resident: int = GROWTH) -> None:
    """Assert that memory takes no more in the end than before, by the least of three rows each, but
    for one rise of the resident set that came between two rows, stayed, and stands out."""
    steps = rows[-1].steps - rows[2].steps
    for name, growth in (("resident", resident), ("objects", OBJECTS)):
        taken = [getattr(row, name) for row in rows]
        rises = sorted(min(taken[n:]) - max(taken[:n]) for n in range(1, len(taken)))
        stands_out = name == "resident" and rises[-1] > 4 * max(rises[-2], 0)
        once = min(max(rises[-1], 0), ONCE) if stands_out else 0
        more = min(taken[-3:]) - min(taken[:3]) - once
        assert more <= growth * steps, f"{name} in {steps} steps: {rows}"


def assert_bounded(rows: Sequence[Taken], records: int) -> None:
    """Assert that the log keeps ``records`` single records, and no more."""
    for row in rows:
        assert 0.8 * records <= row.records <= records, rows


def besides_records(rows: Sequence[Taken]) -> list[Taken]:
    """Return ``rows`` without the objects that single records are: a few more or less at a time."""
    return [row._replace(objects=row.objects - row.records) for row in rows]


def soaked(*arguments: object, **options: object) -> list[Taken]:
    """Return what `soaking.soak` says of a run in a process of its own."""
    done = script(
        f"from soaking import soak\nsoak(*{arguments}, **{options})", seconds=3000, fresh=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [Taken(*json.loads(line)) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("backend", [BACKENDS[0], pytest.param("mapped", marks=pytest.mark.slow)])
def test_nothing_grows_in_some_hundred_steps(backend: str) -> None:
    """By the number of single records, which is reached early on; only totals are added then. The
    network takes another path for each sample."""
    rows = soaked("small", backend, 200, layers=1, records=1500, step_aside=True, policy="repeat")
    assert [row.steps for row in rows] == list(range(20, 201, 20))
    assert_constant(rows)
    assert_bounded(rows[2:], 1500)
    assert_level(besides_records(rows[2:]))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("network", "records"), [("small", recording.MOST_RECORDS), ("small", 1), ("tree", 1)]
)
def test_a_long_run_takes_no_more_than_a_short_one(
    network: str, records: int, backend: str
) -> None:
    """Over 2,000 steps with a pilot, once its memory is full; also with all options as they are by
    default."""
    rows = soaked(network, backend, 2000, records=records, step_aside=records > 1)
    assert_constant(rows)
    before, after = rows[4], rows[5:]
    assert before.steps > MEMORY
    assert max(row.resident for row in after) <= before.resident + WHILE_LEARNING, rows
    if records > 1:
        assert_bounded(rows[3:], records)
    assert_level(besides_records(after), SETTLING if records > 1 else GROWTH)
