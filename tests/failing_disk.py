"""A disk that fails on demand, in forks of a process that has the shim failing_disk.c loaded.

`Server` is that process as a test sees it. The program that it runs calls `serve`.
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pytest
import torch

from dynoffload.memory import spill

CALLS = {"read": 0, "write": 1, "room": 2}
ANSWERS = {"short": 1, "slow": 2}
LASTING = 1 << 40
SECONDS = 120  # for one case


class Case(NamedTuple):
    """A fault.

    Attributes:
        call: "read", "write" or "room" (of the file system); or "cut", which cuts the file off.
        how: name of an errno, "short" or "slow".
        stage: of a step; or "open", when the file is made.
        skip: calls that go well first.
        count: calls that fail then.
        recovers: whether the disk is well again once an error was raised.
        rollback: whether a step that is cut off is to be undone.
    """

    call: str
    how: str
    stage: str
    skip: int
    count: int
    recovers: bool = True
    rollback: bool = False


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


def be_patient(session: Any, seconds: int) -> None:
    """Let no thread of a pager wait longer than that for room that nobody makes."""
    device = session._paging.device
    device._native.pager_set_patience(device._handle, seconds)


class Server:
    """The process with the failing disk.

    Args:
        program: a file that calls `serve`.
        directory: for the shim, spill files and checkpoints.
    """

    def __init__(self, program: str, directory: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if not sys.platform.startswith("linux") or compiler is None:
            pytest.skip("a C compiler and Linux are needed to let a disk fail")
        here, shim = Path(__file__).parent, directory / "failing_disk.so"
        source = here / "failing_disk.c"
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", shim, source, "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"the failing disk cannot be compiled here: {done.stderr[-300:]}")
        path = [str(here), *filter(None, [os.environ.get("PYTHONPATH", "")])]
        self._process = subprocess.Popen(
            [sys.executable, here / program, directory],
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

    def run(self, *given: Any) -> dict[str, Any]:
        """Run a case, assert that it left no file and no bad exit, and return how it ended."""
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None
        assert answers is not None
        pickle.dump(given, asked)
        asked.flush()
        found: dict[str, Any] = pickle.load(answers)
        assert found["files"] == [], found
        assert found["outcome"] == "ended" or found["code"] == 0, found
        return found


Run = Callable[..., dict[str, Any]]
"""Runs what `Server.run` was given, in a directory; tells of the case as soon as it is known."""


def serve(run: Run) -> None:
    """Run each case in a fork of this process, until there are no more."""
    faulthandler.disable()
    torch.set_num_threads(1)
    spill._GROWTH = 64 * 1024  # networks this small would never need more
    directory = Path(sys.argv[1])
    (directory / "spill").mkdir()
    answers: BinaryIO = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed is no answer
    while True:
        try:
            given = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(_forked(run, given, directory), answers)
        answers.flush()


def _forked(run: Run, given: tuple[Any, ...], directory: Path) -> dict[str, Any]:
    answer, said = directory / "answer", directory / "said"
    answer.write_bytes(pickle.dumps({}))
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(SECONDS)
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 2)
            case: Any = None

            def tell(chosen: Any) -> None:
                nonlocal case
                case = chosen
                answer.write_bytes(pickle.dumps({"case": case}))

            found = run(*given, directory, tell)
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
    return {"outcome": "ended", **found, **pickle.loads(answer.read_bytes())}
