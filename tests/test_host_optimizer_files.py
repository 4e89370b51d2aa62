"""Masters and moments in a file: bit for bit as in memory, in fixed staging, and nothing lost."""

from __future__ import annotations

import copy
import errno
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from emulated import emulated
from exactness import assert_same
from host_reference import Pair, odd, on_accelerator, racing, words
from torch.optim import AdamW

from dynoffload.errors import SpillError, StepLostError
from dynoffload.host_optimizer import HostOptimizer
from dynoffload.units import KiB


@pytest.mark.parametrize("kind", ["amsgrad", "momentum"])
def test_a_file_changes_no_bit(kind: str, tmp_path: Path) -> None:
    """The state is looked at between steps, too, through the file's map."""
    pair = Pair(kind, spill_dir=tmp_path)
    with mock.patch.object(os, "preadv", wraps=os.preadv) as read:
        for number in range(3):
            pair.train(words(2, seed=number))
            pair.assert_same()
    assert read.called


@pytest.mark.parametrize("delayed", [False, True])
def test_some_in_memory_and_the_rest_in_a_file(delayed: bool, tmp_path: Path) -> None:
    budget = 40 * KiB
    pair = Pair(spill_dir=tmp_path, host_budget=budget, delayed=delayed)
    in_memory = sum(
        value.nbytes
        for one in pair.ours.state.values()
        for key, value in one.items()
        if key not in ("step", "lags") and not is_mapped(value)
    )
    assert 0 < in_memory <= budget
    pair.train(words(5))
    pair.ours.finish()
    pair.theirs.catch_up()
    pair.assert_same()


def is_mapped(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's bytes are a file's."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(one, 16) for one in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return int(line.split()[4]) != 0
    return False


def test_files_below_late_queues(tmp_path: Path) -> None:
    with racing(1) as queues:
        pair = Pair(model=on_accelerator(odd(), queues), queues=queues, spill_dir=tmp_path)
        pair.train(words(4))
        pair.assert_same()
        pair.ours.close()


def test_staging_is_as_large_as_four_tiles(tmp_path: Path) -> None:
    """However much the file holds."""
    sizes = []
    for width in (2000, 9000):
        with emulated() as queues:
            parameter = torch.nn.Parameter(torch.zeros(width))
            optimizer = HostOptimizer(
                [parameter], AdamW, tile_bytes=4 * KiB, spill_dir=tmp_path, queues=queues
            )
            sizes.append(queues.host_bytes - parameter.nbytes)
            optimizer.close()
    assert sizes[0] == pytest.approx(4 * 3 * 4 * KiB, abs=64)
    assert sizes[1] == pytest.approx(sizes[0], abs=64)


def failing(name: str, skip: int, how: str) -> Any:
    """Return a stand-in for a system call that fails from the ``skip``-th call on."""
    plain, calls = getattr(os, name), [0]

    def call(*args: Any) -> int:
        calls[0] += 1
        if calls[0] <= skip:
            return int(plain(*args))
        if how == "short":
            return 0
        raise OSError(getattr(errno, how), os.strerror(getattr(errno, how)))

    return mock.patch.object(os, name, call)


def step_and_settle(optimizer: HostOptimizer) -> None:
    """Make a step, or begin a delayed one and wait for it."""
    optimizer.step()
    optimizer.settle()


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize(
    ("name", "how", "skip"),
    [("preadv", "EIO", 0), ("preadv", "short", 5), ("pwritev", "ENOSPC", 5)],
)
def test_a_disk_that_fails_loses_the_step_and_says_so(
    name: str, how: str, skip: int, delayed: bool, tmp_path: Path
) -> None:
    pair = Pair(spill_dir=tmp_path, delayed=delayed)
    pair.train(words(2))
    weights = copy.deepcopy(pair.model.state_dict())
    state = copy.deepcopy(pair.ours.state_dict())
    pair.model(words(1)[0]).backward()
    with failing(name, skip, how), pytest.raises(StepLostError, match="cut off") as caught:
        step_and_settle(pair.ours)
    assert isinstance(caught.value.__cause__, SpillError)
    assert str(tmp_path) in str(caught.value)
    for use in (pair.ours.step, pair.ours.state_dict, lambda: pair.ours.clip_grad_norm_(1.0)):
        with pytest.raises(StepLostError, match="cut off before"):
            use()
    pair.model.load_state_dict(weights)
    pair.ours.load_state_dict(state)
    pair.train(words(2, seed=1))
    pair.ours.finish()
    pair.theirs.catch_up()
    pair.assert_same()


def test_a_directory_that_cannot_be_used() -> None:
    model = odd()
    with pytest.raises(SpillError, match="does not exist"):
        HostOptimizer(model.parameters(), AdamW, spill_dir="/nowhere/at/all")
    model(words(1)[0]).backward()
    assert model.out.weight.grad is not None, "a hook is left"


@pytest.mark.parametrize("delayed", [False, True])
def test_groups_that_come_later_get_a_file_too(delayed: bool, tmp_path: Path) -> None:
    """With tiles larger than any before, while an update may be under way."""
    states = []
    for where in (None, tmp_path):
        model = odd()
        optimizer = HostOptimizer(
            model.out.parameters(),
            AdamW,
            lr=1e-2,
            threads=1,
            delayed=delayed,
            tile_bytes=64 * KiB,
            spill_dir=where,
        )
        for number, sample in enumerate(words(5)):
            if number == 2:
                optimizer.add_param_group({"params": model.embedding.parameters()})
                model.embedding.zero_grad()
            model(sample).backward()
            optimizer.step()
        optimizer.finish()
        states.append(optimizer.state_dict()["state"])
    assert_same(states[1], states[0], "state")
