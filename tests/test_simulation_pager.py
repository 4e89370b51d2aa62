"""The simulated device keeps the pager's rules, one by one."""

from __future__ import annotations

import pytest

from dynoffload.planning.schedule import Action, Kind, Schedule, Use
from dynoffload.simulation import Link, Machine
from dynoffload.simulation.execution import State
from dynoffload.simulation.following import Following, Plan
from dynoffload.simulation.pager import FAULT_LOOKAHEAD, SimulatedPager

PAGE = 100


def pager(pages: int, reserve: int = 0, regions: int = 0) -> SimulatedPager:
    """Return a pool with ``regions`` of a page each, written, and as many of them as fit here."""
    link = Link(100.0, 100.0, 200.0)
    made = SimulatedPager(Machine(link, pages * PAGE, workers=2), PAGE, reserve * PAGE)
    made.begin_step()
    for _ in range(regions):
        made.acquire([made.allocate(PAGE)])
    made.finish()
    return made


def follow(on: SimulatedPager, uses: list[Use], *actions: Action) -> None:
    on.follow(uses, Schedule(actions))


def test_regions_are_padded_and_content_is_counted() -> None:
    on = pager(2)
    regions = [on.allocate(PAGE + 1), on.allocate(30)]
    assert [on.size(region) for region in regions] == [2 * PAGE, PAGE]
    for region in regions:
        on.acquire([region])
    result = on.begin_step()
    on.acquire([regions[0]])
    assert (result.bytes_in, result.bytes_out) == (PAGE + 1, 30)


def test_numbers_that_were_given_back_come_again() -> None:
    on = pager(2, regions=2)
    on.release(0)
    assert on.size(0) == 0
    assert on.allocate(PAGE) == 0
    assert on.allocate(PAGE) == 2


def test_what_was_only_staged_leaves_without_a_write() -> None:
    """Region 0 is fetched by plan: untouched it is dropped, touched it is written."""
    for touched, written in ((False, 0), (True, PAGE)):
        on = pager(2, regions=3)
        assert on.state[0] is State.ABSENT
        result = on.begin_step()
        uses = [Use((1,)), Use((0,)), Use((0,))]
        follow(
            on, uses, Action(0, Kind.EVICT, 2), Action(0, Kind.FETCH, 0), Action(1, Kind.EVICT, 0)
        )
        on.finish()
        assert result.prefetched_bytes == PAGE
        before = result.bytes_out
        if touched:
            on.touch([0])
        on.discard(1)
        follow(on, [Use(()), Use(())], Action(0, Kind.EVICT, 0))
        on.finish()
        assert on.state[0] is State.ABSENT
        assert result.bytes_out - before == written


def test_an_access_renews_no_stamp_and_a_touch_does() -> None:
    """The oldest leaves: an access to it does not save it, a touch does."""
    for renew, left in ((False, 0), (True, 1)):
        on = pager(2, regions=2)
        on.access([0])
        if renew:
            on.touch([0])
        on.acquire([on.allocate(PAGE)])
        assert on.state[left] is State.ABSENT


def test_plans_leave_the_reserve_free_and_idle_workers_restore_it() -> None:
    on = pager(4, reserve=1, regions=4)
    on.finish()
    assert len(on.resident()) == 3, "a page of four stays free"
    absent = next(region for region in range(4) if region not in on.resident())
    follow(on, [Use(tuple(on.resident())), Use((absent,))], Action(0, Kind.FETCH, absent))
    on.finish()
    assert on.state[absent] is State.ABSENT, "a planned fetch does not take it"
    result = on.begin_step()
    on.access([absent])
    assert on.state[absent] is State.HERE, "whoever waits does"
    assert result.faults == 1


def test_a_fault_proves_the_uses_before_it_past_if_they_are_few() -> None:
    for ahead in (FAULT_LOOKAHEAD, FAULT_LOOKAHEAD + 1):
        on = pager(2, regions=3)
        uses = [Use((1,))] * ahead + [Use((0,))]
        follow(on, uses)
        on.access([0])
        assert on._plan.position == (ahead if ahead <= FAULT_LOOKAHEAD else 0)
        on.advance(1)
        assert on._plan.position == 1, "and who knows better says so"
        assert on._plan.next_use(1) == 1


def test_progress_that_is_taken_back_counts_from_there() -> None:
    uses = [Use((0,)), Use((1,)), Use((0,)), Use((1,))]
    actions = (Action(1, Kind.FETCH, 1), Action(2, Kind.FETCH, 0))
    following = Following(Plan((), uses, Schedule(actions)))
    assert set(following.advance(3)) == {0, 1}
    following.done()
    following.done()
    assert following.next_use(0) > 3
    assert set(following.advance(1)) == {0, 1}
    assert (following.next_use(0), following.next_use(1)) == (2, 1)
    assert following.due() == actions[0]


