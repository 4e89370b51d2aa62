"""Whether training on this machine's accelerator gives the bits of plain PyTorch there.

What it is: ``make gpu-check``, a program that needs no more than torch and this checkout. Networks
of the zoo and of transformers are trained plainly, again, and paged: in host memory and with a file
below, by loops of many habits, by pilots that lie, and over queues that are late at random and
memory that is poisoned. Where compute-sanitizer is on the path, small cases run under it. What it
is not: a measure of time (see `dynoffload.experiments.gpu`).

It has never run on a GPU so far; its cases have on the emulated accelerator of the tests.

Each case runs in a process that the next one may share; one that dies or hangs has failed, and the
rest goes on. Results are written after each case, so that a run that is cut off leaves what it had.
What could not be run is listed as such and never as passed. The program ends with 0 if none has
failed and at least one case of each kind was exact (in host memory, with a file, over late queues,
of tiles, of the optimizer on the host), with 1 if not, and with 2 where there is no accelerator.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from dynoffload.errors import BackendError, ConfigError, DynOffloadError
from dynoffload.experiments import make_room, write_json
from dynoffload.experiments.gpu_check_cases import (
    Case,
    Verdict,
    cases,
    environment,
    train_case,
    train_plainly,
)
from dynoffload.experiments.gpu_check_host import HostCase, host_cases, train_host_case
from dynoffload.experiments.loops import Loop
from dynoffload.experiments.processes import QUIET, Process, WorkerError

SANITIZER = "compute-sanitizer"
TOOLS = ("memcheck",)  # racecheck looks at memory within a kernel, and this library has none
_FOUND = 86  # what the sanitizer ends with where it has found something
_SHOWS_NOTHING = 3  # what the smallest case ends with that is neither exact nor failed
_SECONDS, _PATIENCE, _START_S = 330.0, 75.0, 60.0
_SAID = 1_500
_SMALLEST = Case("moe", Loop("AdamW foreach", steps=2), files=True)
_ONLY_TORCH = ("transformers",)
"""Modules without which cases cannot run."""


def accelerator() -> torch.device:
    """Return the accelerator of this machine.

    Raises:
        BackendError: there is none.
    """
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None:
        raise BackendError(
            f"this needs an accelerator, and torch {torch.__version__} finds none here: run it "
            "on a machine with a GPU and a build of torch for it"
        )
    return torch.device(here.type, torch.accelerator.current_device_index())


def about(device: torch.device) -> dict[str, Any]:
    """Return what is known of a device and its software."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": str(device),
        "name": str(device),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    return found


