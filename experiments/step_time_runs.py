"""The measured side of `step_time`: plain training and all policies under one budget, in turns.

A policy that refuses a budget or a step, whose process dies, or whose step takes more than
`SLOWEST` times a plain one leaves the turns. What it said is its result; the others go on.

Paging by the system is plain training in a memory group with a swap file. Its limit is the budget
and what a process takes before there is a network. Swapped bytes are those of all processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from dynoffload.experiments import harness
from dynoffload.experiments.baselines import BASELINES
from dynoffload.experiments.baselines.cgroup import (
    LimitError,
    MemoryGroup,
    memory_group,
    swap_file,
    swapped_bytes,
)
from dynoffload.experiments.step_time_policies import PILOT, SYSTEM, Side
from dynoffload.experiments.trainer import BUDGETED, Spec
from dynoffload.experiments.workers import (
    Worker,
    WorkerError,
    losses_equal,
    median_seconds,
    worker,
)
from dynoffload.memory.spill import default_spill_dir

_START_S = 120.0  # to come to the block
_PLAIN_S = 600.0  # of a plain step
LEAST_S = 10.0  # that a step may take, however short a plain one is
SLOWEST = 60.0
"""Times what a plain step takes, that a step may take."""
_SAID = 400
_SPARE = 2.0  # of swap: pages stay in it after they were read back
_STARVED = ", as the kernel does where what it may reclaim in a memory group is less than is wanted"


@dataclass(frozen=True)
class Turns:
    """How steps are made.

    Attributes:
        warmup: first steps of each, which do not count.
        rounds: turns of each.
        per_turn: steps of a turn that count, ...
        lead: ... after so many that do not.
    """

    rounds: int
    warmup: int = 2
    per_turn: int = 3
    lead: int = 1

    @property
    def steps(self) -> int:
        """All that each makes."""
        return self.warmup + self.rounds * (self.lead + self.per_turn)

    @property
    def counted(self) -> list[int]:
        """The numbers of those that count."""
        turn = self.lead + self.per_turn
        return [n for n in range(self.warmup, self.steps) if (n - self.warmup) % turn >= self.lead]


class Contestant:
    """A worker that may drop out.

    Attributes:
        name: of the policy.
        why: it dropped out, "" while it has not.
        state: what it said when it began.
    """

    def __init__(self, name: str, patience: Callable[[], float]) -> None:
        self.name, self.why, self._patience = name, "", patience
        self.state: dict[str, Any] = {}
        self._worker: Worker | None = None
        self._swapped: list[tuple[int, int]] = []  # bytes in and out of each step that counts

    def start(self, stack: ExitStack, spec: Spec, group: MemoryGroup | None = None) -> None:
        """Start it in ``stack``, and in ``group``."""
        try:
            self._worker = stack.enter_context(worker(self.name, spec, group, _START_S))
            self.state = self._worker.ask("state")
        except WorkerError as error:
            self._leave(error)

    def step(self, *, measured: bool = True) -> object:
        """Make a step, unless it has dropped out."""
        if self._worker is None or self.why:
            return None
        self._worker.patience = self._patience()
        before = swapped_bytes() if self.name == SYSTEM else (0, 0)
        try:
            made = self._worker.step(measured=measured)
        except WorkerError as error:
            self._leave(error)
            return None
        if self.name == SYSTEM and measured:
            after = swapped_bytes()
            self._swapped.append((after[0] - before[0], after[1] - before[1]))
        return made

    def _leave(self, error: WorkerError) -> None:
        lines = str(error).strip().splitlines()
        self.why = lines[-1].removeprefix(f"{self.name!r} failed: ")[-_SAID:]
        if self.name == SYSTEM and "was killed by signal 9" in self.why:
            self.why += _STARVED

    def result(self, plain: Worker) -> Side:
        """Return what it did, beside ``plain``."""
        own = self._worker
        equal = losses_equal(plain, own) if own is not None and own.steps else None
        sizing = self.state.get("sizing") if self.state.get("paging") else None
        if self.why or own is None:
            return Side(self.why, losses_equal=equal, sizing=sizing)
        steps = own.measured
        aside = self.state.get("paging") and not own.ask("state")["paging"]
        moved = self._swapped or [(s.stats["bytes_in"], s.stats["bytes_out"]) for s in steps]
        return Side(
            steps_s=tuple(step.seconds for step in steps),
            bytes_in=fmean(read for read, _ in moved),
            bytes_out=fmean(wrote for _, wrote in moved),
            note="paging stepped aside, as everything fits" if aside else "",
            losses_equal=equal,
            sizing=sizing,
        )


def measure(
    spec: Spec,
    policies: Sequence[str],
    budget: int,
    turns: Turns,
    pilot: Path | None,
    on_step: Callable[[str], None],
    *,
    footprint: int,
) -> tuple[tuple[float, ...], dict[str, Side]]:
    """Let plain training and ``policies`` take turns under ``budget``.

    Args:
        spec: what plain training runs.
        policies: those of `step_time_policies.POLICIES` that run.
        budget: bytes.
        turns: how many steps, in which order.
        pilot: of the policy of that name.
        on_step: is told who made a step.
        footprint: bytes of what plain training takes, for the size of a swap file.

    Returns:
        The seconds of the plain steps that count, and what each policy did.

    Raises:
        WorkerError: plain training failed.
    """
    with ExitStack() as stack:
        plain = stack.enter_context(worker("plain", spec, patience=_PLAIN_S))
        plain.wait_ready()

        def patience() -> float:
            known = plain.steps[1:] or plain.steps
            return max(LEAST_S, SLOWEST * median_seconds(known))

        everyone = [Contestant(name, patience) for name in policies]
        for one in everyone:
            on_step(one.name)
            if one.name == SYSTEM:
                _start_paged(stack, one, spec, budget, footprint)
            else:
                one.start(stack, _budgeted(spec, one.name, budget, pilot))
        turning: list[Worker | Contestant] = [plain, *everyone]
        for each, measured in harness.turns(
            turning,
            warmup=turns.warmup,
            rounds=turns.rounds,
            per_turn=turns.per_turn,
            lead=turns.lead,
        ):
            each.step(measured=measured)
            on_step(each.name)
        seconds = tuple(step.seconds for step in plain.measured)
        return seconds, {one.name: one.result(plain) for one in everyone}


def _start_paged(
    stack: ExitStack, one: Contestant, spec: Spec, budget: int, footprint: int
) -> None:
    """Start plain training where the system pages it."""
    bare, directory = replace(spec, meta=True), spec.spill_dir or default_spill_dir()
    try:
        with memory_group(None) as group, worker("before", bare, group) as before:
            base = before.before["charged_bytes"]
        stack.enter_context(swap_file(Path(directory), int(_SPARE * (base + footprint))))
        group = stack.enter_context(memory_group(base + budget, swap=True))
    except LimitError as error:
        one.why = str(error)
    else:
        one.start(stack, spec, group)


def _budgeted(spec: Spec, policy: str, budget: int, pilot: Path | None) -> Spec:
    steered = policy == PILOT and pilot is not None
    return replace(
        spec,
        mode=BUDGETED,
        budget=budget,
        config={} if policy in BASELINES else {"policy": policy},
        baseline=policy if policy in BASELINES else "",
        pilot=str(pilot) if steered else None,
    )
