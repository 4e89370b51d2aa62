"""Compares plain training and methods under a budget by taking steps in turns.

A method drops out if it refuses the budget or a step, if its process dies, or if its step takes
more than `SLOWEST` times a plain one. The error is then its result; the others continue.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from dynoffload.experiments import harness
from dynoffload.experiments.baselines.cgroup import (
    LimitError,
    MemoryGroup,
    memory_group,
    swap_file,
    swapped_bytes,
)
from dynoffload.experiments.ways import Spec
from dynoffload.experiments.workers import (
    Step,
    Worker,
    WorkerError,
    losses_equal,
    median_seconds,
    worker,
)
from dynoffload.memory.spill import default_spill_dir

START_S = 600.0
"""Time limit until the block is entered, and of a plain step."""
LEAST_S = 10.0
"""Minimum time limit of a step, however short a plain one is."""
SLOWEST = 60.0
"""Time limit of a step, in multiples of a plain one."""
_MESSAGE_CHARS = 400
_OOM_WHY = ", as the kernel does where what it may reclaim in a memory group is less than is wanted"


@dataclass(frozen=True)
class Turns:
    """Number and order of steps.

    Attributes:
        rounds: turns of each method.
        warmup: first steps of each method, which are not measured.
        per_turn: measured steps per turn.
        lead: unmeasured steps before them in each turn.
    """

    rounds: int
    warmup: int = 2
    per_turn: int = 3
    lead: int = 1

    @property
    def steps(self) -> int:
        """All steps of one method."""
        return self.warmup + self.rounds * (self.lead + self.per_turn)


@dataclass(frozen=True)
class Way:
    """A method of training.

    Attributes:
        spec: what its process runs.
        limit: bytes of its memory group; None for no group.
        swap_bytes: of a swap file, to which the system pages the group. Swapped bytes are counted
            over all processes.
        orders: the visits of each step, for a method with perfect predictions.
    """

    spec: Spec
    limit: int | None = None
    swap_bytes: int = 0
    orders: Sequence[Sequence[str]] = ()


@dataclass(frozen=True)
class Side:
    """Result of a method under a budget.

    Attributes:
        why: the reason why it has no time; "" if it has.
        steps_s: seconds of the measured steps.
        bytes_in: read from the tier below, per step.
        bytes_out: written to it, per step.
        note: a remark for the reader.
        losses_equal: whether its losses equal plain training's bit for bit, as far as it ran;
            None if it made no step.
        sizing: how the runtime divided the budget; None if it refused it, or does not divide it.
        stall_s: median stall of a step; None if not measured.
        peak_fast_bytes: most bytes of the budget in use; None if not measured.
        group_peak_bytes: peak bytes charged to its memory group; None without one.
        group_before_bytes: bytes charged before it entered the block.
    """

    why: str = ""
    steps_s: tuple[float, ...] = ()
    bytes_in: float = 0.0
    bytes_out: float = 0.0
    note: str = ""
    losses_equal: bool | None = None
    sizing: Mapping[str, int] | None = None
    stall_s: float | None = None
    peak_fast_bytes: int | None = None
    group_peak_bytes: int | None = None
    group_before_bytes: int | None = None

    @property
    def seconds(self) -> float | None:
        """The median step time."""
        return median(self.steps_s) if self.steps_s and not self.why else None


class Contestant:
    """A worker that may drop out.

    Attributes:
        name: of the method.
        why: why it dropped out, "" if it has not.
    """

    def __init__(self, name: str, way: Way, patience: Callable[[], float]) -> None:
        self.name, self.why, self._way, self._patience = name, "", way, patience
        self._state: dict[str, Any] = {}
        self._worker: Worker | None = None
        self._group: MemoryGroup | None = None
        self._swapped: list[tuple[int, int]] = []  # bytes in and out of each measured step

    def start(self, stack: ExitStack) -> None:
        """Start it in ``stack``."""
        way, directory = self._way, Path(self._way.spec.spill_dir or default_spill_dir())
        try:
            if way.swap_bytes:
                stack.enter_context(swap_file(directory, way.swap_bytes))
            if way.limit is not None:
                group = memory_group(way.limit, swap=way.swap_bytes > 0)
                self._group = stack.enter_context(group)
            self._worker = stack.enter_context(worker(self.name, way.spec, self._group, START_S))
            self._state = self._worker.ask("state")
        except (WorkerError, LimitError) as error:
            self._drop_out(error)

    def step(self, *, measured: bool = True) -> object:
        """Make a step, unless it has dropped out."""
        if self._worker is None or self.why:
            return None
        self._worker.patience = self._patience()
        before = swapped_bytes() if self._way.swap_bytes else (0, 0)
        args = [json.dumps(self._way.orders[len(self._worker.steps)])] if self._way.orders else []
        try:
            made = self._worker.step(*args, measured=measured)
        except WorkerError as error:
            self._drop_out(error)
            return None
        if self._way.swap_bytes and measured:
            after = swapped_bytes()
            self._swapped.append((after[0] - before[0], after[1] - before[1]))
        return made

    def _drop_out(self, error: Exception) -> None:
        lines = str(error).strip().splitlines()
        self.why = lines[-1].removeprefix(f"{self.name!r} failed: ")[-_MESSAGE_CHARS:]
        if self._way.swap_bytes and "was killed by signal 9" in self.why:
            self.why += _OOM_WHY

    def result(self, plain: Worker) -> Side:
        """Return its result, compared with ``plain``."""
        own = self._worker
        equal = losses_equal(plain, own) if own is not None and own.steps else None
        sizing = self._state.get("sizing") if self._state.get("paging") else None
        if self.why or own is None:
            return Side(self.why, losses_equal=equal, sizing=sizing)
        state, steps = own.ask("state"), own.measured
        aside = self._state.get("paging") and not state["paging"]
        moved = self._swapped or [
            (s.stats.get("bytes_in", 0), s.stats.get("bytes_out", 0)) for s in steps
        ]
        return Side(
            steps_s=tuple(step.seconds for step in steps),
            bytes_in=fmean(read for read, _ in moved),
            bytes_out=fmean(wrote for _, wrote in moved),
            note="paging stepped aside, as everything fits" if aside else "",
            losses_equal=equal,
            sizing=sizing,
            stall_s=median(s.stats["stall_s"] for s in steps) if state else None,
            peak_fast_bytes=state.get("peak_fast_bytes"),
            group_peak_bytes=None if self._group is None else self._group.usage().peak_bytes,
            group_before_bytes=None if self._group is None else own.charged_bytes,
        )

    @property
    def steps(self) -> list[Step]:
        """The measured steps."""
        return [] if self._worker is None else self._worker.measured

    @property
    def losses(self) -> list[str]:
        """The losses of all its steps."""
        return [] if self._worker is None else self._worker.losses


class Found(NamedTuple):
    """Results of all turns.

    Attributes:
        plain: the measured plain steps.
        plain_losses: of all plain steps.
        steps: the measured steps of each method.
        sides: result of each method.
        described: `Trainer.describe` of a plain step.
    """

    plain: list[Step]
    plain_losses: list[str]
    steps: dict[str, list[Step]]
    sides: dict[str, Side]
    described: dict[str, Any]


def measure(
    spec: Spec,
    ways: Mapping[str, Way],
    turns: Turns,
    on_step: Callable[[str], None],
    *,
    describe: bool = False,
) -> Found:
    """Make plain training and ``ways`` take turns.

    Args:
        spec: what plain training runs.
        ways: by name.
        turns: number and order of steps.
        on_step: called with the name of the method that made a step.
        describe: all make one extra step first, and plain training describes its step.

    Raises:
        WorkerError: plain training failed.
    """
    with ExitStack() as stack:
        plain = stack.enter_context(worker("plain", spec, patience=START_S))
        plain.wait_ready()

        def patience() -> float:
            known = plain.steps[1:] or plain.steps
            return max(LEAST_S, SLOWEST * median_seconds(known)) if known else START_S

        everyone = [Contestant(name, way, patience) for name, way in ways.items()]
        for one in everyone:
            on_step(one.name)
            one.start(stack)
        described: dict[str, Any] = {}
        if describe:
            described = plain.step(measured=False, do="describe")
            for one in everyone:
                one.step(measured=False)
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
        return Found(
            plain.measured,
            plain.losses,
            {one.name: one.steps for one in everyone},
            {one.name: one.result(plain) for one in everyone},
            described,
        )
