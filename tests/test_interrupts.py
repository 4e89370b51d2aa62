"""Ctrl-C anywhere in a step: what was begun is done, or was not begun.

A signal is sent at points spread over all lines that the runtime executes in one training step. The
graph is the smallest that has updates put off, updates made in backward, and tensors too small to
be paged. After the interrupt the network must be in the state before the step or in that after it,
bit for bit, and training goes on from there as it does plainly.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

import pytest
from signalled import At, handled, tracing

from dynoffload.runtime import interrupts
from dynoffload.runtime.interrupts import uninterrupted

SCRIPT = r"""
import random, signal, sys
sys.path.insert(0, sys.argv[3])
from exactness import *
from signalled import At, tracing

backend, where, count = sys.argv[1], sys.argv[2], int(sys.argv[4])
NUMBER = getattr(signal, sys.argv[5])
signal.signal(NUMBER, signal.default_int_handler)


def step(model, optimizer, sample, traced=None):
    torch.manual_seed(0)
    with tracing(traced):
        small_loss(model, sample).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) if where == "clipping" else None
        optimizer.step()
        optimizer.zero_grad()


def of(model, optimizer):
    state = copy.deepcopy(optimizer.state_dict()["state"])
    return {"parameters": [p.detach().clone() for p in model.parameters()], "state": state}


samples = small_samples(4)
plain = small()
theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
states = [None]
for index in range(4):
    step(plain, theirs, samples[index])
    states.append(of(plain, theirs))


