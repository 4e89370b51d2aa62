"""A child process answers, or says why it does not."""

from __future__ import annotations

import pytest

from dynoffload.experiments.children import answer_of
from dynoffload.experiments.simulated_run import BUDGETED, TIMED, Task
from dynoffload.experiments.workers import WorkerError


@pytest.mark.alone
def test_the_answer_is_the_last_line() -> None:
    found = answer_of("simulated_run", Task("tree (fit)", TIMED, 2), "a task")
    assert len(found["times"]) == 2
    assert all(seconds > 0 for step in found["times"] for seconds in step)


def test_what_fails_is_said() -> None:
    task = Task("tree (fit)", BUDGETED, 2, budget=1)
    with pytest.raises(WorkerError, match=r"(?s)a task ended with code 1: .*BudgetError"):
        answer_of("simulated_run", task, "a task")


def test_what_takes_too_long_is_ended() -> None:
    with pytest.raises(WorkerError, match=r"a task took over 0\.5 s"):
        answer_of("simulated_run", Task("tree (fit)", TIMED, 10**6), "a task", timeout_s=0.5)
