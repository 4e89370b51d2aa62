"""Delayed updates: bit for bit the same delay written plainly, and no error that is lost."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from exactness import assert_same
from host_reference import Pair, odd, on_accelerator, racing, words
from torch.optim import AdamW

from dynoffload.errors import StepLostError
from dynoffload.host_optimizer import HostOptimizer
from dynoffload.host_optimizer.update_rule import UpdateRule


@pytest.mark.parametrize(
    ("kind", "warmup_steps", "accumulate"), [("adamw", 0, 1), ("adamw", 2, 1), ("momentum", 1, 2)]
)
def test_a_delay_is_the_one_that_is_written_plainly(
    kind: str, warmup_steps: int, accumulate: int
) -> None:
    """Losses of every step are compared on the way."""
    pair = Pair(kind, delayed=True, warmup_steps=warmup_steps)
    pair.train(words(8), accumulate)
    pair.ours.finish()
    pair.theirs.catch_up()
    pair.assert_same()


def test_on_late_queues() -> None:
    with racing(1) as queues:
        pair = Pair(model=on_accelerator(odd(), queues), queues=queues, delayed=True)
        pair.train(words(6))
        pair.ours.finish()
        pair.theirs.catch_up()
        pair.assert_same()
        pair.ours.close()


def test_the_update_is_made_beside_the_next_step() -> None:
    """The kernel runs while the calling thread is free: it waits for something done there."""
    model = odd()
    optimizer = HostOptimizer(model.parameters(), AdamW, delayed=True)
    free = threading.Event()
    plain = UpdateRule.run

    def run(self: UpdateRule, parts: Any) -> None:
        assert free.wait(30)
        plain(self, parts)

    with mock.patch.object(UpdateRule, "run", run):
        model(words(1)[0]).backward()
        optimizer.step()
        model(words(1)[0]).backward()
        free.set()
        optimizer.step()
    optimizer.finish()


@pytest.mark.parametrize("weights_first", [False, True])
def test_training_that_is_saved_goes_on_as_it_would_have(
    weights_first: bool, tmp_path: Path
) -> None:
    """Parameters that lag behind their masters are saved so, and go on so; also in a file."""
    pair = Pair(delayed=True)
    pair.train(words(3))
    state = copy.deepcopy(pair.ours.state_dict())
    weights = copy.deepcopy(pair.model.state_dict())
    assert all(bool(one["lags"]) for one in state["state"].values() if float(one["step"]))
    pair.model = odd(seed=7)
    pair.ours = HostOptimizer(
        pair.model.parameters(),
        AdamW,
        lr=1e-2,
        delayed=True,
        spill_dir=tmp_path,
        tile_bytes=20480,
    )
    if weights_first:
        pair.model.load_state_dict(weights)
    pair.ours.load_state_dict(state)
    if not weights_first:
        pair.model.load_state_dict(weights)
    pair.train(words(3, seed=1))
    pair.ours.finish()
    pair.theirs.catch_up()
    pair.assert_same()


@pytest.mark.parametrize("who", ["step", "state_dict", "finish", "close"])
def test_an_error_beside_the_next_step_reaches_whoever_comes(who: str) -> None:
    pair = Pair(delayed=True)
    pair.train(words(2))
    good = copy.deepcopy(pair.ours.state_dict())
    pair.backward(words(1)[0])
    with mock.patch.object(UpdateRule, "run", side_effect=MemoryError("no more")):
        pair.ours.step()
        with pytest.raises(StepLostError, match="no more"):
            getattr(pair.ours, who)()
    if who == "close":
        return
    for again in (pair.ours.step, pair.ours.state_dict, pair.ours.settle):
        with pytest.raises(StepLostError, match="cut off before"):
            again()
    pair.ours.load_state_dict(good)
    assert_same(pair.ours.state_dict()["state"], good["state"], "state")
    pair.model(words(1)[0]).backward()
    pair.ours.step()
    pair.ours.finish()
