"""Programs that tests run in processes of their own; no tests here.

The import of torch takes seconds, and so does its end. Processes are forked from a server that has
made that import, and leave without taking the interpreter apart.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    ["pytest", "torch._dynamo", "torch.distributed.fsdp", "dynoffload.runtime.session"]
)

_NAMES = f"import sys\nsys.path.append({str(Path(__file__).parent)!r})\nfrom devices import *\n"


def script(
    body: str, *arguments: object, seconds: float = 60.0, fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a program that sees the names of `devices`; what hangs there fails here.

    ``fresh``: in an interpreter of its own, as its start, its end or its memory is tested.
    """
    body = _NAMES + textwrap.dedent(body)
    given = [str(argument) for argument in arguments]
    if fresh:
        command = [sys.executable, "-c", body, *given]
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        process = FORKED.Process(target=_run, args=(body, given, out.name, err.name))
        process.start()
        process.join(seconds)
        process.kill()
        process.join()
        assert process.exitcode is not None
        return subprocess.CompletedProcess(given, process.exitcode, out.read(), err.read())


def _run(body: str, arguments: list[str], *streams: str) -> None:
    """Run a program here, where it writes to files."""
    for number, stream in enumerate(streams, 1):
        os.dup2(os.open(stream, os.O_WRONLY), number)
    sys.argv = ["-c", *arguments]
    exec(compile(body, "<string>", "exec"), {"__name__": "__main__"})
