"""Fresh processes that call functions of this package; all experiments start processes this way.

A process lives until it is closed, so later calls find the module state of earlier ones. What a
function prints goes to the error stream; its end is quoted if the process dies.

[Note: leaving without restoring]  A process exits by `os._exit`, so contexts that were entered on
`NEVER_LEFT` are never left: leaving a block would copy gigabytes back into unused tensors.
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
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

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
    """A process died, did not answer in time, or a function called in it raised."""


class Process:
    """A fresh Python process.

    Args:
        name: in messages.
        group: the cgroup that it runs in.
        patience: seconds that a call may take, after which the process is killed; None: no limit.
        environment: variables in addition to this process's own.
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
        """Return the result of ``function``, a module-level one, called in the process.

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
        """Kill the process immediately; a waiting call raises `WorkerError`."""
        self._process.kill()

    def close(self) -> None:
        """Close the process's input and wait for it to end; kill it if that takes too long."""
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


class Renewed:
    """Calls functions in one process, which is replaced after a call that failed.

    Args:
        name: in messages.
        options: of `Process`.
    """

    def __init__(self, name: str, **options: Any) -> None:
        self.name, self._options = name, options
        self.process: Process | None = None

    def call(self, function: Callable[..., Value], *args: object) -> Value:
        """See `Process.call`."""
        if self.process is None:
            self.process = Process(self.name, **self._options)
        try:
            return self.process.call(function, *args)
        except WorkerError:
            self.close()
            raise

    def close(self) -> None:
        """End the process, if one runs."""
        if self.process is not None:
            self.process.close()
            self.process = None


def fresh(
    name: str,
    function: Callable[..., Value],
    *args: object,
    patience: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> Value:
    """Return the result of ``function``, called in its own process; see `Process`."""
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
    """Return the results of ``function`` on each of ``given``, run concurrently in processes.

    Args:
        what: name of the group in messages; each process adds its rank.
        function: a module-level function.
        given: one argument for each process.
        patience: seconds that a call may take.
        environment: see `Process`.

    Raises:
        WorkerError: the first failure, which kills all processes.
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
        except BaseException:  # kill first, as leaving the pool waits for its calls
            for process in processes:
                process.kill()
            raise
        return [call.result() for call in calls]


@contextlib.contextmanager
def ended_after(end: Callable[[], None], seconds: float | None) -> Iterator[threading.Event]:
    """Call ``end`` if the block takes longer than ``seconds``; the event is set if it did."""
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
            answer = pickle.dumps((False, str(error)))  # its message needs no traceback
        except Exception as error:
            where = traceback.format_exc().strip().splitlines()[-_LINES:-1]
            told = "\n".join((*where, f"{type(error).__name__}: {error}"))
            answer = pickle.dumps((False, told))
        answers.write(answer)
        answers.flush()
    os._exit(0)  # [Note: leaving without restoring]


if __name__ == "__main__":
    _serve()
