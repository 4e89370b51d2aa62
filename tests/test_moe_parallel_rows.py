"""What parts of a batch rest on: the order of work, and the tier below."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
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


def test_what_is_stored_comes_back_and_its_room_is_used_again(tmp_path: Path) -> None:
    tier = FileTier(tmp_path)
    for _ in range(5):
        given = [torch.randn(rows, 7) for rows in (100, 0, 3, 50)]
        stored = [tier.store(one) for one in given]
        for one in stored:
            one.wait()
        for one, known in zip(stored, given, strict=True):
            found = torch.empty_like(known)
            one.load(found).wait()
            assert torch.equal(found, known)
            one.load(found).wait()  # as often as one likes
        del stored, one
    assert sum(size for _, size in tier.freed) == 153 * 7 * 4 + 1 == tier._room.high
    assert not list(tmp_path.iterdir())


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
    end.set()


def test_a_layer_that_is_collected_in_the_midst_of_another_ones_copies_ends_nothing(
    tmp_path: Path,
) -> None:
    """Layers in cycles are collected at any moment: here after so many allocations from the call on
    that asks for a copy, whatever it holds by then."""
    code = """
        import gc, sys, torch
        from pathlib import Path
        from dynoffload.moe.parallel.tiers import FileTier
        tier, content = FileTier(Path(sys.argv[1])), torch.randn(64)
        for count in range(50):
            gc.collect()
            gc.disable()
            other = FileTier(Path(sys.argv[1]))
            other.itself = other
            other.store(torch.ones(8)).wait()
            del other
            into = torch.empty(64)
            gc.set_threshold(gc.get_count()[0] + count)
            gc.enable()
            stored = tier.store(content)
            gc.disable()
            stored.wait()
            stored.load(into).wait()
            assert torch.equal(into, content)
        print("ended")
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(code), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.stdout == "ended\n", done.stderr[-2000:]
