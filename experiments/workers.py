"""Training processes: the parent half of the comparisons.

A `Worker` is a process of `dynoffload.experiments.trainer`. It keeps the numbers of its steps.
`dynoffload.experiments.harness.turns` says whose step is next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from dynoffload.experiments import trainer
from dynoffload.experiments.baselines.cgroup import MemoryGroup
from dynoffload.experiments.processes import Process
from dynoffload.experiments.processes import WorkerError as WorkerError
from dynoffload.experiments.processes import ended_after as ended_after
from dynoffload.experiments.trainer import Spec


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
        self.name, self.spec, self.group = name, spec, group
        self.steps: list[Step] = []
        self._process = Process(name, group=group, patience=patience)
        try:
            self.before = self._process.call(trainer.build, spec)
        except BaseException:
            self.close()
            raise
        self._ready = False

    def wait_ready(self) -> None:
        """Wait until it is inside its block, with its weights."""
        if not self._ready:
            self._process.call(trainer.enter)
            self._ready = True

    def ask(self, do: str, *args: str) -> dict[str, Any]:
        """Return what `Trainer`'s method ``do`` returns.

        Raises:
            WorkerError: it died; with its last words.
        """
        self.wait_ready()
        return self._process.call(trainer.ask, do, *args)

    def step(self, *args: str, measured: bool = True, do: str = "step") -> dict[str, Any]:
        """Have one step made, keep its numbers and return the answer."""
        answer = self.ask(do, *args)
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

    @property
    def patience(self) -> float | None:
        """Seconds after which it is ended, if it has not answered; None for ever."""
        return self._process.patience

    @patience.setter
    def patience(self, seconds: float | None) -> None:
        self._process.patience = seconds

    def kill(self) -> None:
        """End the process at once; whoever waits for an answer learns that it died."""
        self._process.kill()

    def close(self) -> None:
        """End the process."""
        self._process.close()


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
