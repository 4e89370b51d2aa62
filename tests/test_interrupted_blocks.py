"""Ctrl-C, or an error, as a block begins or ends, and what an interrupt leaves behind.

A block has begun or it has not, and it has ended: wherever the signal comes, no hook, no thread, no
descriptor and no paged tensor is left, all bits are those of before or of after the last step, and
a second block trains on exactly. What is the user's own can be interrupted while it runs.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from exactness import (
    SMALL_PAGES,
    assert_ordinary,
    assert_same_training,
    footprint_of,
    least_budget,
    needs_pager,
)
from fused_networks import PAGES, Chosen, chosen_loss
from signalled import At, handled
from torch import nn

import dynoffload
from dynoffload.runtime import budgeted, interrupts
from dynoffload.runtime.interrupts import interruptible, let_come, uninterrupted
from dynoffload.runtime.updates import speculative

BACKENDS = [pytest.param("pager", marks=needs_pager), "mapped"]

LIFE = r"""
import gc, os, random, signal, sys, threading
sys.path.insert(0, sys.argv[1])
from exactness import *
from fused_networks import PAGES, Chosen, chosen_loss
from signalled import RUNTIME, At
from torch.nn.modules import module as registry
from dynoffload.runtime.meta_init import recipe_is_noted

backend, what, count = sys.argv[2], sys.argv[3], int(sys.argv[4])
signal.signal(signal.SIGINT, signal.default_int_handler)
PLANS = tuple(f"{RUNTIME}/{name}.py" for name in ("sizing", "counting", "host"))  # no change
swallowed = []
sys.unraisablehook = swallowed.append


def begin(meta):
    if not meta:
        model = Chosen()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        chosen_loss(model, (0, [1, 3])).backward()
        optimizer.step()
        chosen_loss(model, (1, [1, 2])).backward()
        return model, optimizer
    with torch.device("meta"):
        model = Chosen()
    dynoffload.materialize(model, give)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@torch.no_grad()
def give(module):
    for name, parameter in module._parameters.items():
        parameter.copy_(dict(type(module)().named_parameters())[name])


def train(model, optimizer, steps):
    for step in steps:
        optimizer.step()
        optimizer.zero_grad()
        chosen_loss(model, (step, [step % 6, 3])).backward()


def left():
    kinds = ("parameter", "buffer", "module")
    hooks = sum(len(getattr(registry, f"_global_{kind}_registration_hooks")) for kind in kinds)
    return threading.active_count(), len(os.listdir("/proc/self/fd")), hooks


