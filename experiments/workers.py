"""Workers that take turns: the parent half of the comparisons.

What it is: `Worker`, a training process (`dynoffload.experiments.trainer`) at the other end of two
pipes, and `alternate`, which lets several step in turn so that a machine that becomes faster or
slower does so for all of them alike. What it is not: parallel; one worker runs at a time.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Protocol, TypeVar

from dynoffload.errors import DynOffloadError
from dynoffload.experiments.baselines.cgroup import MemoryGroup
from dynoffload.experiments.trainer import Spec
from dynoffload.units import format_seconds

_SAID = 2_000  # characters of a dead worker's last words

Number = TypeVar("Number", int, float)


class WorkerError(DynOffloadError, RuntimeError):
    """A worker died, or could not do what it was asked."""


@dataclass(frozen=True)
class Step:
    """One step of a worker.

    Attributes:
        seconds: all of it; ``forward_s``, ``backward_s`` and ``optimizer_s`` are its parts.
        loss: exactly, as `float.hex` writes it.
        stats: fields of `dynoffload.telemetry.StepStats`, for a worker under a budget.
        measured: whether it counts, or was there to warm up.
    """

    seconds: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    loss: str
    stats: Mapping[str, Any] = field(default_factory=dict)
    measured: bool = True


class Worker:
    """A training process; made by `worker`.

    Attributes:
        name: what messages call it.
        patience: seconds after which it is ended, if it has not answered; None for ever.
        steps: all it made so far.
        before: bytes it took just before it entered the block: ``rss_bytes`` and, as its cgroup
            counts, ``charged_bytes``.
    """

    def __init__(
        self,
        name: str,
        spec: Spec,
        group: MemoryGroup | None,
        patience: float | None = None,
    ) -> None:
        self.name, self.spec, self.group, self.patience = name, spec, group, patience
        self.steps: list[Step] = []
        command = [sys.executable, "-P", "-m", "dynoffload.experiments.trainer"]
        command.append(json.dumps(asdict(spec)))
        self._said = tempfile.TemporaryFile(  # noqa: SIM115 - closed by close()
            "w+", encoding="utf-8", errors="replace"
        )
        self._process = subprocess.Popen(
            command if group is None else group.command(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )
        try:
            self.before: dict[str, int] = self._answer()
        except BaseException:
            self.close()
            raise
        self._ready = False

    def wait_ready(self) -> None:
        """Wait until it is inside its block, with its weights."""
        if not self._ready:
            self._answer()
            self._ready = True

    def ask(self, do: str) -> dict[str, Any]:
        """Have one command carried out and return the answer.

        Raises:
            WorkerError: it died; with its last words.
        """
        self.wait_ready()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{do}\n")
            self._process.stdin.flush()
        return self._answer()

    def step(self, *, measured: bool = True, do: str = "step") -> dict[str, Any]:
        """Have one step made, keep its numbers and return the answer."""
        answer = self.ask(do)
        known = {key: answer[key] for key in Step.__dataclass_fields__ if key in answer}
        self.steps.append(Step(**known, measured=measured))
        return answer

    @property
    def measured(self) -> list[Step]:
        """The steps that count."""
        return [step for step in self.steps if step.measured]

    @property
    def losses(self) -> list[str]:
        """The losses of all steps."""
        return [step.loss for step in self.steps]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        with ended_after(self.kill, self.patience) as late:
            line = self._process.stdout.readline()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        if late.is_set() and self.patience is not None:
            self._process.wait()
            raise WorkerError(
                f"the worker {self.name!r} gave no answer within {format_seconds(self.patience)}"
            )
        code = self._process.wait()
        self._said.seek(0)
        words = self._said.read().strip()[-_SAID:]
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        kills = self.group.usage().oom_kills if self.group is not None else 0
        if kills and self.group is not None:
            how += f", for want of memory within {self.group.limit_bytes} bytes"
        raise WorkerError(f"the worker {self.name!r} {how}" + (f": {words}" if words else ""))

    def kill(self) -> None:
        """End the process at once; whoever waits for an answer is told that it died."""
        self._process.kill()

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._said.close()


@contextlib.contextmanager
def ended_after(end: Callable[[], None], seconds: float | None) -> Iterator[threading.Event]:
    """Call ``end`` when the time is over, if the block is not; the event says that it was."""
    late = threading.Event()
    if seconds is None:
        yield late
        return

    def over() -> None:
        late.set()
        end()

    timer = threading.Timer(seconds, over)
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()


@contextlib.contextmanager
def worker(
    name: str, spec: Spec, group: MemoryGroup | None = None, patience: float | None = None
) -> Iterator[Worker]:
    """Yield a new worker, in ``group`` if one is given; it is ended with the block.

    Raises:
        WorkerError: it died while it started, or had no answer within ``patience`` seconds.
    """
    started = Worker(name, spec, group, patience)
    try:
        yield started
    finally:
        started.close()


class Steps(Protocol):
    """What takes turns: a `Worker`, or something that stands for one."""

    def step(self, *, measured: bool = True) -> object:
        """Make one step."""
        ...


Stepping = TypeVar("Stepping", bound=Steps)


def alternate(
    workers: Sequence[Stepping],
    *,
    warmup: int,
    rounds: int,
    per_turn: int,
    lead: int,
    on_step: Callable[[Stepping], None] = lambda worker: None,
) -> None:
    """Let workers step in turn.

    The first ``lead`` steps of each turn do not count: a worker that waits for its turn finishes
    transfers meanwhile, which would be a present to its next step.

    Args:
        workers: who takes turns.
        warmup: steps of each before the first round.
        rounds: how many turns each has.
        per_turn: measured steps of a turn.
        lead: steps of a turn before those.
        on_step: called after each step.
    """
    for each in workers:
        for _ in range(warmup):
            each.step(measured=False)
            on_step(each)
    for number in range(rounds):
        # Turn about, so that none always follows the same neighbour.
        for each in workers if number % 2 == 0 else list(reversed(workers)):
            for place in range(lead + per_turn):
                each.step(measured=place >= lead)
                on_step(each)


def losses_equal(first: Worker, second: Worker) -> bool:
    """Return whether two workers' losses are the same, bit by bit, as far as both have come.

    Raises:
        ValueError: one has made no step: equal would mean nothing.
    """
    common = min(len(first.losses), len(second.losses))
    if not common:
        raise ValueError(f"{first.name!r} and {second.name!r} have no step in common")
    return first.losses[:common] == second.losses[:common]


def median_seconds(steps: Sequence[Step]) -> float:
    """Return the median seconds of ``steps``."""
    return median(step.seconds for step in steps)


def median_stat(steps: Sequence[Step], name: str) -> float:
    """Return the median of one of the session's numbers over ``steps``."""
    return float(median(step.stats[name] for step in steps))


def mean_accuracy(steps: Sequence[Step]) -> float | None:
    """Return the mean block-order accuracy over the steps that had a prediction, or None."""
    known = [a for step in steps if (a := step.stats.get("accuracy")) is not None]
    return sum(known) / len(known) if known else None
