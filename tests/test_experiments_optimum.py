"""The bound of a step: counted by hand on a small string, and never above what it bounds."""

from __future__ import annotations

import pytest

from dynoffload.experiments.optimum import StepString, StepVisit, step_bound, step_string
from dynoffload.simulation.machine import Link

MB = 10**6
FOUR = dict.fromkeys("abcd", MB)
FAST = Link(1e9, 1e9, 2e9)
DUPLEX = Link(1e6, 1e6, 2e6)
TURNS = Link(1e6, 1e6, 1e6)


def chain(saved: int = 0) -> StepString:
    return step_string([StepVisit((name,), saved) for name in FOUR], FOUR)


def test_with_room_for_all_only_compute_is_left() -> None:
    bound = step_bound(chain(), 16 * MB, FAST, 2.0, 3.0)
    assert bound.seconds == 5.0
    assert (bound.forward.bytes_in, bound.forward.bytes_out) == (0, 0)
    assert (bound.backward.bytes_in, bound.backward.bytes_out) == (0, 0)


def test_with_room_for_one_update_all_others_are_moved() -> None:
    # Each forward use holds weight, gradient and two states: 4 MB, all of the budget.
    bound = step_bound(chain(), 4 * MB, DUPLEX, 0.0, 0.0)
    # Read: everything of b, c and d. Written: weight and states of a, b and c; gradients are dead.
    assert bound.forward.bytes_in == 12 * MB
    assert bound.forward.bytes_out == 9 * MB
    # Backward keeps what it likes at its start: 4 MB of weights less the gradient beside them.
    # Of 4 MB of gradients one stays with the last weight, and two more in its place.
    assert bound.backward.bytes_in == pytest.approx(1 * MB, abs=MB)
    assert bound.backward.bytes_out <= 3 * MB
    assert bound.seconds == 12.0 + max(
        bound.backward.bytes_in / 1e6, bound.backward.bytes_out / 1e6
    )


def test_compute_hides_what_it_can() -> None:
    slow = step_bound(chain(), 4 * MB, DUPLEX, 20.0, 5.0)
    assert slow.spread_s == 25.0
    assert slow.seconds == 25.0


def test_on_a_shared_link_reads_and_writes_take_turns() -> None:
    assert TURNS.in_turns
    assert not DUPLEX.in_turns
    turns = step_bound(chain(), 4 * MB, TURNS, 0.0, 0.0)
    duplex = step_bound(chain(), 4 * MB, DUPLEX, 0.0, 0.0)
    moved = (turns.forward, turns.backward)
    assert turns.seconds == sum(phase.bytes_in + phase.bytes_out for phase in moved) / 1e6
    assert turns.spread_s <= turns.seconds
    assert turns.overlapped_s == duplex.overlapped_s == duplex.seconds < turns.seconds


def test_less_memory_is_never_faster() -> None:
    string = chain(saved=MB)
    bounds = [step_bound(string, b * MB, DUPLEX, 1.0, 1.0).seconds for b in range(5, 25)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] > bounds[-1] == 2.0


def test_saved_activations_are_made_once_and_die_in_backward() -> None:
    string = step_string([StepVisit(("a",), 5), StepVisit(("b",), 7)], FOUR)
    chunks = [region for use in string.forward for region in use.creates]
    assert [string.sizes[region] for region in chunks] == [5, 7]
    assert [use.frees for use in string.backward] == [(chunks[1],), (chunks[0],)]


def test_a_shared_parameter_is_updated_once_and_its_gradient_grows() -> None:
    string = step_string([StepVisit(("a",), 0), StepVisit(("a",), 0)], FOUR)
    first, second = string.forward
    assert len(first.writes) == 2
    assert second.writes == ()
    later = string.backward[1]
    assert set(later.writes) == set(string.backward[0].creates)