def bare(model):
    for module in model.modules():
        assert not module._forward_pre_hooks and not module._forward_hooks
        assert not module._compiled_call_impl
        assert not module._state_dict_pre_hooks and not module._load_state_dict_pre_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def life(n, meta=False):
    plain, theirs = begin(False)
    model, optimizer = begin(meta)
    options = {**PAGES, "backend": backend, "step_aside": False}
    budget, _ = least_budget(model, optimizer, footprint_of(model) // 3, options)
    at = At(n, without=PLANS)
    came = False
    sys.settrace(at if what != "leaving" else None)
    try:
        with dynoffload.offload(model, optimizer, budget=budget, config=options):
            sys.settrace(None)
            train(model, optimizer, (2, 3))
            sys.settrace(at if what == "leaving" else None)
    except KeyboardInterrupt:
        came = True
    finally:
        sys.settrace(None)
    assert came == (0 < n <= at.lines)
    gc.collect()
    bare(model)
    if meta:
        if came:
            assert all(p.is_meta for p in model.parameters()) and recipe_is_noted(model)
        return at.lines
    if what == "leaving" or not came:
        train(plain, theirs, (2, 3))
    for number in range(2):
        assert_same_training(model, optimizer, plain, theirs)
        assert_ordinary(model, optimizer)
        if number == 0:
            with dynoffload.offload(model, optimizer, budget=budget, config=options):
                train(model, optimizer, (4, 5))
            train(plain, theirs, (4, 5))
    return at.lines


meta = what == "meta"
life(0, meta)
gc.collect()
gc.freeze()  # what was imported: each life collects what it leaves
lines = life(0, meta)  # without what is done once
gc.collect()
before = left()
chance = random.Random(1)
every = lines / count
for start in range(count):
    n = 1 + chance.randrange(int(start * every), int((start + 1) * every))
    try:
        life(n, meta)
        gc.collect()
        assert left() == before, (left(), before)
    except BaseException as error:
        error.add_note(f"{n} of {lines}")
        raise
assert not swallowed, swallowed
"""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("what", ["entering", "leaving", "meta"])
@pytest.mark.parametrize("count", [4, pytest.param(120, marks=pytest.mark.slow)])
def test_a_block_has_begun_or_has_not(backend: str, what: str, count: int) -> None:
    """Wherever the signal comes as it is entered or left; a model from the meta device is there
    again if its block has not begun."""
    done = subprocess.run(
        [sys.executable, "-c", LIFE, str(Path(__file__).parent), backend, what, str(count)],
        capture_output=True,
        text=True,
        timeout=110 + 10 * count,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def descriptors() -> int:
    """Return how many files are open: a device that lives has its spill file."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def trained(
    backend: str, steps: int = 4, **changes: Any
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    model = Chosen()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {**PAGES, "backend": backend, "step_aside": False, "draft_share": 1.0, **changes}
    budget, _ = least_budget(model, optimizer, footprint_of(model) // 2, options)

    def run() -> None:
        with dynoffload.offload(model, optimizer, budget=budget, config=options):
            for step in range(steps):
                chosen_loss(model, (step, [step % 3, 3])).backward()
                optimizer.step()
                optimizer.zero_grad()

    return model, optimizer, run


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("whose", ["a parameter's", "the root's"])
def test_a_block_whose_hooks_fail_is_undone(
    backend: str, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error as the model is paged, or before the session is there, is what the user sees."""
    model, optimizer, run = trained(backend)
    before = descriptors()

    def fails(*_: Any) -> None:
        raise MemoryError("no room for hooks")

    if whose == "the root's":
        monkeypatch.setattr(budgeted, "choosing", fails)
    else:
        monkeypatch.setattr(torch.Tensor, "register_post_accumulate_grad_hook", fails)
    with pytest.raises(MemoryError, match="no room for hooks"):
        run()
    assert descriptors() == before
    assert_ordinary(model, optimizer)
    assert not any(module._state_dict_pre_hooks for module in model.modules())
    monkeypatch.undo()
    run()


def test_an_interrupt_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes while the runtime has views of what is paged, and is caught outside."""
    model, optimizer, run = trained("auto", policy="repeat")
    before = descriptors()
    real, sent = speculative.snapshot, []

    def snapshot(*args: Any) -> Any:
        if not sent:
            sent.append(signal.raise_signal(signal.SIGINT))
        return real(*args)

    monkeypatch.setattr(speculative, "snapshot", snapshot)
    with handled(), pytest.raises(KeyboardInterrupt) as caught:
        run()
    assert sent, "no draft was made"
    assert descriptors() == before, "the pool and the spill file stay"
    assert_ordinary(model, optimizer)
    del caught


def test_features_can_be_interrupted() -> None:
    """The user's function ends where Ctrl-C comes, and training goes on afterwards."""
    reached = []

    def features(*args: Any, **kwargs: Any) -> dict[str, float]:
        reached.append("called")
        if len(reached) == 1:
            signal.raise_signal(signal.SIGINT)
            reached.append("went on")
        return {"a": 1.0}

    model = Chosen()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {**PAGES, "features": features, "step_aside": False}
    plain = Chosen()
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    budget, _ = least_budget(model, optimizer, footprint_of(model) // 2, options)
    with handled(), dynoffload.offload(model, optimizer, budget=budget, config=options):
        with pytest.raises(KeyboardInterrupt):
            chosen_loss(model, (0, [0, 3]))
        assert reached == ["called"]
        for step in range(3):
            for one, its in ((model, optimizer), (plain, theirs)):
                chosen_loss(one, (step, [step, 3])).backward()
                its.step()
                its.zero_grad()
    assert_same_training(model, optimizer, plain, theirs)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 64))


def test_an_init_can_be_interrupted() -> None:
    """Weights are given by the user's function as the block begins, which it then does not."""
    with torch.device("meta"):
        model = nn.Sequential(Layer(), Layer())
    reached = []

    def init(module: nn.Module) -> None:
        reached.append("called")
        signal.raise_signal(signal.SIGINT)
        reached.append("went on")

    before = descriptors()
    dynoffload.materialize(model, init)
    with (
        handled(),
        pytest.raises(KeyboardInterrupt),
        dynoffload.offload(model, budget="1MiB", config=SMALL_PAGES),
    ):
        pytest.fail("the block must not begin")
    assert reached == ["called"]
    assert descriptors() == before
    assert_ordinary(model)


def test_signals_are_let_in_where_it_is_said() -> None:
    """And put off again afterwards."""
    done: list[str] = []

    @uninterrupted
    def call() -> None:
        let_come()
        signal.raise_signal(signal.SIGINT)
        done.append("before")
        try:
            let_come()
        except KeyboardInterrupt:
            done.append("let in")
        signal.raise_signal(signal.SIGINT)
        done.append("after")

    with handled():
        with pytest.raises(KeyboardInterrupt):
            call()
        let_come()
    assert done == ["before", "let in", "after"]


def test_what_is_the_users_is_interrupted_at_once() -> None:
    """Whatever line of what lets signals through another comes at, they are put off again until
    the outermost call is over, and the handlers are in their places then."""
    numbers = [signal.SIGINT, signal.SIGUSR1]
    came: list[int] = []
    done: list[str] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        assert frame is not None
        came.append(number)
        raise KeyboardInterrupt

    @interruptible
    def users() -> None:
        signal.raise_signal(signal.SIGINT)
        done.append("went on")

    @uninterrupted
    def inner() -> None:
        users()

    @uninterrupted
    def outer(trace: Any) -> None:
        sys.settrace(trace)
        try:
            inner()
        except KeyboardInterrupt:
            sys.settrace(None)
            seen = len(came)
            signal.raise_signal(signal.SIGINT)
            assert len(came) == seen, "signals come, though they are held off"
            done.append("undone")
        finally:
            sys.settrace(None)

    def sends_at(line: int) -> bool:
        at = At(line, interrupts.__file__, number=signal.SIGUSR1)
        with pytest.raises(KeyboardInterrupt):
            outer(at)
        return at.lines >= line

    with handled(interrupt, *numbers):
        line = 1
        while sends_at(line):
            assert [signal.getsignal(number) for number in numbers] == [interrupt] * 2, line
            assert (interrupts._depth, interrupts._held) == (0, None), line
            assert done == ["undone"], line
            assert came.count(signal.SIGUSR1) == 1, line
            came.clear()
            done.clear()
            line += 1
    assert line > 20
