"""One rank is lost: the other ends within the timeout, and says who, where, and what it awaited."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from exactness import needs_pager
from gloo_ranks import run_ranks
from programs import FORKED
from ranks_faults import AT, HANGS_S, TIMEOUT_S, main, waiting

from dynoffload.config import OffloadConfig
from dynoffload.distributed.watchdog import ENDED
from dynoffload.errors import ConfigError

_MOMENT_S = 12.0  # beyond the timeout, on a busy machine
WORDS = {
    "kill": r"rank 1 is gone, its process \d+ has ended",
    "raise": r"rank 1 has left its block by an error \(Lost: of the second rank\)",
    "hang": r"rank 1 runs, and has been for \d+ s in step 3, forward, at 'layers\.2\.0'",
    "stop": r"rank 1 has been silent for \d+ s, last heard of in step \d",
    "leave": r"rank 1 has left its block, after 3 steps",
}


def ended(kinds: Sequence[str], directory: Path) -> dict[str, Any]:
    """Start pairs in which the second rank is lost, all at once; return how the first ones ended.

    Nothing is left in the spill directories by then.
    """
    pairs = {
        kind: [
            FORKED.Process(target=main, args=(directory / kind, rank, kind)) for rank in range(2)
        ]
        for kind in kinds
    }
    found: dict[str, Any] = {}
    try:
        for kind, pair in pairs.items():
            (directory / kind).mkdir(exist_ok=True)
            for one in pair:
                one.start()
        for kind, pair in pairs.items():
            survivor = int(kind == "store")
            first, second = pair[survivor], pair[1 - survivor]
            first.join(200)
            second.kill()
            second.join()
            answer = directory / kind / f"{survivor}.json"
            words = json.loads(answer.read_text()) if answer.exists() else {}
            said = (directory / kind / f"said-{survivor}").read_text()
            found[kind] = {**words, "said": said, "code": first.exitcode}
            for rank in range(2):
                left = list((directory / kind / f"spill-{rank}").iterdir())
                assert not left, f"{kind}, rank {rank}: a spill file is left"
        return found
    finally:
        for one in (one for pair in pairs.values() for one in pair if one.pid):
            one.kill()
            one.join()


def check(kinds: Sequence[str], directory: Path) -> None:
    """Check how the first ranks end whose second ones are lost."""
    for kind, found in ended(kinds, directory).items():
        assert "words" in found, f"{kind}: {found['said'][-3000:]}"
        words = found["words"]
        assert re.search(WORDS[kind], words), words
        assert words.startswith(f"rank 0 (step {AT}, "), words
        leaves = kind == "leave"
        awaited = "the first rank's buffers" if leaves else "the reduction of gradients"
        assert f"waited for {awaited}, and in vain" in words, words
        assert "go on from the last checkpoint" in words
        assert (found["rank"], found["lost"]) == (0, [1])
        assert found["cause"] == "RuntimeError", "the group's own error is the cause"
        assert found["seconds"] < TIMEOUT_S + _MOMENT_S < HANGS_S
        assert found["code"] == 1
        assert "RankError" in found["said"]


@needs_pager
def test_the_other_rank_ends_and_says_who_was_lost(tmp_path: Path) -> None:
    """Killed; left by an error; hanging in its forward."""
    check(["kill", "raise", "hang"], tmp_path)


@pytest.mark.slow
@needs_pager
def test_one_that_is_stopped_and_one_that_leaves_early(tmp_path: Path) -> None:
    check(["stop", "leave"], tmp_path)


@pytest.mark.slow
@needs_pager
def test_the_rank_that_holds_the_store_is_lost(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "store" / "address").write_text(f"tcp://127.0.0.1:{port}")
    found = ended(["store"], tmp_path)["store"]
    assert "words" in found, found["said"][-3000:]
    assert re.search(r"rank 0 is gone, its process \d+ has ended", found["words"])
    assert (found["rank"], found["lost"]) == (1, [0])


@pytest.mark.slow
@needs_pager
def test_a_wait_that_nobody_can_end_ends_the_process(tmp_path: Path) -> None:
    """A barrier of a group of the user's own, whose timeout is minutes."""
    found = ended(["barrier"], tmp_path)["barrier"]
    assert found["code"] == ENDED, found["said"][-3000:]
    assert re.search(r"rank 0 \(step 3, .*waited for the others in barrier\(\)", found["said"])
    assert "rank 1 runs, and has been for" in found["said"]
    assert "so the process ends" in found["said"]


@pytest.mark.parametrize("wait", [0, -1.0, True, "5", float("nan")])
def test_a_timeout_that_is_none_is_refused(wait: Any) -> None:
    with pytest.raises(ConfigError, match=r"rank_timeout=.* is not a number of seconds"):
        OffloadConfig(rank_timeout=wait)


@pytest.mark.slow
def test_a_long_wait_is_warned_of_and_ends_no_process_unless_that_was_asked_for() -> None:
    """A group of the user's own may allow hours, as for what the first rank does alone."""
    first, second = run_ranks(waiting, 2, only=(0, 1))  # it changes its processes
    (told,) = [one for one in first if "has waited" in one]
    assert "waited for the others in barrier()" in told
    assert "rank 1 runs, and has been for" in told
    assert "config={'rank_timeout': seconds} ends the process" in told
    assert not [one for one in second if "has waited" in one]
