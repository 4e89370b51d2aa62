"""The measured side of `dynoffload.experiments.step_time`: all policies under one budget, in turns.

What it is: `measure`, which starts plain training and a process for each policy, lets them take
turns on the same samples, and returns each one's steps, or why it made none. What it is not: a
simulation; see `dynoffload.experiments.step_time_policies`.

[Note: what cannot run]  A policy may refuse a budget when it begins, or a step in the middle, the
kernel may end its process, or a step may take more than `Turns.slowest` times what a plain one
takes. It then leaves the turns, and what it said, or did, is its result; the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from dynoffload.experiments.step_time_policies import PILOT, Side
from dynoffload.experiments.trainer import BUDGETED, Spec
from dynoffload.experiments.workers import (
    Worker,
    WorkerError,
    alternate,
    losses_equal,
    median_seconds,
    worker,
)
from dynoffload.memory.cgroup import remove_left, why_unavailable

_START_S = 120.0  # to come to the block
_PLAIN_S = 600.0  # of a plain step
LEAST_S = 10.0  # that a step may take, however short a plain one is
_SAID = 400
_STARVED = ", as the kernel does where what it may reclaim in a memory group is less than is wanted"


@dataclass(frozen=True)
class Turns:
    """How steps are made.

    Attributes:
        warmup: first steps of each, which do not count.
        rounds: turns of each.
        per_turn: steps of a turn that count, ...
        lead: ... after so many that do not.
        slowest: times what a plain step takes, that a step may take.
    """

    rounds: int
    warmup: int = 2
    per_turn: int = 3
    lead: int = 1
    slowest: float = 60.0

    @property
    def steps(self) -> int:
        """All that each makes."""
        return self.warmup + self.rounds * (self.lead + self.per_turn)

    @property
    def counted(self) -> list[int]:
        """The numbers of those that count."""
        turn = self.lead + self.per_turn
        return [n for n in range(self.warmup, self.steps) if (n - self.warmup) % turn >= self.lead]


@dataclass(frozen=True)
class Measured:
    """One policy's run.

    Attributes:
        side: its times and bytes.
        losses_equal: whether its losses are those of plain training, bit by bit, as far as it came;
            None if it made no step.
        sizing: how the budget was divided; None if it was refused.
    """

    side: Side
    losses_equal: bool | None = None
    sizing: Mapping[str, int] | None = None


class Contestant:
    """A worker that may drop out; see [Note: what cannot run].

    Attributes:
        name: of the policy.
        why: it dropped out, "" while it has not.
        state: what it said when it began.
    """

    def __init__(self, name: str, patience: Callable[[], float]) -> None:
        self.name, self.why, self._patience = name, "", patience
        self.state: dict[str, Any] = {}
        self._worker: Worker | None = None

    def start(self, stack: ExitStack, spec: Spec) -> None:
        """Start it in ``stack``."""
        try:
            self._worker = stack.enter_context(worker(self.name, spec, patience=_START_S))
            self.state = self._worker.ask("state")
        except WorkerError as error:
            self._leave(error)

    def step(self, *, measured: bool = True) -> object:
        """Make a step, unless it has dropped out."""
        if self._worker is None or self.why:
            return None
        self._worker.patience = self._patience()
        try:
            return self._worker.step(measured=measured)
        except WorkerError as error:
            self._leave(error)
            return None

    def _leave(self, error: WorkerError) -> None:
        lines = str(error).strip().splitlines()
        self.why = lines[-1].rpartition("ended with code 1: ")[2][-_SAID:]
        if self.name == "os-paging" and "was killed by signal 9" in self.why:
            self.why += _STARVED

    def result(self, plain: Worker) -> Measured:
        """Return what it did, beside ``plain``."""
        own = self._worker
        steps = own.measured if own is not None and not self.why else []
        equal = losses_equal(plain, own) if own is not None and own.steps else None
        sizing = self.state.get("sizing") if self.state.get("paging") else None
        if self.why or own is None:
            return Measured(Side(self.why), equal, sizing)
        aside = self.state.get("paging") and not own.ask("state")["paging"]
        side = Side(
            steps_s=tuple(step.seconds for step in steps),
            bytes_in=fmean(step.stats["bytes_in"] for step in steps),
            bytes_out=fmean(step.stats["bytes_out"] for step in steps),
            note="paging stepped aside, as everything fits" if aside else "",
        )
        return Measured(side, equal, sizing)


def measure(
    spec: Spec,
    policies: Sequence[str],
    budget: int,
    turns: Turns,
    pilot: Path | None,
    on_step: Callable[[str], None],
) -> tuple[tuple[float, ...], dict[str, Measured]]:
    """Let plain training and ``policies`` take turns under ``budget``.

    Args:
        spec: what plain training runs.
        policies: names of `OffloadConfig.policy`.
        budget: bytes.
        turns: how many steps, in which order.
        pilot: of the policy of that name.
        on_step: is told who made a step.

    Returns:
        The seconds of the plain steps that count, and what each policy did.

    Raises:
        WorkerError: plain training failed.
    """
    try:
        with ExitStack() as stack:
            plain = stack.enter_context(worker("plain", spec, patience=_PLAIN_S))
            plain.wait_ready()

            def patience() -> float:
                known = plain.steps[1:] or plain.steps
                return max(LEAST_S, turns.slowest * median_seconds(known))

            everyone = [Contestant(name, patience) for name in policies]
            for one in everyone:
                on_step(one.name)
                one.start(stack, _budgeted(spec, one.name, budget, pilot))
            turning: list[Worker | Contestant] = [plain, *everyone]
            alternate(
                turning,
                warmup=turns.warmup,
                rounds=turns.rounds,
                per_turn=turns.per_turn,
                lead=turns.lead,
                on_step=lambda stepped: on_step(stepped.name),
            )
            seconds = tuple(step.seconds for step in plain.measured)
            return seconds, {one.name: one.result(plain) for one in everyone}
    finally:
        if spec.spill_dir is not None and not why_unavailable(swap=True):
            remove_left(Path(spec.spill_dir))


def _budgeted(spec: Spec, policy: str, budget: int, pilot: Path | None) -> Spec:
    steered = policy == PILOT and pilot is not None
    return replace(
        spec,
        mode=BUDGETED,
        budget=budget,
        config={"policy": policy},
        pilot=str(pilot) if steered else None,
    )
