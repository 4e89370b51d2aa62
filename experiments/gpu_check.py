"""Whether training on this machine's accelerator gives the bits of plain PyTorch there.

``make gpu-check``: needs torch, numpy, rapidfuzz and this checkout. Networks of the zoo and of
transformers are trained twice plainly, and once paged: in host memory and with a spill file, with
many loops, with pilots that predict wrongly, on randomly delayed streams and in poisoned memory.

Cases share a process; if it dies or hangs, the case has failed, and the others continue. Results
are written after each case. Exit code 0: none failed and at least one case of each kind was exact;
1: otherwise; 2: there is no accelerator.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from dynoffload.errors import BackendError, ConfigError, DynOffloadError
from dynoffload.experiments import make_room, write_json
from dynoffload.experiments.gpu_check_cases import Case, cases
from dynoffload.experiments.gpu_check_training import Verdict, environment, train_case
from dynoffload.experiments.processes import QUIET, Renewed, WorkerError

_SECONDS, _PATIENCE = 330.0, 135.0


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
    """Return a description of a device and its software."""
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
    ask: Callable[[Case], dict[str, Any]],
    chosen: Sequence[Case],
    seconds: float,
    tell: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    """Run cases one after the other and return their rows.

    Args:
        ask: runs a case; see `train_case`. A result without a verdict counts as failed.
        chosen: the cases.
        seconds: no further case starts after this time.
        tell: called with each row.
    """
    began = time.perf_counter()
    rows = []
    for case in chosen:
        start = time.perf_counter()
        home, colon, _ = case.network.partition(":")
        row: dict[str, Any] = {"case": case.describe(), "kind": case.kind.value}
        row |= {"verdict": Verdict.NOT_RUN.value, "why": ""}
        if colon and find_spec(home) is None:
            row["why"] = f"{home} is not installed"
        elif start - began > seconds:
            row["why"] = f"the {seconds:g} s were over"
        else:
            row |= {"verdict": Verdict.FAILED.value, **ask(case)}
        row["seconds"] = time.perf_counter() - start
        rows.append(row)
        tell(row)
    return rows


def passed(rows: Sequence[dict[str, Any]]) -> bool:
    """Return whether no case has failed, and at least one of each kind is exact."""
    exact = {row["kind"] for row in rows if row["verdict"] == Verdict.EXACT.value}
    failed = any(row["verdict"] == Verdict.FAILED.value for row in rows)
    return bool(rows) and exact == {row["kind"] for row in rows} and not failed


def main(words: Sequence[str] | None = None) -> int:
    """Run the checks; return the exit code."""
    parser = argparse.ArgumentParser("gpu-check", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="where the rows so far are written")
    parser.add_argument("--spill-dir", help="where files below host memory lie")
    parser.add_argument("--only", default="", help="cases whose description has this in it")
    parser.add_argument("--steps", type=int, default=4, help="of each case")
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="for all cases together")
    parser.add_argument("--patience", type=float, default=_PATIENCE, help="seconds for one case")
    options = parser.parse_args(words)
    os.environ.update(environment())  # processes inherit it
    try:
        return _run(accelerator(), options)
    except DynOffloadError as error:
        sys.stderr.write(f"gpu-check: {error}\n")
        return 2 if isinstance(error, BackendError) else 1


def _run(device: torch.device, options: argparse.Namespace) -> int:
    if options.json is not None:
        make_room(options.json, "--json")
    chosen = [case for case in cases(options.steps) if options.only in case.describe()]
    if not chosen:
        raise ConfigError(f"no case has {options.only!r} in its description")
    known, rows = about(device), list[dict[str, Any]]()
    sys.stdout.write(f"{known['name']}, torch {known['torch']}, Python {known['python']}\n")

    def tell(row: dict[str, Any]) -> None:
        rows.append(row)
        why = f": {row['why']}" if row["why"] else ""
        sys.stdout.write(f"{row['verdict']:>17}  {row['case']}{why}\n")
        sys.stdout.flush()
        if options.json is not None:
            result = {"environment": known, "passed": passed(rows), "rows": rows}
            write_json(options.json, result)

    # Once a kernel has failed on an accelerator, everything after it in its process fails.
    processes = Renewed("a case", patience=options.patience, environment=QUIET)

    def ask(case: Case) -> dict[str, Any]:
        try:
            return processes.call(train_case, case, device, options.spill_dir)
        except WorkerError as error:
            return {"why": str(error)}

    with contextlib.closing(processes):
        check(ask, chosen, options.seconds, tell)
    counts = Counter(row["verdict"] for row in rows)
    told = ", ".join(f"{counts[each.value]} {each.value}" for each in Verdict)
    sys.stdout.write(f"{told}: {'passed' if passed(rows) else 'NOT PASSED'}\n")
    return 0 if passed(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
