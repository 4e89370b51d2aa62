"""Runs a user script as ``python script.py`` would, inside this process."""

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
        SystemExit: raised by the script; code 1 after an exception of the script, whose traceback
            is shown from the script's first frame on; code 130 after Ctrl-C.
        DynOffloadError: raised inside the script; ``raised_at`` holds the place in the script.
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
                with contextlib.suppress(ValueError, OSError):  # script closed it, or broken pipe
                    stream.flush()


@contextlib.contextmanager
def log_lines(level: int = logging.INFO) -> Iterator[None]:
    """Show the package's log lines on stderr, unless the script configures logging."""

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
    # With -P or PYTHONSAFEPATH Python adds no script directory, so there is none to replace.
    if not sys.flags.safe_path:
        sys.path[:1] = [os.path.dirname(os.path.realpath(script))]
    try:
        yield
    finally:
        sys.argv[:], sys.path[:] = argv, path


def _from_script(script: Path, trace: TracebackType | None) -> TracebackType | None:
    """Return ``trace`` from the script's first frame on; earlier frames are the launcher's."""
    while trace is not None and trace.tb_frame.f_code.co_filename != str(script):
        trace = trace.tb_next
    return trace


def _show(script: Path, error: BaseException) -> None:
    trace = _from_script(script, error.__traceback__)
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def _place(script: Path, trace: TracebackType | None) -> str:
    """Return the innermost line of the script in the traceback, as `` (file:line)``, or ""."""
    line = 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(script):
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" ({script}:{line})" if line else ""
