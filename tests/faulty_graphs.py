"""Lives of random graphs with a failing disk; run by test_random_graphs.py, not a test.

A user saves a checkpoint before one of the days. When an error is raised, he makes the day again if
nothing but gradients was changed in it, and else goes on from the checkpoint. So a life ends in one
of three ways:

- "exact": bit for bit as plainly, after what errors there were;
- "lost": an error has said so, and either the disk stays bad, or the block was left;
- "ended": the process has ended by itself and said why.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from days import live
from exactness import Twin, assert_same
from failing_disk import LASTING, Case, Disk, Server, be_patient, serve
from graphs import Graph
from hypothesis import strategies as st
from lives import LIVES, Life

import dynoffload
from dynoffload.errors import SpillError, StepLostError

MOST_ERRORS = 4
PATIENCE = 1  # seconds for room that nobody makes
MOST = {"EIO": 24, "ENOSPC": 24, "EINTR": 9, "slow": 3}
"""Calls that fail in all, by kind, but of reads and of the file system's room, which fail at once:
a write is tried again for some seconds, for each region that wants room."""
KINDS = [
    ("read", "EIO"),
    ("write", "EIO"),
    ("write", "ENOSPC"),
    ("read", "EINTR"),
    ("write", "EINTR"),
    ("read", "short"),
    ("write", "short"),
    ("read", "slow"),
    ("write", "slow"),
    ("room", "ENOSPC"),
]
PASSING = ("short", "slow", "EINTR")


@dataclass(frozen=True)
class Fault:
    """A disk that fails in a life.

    Attributes:
        kinds: calls and how they fail; the first is taken that the life has calls for.
        where: the share of those calls that go well first.
        count: calls that fail then.
        recovers: whether the disk is well again once an error was raised.
        day: on which they begin to, of all days; counted round.
        saved: the day before which the checkpoint is saved, that or an earlier one.
    """

    kinds: Sequence[tuple[str, str]]
    where: float
    count: int
    recovers: bool
    day: int
    saved: int

    def case(self, disk: Disk) -> Case | None:
        """Return the fault in a life whose calls ``disk`` has seen, None where there were none."""
        for call, how in self.kinds:
            met = disk.met(call, how)
            if met:
                at_once = how not in ("slow", "EINTR") and call != "write"
                count = self.count if at_once else min(self.count, MOST.get(how, LASTING))
                return Case(call, how, "", int(self.where * met), count, self.recovers)
        return None


def _struck(life: Life, seed: int) -> tuple[Life, Fault]:
    """Return a life that cannot do without the disk, and a fault: another for each life, as lives
    are often drawn by changing a part of the last."""
    chance = random.Random(f"{seed} {life}")
    fault = Fault(
        kinds=chance.sample(KINDS, len(KINDS)),
        where=chance.random() * 0.9,  # no two lives make quite as many calls
        count=chance.choice([1, 3, LASTING, LASTING]),
        recovers=chance.choice([True, True, True, False]),
        day=chance.randrange(6),
        saved=chance.randrange(6),
    )
    return replace(life, share=life.share / 2, aside=False), fault


STRUCK = st.builds(_struck, LIVES, st.integers(0, 1 << 16))
"""Lives, each with a fault."""


def live_struck(server: Server, life: Life, fault: Fault) -> dict[str, Any]:
    """Live with a fault, assert that it ended in one of the three ways, and return how."""
    found = server.run(life, fault)
    case = found["case"]
    if found["outcome"] == "ended":
        assert found["code"] == -signal.SIGABRT, found
        assert life.backend == "pager", found
        assert "process ends here" in found["said"], found
        return found
    errors = found["errors"]
    if found["outcome"] == "lost":
        assert errors, found
        assert not case.recovers or errors[-1].startswith("leaving: "), found
    else:
        assert found["outcome"] == "exact", found
    if found["hits"] == 0 or case.how in PASSING:
        assert (found["outcome"], errors) == ("exact", []), found
    assert found["peak"] <= found["budget"], found
    assert found["peak"] or found["outcome"] == "lost", found  # perhaps no step was made
    return found


def run(
    life: Life, fault: Fault, directory: Path, tell: Callable[[Case | None], None]
) -> dict[str, Any]:
    """Live plainly, and then with a fault, told before; raise where anything differs."""
    # Gradients are not in a checkpoint, so none may outlast a day.
    days = ["plain" if day == "zeroed in place" else day for day in life.days]
    struck = fault.day % len(days)
    saved = min(fault.saved, struck)
    disk = Disk()
    _healthy(life, days, saved, struck, directory, disk)
    case = fault.case(disk)
    tell(case)
    twin = life.twin()
    conditions = life.conditions(twin)
    expected = []
    for number, day in enumerate(days):
        if number == saved:
            _begin(twin.reference)
        expected.append(live(twin.reference, twin.its, day, number, life.autocast))
    errors, hits = [], 0
    number, armed, lost, now = 0, False, False, ""

    def changes() -> None:
        nonlocal now
        now = "changing"

    def note(error: Exception) -> None:
        nonlocal hits
        errors.append(f"{now}: {type(error).__name__}: {error}")
        hits = max(hits, disk.hits())
        if case is not None and case.recovers:
            disk.heal()

    try:
        with _block(life, twin, conditions, directory) as session:
            while number < len(days) and not lost:
                if number == saved and not armed:
                    _begin(twin.model)
                    session.save(directory / "checkpoint")
                if number == struck and not armed:
                    armed = True
                    if case is not None:
                        disk.arm(case)
                try:
                    now = "making"
                    found = live(
                        twin.model, twin.optimizer, days[number], number, life.autocast, changes
                    )
                except (SpillError, StepLostError) as error:
                    note(error)
                    twin.optimizer.zero_grad()
                    lost = len(errors) >= MOST_ERRORS
                    if now == "making" and not isinstance(error, StepLostError):
                        continue
                    try:
                        now = "loading"
                        _begin(twin.model)
                        session.load(directory / "checkpoint")
                        number = saved
                    except (SpillError, StepLostError) as another:
                        note(another)
                        lost = True
                else:
                    assert_same(found, expected[number], f"day {number}, {days[number]}")
                    number += 1
            now = "leaving"
    except (SpillError, StepLostError) as error:
        note(error)
        lost = True
    hits = max(hits, disk.hits())
    disk.heal()
    if not lost:
        twin.assert_same()
        assert_same(_held(twin.model), _held(twin.reference), "gradients that are still kept")
    return {
        "outcome": "lost" if lost else "exact",
        "errors": errors,
        "hits": hits,
        "peak": max((step.peak_fast_bytes for step in session.log.steps), default=0),
        "budget": conditions["budget"],
    }


@contextlib.contextmanager
def _block(
    life: Life, twin: Twin, conditions: dict[str, Any], directory: Path
) -> Iterator[dynoffload.Session]:
    """Be in a block around the copy that is to be paged, where no thread waits for long."""
    with dynoffload.offload(
        twin.model, twin.optimizer, spill_dir=directory / "spill", **conditions
    ) as session:
        if session.paging and life.backend == "pager":
            be_patient(session, PATIENCE)
        yield session


def _healthy(
    life: Life, days: Sequence[str], saved: int, struck: int, directory: Path, disk: Disk
) -> None:
    """Live without a fault, so that ``disk`` tells which calls there are from a day on."""
    twin = life.twin()
    with _block(life, twin, life.conditions(twin), directory) as session:
        for number, day in enumerate(days):
            if number == saved:
                _begin(twin.model)
                session.save(directory / "checkpoint")
            if number == struck:
                disk.heal()
            live(twin.model, twin.optimizer, day, number, life.autocast)
    shutil.rmtree(directory / "checkpoint")


def _begin(model: torch.nn.Module) -> None:
    """Be without gradients, as after a load."""
    for parameter in model.parameters():
        parameter.grad = None
    _held(model).clear()


def _held(model: torch.nn.Module) -> list[torch.Tensor]:
    assert isinstance(model, Graph)
    return model.held


if __name__ == "__main__":
    with contextlib.suppress(ImportError):
        import transformers.integrations.moe  # noqa: F401 once, not in every fork
    serve(run)
