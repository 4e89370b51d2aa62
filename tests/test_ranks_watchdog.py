"""The rank watchdog: it outlives what another rank reports, and what fails in itself."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.testing._internal.distributed.fake_pg import FakeStore

from dynoffload.distributed import watchdog
from dynoffload.distributed.status import RankStatus, key
from dynoffload.distributed.watchdog import RankWatchdog, watch_ranks


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RankWatchdog]]:
    """Yield a function that begins a watchdog of the first of three ranks; there are no others."""
    assert FakeStore is not None  # its import makes the backend known
    monkeypatch.setattr(watchdog, "_BEAT_S", 0.05)
    monkeypatch.setattr(watchdog, "_FIRST_S", 0.01)
    wait = datetime.timedelta(minutes=5)
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=3, timeout=wait)
    began: list[RankWatchdog] = []

    def begin(status: Callable[[], RankStatus] = RankStatus) -> RankWatchdog:
        found = watch_ranks(status, None, ())
        assert found is not None
        began.append(found)
        return found

    yield begin
    for one in began:
        one.end(None)
    dist.destroy_process_group()


def tell(rank: int, text: str | bytes) -> None:
    """Put up a rank's report."""
    _get_default_store().set(key(rank), text)


def line(**other: Any) -> str:
    """Return a line such as another rank puts up."""
    status = {"step": 1, "phase": "", "site": "", "gradient": "", "progress": 1}
    own = {"beat": 1, "block": 1, "machine": "elsewhere", "pid": 1, "born": 1, "left": None}
    return json.dumps({**own, "status": status, **other})


def until(true: Callable[[], bool]) -> bool:
    """Wait for ten seconds at most."""
    end = time.monotonic() + 10
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return true()


@pytest.mark.parametrize("text", [b"\xff\xfe", "[]", "{}", line(status={"stepp": 1})])
def test_a_line_that_cannot_be_read_does_not_end_the_watch(
    watching: Callable[..., RankWatchdog], text: str | bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The rank's next line is read, those of others are, and this rank goes on telling its own."""
    tell(1, text)
    tell(2, line(beat=1))
    ours = watching()
    assert until(lambda: "the status of rank 1 cannot be read" in caplog.text)
    assert ours._thread.is_alive()
    beat = ours._store._beat
    tell(1, line(beat=7))
    tell(2, line(beat=8))
    assert until(
        lambda: {rank: one.beat for rank, one in ours._store.reports.items()} == {1: 7, 2: 8}
    )
    assert until(lambda: ours._store._beat > beat)
    assert caplog.text.count("cannot be read") == 1


def test_an_error_in_the_watch_is_said_once_and_it_goes_on(
    watching: Callable[..., RankWatchdog], caplog: pytest.LogCaptureFixture
) -> None:
    fails = False

    def status() -> RankStatus:
        if fails:
            raise RuntimeError("dictionary changed size during iteration")
        return RankStatus()

    tell(1, line())
    tell(2, line())
    ours = watching(status)
    assert until(lambda: ours._store._beat > 2)
    fails = True
    assert until(lambda: "dictionary changed size" in caplog.text)
    time.sleep(0.2)
    fails = False
    beat = ours._store._beat
    assert until(lambda: ours._store._beat > beat + 2)
    assert caplog.text.count("the rank watchdog goes on") == 1
