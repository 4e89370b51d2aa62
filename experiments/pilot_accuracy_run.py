"""One part of `dynoffload.experiments.pilot_accuracy`: a case at one seed.

What it is: ``python -m dynoffload.experiments.pilot_accuracy_run TASK``, a process that computes
with one thread, writes the recording of a case where its task says, and prints the scores as one
JSON object. What it is not: a judge of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynoffload.experiments.pilot_cases import CASES
from dynoffload.experiments.pilot_recording import Recording, record
from dynoffload.experiments.pilot_scores import scores

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
    """

    case: str
    seed: int
    samples: int
    recording: str
    kinds: Sequence[str] = ()


def carry_out(task: Task) -> dict[str, Any]:
    """Return what the task asks for."""
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
