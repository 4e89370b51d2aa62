"""One step with a failing disk, in a process of its own; run by test_faults.py, not a test.

    python faulty.py BACKEND DIRECTORY CASES      # CASES: JSON, a list of lists, see `Case`

Every case trains in a fork of this process, which has imported everything once, and prints one line
of JSON: how training ended. "exact": bit for bit as plainly. "lost": an error said so. A process
that ended by itself is told by its exit status.
"""

from __future__ import annotations

import copy
import ctypes
import errno
import faulthandler
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from exactness import SMALL_PAGES, assert_same, footprint_of, least_budget, small, small_samples
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

import dynoffload
from dynoffload.errors import DynOffloadError, StepLostError
from dynoffload.memory import spill

CALLS = {"read": 0, "write": 1, "room": 2}
KINDS = {"short": 1, "slow": 2}
STEPS = 5
LASTING = 1 << 40
STRUCK = 3  # the step with the fault
PATIENCE = 5  # seconds for room that nobody makes


class Case(NamedTuple):
    """A fault.

    Attributes:
        call: "read", "write" or "room" (of the file system); or "cut", which cuts the file off.
        how: name of an errno, "short" or "slow".
        stage: of a step; or "open", when the file is made.
        skip: calls that go well first.
        count: calls that fail then.
        recovers: whether the disk is well again once an error was raised.
        rollback: whether a step that is cut off is to be undone.
    """

    call: str
    how: str
    stage: str
    skip: int
    count: int
    recovers: bool = True
    rollback: bool = False


class Disk:
    """The shim that was loaded before the C library."""

    def __init__(self) -> None:
        self._shim = ctypes.CDLL(None)
        self._shim.fault_hits.restype = self._shim.fault_met.restype = ctypes.c_long

    def arm(self, case: Case) -> None:
        """Let calls fail from now on."""
        kind = KINDS.get(case.how, 0)
        error = 0 if kind else getattr(errno, case.how)
        skip, count = ctypes.c_long(case.skip), ctypes.c_long(case.count)
        self._shim.fault_arm(CALLS[case.call], kind, error, skip, count)

    def heal(self) -> None:
        """Let no call fail any more."""
        self._shim.fault_arm(0, 0, 0, ctypes.c_long(0), ctypes.c_long(0))

    def met(self, call: str, how: str) -> int:
        """Return how many calls there were since `arm` or `heal` that can fail in this way."""
        return int(self._shim.fault_met(CALLS[call], how == "short"))

    def hits(self) -> int:
        """Return how many calls failed, were short, or slow."""
        return int(self._shim.fault_hits())


def train(
    model: nn.Module, optimizer: Optimizer, number: int, stage: Any = lambda name: None
) -> None:
    """Make one step, telling ``stage`` what begins."""
    tokens, targets = SAMPLES[number]
    torch.manual_seed(number)
    stage("forward")
    loss = F.cross_entropy(model(tokens), targets)
    stage("backward")
    loss.backward()
    stage("step")
    optimizer.step()
    stage("after")
    optimizer.zero_grad()


def make() -> tuple[nn.Module, Optimizer]:
    """Return a network and its optimizer, the same each time."""
    model = small(layers=3)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def state_of(model: nn.Module, optimizer: Optimizer) -> Any:
    """Return copies of all that a step changes."""
    state = copy.deepcopy(optimizer.state_dict()["state"])
    return [p.detach().clone() for p in model.parameters()], state


SAMPLES = small_samples(STEPS)


def refuses(model: nn.Module, optimizer: Optimizer) -> bool:
    """Return whether nobody gets what is half of two steps."""
    uses: list[Callable[[], Any]] = [
        lambda: model(SAMPLES[0][0]),
        model.state_dict,
        optimizer.step,
        optimizer.state_dict,
    ]
    refused = 0
    for use in uses:
        try:
            use()
        except StepLostError:
            refused += 1
    return refused == len(uses)


