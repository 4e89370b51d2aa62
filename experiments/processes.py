"""Fresh processes that call functions of this package: the one way experiments have to start one.

``process.call(function, *args)`` runs a module's function in the process and returns its value. The
process stays until it is closed, so that later calls find what earlier ones left in their modules;
`fresh` takes a process for one call. What a function prints goes to the error stream, whose end is
quoted if the process dies.

[Note: leaving without restoring]  A process ends by `os._exit`, and what a function has entered on
`NEVER_LEFT` is not left. Leaving an ``offload`` block would copy gigabytes back into ordinary
tensors that nobody looks at; the spill file has no name and goes with the process.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from dynoffload.errors import DynOffloadError
from dynoffload.units import format_seconds

if TYPE_CHECKING:
    from dynoffload.experiments.baselines.cgroup import MemoryGroup

_QUOTED = 2_000  # characters of what a dead process printed last
_LINES = 8  # of a traceback
_END_S = 20.0

NEVER_LEFT = contextlib.ExitStack()
"""See [Note: leaving without restoring]."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Environment of a process that computes with one thread."""
QUIET = {"PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error"}
"""Environment of a process that does not warn."""

Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")
T = TypeVar("T")


class WorkerError(DynOffloadError, RuntimeError):
    """A process died, gave no answer in time, or a function that it called raised."""


class Process:
    """A fresh Python process.

    Args:
        name: what messages call it.
        group: the cgroup that it runs in.
        patience: seconds that a call may take; None for ever. The process is killed after them.
        environment: variables that it gets beside this process's own.
    """

    def __init__(
        self,
        name: str,
        *,
        group: MemoryGroup | None = None,
        patience: float | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.group, self.patience = name, group, patience
        self._printed = tempfile.TemporaryFile(  # noqa: SIM115 - closed by close()
            "w+", encoding="utf-8", errors="replace"
        )
        command = [sys.executable, "-P", "-m", "dynoffload.experiments.processes"]
        self._process = subprocess.Popen(
            command if group is None else group.command(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            env={**os.environ, **(environment or {})},
        )

    def call(
        self,
        function: Callable[Arguments, Value],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Value:
        """Return what ``function``, of a module, returns in the process.

        Raises:
            WorkerError: it raised, or the process died or took too long; the last line says why.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = pickle.dumps((function, args, kwargs))
        with ended_after(self.kill, self.patience) as late:
            try:
                self._process.stdin.write(request)
                self._process.stdin.flush()
                returned, value = pickle.load(self._process.stdout)
            except (BrokenPipeError, EOFError, pickle.UnpicklingError) as error:
                raise WorkerError(self._died(late.is_set())) from error
        if not returned:
            raise WorkerError(f"{self.name!r} failed: {value}")
        found: Value = value
        return found

    def _died(self, late: bool) -> str:
        code = self._process.wait()
        if late and self.patience is not None:
            return f"{self.name!r} gave no answer within {format_seconds(self.patience)}"
        self._printed.seek(0)
        words = self._printed.read().strip()[-_QUOTED:]
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        if self.group is not None and self.group.usage().oom_kills:
            how += f", for want of memory within {self.group.limit_bytes} bytes"
        return f"{self.name!r} {how}" + (f": {words}" if words else "")

    def kill(self) -> None:
        """End the process at once; a call that waits raises `WorkerError`."""
        self._process.kill()

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._printed.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fresh(
    name: str,
    function: Callable[..., Value],
    *args: object,
    patience: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> Value:
    """Return what ``function`` returns in a process of its own; see `Process`."""
    with Process(name, patience=patience, environment=environment) as process:
        return process.call(function, *args)


def at_once(
    what: str,
    function: Callable[[T], Value],
    given: Sequence[T],
    *,
    patience: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[Value]:
    """Return what ``function`` makes of each of ``given``, all at once in processes of their own.

    Args:
        what: names them all; messages call each by its number, too.
        function: of a module.
        given: one for each process.
        patience: seconds that a call may take.
        environment: see `Process`.

    Raises:
        WorkerError: of the first that fails, which ends all.
    """
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                Process(f"rank {rank} of {what}", patience=patience, environment=environment)
            )
            for rank in range(len(given))
        ]
        pool = stack.enter_context(ThreadPoolExecutor(len(given)))
        calls = [
            pool.submit(process.call, function, one)
            for process, one in zip(processes, given, strict=True)
        ]
        try:
            for done in as_completed(calls):
                done.result()
        except BaseException:  # before the pool waits for what they do
            for process in processes:
                process.kill()
            raise
        return [call.result() for call in calls]


@contextlib.contextmanager
def ended_after(end: Callable[[], None], seconds: float | None) -> Iterator[threading.Event]:
    """Call ``end`` if the block takes longer than ``seconds``; the event says that it did."""
    late = threading.Event()
    if seconds is None:
        yield late
        return

    def over() -> None:
        late.set()
        end()

    timer = threading.Timer(seconds, over)
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()


def _serve() -> None:
    """Answer calls until their pipe is closed."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            function, args, kwargs = pickle.load(sys.stdin.buffer)
            answer = pickle.dumps((True, function(*args, **kwargs)))
        except EOFError:
            break
        except DynOffloadError as error:
            answer = pickle.dumps((False, str(error)))  # it says all there is to say
        except Exception as error:
            where = traceback.format_exc().strip().splitlines()[-_LINES:-1]
            told = "\n".join((*where, f"{type(error).__name__}: {error}"))
            answer = pickle.dumps((False, told))
        answers.write(answer)
        answers.flush()
    os._exit(0)  # [Note: leaving without restoring]


if __name__ == "__main__":
    _serve()
