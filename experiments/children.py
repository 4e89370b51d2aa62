"""Processes that carry out one task and print what they found.

What it is: `answer_of`, which runs a module of this package as a program with a task as JSON, and
returns the JSON object on its last line. What it is not: a worker that takes commands; see
`dynoffload.experiments.workers`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dynoffload.experiments.workers import WorkerError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_SAID = 1_000


def answer_of(
    module: str,
    task: DataclassInstance,
    what: str,
    timeout_s: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return what ``module`` answers to ``task``.

    Args:
        module: of `dynoffload.experiments`.
        task: its fields are the task's.
        what: messages call it.
        timeout_s: after which it is ended.
        environment: variables that it gets beside this process's own.

    Raises:
        WorkerError: it failed, or took too long.
    """
    command = [sys.executable, "-P", "-m", f"dynoffload.experiments.{module}"]
    try:
        done = subprocess.run(
            [*command, json.dumps(asdict(task))],
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
            env={**os.environ, **(environment or {})},
        )
    except subprocess.TimeoutExpired as error:
        raise WorkerError(f"{what} took over {timeout_s:g} s") from error
    if done.returncode or not done.stdout:
        said = done.stderr.strip()[-_SAID:] or "it printed nothing"
        raise WorkerError(f"{what} ended with code {done.returncode}: {said}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
