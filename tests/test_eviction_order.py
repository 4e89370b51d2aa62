"""Who is evicted is found without a scan, and is whom a scan finds."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from emulated import emulated
from hypothesis import given
from hypothesis import strategies as st
from mutants import Program
from scans import compared

from dynoffload.memory import eviction_order
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
    order: EvictionOrder[int] = EvictionOrder(
        range(COUNT).__iter__, places.__contains__, lambda one: places[one]
    )

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
    order: EvictionOrder[int] = EvictionOrder(
        stamps.keys, stamps.__contains__, lambda one: (stamps[one], one)
    )
    for turn in range(10_000):
        order.add(turn % 50)
        assert len(order._entries) <= 2 * 50 + 64 + 1


@pytest.mark.parametrize("call", ["first", "renew", "add"])
def test_no_member_is_lost_where_a_signal_ends_a_call(call: str) -> None:
    """At each line; members that are passed over, outdated or gone are at the front."""
    ended, line = True, 0
    while ended:
        line += 1
        places = {one: (one, one) for one in range(10)}
        order: EvictionOrder[int] = EvictionOrder(
            lambda places=places: places, places.__contains__, places.__getitem__
        )
        order.renew()
        order._limit = 11  # another entry is one too many
        places[1], places[5] = (20, 1), (-1, 5)
        del places[0]
        calls: dict[str, Callable[[], object]] = {
            "first": lambda order=order: order.first((9,), (4).__lt__),
            "renew": order.renew,
            "add": lambda order=order: [order.add(5), order.add(5)],
        }
        order.add(5)
        ended = _ends_at(line, calls[call])
        left = []
        while (found := order.first((99,), lambda one: True)) is not None:
            left.append(found)
            del places[found]
        assert left == [5, 2, 3, 4, 6, 7, 8, 9, 1]
    assert line > 5


def _ends_at(line: int, call: Callable[[], object]) -> bool:
    """Interrupt a call as it comes to this line; return whether it comes so far."""
    left = line

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != eviction_order.__file__:
            return None
        left -= event == "line"
        if not left:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


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

        order: EvictionOrder[int] = EvictionOrder(lambda: range(count), lambda one: True, place)
        order.renew()
        calls, first = 0, None
        for turn in range(100):
            first = order.first((count,), lambda one: True)
            assert first is not None
            places[first] = (count - 1 + turn, first)
        return calls

    assert asked(10_000) <= asked(1000) + 100
