"""Scans over all regions, which devices written in Python stand in for: no tests here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from dynoffload.memory.accelerator.host import HostTier
from dynoffload.memory.accelerator.pool import RegionPool
from dynoffload.memory.accelerator.region import State
from dynoffload.memory.region_cache import RegionCache


@contextmanager
def compared() -> Iterator[Counter[tuple[str, bool]]]:
    """Compare what is evicted with what a scan finds. Yield how often that was, by the method and
    whether there was something."""
    seen: Counter[tuple[str, bool]] = Counter()

    def checked(home: Any, name: str, scan: Callable[..., Any]) -> Any:
        method = getattr(home, name)

        def choose(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = method(self, *args, **kwargs)
            assert found is scan(self, *args, **kwargs), name
            seen[name, found is not None] += 1
            return found

        return mock.patch.object(home, name, choose)

    with (
        checked(RegionCache, "_victim", _victim),
        checked(HostTier, "_host_victim", _host_victim),
    ):
        yield seen


def _victim(self: Any, later_than: int) -> Any:
    found, best = None, (later_than, 0)
    for cell in self._cells.values():
        if self._may_leave(cell):
            next_use = self._plan.next_use(cell.region)
            if next_use > later_than and (found is None or (next_use, -cell.stamp) > best):
                found, best = cell, (next_use, -cell.stamp)
    assert self._pinned.keys() == {cell for cell in self._cells.values() if cell.pins}
    if isinstance(self, RegionPool):
        leaving = [cell for cell in self._cells.values() if cell.state is State.LEAVING]
        assert self._leaving.keys() == set(leaving)
    return found


def _host_victim(self: Any, wanted: Any, *, any_time: bool) -> Any:
    """A copy whose end was not noticed is of a region that would leave later, or has not ended."""
    found = None
    best = (False, -1 if any_time else self._plan.next_use(wanted.region), 0)
    for cell in self._cells.values():
        if cell.slot is None or cell is wanted or cell.error or cell.copied or cell.io:
            continue
        rank = (not cell.in_host or cell.in_file, self._plan.next_use(cell.region), -cell.stamp)
        if rank > best:
            found, best = cell, rank
    assert self._failed.keys() == {cell for cell in self._cells.values() if cell.error}
    assert self._in_transfer.keys() == {cell for cell in self._cells.values() if cell.io}
    return found
