"""Training processes: the parent side of the comparisons.

A `Worker` is a process of `dynoffload.experiments.trainer`, and stores the results of its steps.
`dynoffload.experiments.harness.turns` schedules the workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from dynoffload.experiments import trainer
from dynoffload.experiments.baselines.cgroup import MemoryGroup, memory_group
from dynoffload.experiments.processes import Process
from dynoffload.experiments.processes import WorkerError as WorkerError
from dynoffload.experiments.ways import Spec

_BEFORE = 3  # processes measured without a network


@dataclass(frozen=True)
class Step:
    """One step of a worker.

    Attributes:
        seconds: whole step; ``forward_s``, ``backward_s`` and ``optimizer_s`` are its parts.
        loss: exact value in `float.hex` format.
        stats: fields of `dynoffload.telemetry.StepStats`, for a worker under a budget.
        measured: False for warm-up steps.
    """

    seconds: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    loss: str
    stats: Mapping[str, Any] = field(default_factory=dict)
    measured: bool = True


class Worker(Process):
    """A training process.

    Args:
        name: in messages.
        spec: what it trains.
        group: the cgroup that it runs in.
        patience: seconds that an answer may take; None: no limit.

        Attributes:
        steps: all steps so far.
        charged_bytes: bytes charged to its cgroup just before it entered the block.

        Raises:
        WorkerError: it died at startup, or did not answer within ``patience`` seconds.
    """

    def __init__(
        self,
        name: str,
        spec: Spec,
        group: MemoryGroup | None = None,
        patience: float | None = None,
    ) -> None:
        super().__init__(name, group=group, patience=patience)
        self.spec = spec
        self.steps: list[Step] = []
        self._ready = False
        try:
            self.charged_bytes = self.call(trainer.build, spec)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Worker:
        return self

    def wait_ready(self) -> None:
        """Wait until it has entered its block, where weights are materialized."""
        if not self._ready:
            self.call(trainer.enter)
            self._ready = True

    def ask(self, do: str, *args: str) -> dict[str, Any]:
        """Return the result of `Trainer`'s method ``do``.

        Raises:
            WorkerError: it died; quotes the end of its output.
        """
        self.wait_ready()
        return self.call(trainer.ask, do, *args)

    def step(self, *args: str, measured: bool = True, do: str = "step") -> dict[str, Any]:
        """Make the worker do one step, store its results and return the answer."""
        answer = self.ask(do, *args)
        known = {key: answer[key] for key in Step.__dataclass_fields__ if key in answer}
        self.steps.append(Step(**known, measured=measured))
        return answer

    @property
    def measured(self) -> list[Step]:
        """The measured steps."""
        return [step for step in self.steps if step.measured]

    @property
    def losses(self) -> list[str]:
        """The losses of all steps."""
        return [step.loss for step in self.steps]


worker = Worker
"""Alias that reads better in a ``with`` statement."""


def charged_before(spec: Spec) -> int:
    """Return the bytes charged to a process without a network: the minimum of several, as the
    first process to read a library's files is charged for them and later ones are not."""
    charged = []
    for _ in range(_BEFORE):
        with memory_group(None) as group, Worker("before", replace(spec, meta=True), group) as one:
            charged.append(one.charged_bytes)
    return min(charged)


def losses_equal(first: Worker, second: Worker) -> bool:
    """Return whether two workers' losses are bitwise equal, over the steps that both have made.

    Raises:
        ValueError: one has made no step, so there is nothing to compare.
    """
    common = min(len(first.losses), len(second.losses))
    if not common:
        raise ValueError(f"{first.name!r} and {second.name!r} have no step in common")
    return first.losses[:common] == second.losses[:common]


def median_seconds(steps: Sequence[Step]) -> float:
    """Return the median seconds of ``steps``."""
    return median(step.seconds for step in steps)
