"""Tasks on three resources: closed forms, slow ranks, and what slows what down."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynoffload.errors import ConfigError
from dynoffload.simulation.streams import Program, Resource, Slowdown

COMPUTE, LINK, COPY = Resource.COMPUTE, Resource.LINK, Resource.COPY
ALMOST = Slowdown(compute_beside_link=1 + 1e-12)  # takes the way from event to event


def test_one_resource_takes_the_sum() -> None:
    program = Program(2)
    for number in range(5):
        program.add(f"{number}", COMPUTE, [1.0 + number, 2.0])
    timeline = program.run()
    assert timeline.ends[-1].tolist() == [15.0, 10.0]
    assert timeline.busy(COMPUTE).tolist() == [15.0, 10.0]
    assert timeline.seconds == 15.0


def test_a_collective_waits_for_the_slowest_rank() -> None:
    program = Program(3)
    first = program.add("products", COMPUTE, [1.0, 5.0, 2.0])
    sent = program.add("exchange", LINK, [0.5, 0.25, 0.0], [first])
    program.add("products", COMPUTE, [3.0, 1.0, 2.0], [sent])
    timeline = program.run()
    assert timeline.starts[sent].tolist() == [5.0] * 3
    assert timeline.ends[sent].tolist() == [5.5] * 3
    assert timeline.seconds == 8.5
    assert timeline.busy(LINK).tolist() == [0.5] * 3  # waiting is no work


def test_what_runs_beside_is_slowed_down_as_long_as_it_does() -> None:
    program = Program(1)
    program.add("products", COMPUTE, 4.0)
    program.add("exchange", LINK, 1.0)
    timeline = program.run(Slowdown(compute_beside_link=2.0, link_beside_compute=1.5))
    # The exchange takes 1.5 s, in which half as much of the products is done.
    assert timeline.ends[1, 0] == pytest.approx(1.5)
    assert timeline.ends[0, 0] == pytest.approx(4.0 + 0.75)


def test_factors_of_both_others_multiply() -> None:
    program = Program(1)
    for resource in (COMPUTE, LINK, COPY):
        program.add(resource.name, resource, 1.0)
    timeline = program.run(Slowdown(compute_beside_link=2.0, compute_beside_copy=3.0))
    # The others end after 1 s, with 1/6 of the products done.
    assert timeline.ends[:, 0] == pytest.approx([1 + 5 / 6, 1.0, 1.0])


def test_a_collective_goes_at_the_pace_of_the_rank_that_is_slowed_down_most() -> None:
    program = Program(2)
    program.add("products", COMPUTE, [9.0, 0.0])
    program.add("exchange", LINK, 2.0)
    timeline = program.run(Slowdown(link_beside_compute=3.0))
    assert timeline.ends[1].tolist() == pytest.approx([6.0, 6.0])


@st.composite
def programs(draw: st.DrawFn) -> Program:
    ranks = draw(st.integers(1, 4))
    program = Program(ranks)
    for number in range(draw(st.integers(0, 12))):
        seconds = draw(st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks))
        after = draw(st.lists(st.integers(0, number - 1), max_size=3)) if number else []
        program.add(str(number), draw(st.sampled_from(list(Resource))), np.array(seconds), after)
    return program


@settings(deadline=None, max_examples=150)
@given(programs())
def test_both_ways_to_time_agree(program: Program) -> None:
    straight, fluid = program.run(), program.run(ALMOST)
    np.testing.assert_allclose(fluid.ends, straight.ends, atol=1e-6)


@settings(deadline=None, max_examples=100)
@given(programs())
def test_tasks_keep_their_order_and_wait(program: Program) -> None:
    timeline = program.run(Slowdown(compute_beside_copy=1.5, link_beside_compute=2.0))
    last: dict[Resource, int] = {}
    for number, task in enumerate(timeline.tasks):
        for other in (*task.after, *([last[task.resource]] if task.resource in last else [])):
            assert (timeline.starts[number] >= timeline.ends[other] - 1e-9).all()
        assert (
            timeline.ends[number] - timeline.starts[number] >= task.seconds * (1 - 1e-9) - 1e-9
        ).all()
        if task.resource is LINK:
            assert np.ptp(timeline.starts[number]) == np.ptp(timeline.ends[number]) == 0
        last[task.resource] = number


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 ranks"):
        Program(0)
    with pytest.raises(ConfigError, match="'x' takes -1"):
        Program(1).add("x", COMPUTE, -1.0)
    with pytest.raises(ConfigError, match="number 0 and waits for"):
        Program(1).add("x", COMPUTE, 1.0, [0])
    with pytest.raises(ConfigError, match=r"link_beside_copy is 0\.5"):
        Slowdown(link_beside_copy=0.5)
