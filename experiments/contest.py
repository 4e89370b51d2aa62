"""Compares plain training and methods under a budget by taking steps in turns.

A method drops out if it refuses the budget or a step, if its process dies, or if its step takes
more than `SLOWEST` times a plain one. The error is then its result; the others continue.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from dynoffload.experiments import harness, trainer
from dynoffload.experiments.baselines.cgroup import (
    LimitError,
    MemoryGroup,
    memory_group,
    swap_file,
    swapped_bytes,
)
from dynoffload.experiments.processes import Process, WorkerError
from dynoffload.experiments.ways import Spec
from dynoffload.memory.spill import default_spill_dir

START_S = 600.0
"""Time limit until the block is entered, and of a plain step."""
LEAST_S = 10.0
"""Minimum time limit of a step, however short a plain one is."""
SLOWEST = 60.0
"""Time limit of a step, in multiples of a plain one."""
_BEFORE = 3  # processes measured without a network
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
class Step:
    """One step of a training process.

    Attributes:
        seconds: whole step; ``forward_s``, ``backward_s`` and ``optimizer_s`` are its parts.
        loss: exact value in `float.hex` format.
        stats: fields of `dynoffload.telemetry.StepStats`, for a session.
        measured: False for warm-up steps.
    """

    seconds: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    loss: str
    stats: Mapping[str, Any] = field(default_factory=dict)
    measured: bool = True


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
    """A training process, which drops out when it fails.

    Args:
        name: in messages.
        way: what it runs.
        patience: returns the seconds that a step may take.
        required: raise `WorkerError` instead of dropping out.

    Attributes:
        why: why it dropped out, "" if it has not.
        every: its steps so far.
    """

    def __init__(
        self,
        name: str,
        way: Way,
        patience: Callable[[], float] = lambda: START_S,
        *,
        required: bool = False,
    ) -> None:
        self.name, self.why, self.every = name, "", list[Step]()
        self._way, self._patience, self._required = way, patience, required
        self._process: Process | None = None
        self._group: MemoryGroup | None = None
        self._charged = 0  # bytes of its group just before it entered the block
        self._state: dict[str, Any] = {}
        self._swapped: list[tuple[int, int]] = []  # bytes in and out of each measured step

    def start(self, stack: ExitStack) -> None:
        """Start it in ``stack`` and wait until it has entered its block."""
        way, directory = self._way, Path(self._way.spec.spill_dir or default_spill_dir())
        try:
            if way.swap_bytes:
                stack.enter_context(swap_file(directory, way.swap_bytes))
            if way.limit is not None:
                group = memory_group(way.limit, swap=way.swap_bytes > 0)
                self._group = stack.enter_context(group)
            process = Process(self.name, group=self._group, patience=START_S)
            self._process = stack.enter_context(process)
            self._charged = process.call(trainer.build, way.spec)
            process.call(trainer.enter)
            self._state = process.call(trainer.ask, "state")
        except (WorkerError, LimitError) as error:
            self._drop_out(error)

    def step(self, *, measured: bool = True, do: str = "step") -> dict[str, Any]:
        """Make a step and return the answer; {} once it has dropped out."""
        if self._process is None or self.why:
            return {}
        self._process.patience = self._patience()
        before = swapped_bytes() if self._way.swap_bytes else (0, 0)
        args = [json.dumps(self._way.orders[len(self.every)])] if self._way.orders else []
        try:
            answer = self._process.call(trainer.ask, do, *args)
        except WorkerError as error:
            self._drop_out(error)
            return {}
        known = {key: answer[key] for key in Step.__dataclass_fields__ if key in answer}
        self.every.append(Step(**known, measured=measured))
        if self._way.swap_bytes and measured:
            after = swapped_bytes()
            self._swapped.append((after[0] - before[0], after[1] - before[1]))
        return answer

    def _drop_out(self, error: Exception) -> None:
        if self._required:
            raise error
        lines = str(error).strip().splitlines()
        killed = lines[0].partition(": ")[0]  # what it printed last does not say why
        why = killed if " was killed by signal " in killed else lines[-1]
        self.why = why.removeprefix(f"{self.name!r} failed: ")[-_MESSAGE_CHARS:]
        if self._way.swap_bytes and "was killed by signal 9" in self.why:
            self.why += _OOM_WHY

    @property
    def steps(self) -> list[Step]:
        """The measured steps."""
        return [step for step in self.every if step.measured]

    @property
    def losses(self) -> list[str]:
        """The losses of all its steps."""
        return [step.loss for step in self.every]

    def result(self, plain: Sequence[str]) -> Side:
        """Return its result, compared with the losses of plain training."""
        common = min(len(plain), len(self.losses))
        equal = self.losses[:common] == list(plain[:common]) if common else None
        sizing = self._state.get("sizing") if self._state.get("paging") else None
        if self.why or self._process is None:
            return Side(self.why, losses_equal=equal, sizing=sizing)
        state, steps = self._process.call(trainer.ask, "state"), self.steps
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
            group_before_bytes=None if self._group is None else self._charged,
        )


class Found(NamedTuple):
    """Results of all turns.

    Attributes:
        plain: the measured plain steps.
        plain_losses: of all plain steps.
        steps: the measured steps of each method.
        every: all of its steps.
        sides: result of each method.
        described: `Trainer.describe` of a plain step.
    """

    plain: list[Step]
    plain_losses: list[str]
    steps: dict[str, list[Step]]
    every: dict[str, list[Step]]
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
        plain = Contestant("plain", Way(spec), required=True)
        plain.start(stack)

        def patience() -> float:
            known = plain.every[1:] or plain.every
            return max(LEAST_S, SLOWEST * median_seconds(known)) if known else START_S

        others = [Contestant(name, way, patience) for name, way in ways.items()]
        for one in others:
            on_step(one.name)
            one.start(stack)
        described: dict[str, Any] = {}
        if describe:
            described = plain.step(measured=False, do="describe")
            for one in others:
                one.step(measured=False)
        for each, measured in harness.turns(
            [plain, *others],
            warmup=turns.warmup,
            rounds=turns.rounds,
            per_turn=turns.per_turn,
            lead=turns.lead,
        ):
            each.step(measured=measured)
            on_step(each.name)
        return Found(
            plain.steps,
            plain.losses,
            {one.name: one.steps for one in others},
            {one.name: one.every for one in others},
            {one.name: one.result(plain.losses) for one in others},
            described,
        )


def charged_before(spec: Spec) -> int:
    """Return the bytes charged to a process without a network: the minimum of several, as the
    first process to read a library's files is charged for them and later ones are not."""
    charged = []
    for _ in range(_BEFORE):
        with memory_group(None) as group, Process("before", group=group) as one:
            charged.append(one.call(trainer.build, replace(spec, meta=True)))
    return min(charged)


def median_seconds(steps: Sequence[Step]) -> float:
    """Return the median seconds of ``steps``."""
    return median(step.seconds for step in steps)
