"""A process that answers tasks one after the other, and is replaced if it dies or hangs.

What it is: `Server`, for measurements of many small cases, each of which would take less than a
process takes to start. What it is not: a worker that keeps a state; see
`dynoffload.experiments.workers`. A process that has raised is not asked again either: an
accelerator that met an error in a kernel fails whatever comes after.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

_LINES = 8  # of a traceback
_END_S = 10.0


class Server:
    """A process that answers tasks.

    Args:
        answer: a function of a module, called in the process with each task.
        prepare: called there first.
        patience: seconds that one answer may take; the first has ``start_s`` more.
        start_s: seconds that a process may take to start.
    """

    def __init__(
        self,
        answer: Callable[[Any], dict[str, Any]],
        prepare: Callable[[], None],
        patience: float,
        start_s: float = 60.0,
    ) -> None:
        self._answer, self._prepare = answer, prepare
        self._patience, self._start_s = patience, start_s
        self._context = multiprocessing.get_context("spawn")
        self._process: Any = None
        self._pipe: Connection | None = None

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def ask(self, task: Any) -> dict[str, Any]:
        """Return the answer to ``task``, or why there is none.

        Returns:
            What the function returned; ``why`` alone if the process died or gave no answer in
            time; ``why`` and ``where`` if the function raised.
        """
        patience = self._patience
        if self._process is None:
            patience += self._start_s
            self._pipe, theirs = self._context.Pipe()
            self._process = self._context.Process(
                target=_serve, args=(theirs, self._answer, self._prepare), daemon=True
            )
            self._process.start()
            theirs.close()
        pipe = self._pipe
        assert pipe is not None
        try:
            pipe.send(task)
            if pipe.poll(patience):
                found: dict[str, Any] = pipe.recv()
                if "where" in found:
                    self._end()
                return found
            why = f"no answer within {self._patience:.0f} s"
        except (EOFError, OSError):
            self._process.join(_END_S)
            why = f"the process ended with code {self._process.exitcode}"
        self._end()
        return {"why": why}

    def _end(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if self._process is not None:
            self._process.join(_END_S)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
            self._process = None


def _serve(
    pipe: Connection, answer: Callable[[Any], Mapping[str, Any]], prepare: Callable[[], None]
) -> None:
    """Answer the tasks that come through ``pipe`` until it is closed."""
    prepare()
    with contextlib.suppress(EOFError):
        while True:
            task = pipe.recv()
            try:
                found = dict(answer(task))
            except Exception as error:
                where = traceback.format_exc().strip().splitlines()[-_LINES:]
                found = {"why": f"{type(error).__name__}: {error}", "where": where}
            pipe.send(found)