def run(case: Case, backend: str, directory: str, expected: Any) -> dict[str, Any]:
    """Train with the fault of ``case``, and return how it went."""
    disk = Disk()
    model, optimizer = make()
    config = {**SMALL_PAGES, "backend": backend, "step_aside": False, "draft_share": 1.0}
    config["rollback"] = case.rollback
    config["debug"] = case.call == "cut"  # what is cut off may read as zeros
    budget, _ = least_budget(model, optimizer, footprint_of(model) // 3, config)
    errors: list[str] = []
    number, done, lost, now, hits = 0, False, False, "", 0

    def begins(stage: str) -> None:
        nonlocal now
        now = stage
        # The file has its room after the first forward.
        if stage != case.stage or errors or number != (STRUCK if case.call != "room" else 0):
            return
        if case.call == "cut":
            assert session._paging is not None
            os.ftruncate(session._paging.device._spill.fd, 0)  # type: ignore[attr-defined]
        else:
            disk.arm(case)

    def note(error: DynOffloadError) -> None:
        nonlocal hits
        errors.append(f"{now}: {type(error).__name__}: {error}")
        hits = max(hits, disk.hits())
        if case.recovers:
            disk.heal()

    if case.stage == "open":
        disk.arm(case)
    try:
        with dynoffload.offload(
            model, optimizer, budget=budget, config=config, spill_dir=directory
        ) as session:
            paging = session._paging
            if paging is not None and backend == "pager":
                native = paging.device._native  # type: ignore[attr-defined]
                native.pager_set_patience(paging.device._handle, PATIENCE)  # type: ignore[attr-defined]
            while number < STEPS and len(errors) < 4 and not lost:
                try:
                    train(model, optimizer, number, begins)
                except DynOffloadError as error:
                    note(error)
                    optimizer.zero_grad()
                    if case.rollback and case.recovers:
                        number -= isinstance(error, StepLostError)  # the step before is undone too
                        assert_same(state_of(model, optimizer), expected[number], str(case))
                        continue
                    # In forward and backward no update is made: the step can be made again.
                    lost = isinstance(error, StepLostError) or now in ("step", "after")
                else:
                    number += 1
            done = number == STEPS
            now = "end"
        now = "left"
    except DynOffloadError as error:
        note(error)
        done = False
        if case.stage == "open":
            done = number == 0
    hits = max(hits, disk.hits())
    outcome = "lost"
    if (done and now != "end") or case.stage == "open":
        assert_same(state_of(model, optimizer), expected[number], str(case))
        outcome = "exact"
    elif not errors:
        outcome = "silent"
    elif not refuses(model, optimizer):
        outcome = "mixed"
    return {"outcome": outcome, "errors": errors, "hits": hits, "steps": number}


def forked(case: Case, backend: str, directory: str, expected: Any) -> dict[str, Any]:
    """Run a case in a fork of this process, and return how it ended."""
    with tempfile.TemporaryFile() as said:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            code = 1
            try:
                os.close(reader)
                os.dup2(said.fileno(), 2)
                answer = run(case, backend, directory, expected)
                os.write(writer, json.dumps(answer).encode())
                code = 0
            except BaseException as error:
                sys.stderr.write(f"{type(error).__name__}: {error}\n")
                sys.stderr.flush()
            finally:
                os._exit(code)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            answer = pipe.read()
        _, status = os.waitpid(child, 0)
        said.seek(0)
        found = {"case": list(case), "code": os.waitstatus_to_exitcode(status)}
        found["said"] = said.read().decode(errors="replace")[-2000:]
        return {**found, **(json.loads(answer) if answer else {"outcome": "ended"})}


def main() -> None:
    """Run the cases of the command line."""
    faulthandler.disable()
    torch.set_num_threads(1)
    backend, directory, cases = sys.argv[1:]
    spill._GROWTH = 64 * 1024  # a network this small would never need more
    model, optimizer = make()
    expected = [state_of(model, optimizer)]
    for number in range(STEPS):
        train(model, optimizer, number)
        expected.append(state_of(model, optimizer))
    for fields in json.loads(cases):
        found = forked(Case(*fields), backend, directory, expected)
        found["files"] = sorted(path.name for path in Path(directory).iterdir())
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
