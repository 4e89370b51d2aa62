"""What parts of a batch rest on: the order of work, and the tier below."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import parallel_cases as cases
import pytest
import torch
from torch import Tensor

from dynoffload.errors import SpillError
from dynoffload.moe.parallel import computation
from dynoffload.moe.parallel.exchange import Exchange, Pending
from dynoffload.moe.parallel.tiers import FileTier


class Watched(Exchange):
    """Writes down what is started and awaited."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def start(self, into: Tensor, given: Tensor, takes: Any, gives: Any, what: str) -> Pending:
        pending = super().start(into, given, takes, gives, what)
        self.log.append(what)
        log = self.log

        class Awaited(Pending):
            def wait(self) -> None:
                log.append(f"wait {what}")

        return Awaited(pending, None, what, ())


def test_exchanges_of_other_parts_are_on_their_way_while_experts_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    _, layer = cases.layers(1)
    layer.exchange = Watched(log)
    for name in ("forward", "backward"):
        own = getattr(computation, name)

        def logged(*given: Any, name: str = name, own: Any = own, **named: Any) -> None:
            log.append(name)
            own(*given, **named)

        monkeypatch.setattr(computation, name, logged)
    layer.set_pipeline(3, "S4")
    out = layer(torch.randn(20, cases.WIDTH, dtype=torch.float64, requires_grad=True)).hidden
    assert log[log.index("forward") - 1 :] == [
        "rows of part 2 of 3", "forward", "results of part 1 of 3",
        "wait rows of part 2 of 3",
        "rows of part 3 of 3", "forward", "wait results of part 1 of 3", "results of part 2 of 3",
        "wait rows of part 3 of 3",
        "forward", "wait results of part 2 of 3", "results of part 3 of 3",
        "wait results of part 3 of 3",
    ]  # fmt: skip
    log.clear()
    out.sum().backward()
    at = log.index("backward")
    assert log[at - 2 : at] == ["rows of part 2 of 3"] * 2  # for rows, and gradients of results


# The file below


def test_what_is_stored_comes_back(tmp_path: Path) -> None:
    tier = FileTier(tmp_path)
    given = [torch.randn(rows, 7) for rows in (100, 0, 3, 50)]
    stored = [tier.store(one) for one in given]
    for one, known in zip(stored, given, strict=True):
        for _ in range(2):  # as often as one likes
            found = torch.empty_like(known)
            one.load(found).wait()
            assert torch.equal(found, known)
    assert not list(tmp_path.iterdir())
    open_files = len(os.listdir("/proc/self/fd"))
    del tier, stored, one
    end = time.monotonic() + 10  # the thread may still let go of the last
    while len(os.listdir("/proc/self/fd")) == open_files and time.monotonic() < end:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) == open_files - 1


def test_a_file_that_cannot_be_written_or_read_is_an_error_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = FileTier(tmp_path, timeout=60.0)
    stored = tier.store(torch.ones(10))
    stored.wait()

    def fails(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fails)
        with pytest.raises(SpillError, match="cannot write a part of a batch to the spill file"):
            tier.store(torch.ones(10)).wait()
        patch.setattr(os, "preadv", fails)
        with pytest.raises(SpillError, match="cannot read a part of a batch back"):
            stored.load(torch.empty(10)).wait()
        patch.setattr(os, "preadv", lambda *_: 0)
        with pytest.raises(SpillError, match="the file ends before"):
            stored.load(torch.empty(10)).wait()
    end, slow = threading.Event(), FileTier(tmp_path, timeout=0.2)
    monkeypatch.setattr("dynoffload.moe.parallel.tiers._copy", lambda *_: end.wait(60))
    with pytest.raises(SpillError, match=r"was not copied to or from the spill .* in 0.2 s"):
        slow.store(torch.ones(10)).wait()
    monkeypatch.undo()
    FileTier(tmp_path, timeout=20.0).store(torch.ones(10)).wait()  # which hangs on no other's disk
    end.set()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_of_a_fork_copies_too(tmp_path: Path) -> None:
    FileTier(tmp_path).store(torch.ones(10)).wait()
    child = os.fork()
    if not child:
        try:
            FileTier(tmp_path, timeout=20.0).store(torch.ones(10)).wait()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
