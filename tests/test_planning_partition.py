"""Execution blocks: cut where samples decide and where least is exposed; steps read from traces."""

from __future__ import annotations

import itertools
import statistics
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynoffload.errors import ConfigError
from dynoffload.experiments.planner_cases import drawn, recorded
from dynoffload.experiments.planner_scaling import deep
from dynoffload.experiments.zoo import build, samples
from dynoffload.planning import build_vocabulary
from dynoffload.planning.timed import (
    Problem,
    check,
    decision_cuts,
    partition,
    plan,
    plan_blocks,
    step_of,
)
from dynoffload.planning.timed.partition import BlockCosts, exposed
from dynoffload.profiler import Recorder, Trace, resolve


def cost(problem: Problem, stops: tuple[int, ...], longest: int) -> float:
    """Return what these blocks expose, pair by pair, in plain words of the rule."""
    costs = BlockCosts(problem, longest)
    starts = (0, *stops[:-1])
    total = float(costs.fetch[0, stops[0] - 1])
    for place, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        write = costs.write[stop, stop - start - 1]
        fetch, fits = 0.0, True
        if place + 1 < len(stops):
            length = stops[place + 1] - stop
            fetch = costs.fetch[stop, length - 1]
            lack = costs.lack[stop, length - 1]
            fits = costs.need[start, stop - start - 1] + lack <= problem.capacity
        total += float(exposed(costs.seconds(start, stop), write, fetch, fits))
    return total


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 300), st.sets(st.integers(1, 8), max_size=3))
def test_no_other_cuts_expose_less(seed: int, cuts: set[int]) -> None:
    problem = drawn(seed).problem
    lengths = (1, 2, 3)
    found = partition(problem, cuts, lengths)
    count = len(problem.uses)
    assert found.stops[-1] == count
    assert {cut for cut in cuts if cut < count} <= set(found.stops)
    assert found.exposed_s == pytest.approx(cost(problem, found.stops, 3), abs=1e-9)
    costs = BlockCosts(problem, 3)
    for chosen in itertools.islice(cut_anywhere(count, lengths), 400):
        starts = (0, *chosen[:-1])
        blocks = list(zip(starts, chosen, strict=True))
        parted = all(not any(a < cut < b for cut in cuts) for a, b in blocks)
        fit = all(b - a == 1 or costs.need[a, b - a - 1] <= problem.capacity for a, b in blocks)
        if parted and fit:
            assert found.exposed_s <= cost(problem, chosen, 3) + 1e-6 * count


def cut_anywhere(count: int, lengths: tuple[int, ...]) -> itertools.chain[tuple[int, ...]]:
    """Yield every way to cut ``count`` uses."""
    if count == 0:
        return itertools.chain([()])
    return itertools.chain.from_iterable(
        ((*rest, count) for rest in cut_anywhere(count - length, lengths))
        for length in lengths
        if length <= count
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 300))
def test_what_a_block_needs_is_what_its_uses_touch(seed: int) -> None:
    problem = drawn(seed).problem
    costs = BlockCosts(problem, 4)
    for start in range(len(problem.uses)):
        for length in range(1, min(4, len(problem.uses) - start) + 1):
            uses = problem.uses[start : start + length]
            touched = {region for use in uses for region in (*use.regions, *use.creates)}
            need = sum(problem.sizes[region] for region in touched)
            assert costs.need[start, length - 1] == need
    assert np.all(np.diff(costs.fetch, axis=1) >= -1e-12)


def test_blocks_of_one_use_must_be_allowed() -> None:
    with pytest.raises(ConfigError, match="blocks of one use"):
        partition(drawn(0).problem, (), (2, 4))


@pytest.mark.parametrize("name", ["moe", "tree", "gpt2", "t5"])
def test_real_steps_are_planned_in_blocks(name: str) -> None:
    """Seconds and bytes are those of the operators, and the plan can be carried out."""
    step = recorded(name)
    least, most = step.extent()
    seconds = sum(use.seconds for use in step.uses)
    for share in (0.0, 0.4):
        capacity = least + int(share * (most - least))
        blocks, found = plan_blocks(step, capacity, most / seconds, most / seconds)
        check(found)
        assert sum(use.seconds for use in blocks.uses) == pytest.approx(seconds)
        assert step.backward == 0 or any(
            stop == step.spans[step.backward - 1][1] for _, stop in blocks.spans
        )
        whole = plan(step.on(capacity, most / seconds, most / seconds), allowance=20_000)
        check(whole)
        assert min(found.seconds, whole.seconds) >= seconds * (1 - 1e-9)


def test_fusing_keeps_what_is_alive() -> None:
    step = recorded("gpt2")
    fused = step.fused([step.backward, len(step.uses)])
    outside = {r for use in step.uses for r in use.regions}
    outside -= {r for use in step.uses for r in use.creates}
    given_bytes = sum(step.sizes[region] for region in outside)
    there = {r for use in fused.uses for r in use.regions}
    there -= {r for use in fused.uses for r in use.creates}
    assert sum(fused.sizes[region] for region in there) == given_bytes
    with pytest.raises(ConfigError, match="where backward begins"):
        step.fused([len(step.uses)])
    with pytest.raises(ConfigError, match="ascend"):
        step.fused([3, 2])


def traces_of_experts(count: int) -> list[Trace]:
    """Return steps of the mixture of experts."""
    model = build("moe")
    traces: list[Trace] = []
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    drawn_samples = samples("moe", rows=1, length=4)
    with Recorder(model, optimizer, on_step=traces.append):
        for _ in range(count):
            model(*next(drawn_samples).args).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return traces


def test_cuts_at_decision_points() -> None:
    """Before and after each expert that some sample does without, and where a phase begins."""
    programs = [resolve(trace) for trace in traces_of_experts(4)]
    vocabulary = build_vocabulary(programs)
    optional = {path for block in vocabulary.blocks if block.optional for path in block.visits}
    assert optional
    program = programs[0]
    cuts = set(decision_cuts(program, vocabulary))
    for number in range(1, len(program.visits)):
        one, other = program.visits[number - 1], program.visits[number]
        phase = one.phase is not other.phase
        if phase or (one.path in optional) != (other.path in optional):
            assert number in cuts
    assert len(cuts) < len(program.visits) - 1


def test_planning_grows_no_faster_than_n_log_n() -> None:
    """Four times the operators take at most some eight times as long, in one run of both."""
    taken = []
    for operators in (1_000, 4_000):
        trace = deep(operators)
        program = resolve(trace)
        times = []
        for _ in range(5):
            began = time.process_time()
            step = step_of(trace, program).at_visits()
            least, most = step.extent()
            seconds = sum(use.seconds for use in step.uses)
            plan_blocks(step, least + (most - least) // 3, most / seconds, most / seconds)
            times.append(time.process_time() - began)
        taken.append(statistics.median(times))
    assert taken[1] / taken[0] < 8.0
