"""A disk that fails in the middle of a step: training goes on exactly, or says that it does not.

A shim (failing_disk.c) between the process and the C library lets reads, writes and allocations of
the spill file fail, fall short, or take long, in each part of a step. The only fault that needs no
shim is a file that is cut off: the kernel's own answer to that is a bus error. See faulty.py for
what one case does. Whatever happens, the outcome is one of these, and no file is left behind:

- "exact": bit for bit the state of plain training, if an error was raised after the step that it
  interrupted was made again;
- "kept": an error has said so, and all is as it was after the last step that was made;
- "lost": an error has said so, in step() or as the block was left, and then nobody gets what is
  half of two steps: forward, step() and state_dict() raise until a checkpoint is loaded;
- "ended": the process has ended by itself and said why, as a thread slept on bytes that cannot be
  had.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from exactness import needs_pager
from failing_disk import LASTING, Case, Server

BACKENDS = [pytest.param("pager", marks=needs_pager), "mapped"]
OUTCOMES = {"exact", "lost", "ended"}
PASSING = [
    Case("read", "EIO", "forward", 3, 1),
    Case("write", "EIO", "backward", 3, 1),
    Case("read", "EINTR", "backward", 0, 9),
    Case("write", "EINTR", "forward", 0, 9),
    Case("read", "short", "forward", 0, 50),
    Case("write", "short", "backward", 0, 50),
    Case("read", "slow", "step", 0, 3),
    Case("write", "slow", "step", 0, 3),
]
"""Faults that nobody may notice."""

REFUSING = [
    Case("read", "EIO", "forward", 3, LASTING),
    Case("read", "EIO", "step", 3, LASTING),
    Case("write", "EIO", "backward", 3, LASTING),
    Case("write", "EIO", "after", 3, LASTING),
    Case("room", "ENOSPC", "forward", 0, LASTING),
]
"""Faults that last until an error was raised."""

DETERMINED = {
    ("mapped", REFUSING[0]): {"exact"},
    ("mapped", REFUSING[1]): {"lost"},
    ("pager", REFUSING[0]): {"exact", "ended"},
    ("mapped", REFUSING[4]): {"exact"},
    ("pager", REFUSING[4]): {"exact"},
}
"""How they end where that is determined: what cannot be read is told in the same forward, which is
made again, or in the same step, which is not; unless, on the pager, a thread sleeps on it, and
whether one does depends on what was prefetched. What cannot be written stays in memory until
somebody needs the room, which may be before step(), in it or after; and with the pager an update
whose state cannot be read in step() may be put off into the next forward."""

UNDONE = [
    Case(call, how, stage, skip, LASTING, True, True)
    for call, how in (("read", "EIO"), ("write", "ENOSPC"))
    for stage in ("forward", "step", "after")
    for skip in (0, 3)
]
"""Faults under ``rollback``, which no step is lost by that could be made again."""

FULL = [one for one in UNDONE if one.call == "write"]
BRIEFLY = [one for one in UNDONE if one not in FULL or (one.skip == 3) == (one.stage == "step")]
"""Of the faults of a full disk, which are waited for, one in each part of a step."""

FOR_GOOD = [
    Case("read", "EIO", "backward", 0, LASTING, False),
    Case("write", "ENOSPC", "forward", 0, LASTING, False),
    Case("cut", "", "forward", 0, 1, False),
]
"""Faults that outlast the block."""

OPENING = Case("room", "ENOSPC", "open", 0, LASTING, False)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A process whose disk can be made to fail."""
    with Server("faulty.py", tmp_path_factory.mktemp("faulty")) as started:
        yield started


def possible(cases: Iterable[Case], backend: str) -> list[Case]:
    """Return the cases that a backend can meet: a mapping is read and written whole or not."""
    return [case for case in cases if backend == "pager" or case.how != "short"]


def check(case: Case, found: dict[str, Any], backend: str) -> None:
    """Assert that a case ended in one of the four ways."""
    if found["outcome"] == "ended":
        # A bus error is the kernel's word; all else is ours, and says why.
        signals = (-6, -7) if case.call == "cut" else (-6,)
        assert found["code"] in signals, found
        assert backend == "pager" or case.call == "cut", found
        assert found["code"] == -7 or "process ends here" in found["said"], found
        return
    assert found["hits"] > 0 or case.call == "cut", f"nothing has failed: {found}"
    errors = found["errors"]
    if found["outcome"] == "exact":
        assert found["steps"] == 5
        return
    assert errors, found
    if found["outcome"] == "kept":  # nothing had to be written as the block ended
        assert case.call == "write", found
        assert not any(error.startswith("end:") for error in errors), found
        return
    assert found["outcome"] == "lost", found
    if case.recovers:  # then forward and backward can be made again, and steps cannot
        assert any(error.startswith(("step:", "after:", "end:")) for error in errors), found
        assert not any(error.startswith("end: SpillError") for error in errors), found
    assert all("SpillError" in e or "StepLostError" in e or "CorruptionE" in e for e in errors), (
        found
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_disk_that_fails(every: int, backend: str, server: Server) -> None:
    """In each part of a step, for a moment, until it is noticed, and for good."""
    parts = (possible(PASSING, backend), REFUSING, FOR_GOOD)
    cases = [OPENING, *(case for part in parts for case in part[::every])]
    for case in cases:
        found = server.run(case, backend)
        if case == OPENING:  # refused before anything was touched
            assert (found["outcome"], found["steps"], found["hits"]) == ("exact", 0, 1), found
            assert "free space there" in found["errors"][0]
            continue
        check(case, found, backend)
        if case in PASSING:
            assert found["outcome"] == "exact", found
            assert found["errors"] == [], found
        if case in REFUSING:
            assert found["outcome"] in DETERMINED.get((backend, case), OUTCOMES), found
            assert found["outcome"] == "ended" or found["errors"], f"nobody was told: {found}"
        if case in FOR_GOOD:
            assert found["outcome"] != "exact", found
        if case.call == "room":
            assert "free space there" in found["errors"][0], found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "cases",
    [pytest.param(BRIEFLY, id="some"), pytest.param(UNDONE, marks=pytest.mark.slow, id="all")],
)
def test_a_step_that_a_disk_cuts_off_is_undone(
    backend: str, cases: list[Case], server: Server
) -> None:
    """After each error the state is that of the last finished step, and training goes on."""
    told = 0
    for case in cases:
        found = server.run(case, backend)
        if found["code"] == 0 and found["hits"] == 0:
            assert found["outcome"] == "exact", found  # it came too late to meet anything
            continue
        check(case, found, backend)
        assert found["outcome"] in ("exact", "ended"), found
        told += found["outcome"] == "exact" and bool(found["errors"])
    assert told >= 2, "nobody was told of an error"
