"""Lives of random graphs with a failing disk, each in a fork of a process that has the shim loaded.

`Server` is that process as a test sees it: run as a program, this file reads pickled cases and
writes how each ended. The shim (failing_disk.c) lies between the process and the C library.

A user saves a checkpoint before one of the days. When an error is raised, he makes the day again if
nothing but gradients was changed in it, and else goes on from the checkpoint. So a life ends in one
of three ways:

- "exact": bit for bit as plainly, after what errors there were;
- "lost": an error has said so, and either the disk stays bad, or the block was left;
- "ended": the process has ended by itself and said why.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from days import live
from exactness import Twin, assert_same
from graphs import Graph
from hypothesis import strategies as st
from lives import LIVES, Life

import dynoffload
from dynoffload.errors import SpillError, StepLostError
from dynoffload.memory import spill

CALLS = {"read": 0, "write": 1, "room": 2}
ANSWERS = {"short": 1, "slow": 2}
LASTING = 1 << 40
MOST_ERRORS = 4
SECONDS = 120  # for one life
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


class Case(NamedTuple):
    """Calls that fail: "read", "write" or "room" (of the file system), by the name of an errno,
    "short" or "slow"; so many go well first, and the disk recovers once an error was raised."""

    call: str
    how: str
    skip: int
    count: int
    recovers: bool


class Disk:
    """The shim that was loaded before the C library."""

    def __init__(self) -> None:
        self._shim = ctypes.CDLL(None)
        self._shim.fault_hits.restype = self._shim.fault_met.restype = ctypes.c_long

    def arm(self, case: Case) -> None:
        """Let calls fail from now on."""
        kind = ANSWERS.get(case.how, 0)
        error = 0 if kind else getattr(errno, case.how)
        skip, count = ctypes.c_long(case.skip), ctypes.c_long(case.count)
        self._shim.fault_arm(CALLS[case.call], kind, error, skip, count)

    def heal(self) -> None:
        """Let no call fail any more."""
        self._shim.fault_arm(0, 0, 0, ctypes.c_long(0), ctypes.c_long(0))

    def met(self, call: str, how: str) -> int:
        """Return how many calls there were since `arm` or `heal` that can fail in this way."""
        return int(self._shim.fault_met(CALLS[call], how == "short"))

    def hits(self) -> int:
        """Return how many calls failed, were short, or slow."""
        return int(self._shim.fault_hits())


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
                return Case(call, how, int(self.where * met), count, self.recovers)
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


class Server:
    """The process with the failing disk.

    Args:
        shim: the compiled failing_disk.c.
        directory: for spill files and checkpoints.
    """

    def __init__(self, shim: Path, directory: Path) -> None:
        here = str(Path(__file__).parent)
        path = [here, *filter(None, [os.environ.get("PYTHONPATH", "")])]
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(directory)],
            env={**os.environ, "LD_PRELOAD": str(shim), "PYTHONPATH": os.pathsep.join(path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(SECONDS)

    def live(self, life: Life, fault: Fault) -> dict[str, Any]:
        """Live with a fault, assert that it ended in one of the three ways, and return how."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        pickle.dump((life, fault), process.stdin)
        process.stdin.flush()
        found: dict[str, Any] = pickle.load(process.stdout)
        assert found["files"] == [], found
        case = found["case"]
        if found["outcome"] == "ended":
            assert found["code"] == -signal.SIGABRT, found
            assert life.backend == "pager", found
            assert "process ends here" in found["said"], found
            return found
        assert found["code"] == 0, found
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
            device = session._paging.device  # type: ignore[union-attr]
            device._native.pager_set_patience(device._handle, PATIENCE)  # type: ignore[attr-defined]
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


def forked(life: Life, fault: Fault, directory: Path) -> dict[str, Any]:
    """Live in a fork of this process, and return how it ended."""
    answer, said = directory / "answer", directory / "said"
    answer.write_bytes(b"")
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(SECONDS)
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 2)
            case: Case | None = None

            def tell(chosen: Case | None) -> None:
                nonlocal case
                case = chosen
                answer.write_bytes(pickle.dumps({"case": case}))

            found = run(life, fault, directory, tell)
            answer.write_bytes(pickle.dumps({"case": case, **found}))
            code = 0
        except BaseException as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            sys.stderr.flush()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    found = {"code": os.waitstatus_to_exitcode(status)}
    found["said"] = said.read_text(errors="replace")[-3000:]
    found["files"] = sorted(path.name for path in (directory / "spill").iterdir())
    shutil.rmtree(directory / "checkpoint", ignore_errors=True)
    return {"outcome": "ended", **found, **pickle.loads(answer.read_bytes() or pickle.dumps({}))}


def main() -> None:
    """Serve until there are no more cases."""
    faulthandler.disable()
    torch.set_num_threads(1)
    spill._GROWTH = 64 * 1024  # networks this small would never need more
    with contextlib.suppress(ImportError):
        import transformers.integrations.moe  # noqa: F401 once, not in every fork
    directory = Path(sys.argv[1])
    (directory / "spill").mkdir()
    answers: BinaryIO = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed is no answer
    while True:
        try:
            life, fault = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(forked(life, fault, directory), answers)
        answers.flush()


if __name__ == "__main__":
    main()
