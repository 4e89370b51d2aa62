"""Ctrl-C, or an error, anywhere in a block: what was begun is done, or was not begun.

A signal comes at lines drawn from all that the library executes as a block begins, trains and ends.
Then the state is that of before or of after, bit for bit; no hook, thread, descriptor or paged
tensor is left that should not be; and training goes on as plainly. What is the user's own can be
interrupted while it runs.
"""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

import pytest
import torch
from devices import script
from exactness import (
    SMALL_PAGES,
    Loop,
    assert_ordinary,
    assert_same_training,
    footprint_of,
    least_budget,
    needs_pager,
)
from fused_networks import PAGES, Chosen, chosen_loss
from signalled import handled
from torch import nn

import dynoffload
from dynoffload.runtime import budgeted
from dynoffload.runtime.updates import pending

BACKENDS = [pytest.param("pager", marks=needs_pager), "mapped"]
SLOW = pytest.mark.slow

STEPS = r"""
import random, signal
from exactness import *
from fused_networks import PAGES, Chosen, chosen_loss
from signalled import LIBRARY, At, tracing

backend, attempts, number = sys.argv[1], int(sys.argv[2]), getattr(signal, sys.argv[3])
signal.signal(number, signal.default_int_handler)
swallowed = []
sys.unraisablehook = swallowed.append
chance = random.Random(1)


class Grows(Chosen):
    # What a slice of a list of layers is: a module of its own, made in each forward.
    def forward(self, x, hit):
        return nn.ModuleList([self.experts])[0](x, hit) @ self.head + x


def sample(step):
    generator = random.Random(step)
    return step, generator.sample(range(6), generator.randrange(1, 4))


def gradients(model, step):
    loss = chosen_loss(model, sample(step))
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def finish(model, optimizer):
    if len(sys.argv) > 4:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def of(model, optimizer):
    state = copy.deepcopy(optimizer.state_dict()["state"])
    return {"parameters": [p.detach().clone() for p in model.parameters()], "state": state}


plain, model = Grows(), Grows()
theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
config = {**PAGES, "backend": backend, "step_aside": False}
budget, _ = least_budget(model, optimizer, footprint_of(model) // 3, config)
came = {"gradients": 0, "step": 0, "made": 0}
lines = {"gradients": 0, "step": 0}
step = tries = 0


def at(phase):
    disturbed = step > 2 and tries < 3 and chance.random() < 0.7
    most = max(2, int(1.1 * lines[phase]))
    return At(chance.randrange(1, most) if disturbed else 0, LIBRARY, number=number)


with dynoffload.offload(model, optimizer, budget=budget, config=config):
    while came["gradients"] + came["step"] < attempts:
        here = at("gradients")
        try:
            with tracing(here):
                ours = gradients(model, step)
        except KeyboardInterrupt:
            came["gradients"], tries = came["gradients"] + 1, tries + 1
            optimizer.zero_grad()
            continue
        lines["gradients"] = max(lines["gradients"], here.lines)
        assert_same(ours, gradients(plain, step), f"step {step}, {came} interrupts")
        here, before = at("step"), of(plain, theirs)
        finish(plain, theirs)
        try:
            with tracing(here):
                finish(model, optimizer)
            lines["step"] = max(lines["step"], here.lines)
        except KeyboardInterrupt:
            came["step"], tries = came["step"] + 1, tries + 1
            optimizer.zero_grad()
            now, after = of(model, optimizer), of(plain, theirs)
            made = all(map(torch.equal, now["parameters"], after["parameters"]))
            came["made"] += made
            assert_same(now, after if made else before, f"step {step} interrupted, {came}")
            if not made:
                gradients(model, step)
                finish(model, optimizer)
        step, tries = step + 1, 0
assert_same(optimizer.state_dict(), theirs.state_dict(), "state")
assert_same(list(model.parameters()), list(plain.parameters()), "parameters")
assert_ordinary(model, optimizer)
hooks = [hook for m in model.modules() for hook in (*m._forward_pre_hooks, *m._forward_hooks)]
assert not hooks and not swallowed, (hooks, swallowed)
assert not any(m._compiled_call_impl for m in model.modules())
print(came["gradients"], came["step"], came["made"])
"""
"""Steps of fused experts whose updates wait, with interrupts."""

