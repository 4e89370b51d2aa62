"""The simulated device keeps the pager's rules, one by one."""

from __future__ import annotations

from dynoffload.planning.schedule import Action, Kind, Schedule, Use
from dynoffload.simulation import Link, Machine
from dynoffload.simulation.fast_memory import State
from dynoffload.simulation.pager import SimulatedPager

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


def test_what_was_only_read_leaves_without_a_write() -> None:
    """Region 0 is fetched by plan, and written back if it was acquired, as to be written."""
    for use, written in (("none", 0), ("touch", 0), ("access", 0), ("acquire", PAGE)):
        on = pager(2, regions=3)
        assert on.state[0] is State.ABSENT
        result = on.begin_step()
        uses = [Use((1,)), Use((0,)), Use((0,))]
        follow(
            on, uses, Action(0, Kind.EVICT, 2), Action(0, Kind.FETCH, 0), Action(1, Kind.EVICT, 0)
        )
        on.finish()
        assert result.bytes_in == PAGE
        before = result.bytes_out
        if use != "none":
            getattr(on, use)([0])
        on.discard(1)
        follow(on, [Use(()), Use(())], Action(0, Kind.EVICT, 0))
        on.finish()
        assert on.state[0] is State.ABSENT
        assert result.bytes_out - before == written


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
