"""One part of `dynoffload.experiments.pilot_accuracy`: a case at one seed, or a case's transfer.

What it is: ``python -m dynoffload.experiments.pilot_accuracy_run TASK``, a process that computes
with one thread, writes the recording of a case where its task says, and prints the scores as one
JSON object. What it is not: a judge of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynoffload.experiments.pilot_cases import CASES
from dynoffload.experiments.pilot_recording import Recording, record
from dynoffload.experiments.pilot_scores import scores
from dynoffload.experiments.pilot_transfer import transfer

LEAST = 16
"""Samples of a case, at least."""


@dataclass(frozen=True)
class Task:
    """What one process does.

    Attributes:
        case: key of the case.
        seed: of everything.
        samples: that are recorded of it, before its share of them is taken.
        recording: file of its recording, which is made where it is missing.
        kinds: of models.
        others: for transfer: the recordings of all cases, by key; empty: the case's own scores.
    """

    case: str
    seed: int
    samples: int
    recording: str
    kinds: Sequence[str] = ()
    others: Mapping[str, str] = field(default_factory=dict)


def carry_out(task: Task) -> dict[str, Any]:
    """Return what the task asks for."""
    if task.others:
        known = {key: Recording.load(Path(path)) for key, path in task.others.items()}
        return transfer(task.case, known, task.seed)
    case, path = CASES[task.case], Path(task.recording)
    if not path.exists():
        record(case, max(LEAST, round(case.share * task.samples)), task.seed).save(path)
    return scores(Recording.load(path), task.seed, task.kinds)


def main() -> None:
    """Carry out the task of the command line."""
    import torch

    torch.set_num_threads(1)
    answer = carry_out(Task(**json.loads(sys.argv[1])))
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