BLOCKS = r"""
import gc, os, random, signal, threading
from exactness import *
from fused_networks import PAGES, Chosen, chosen_loss
from signalled import RUNTIME, At
from torch.nn.modules import module as registry
from dynoffload.runtime.meta_init import recipe_is_noted

backend, what, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
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
"""Blocks that are interrupted as they are entered or left; of models from the meta device too."""


@pytest.mark.parametrize(
    ("backend", "number", "clips"),
    [
        ("pager", "SIGINT", []),
        ("mapped", "SIGINT", []),
        pytest.param("pager", "SIGINT", ["clips"], marks=SLOW),
        pytest.param("pager", "SIGUSR1", [], marks=SLOW),
    ],
)
@pytest.mark.parametrize("attempts", [30, pytest.param(600, marks=SLOW)])
def test_interrupts_all_along(backend: str, number: str, clips: list[str], attempts: int) -> None:
    """Of fused experts whose updates wait, in forwards and backwards that are then made anew, and
    in steps, which are made or are not: no bit and no hook differs, and no signal is swallowed."""
    done = script(STEPS, backend, attempts, number, *clips, seconds=120 + 2 * attempts)
    assert done.returncode == 0, done.stderr[-3000:]
    in_gradients, in_step, made = map(int, done.stdout.split())
    assert in_gradients > attempts // 4
    assert 0 < made <= in_step


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("what", ["entering", "leaving", "meta"])
@pytest.mark.parametrize("count", [4, pytest.param(120, marks=pytest.mark.slow)])
def test_a_block_has_begun_or_has_not(backend: str, what: str, count: int) -> None:
    """Wherever the signal comes as it is entered or left; a model from the meta device is there
    again if its block has not begun."""
    done = script(BLOCKS, backend, what, count, seconds=110 + 10 * count)
    assert done.returncode == 0, done.stderr[-3000:]


def descriptors() -> int:
    """Return how many files are open: a device that lives has its spill file."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


class Trained:
    """A model of experts with a block to train it in."""

    def __init__(self, backend: str = "auto", **changes: Any) -> None:
        self.model = Chosen()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        config = {**PAGES, "backend": backend, "step_aside": False, **changes}
        budget, _ = least_budget(self.model, self.optimizer, footprint_of(self.model) // 2, config)
        self.options = {"budget": budget, "config": config}

    def run(self) -> None:
        with dynoffload.offload(self.model, self.optimizer, **self.options):
            hits = [(step, [step % 3, 3]) for step in range(4)]
            Loop(steps=4).run(self.model, self.optimizer, hits, chosen_loss)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("whose", ["a parameter's", "the root's"])
def test_a_block_whose_hooks_fail_is_undone(
    backend: str, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error as the model is paged, or before the session is there, is what the user sees."""
    trained = Trained(backend)
    before = descriptors()

    def fails(*_: Any) -> None:
        raise MemoryError("no room for hooks")

    with monkeypatch.context() as patch:
        if whose == "the root's":
            patch.setattr(budgeted, "choosing", fails)
        else:
            patch.setattr(torch.Tensor, "register_post_accumulate_grad_hook", fails)
        with pytest.raises(MemoryError, match="no room for hooks"):
            trained.run()
    assert descriptors() == before
    assert_ordinary(trained.model, trained.optimizer)
    assert not any(module._state_dict_pre_hooks for module in trained.model.modules())
    trained.run()


def test_an_interrupt_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes while the runtime has views of what is paged, and is caught outside."""
    trained = Trained(policy="repeat")
    before = descriptors()
    real, sent = pending.neighbours, []

    def neighbours(*args: Any) -> Any:
        if not sent:
            sent.append(signal.raise_signal(signal.SIGINT))
        return real(*args)

    monkeypatch.setattr(pending, "neighbours", neighbours)
    with handled(), pytest.raises(KeyboardInterrupt) as caught:
        trained.run()
    assert sent, "no update was made"
    assert descriptors() == before, "the pool and the spill file stay"
    assert_ordinary(trained.model, trained.optimizer)
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

    trained, plain = Trained(features=features), Trained()
    hits = [(step, [step, 3]) for step in range(3)]
    with handled(), dynoffload.offload(trained.model, trained.optimizer, **trained.options):
        with pytest.raises(KeyboardInterrupt):
            chosen_loss(trained.model, (0, [0, 3]))
        assert reached == ["called"]
        for one in (trained, plain):
            Loop(steps=3).run(one.model, one.optimizer, hits, chosen_loss)
    assert_same_training(trained.model, trained.optimizer, plain.model, plain.optimizer)


def test_an_init_can_be_interrupted() -> None:
    """Weights are given by the user's function as the block begins, which it then does not."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    reached = []

    def init(module: nn.Module) -> None:
        reached.append("called")
        signal.raise_signal(signal.SIGINT)
        reached.append("went on")

    before = descriptors()
    dynoffload.materialize(model, init)
    with handled(), pytest.raises(KeyboardInterrupt):
        dynoffload.offload(model, budget="1MiB", config=SMALL_PAGES).start()
    assert reached == ["called"]
    assert descriptors() == before
    assert_ordinary(model)