def interrupted_at(n):
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {**SMALL_PAGES, "backend": backend, "step_aside": False, "draft_share": 1.0}
    budget, _ = least_budget(model, optimizer, footprint_of(model) // 3, config)
    at = At(n, number=NUMBER)
    came = False
    with dynoffload.offload(model, optimizer, budget=budget, config=config):
        step(model, optimizer, samples[0])
        step(model, optimizer, samples[1])
        try:
            step(model, optimizer, samples[2], at)
        except KeyboardInterrupt:
            came = True
        optimizer.zero_grad()
        now = of(model, optimizer)
        made = all(map(torch.equal, now["parameters"], states[3]["parameters"]))
        assert_same(now, states[3 if made else 2], f"interrupted at {n}")
        assert came or made or n == 0
        if not made:
            step(model, optimizer, samples[2])
        step(model, optimizer, samples[3])
    assert_same(of(model, optimizer), states[4], f"gone on after {n}")
    assert_ordinary(model, optimizer)
    return at.lines, came, made


lines, _, _ = interrupted_at(0)
chance = random.Random(1)
every = lines // count
points = [chance.randrange(start, start + every) for start in range(1, lines, every)]
points.append(int(0.94 * lines))  # the step is made by then, if not all of it
outcomes = [interrupted_at(n)[1:] for n in points]
print(len(points), sum(came for came, _ in outcomes), sum(came and made for came, made in outcomes))
"""


SLOW = pytest.mark.slow
LOOPS = [
    ("pager", "plainly", "SIGINT"),
    pytest.param("pager", "clipping", "SIGINT", marks=SLOW),
    pytest.param("pager", "plainly", "SIGUSR1", marks=SLOW),
    ("mapped", "plainly", "SIGINT"),
]


@pytest.mark.parametrize(("backend", "where", "number"), LOOPS)
@pytest.mark.parametrize("count", [6, pytest.param(60, marks=SLOW)])
def test_a_step_is_made_or_is_not(backend: str, where: str, number: str, count: int) -> None:
    """Wherever the signal comes, the state is that of one whole step, and training goes on."""
    arguments = [backend, where, str(Path(__file__).parent), str(count), number]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        capture_output=True,
        text=True,
        timeout=60 + 10 * count,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    points, came, made = map(int, done.stdout.split())
    assert came > points // 2
    assert 0 < made < came


LIFE = r"""
import random, signal, sys
sys.path.insert(0, sys.argv[1])
from exactness import *
from fused_networks import PAGES, Chosen, chosen_loss
from signalled import LIBRARY, At, tracing

backend, seed, attempts = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
signal.signal(signal.SIGINT, signal.default_int_handler)
swallowed = []
sys.unraisablehook = swallowed.append
chance = random.Random(seed)


def gradients(model, sample, at=None):
    with tracing(at):
        loss = chosen_loss(model, sample)
        loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


class Grows(Chosen):
    # What a slice of a list of layers is: a module of its own, made in each forward.
    def forward(self, x, hit):
        return nn.ModuleList([self.experts])[0](x, hit) @ self.head + x


def sample(step):
    generator = random.Random(step)
    return step, generator.sample(range(6), generator.randrange(1, 4))


plain, model = Grows(), Grows()
theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
config = {**PAGES, "backend": backend, "step_aside": False, "draft_share": 0.5}
budget, _ = least_budget(model, optimizer, footprint_of(model) // 3, config)
step = came = tries = lines = 0
with dynoffload.offload(model, optimizer, budget=budget, config=config):
    while came < attempts:
        disturbed = step > 2 and tries < 3
        at = At(chance.randrange(1, int(1.3 * lines)) if disturbed else 0, LIBRARY)
        try:
            ours = gradients(model, sample(step), at)
        except KeyboardInterrupt:
            came, tries = came + 1, tries + 1
            optimizer.zero_grad()
            continue
        lines = max(lines, at.lines)
        assert_same(ours, gradients(plain, sample(step)), f"step {step}, {came} interrupts")
        for one in (optimizer, theirs):
            one.step()
            one.zero_grad()
        step, tries = step + 1, 0
assert_same(optimizer.state_dict(), theirs.state_dict(), "state")
assert_same(list(model.parameters()), list(plain.parameters()), "parameters")
assert_ordinary(model, optimizer)
hooks = [hook for m in model.modules() for hook in (*m._forward_pre_hooks, *m._forward_hooks)]
assert not hooks and not swallowed, (hooks, swallowed)
assert not any(m._compiled_call_impl for m in model.modules())
print(step, came)
"""


@pytest.mark.parametrize("backend", ["pager", "mapped"])
@pytest.mark.parametrize(("seed", "attempts"), [(1, 30), pytest.param(2, 600, marks=SLOW)])
def test_interrupts_all_along(backend: str, seed: int, attempts: int) -> None:
    """Of fused experts whose updates wait, in forwards and backwards that are then made anew: no
    gradient, no parameter and no hook differs; and no signal is swallowed."""
    arguments = [str(Path(__file__).parent), backend, str(seed), str(attempts)]
    done = subprocess.run(
        [sys.executable, "-c", LIFE, *arguments],
        capture_output=True,
        text=True,
        timeout=120 + 2 * attempts,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    steps, came = map(int, done.stdout.split())
    assert came == attempts
    assert steps >= came // 3


def test_a_signal_waits_for_the_outermost_call() -> None:
    """And is passed on once, with the result lost, as when it comes right after the call."""
    done: list[str] = []

    @uninterrupted
    def inner() -> None:
        signal.raise_signal(signal.SIGINT)
        done.append("inner")

    @uninterrupted
    def outer() -> None:
        inner()
        done.append("outer")

    with handled():
        with pytest.raises(KeyboardInterrupt):
            outer()
        assert done == ["inner", "outer"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_handlers_are_put_back_whatever_is_raised_meanwhile() -> None:
    """One signal comes within the call, and another, whose handler raises too, at any line of what
    puts handlers off and admits them."""
    numbers = [signal.SIGINT, signal.SIGUSR1, signal.SIGTERM]
    came: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        came.append(number)
        raise KeyboardInterrupt

    @uninterrupted
    def call() -> None:
        signal.raise_signal(signal.SIGTERM)

    def sends_at(line: int) -> bool:
        """Send a signal at a line; return whether there are so many."""
        at = At(line, interrupts.__file__, number=signal.SIGUSR1)
        came.clear()
        with pytest.raises(KeyboardInterrupt), tracing(at):
            call()
        return at.lines >= line

    with handled(interrupt, *numbers):
        line = 1
        while sends_at(line):
            assert came.count(signal.SIGUSR1) == 1, line
            assert [signal.getsignal(number) for number in numbers] == [interrupt] * 3, line
            line += 1
    assert line > 20


def test_handlers_of_the_users_are_kept() -> None:
    """One that returns, and one that the call itself sets."""
    came: list[int] = []
    with handled(lambda number, frame: came.append(number), signal.SIGTERM):

        @uninterrupted
        def call() -> str:
            signal.raise_signal(signal.SIGTERM)
            assert not came
            return "result"

        assert call() == "result"
        assert came == [signal.SIGTERM]

        @uninterrupted
        def sets() -> None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

        sets()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