def check(
    ask: Callable[[Case | HostCase], dict[str, Any]],
    chosen: Sequence[Case | HostCase],
    seconds: float,
    tell: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    """Run cases one after the other and return their rows.

    Args:
        ask: runs one; see `train_case`. What has no verdict has failed.
        chosen: the cases.
        seconds: after which no other is begun.
        tell: told each row.
    """
    began = time.perf_counter()
    rows = []
    for case in chosen:
        row: dict[str, Any] = {"case": case.describe(), **asdict(case)}
        start = time.perf_counter()
        lacks = _lacks(case)
        if lacks:
            row |= {"verdict": Verdict.NOT_RUN.value, "why": f"{lacks} is not installed"}
        elif start - began > seconds:
            row |= {"verdict": Verdict.NOT_RUN.value, "why": f"the {seconds:g} s were over"}
        else:
            row |= {"verdict": Verdict.FAILED.value, **ask(case)}
        row["seconds"] = time.perf_counter() - start
        rows.append(row)
        tell(row)
    return rows


def _lacks(case: Case | HostCase) -> str:
    """Return the module without which a case cannot run, "" if none is lacking."""
    if isinstance(case, HostCase):
        return ""
    home, colon, _ = case.network.partition(":")
    return home if colon and find_spec(home) is None else ""


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Return how many rows there are of each verdict."""
    return {each.value: sum(row["verdict"] == each.value for row in rows) for each in Verdict}


def passed(rows: Sequence[dict[str, Any]]) -> bool:
    """Return whether none has failed, and of each kind of case there are, one at least is exact."""
    exact: dict[str, bool] = {}
    for row in rows:
        kind = _kind_of(row)
        exact[kind] = exact.get(kind, False) or row["verdict"] == Verdict.EXACT.value
    exact.pop(_SANITIZED, None)  # for machines that have it
    failed = any(row["verdict"] == Verdict.FAILED.value for row in rows)
    return bool(exact) and all(exact.values()) and not failed


_SANITIZED = "sanitized"


def _kind_of(row: dict[str, Any]) -> str:
    """Return what a row is to show: each has to be shown once."""
    if "place" in row:
        return "the optimizer on the host"
    if "network" not in row:
        return _SANITIZED
    if row["late"] is not None:
        return "no race"
    if row["tiles"]:
        return "tiles"
    return "with a file" if row["files"] else "in host memory"


# compute-sanitizer


def sanitize(
    device: torch.device, tool: str, spill_dir: str | None, patience: float
) -> dict[str, Any]:
    """Run a small case under a tool of compute-sanitizer and return a row.

    What the tool reports of plain training as well is not this library's; such a row is not run.

    Args:
        device: the accelerator.
        tool: a name in `TOOLS`.
        spill_dir: where the file lies.
        patience: seconds that it may take.
    """
    row: dict[str, Any] = {"case": f"{SANITIZER} {tool}: {_SMALLEST.describe()}"}
    program = shutil.which(SANITIZER)
    if device.type != "cuda" or program is None:
        why = f"{SANITIZER} is not on the path" if device.type == "cuda" else f"no {device.type}"
        return {**row, "verdict": Verdict.NOT_RUN.value, "why": why}
    start = time.perf_counter()
    found, why = _sanitized(program, tool, "--one", spill_dir, patience)
    if found is Verdict.FAILED and _sanitized(program, tool, "--plain", None, patience)[0] is found:
        found, why = Verdict.NOT_RUN, f"it reports plain training, too: {why}"
    return {**row, "verdict": found.value, "why": why, "seconds": time.perf_counter() - start}


def _sanitized(
    program: str, tool: str, what: str, spill_dir: str | None, patience: float
) -> tuple[Verdict, str]:
    ours = [sys.executable, "-P", "-m", "dynoffload.experiments.gpu_check", what]
    ours += [] if spill_dir is None else ["--spill-dir", spill_dir]
    # Errors of calls, such as a refused registration, are the library's to handle.
    flags = ["--tool", tool, "--error-exitcode", str(_FOUND), "--print-limit", "5"]
    flags += ["--report-api-errors", "no"] if tool == "memcheck" else []
    # Each tensor has an allocation of its own, so that none lies beside another unseen.
    alone = {**os.environ, **environment(), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            [program, *flags, *ours],
            capture_output=True,
            text=True,
            check=False,
            timeout=patience,
            env=alone,
        )
    except subprocess.TimeoutExpired:
        return Verdict.NOT_RUN, f"it took over {patience:g} s"
    said = (done.stdout + done.stderr).strip()[-_SAID:]
    if done.returncode == 0:
        return Verdict.EXACT, ""
    if done.returncode in (1, _FOUND):
        return Verdict.FAILED, said
    return Verdict.NOT_RUN, f"it ended with code {done.returncode}: {said}"


# The program


def main(words: Sequence[str] | None = None) -> int:
    """Run the checks; return what the process ends with."""
    options = _parser().parse_args(words)
    os.environ.update(environment())  # processes inherit it
    try:
        device = accelerator()
        if options.json is not None:
            make_room(options.json, "--json")
        if options.one or options.plain:
            return _run_one(device, options)
        return _run_all(device, options)
    except BackendError as error:
        sys.stderr.write(f"gpu-check: {error}\n")
        return 2
    except DynOffloadError as error:
        sys.stderr.write(f"gpu-check: {error}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("gpu-check", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="where the rows so far are written")
    parser.add_argument("--spill-dir", help="where files below host memory lie")
    parser.add_argument("--only", default="", help="cases whose description has this in it")
    parser.add_argument("--steps", type=int, default=4, help="of each case")
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="for all cases together")
    parser.add_argument("--patience", type=float, default=_PATIENCE, help="seconds for one case")
    parser.add_argument("--one", action="store_true", help="the smallest case, in this process")
    parser.add_argument("--plain", action="store_true", help="its plain training alone")
    return parser


def _run_one(device: torch.device, options: argparse.Namespace) -> int:
    if options.plain:
        train_plainly(_SMALLEST, device)
        return 0
    row = train_case(_SMALLEST, device, options.spill_dir)
    sys.stdout.write(json.dumps(row) + "\n")
    return {Verdict.EXACT.value: 0, Verdict.FAILED.value: 1}.get(row["verdict"], _SHOWS_NOTHING)


def _run_all(device: torch.device, options: argparse.Namespace) -> int:
    every: list[Case | HostCase] = [*cases(options.steps), *host_cases()]
    chosen = [case for case in every if options.only in case.describe()]
    if not chosen:
        raise ConfigError(f"no case has {options.only!r} in its description")
    known = about(device)
    sys.stdout.write(f"{known['name']}, torch {known['torch']}, Python {known['python']}\n")
    missing = [name for name in _ONLY_TORCH if find_spec(name) is None]
    rows: list[dict[str, Any]] = []

    def tell(row: dict[str, Any]) -> None:
        rows.append(row)
        why = f": {row['why']}" if row["why"] else ""
        sys.stdout.write(f"{row['verdict']:>17}  {row['case']}{why}\n")
        sys.stdout.flush()
        if options.json is not None:
            write_json(options.json, _result(known, missing, rows))

    with Cases(device, options.spill_dir, options.patience) as asked:
        check(asked.train, chosen, options.seconds, tell)
    for tool in () if options.only else TOOLS:
        tell(sanitize(device, tool, options.spill_dir, options.patience))
    found = summary(rows)
    told = ", ".join(f"{count} {name}" for name, count in found.items())
    sys.stdout.write(f"{told}: {'passed' if passed(rows) else 'NOT PASSED'}\n")
    return 0 if passed(rows) else 1


def _result(
    known: dict[str, Any], missing: Sequence[str], rows: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "environment": known,
        "missing": list(missing),
        "summary": summary(rows),
        "passed": passed(rows),
        "rows": list(rows),
    }


def _train(case: Case | HostCase, device: torch.device, spill_dir: str | None) -> dict[str, Any]:
    if isinstance(case, HostCase):
        return train_host_case(case, device, spill_dir)
    return train_case(case, device, spill_dir)


class Cases:
    """A process that trains cases, replaced if it fails: an accelerator that met an error in a
    kernel fails whatever comes after."""

    def __init__(self, device: torch.device, spill_dir: str | None, patience: float) -> None:
        self._where: tuple[torch.device, str | None] = (device, spill_dir)
        self._patience = patience
        self._process: Process | None = None

    def train(self, case: Case | HostCase) -> dict[str, Any]:
        """Return a case's row, or ``why`` alone if there is none."""
        try:
            return self._started().call(_train, case, *self._where)
        except WorkerError as error:
            self.__exit__()
            return {"why": str(error)}

    def _started(self) -> Process:
        if self._process is None:
            patience = self._patience + _START_S
            self._process = Process("a case", patience=patience, environment=QUIET)
        return self._process

    def __enter__(self) -> Cases:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None


if __name__ == "__main__":
    sys.exit(main())
