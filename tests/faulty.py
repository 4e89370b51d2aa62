"""One step with a failing disk; run by test_faults.py, not a test.

"exact": bit for bit as plainly. "kept": an error said so, and all is as it was after the last step
that was made. "lost": an error said so, and all uses are refused.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from exactness import SMALL_PAGES, assert_same, footprint_of, least_budget, small, small_samples
from failing_disk import Case, Disk, be_patient, serve
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

import dynoffload
from dynoffload.errors import DynOffloadError, StepLostError

STEPS = 5
STRUCK = 3  # the step with the fault
PATIENCE = 5  # seconds for room that nobody makes
IN_VAIN = 2  # the same, where nobody can make it, as the disk is full


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


def run(case: Case, backend: str, directory: Path, expected: Any) -> dict[str, Any]:
    """Train with the fault of ``case``, and return how it went."""
    disk = Disk()
    model, optimizer = make()
    config = {**SMALL_PAGES, "backend": backend, "step_aside": False}
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
            if backend == "pager":
                be_patient(session, IN_VAIN if case.how == "ENOSPC" else PATIENCE)
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
        assert_same(state_of(model, optimizer), expected[number], str(case))
        outcome = "kept"
    return {"outcome": outcome, "errors": errors, "hits": hits, "steps": number}


def main() -> None:
    """Train plainly once, and serve."""
    torch.set_num_threads(1)
    model, optimizer = make()
    expected = [state_of(model, optimizer)]
    for number in range(STEPS):
        train(model, optimizer, number)
        expected.append(state_of(model, optimizer))
    serve(lambda case, backend, directory, tell: run(case, backend, directory / "spill", expected))


if __name__ == "__main__":
    main()
