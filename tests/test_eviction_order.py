"""Who is evicted is found without a scan, and is whom a scan finds."""

from __future__ import annotations

import random
from pathlib import Path

from emulated import emulated
from hypothesis import given
from hypothesis import strategies as st
from mutants import Program
from scans import compared

from dynoffload.memory.eviction_order import EvictionOrder

COUNT = 8


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["rise", "fall", "leave", "hold", "first", "renew"]),
            st.integers(0, COUNT - 1),
            st.integers(0, 4),
        ),
        max_size=200,
    )
)
def test_the_first_is_the_lowest_whatever_was_noted(work: list[tuple[str, int, int]]) -> None:
    """Only places that fall are noted. Places differ by their second part."""
    places: dict[int, tuple[int, int]] = {}
    held: set[int] = set()
    order: EvictionOrder[int] = EvictionOrder(range(COUNT).__iter__, places.get)

    def may_leave(member: int) -> bool:
        return member not in held

    for what, member, value in work:
        if what == "rise" and member in places:
            places[member] = (max(value, places[member][0]), member)
        elif what == "fall":
            places[member] = (min(value, *places.get(member, (value,))[:1]), member)
            order.add(member)
        elif what == "leave":
            places.pop(member, None)
        elif what == "hold":
            held ^= {member}
        elif what == "renew":
            order.renew()
        else:
            free = [one for one in places if may_leave(one) and places[one] < (value,)]
            wanted = min(free, key=places.__getitem__, default=None)
            assert order.first((value,), may_leave) == wanted


def test_entries_that_are_out_of_date_are_bounded() -> None:
    stamps = dict.fromkeys(range(50), 0)
    order: EvictionOrder[int] = EvictionOrder(stamps.keys, lambda one: (stamps[one], one))
    for turn in range(10_000):
        order.add(turn % 50)
        assert len(order._entries) <= 2 * 50 + 64


def test_a_program_evicts_what_scans_find(tmp_path: Path) -> None:
    """With and without a file below host memory, on streams that are late."""
    with compared() as seen:
        for seed in range(12):
            with emulated(seed, delay_s=0.0003) as streams:
                assert Program(streams, tmp_path, seed).run() == 0
    assert min(seen["_victim", True], seen["_host_victim", True]) > 100


def test_the_work_for_an_eviction_does_not_grow_with_the_regions() -> None:
    """Counted in places that are asked for."""

    def asked(count: int) -> int:
        places = [(random.Random(n).randrange(count), n) for n in range(count)]
        calls = 0

        def place(one: int) -> tuple[int, int]:
            nonlocal calls
            calls += 1
            return places[one]

        order: EvictionOrder[int] = EvictionOrder(lambda: range(count), place)
        order.renew()
        calls, first = 0, None
        for turn in range(100):
            first = order.first((count,), lambda one: True)
            assert first is not None
            places[first] = (count - 1 + turn, first)
        return calls

    assert asked(10_000) <= asked(1000) + 100