def test_a_region_lends_its_pages_only_as_the_file_holds_them_too() -> None:
    on = pager(3, regions=1)
    twin = on.twin(0)
    assert not on.lend([0], [twin]), "it lies at its address, and may be written"
    on.withdraw([0])
    assert not on.lend([0], [twin]), "it was there, and may have been written"
    follow(on, [Use(())], Action(0, Kind.EVICT, 0))
    on.finish()
    follow(on, [Use(()), Use((0,))], Action(0, Kind.FETCH, 0))
    on.finish()
    assert on.lend([0], [twin])
    assert (on.state[0], on.state[twin]) == (State.ABSENT, State.HERE)


def test_twins_trade_contents_and_next_uses() -> None:
    on = pager(2, regions=1)
    twin = on.twin(0)
    on.acquire([twin])
    follow(on, [Use(()), Use((twin,))], Action(0, Kind.EVICT, 0))
    on.finish()
    result = on.begin_step()
    on.exchange([0], [twin])
    assert (on.state[0], on.state[twin]) == (State.HERE, State.ABSENT)
    assert on._plan.next_use(0) == 1
    on.acquire([0])
    assert result.bytes_in == 0
    on.acquire([twin])
    assert result.bytes_in == PAGE


def test_what_is_pinned_stays() -> None:
    on = pager(2, regions=2)
    on.acquire([0], pin=True)
    on.acquire([on.allocate(PAGE)])
    assert on.state[1] is State.ABSENT
    on.unpin([0])
    on.acquire([on.allocate(PAGE)])
    assert on.state[0] is State.ABSENT


def test_a_stall_lasts_as_long_as_its_transfers() -> None:
    """A page out and a page in, one second each at 100 B/s."""
    on = pager(1, regions=2)
    result = on.begin_step()
    on.access([0])
    assert result.stall_s == pytest.approx(2.0)


def test_an_access_pays_for_its_fault_and_a_verb_does_not() -> None:
    link = Link(100.0, 100.0, 200.0, fault_s=0.5)
    for verb, seconds in (("access", 2.5), ("acquire", 2.0)):
        on = SimulatedPager(Machine(link, PAGE, workers=2), PAGE, 0)
        for _ in range(2):
            on.acquire([on.allocate(PAGE)])
        began = on.now
        getattr(on, verb)([0])
        assert on.now - began == pytest.approx(seconds)


def test_what_is_waited_for_stays_until_the_waiter_is_woken() -> None:
    """Room is made for the reserve as soon as a page has come, and nothing else may leave."""
    on = pager(4, reserve=2, regions=6)
    on.acquire([1, 2], pin=True)
    follow(on, [Use((1,)), Use((2,))])
    on.access([0])
    assert on.state[0] in (State.HERE, State.WRITING)
    on.access([0])
    on.unpin([1, 2])


def test_whoever_asks_for_a_place_waits_for_the_kernel() -> None:
    """Two pages into place, back, and into place again; what a transfer takes away is its own."""
    link = Link(100.0, 100.0, 200.0)
    on = SimulatedPager(Machine(link, 2 * PAGE, workers=2), PAGE, 0, move_s=0.5)
    on.begin_step()
    region = on.allocate(2 * PAGE)
    on.acquire([region])
    assert on.now == 1.0
    on.touch([region])  # it is there
    assert on.now == 1.0
    on.lock([region])
    assert on.now == 2.0
    on.unlock([region])
    on.touch([region])
    assert on.now == 3.0
    on.discard(region)
    assert on.now == 4.0
    on.discard(region)  # nothing is there any more
    assert on.now == 4.0


def test_what_leaves_by_a_transfer_is_moved_by_it() -> None:
    link = Link(100.0, 100.0, 200.0)
    on = SimulatedPager(Machine(link, PAGE, workers=2), PAGE, 0, move_s=0.5)
    on.begin_step()
    first, second = on.allocate(PAGE), on.allocate(PAGE)
    on.acquire([first])
    assert on.now == 0.5
    on.acquire([second])  # a second for the write of the first, half of one to take it away first
    assert on.now == 2.5


def test_extra_regions_are_counted_while_they_are_there() -> None:
    on = pager(8)
    on.allocate(PAGE)
    first = on.allocate(2 * PAGE, extra=True)
    assert on.most_extra == 2 * PAGE
    on.release(first)
    on.release(on.allocate(PAGE, extra=True))
    assert on.most_extra == 2 * PAGE
    on.allocate(3 * PAGE, extra=True)
    assert on.most_extra == 3 * PAGE


def test_the_file_ends_where_the_last_region_did() -> None:
    """A gap that nothing fits stays; one that something fits is taken again."""
    on = pager(8)
    small, large = on.allocate(PAGE), on.allocate(3 * PAGE)
    assert on.file_bytes == 4 * PAGE
    on.release(small)
    other = on.allocate(2 * PAGE)
    assert on.file_bytes == 6 * PAGE
    on.allocate(PAGE)
    assert on.file_bytes == 6 * PAGE
    on.release(large)
    on.release(other)
    on.allocate(5 * PAGE)
    assert on.file_bytes == 6 * PAGE
