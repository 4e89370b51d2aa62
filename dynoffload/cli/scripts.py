"""Runs a user's script as ``python script.py`` would, inside this process."""

from __future__ import annotations

import contextlib
import logging
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from dynoffload.errors import DynOffloadError, ProfilingDone
from dynoffload.launch import said_by

INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def run_script(script: Path, arguments: Sequence[str]) -> None:
    """Run ``script`` as ``__main__`` with ``sys.argv`` and ``sys.path[0]`` as Python sets them.

    Raises:
        SystemExit: as the script raised it; with code 1 after an exception of the script, whose
            traceback was shown from the script's first line on; with code 130 after Ctrl-C.
        DynOffloadError: as the script met it; it carries where in the script that was.
        ProfilingDone: when enough steps were recorded.
    """
    with _as_started_by_python(script, arguments):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except (SystemExit, ProfilingDone):
            raise
        except DynOffloadError as error:
            error.raised_at = _place(script, error.__traceback__)  # type: ignore[attr-defined]
            raise
        except KeyboardInterrupt as error:
            _show(script, error)
            raise SystemExit(INTERRUPTED) from None
        except Exception as error:
            _show(script, error)
            raise SystemExit(1) from None
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(ValueError, OSError):  # closed by the script, or a pipe
                    stream.flush()


@contextlib.contextmanager
def log_lines(level: int = logging.INFO) -> Iterator[None]:
    """Show the package's log lines on the error stream, unless the script configures logging."""

    class Unconfigured(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            return not logging.getLogger().handlers

    logger = logging.getLogger("dynoffload")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"dynoffload: {said_by()}%(message)s"))
    handler.addFilter(Unconfigured())
    before = logger.level
    logger.addHandler(handler)
    if before == logging.NOTSET:
        logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


@contextlib.contextmanager
def _as_started_by_python(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    argv, path = sys.argv[:], sys.path[:]
    sys.argv[:] = [str(script), *arguments]
    # With -P or PYTHONSAFEPATH Python puts no directory in front, so there is none to replace.
    if not sys.flags.safe_path:
        sys.path[:1] = [os.path.dirname(os.path.realpath(script))]
    try:
        yield
    finally:
        sys.argv[:], sys.path[:] = argv, path


def _from_script(script: Path, trace: TracebackType | None) -> TracebackType | None:
    """Return ``trace`` from the script's own first frame on; what led there is of no interest."""
    while trace is not None and trace.tb_frame.f_code.co_filename != str(script):
        trace = trace.tb_next
    return trace


def _show(script: Path, error: BaseException) -> None:
    trace = _from_script(script, error.__traceback__)
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def _place(script: Path, trace: TracebackType | None) -> str:
    """Return the last line of the script itself on the way to an error."""
    line = 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(script):
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" ({script}:{line})" if line else ""
