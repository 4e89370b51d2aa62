"""The processes of experiments, forked from a server that has imported torch; no tests here.

What an experiment measures is the same there; only the start of an interpreter is spared. That the
processes are fresh ones is `test_experiments_harness`'s to show.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.reduction import DupFd
from types import SimpleNamespace
from typing import IO, Any

import pytest
from programs import FORKED

from dynoffload.experiments import processes


class _Handed:
    """A descriptor that a forked process gets a copy of."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _taken, (DupFd(self.number),)


def _taken(copy: Any) -> _Handed:
    return _Handed(copy.detach())


class _Forked:
    """What `processes.Process` uses of `subprocess.Popen`."""

    def __init__(
        self, command: list[str], stdin: int, stdout: int, stderr: IO[str], env: Mapping[str, str]
    ) -> None:
        assert command[-1] == processes.__name__
        assert stdin == stdout == subprocess.PIPE
        asked, asks = os.pipe()
        answers, answered = os.pipe()
        handed = [_Handed(number) for number in (asked, answered, stderr.fileno())]
        self._process = FORKED.Process(target=_serve, args=(handed, dict(env)))
        self._process.start()
        os.close(asked)
        os.close(answered)
        self.stdin, self.stdout = os.fdopen(asks, "wb"), os.fdopen(answers, "rb")

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; return its exit code."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(processes.__name__, timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        """Kill it."""
        self._process.kill()


def _serve(handed: list[_Handed], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    for number, one in enumerate(handed):
        os.dup2(one.number, number)
        os.close(one.number)
    sys.stdin = os.fdopen(0)
    processes._serve()


def fork_processes(patch: pytest.MonkeyPatch) -> None:
    """Have experiments fork their processes."""
    known = {name: getattr(subprocess, name) for name in ("PIPE", "TimeoutExpired")}
    patch.setattr(processes, "subprocess", SimpleNamespace(Popen=_Forked, **known))
