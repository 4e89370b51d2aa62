"""Tasks on three resources: closed forms, slow ranks, and order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynoffload.errors import ConfigError
from dynoffload.simulation.streams import Resource, Timeline

COMPUTE, LINK = Resource.COMPUTE, Resource.LINK


def test_one_resource_takes_the_sum() -> None:
    timeline = Timeline(2)
    for number in range(5):
        timeline.add(f"{number}", COMPUTE, [1.0 + number, 2.0])
    assert timeline.tasks[-1].end.tolist() == [15.0, 10.0]
    assert timeline.busy(COMPUTE).tolist() == [15.0, 10.0]
    assert timeline.seconds == 15.0


def test_a_collective_waits_for_the_slowest_rank() -> None:
    timeline = Timeline(3)
    first = timeline.add("products", COMPUTE, [1.0, 5.0, 2.0])
    sent = timeline.add("exchange", LINK, [0.5, 0.25, 0.0], [first])
    timeline.add("products", COMPUTE, [3.0, 1.0, 2.0], [sent])
    assert timeline.tasks[sent].start.tolist() == [5.0] * 3
    assert timeline.tasks[sent].end.tolist() == [5.5] * 3
    assert timeline.seconds == 8.5
    assert timeline.busy(LINK).tolist() == [0.5] * 3  # waiting is no work


@st.composite
def timelines(draw: st.DrawFn) -> tuple[Timeline, list[list[int]]]:
    """Draw a timeline, and what each task waits for."""
    ranks = draw(st.integers(1, 4))
    timeline, waits = Timeline(ranks), []
    for number in range(draw(st.integers(0, 12))):
        seconds = draw(st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks))
        after = draw(st.lists(st.integers(0, number - 1), max_size=3)) if number else []
        resource = draw(st.sampled_from(list(Resource)))
        timeline.add(str(number), resource, np.array(seconds), after)
        waits.append(after)
    return timeline, waits


@settings(deadline=None, max_examples=150)
@given(timelines())
def test_tasks_keep_their_order_and_wait_no_longer_than_they_must(
    drawn: tuple[Timeline, list[list[int]]],
) -> None:
    timeline, waits = drawn
    last: dict[Resource, int] = {}
    for number, task in enumerate(timeline.tasks):
        before = [*waits[number], *([last[task.resource]] if task.resource in last else [])]
        soonest = np.zeros_like(task.start)
        for other in before:
            soonest = np.maximum(soonest, timeline.tasks[other].end)
        if task.resource is LINK:
            soonest[:] = soonest.max()
            assert np.ptp(task.end) == 0
        assert (task.start == soonest).all()
        last[task.resource] = number


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="'x' takes -1"):
        Timeline(1).add("x", COMPUTE, -1.0)
    with pytest.raises(ConfigError, match="number 0 and waits for"):
        Timeline(1).add("x", COMPUTE, 1.0, [0])
