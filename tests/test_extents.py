"""Runs of pages: never given out twice, never lost, merged when given back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynoffload.planning.extents import Extents

TOTAL = 40


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["take", "take_last"]), st.integers(1, 12)),
            st.tuples(st.just("give"), st.integers(0, 99)),
        ),
        max_size=80,
    )
)
def test_against_a_bitmap(steps: list[tuple[str, int]]) -> None:
    extents, taken, free = Extents(TOTAL), [], [True] * TOTAL
    high = 0
    for step, number in steps:
        if step != "give":
            places = [at for at in range(TOTAL - number + 1) if all(free[at : at + number])]
            if step == "take_last":
                places.reverse()
            first = places[0] if places else None  # the lowest place where it fits, or the highest
            assert getattr(extents, step)(number) == first
            if first is not None:
                taken.append((first, number))
                free[first : first + number] = [False] * number
                high = max(high, first + number) if step == "take" else high
        elif taken:
            start, pages = taken.pop(number % len(taken))
            extents.give(start, pages)
            free[start : start + pages] = [True] * pages
        assert extents.high == high
    for start, pages in taken:
        extents.give(start, pages)
    assert extents.take(TOTAL) == 0  # one run again
