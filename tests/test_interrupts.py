"""Ctrl-C anywhere in a step: what was begun is done, or was not begun.

A signal is sent at lines drawn from all that the library executes in a training step, of a network
that has updates put off, updates made in backward, and slices. After the interrupt it must be in
the state before the step or in that after it, bit for bit, and training goes on as it does plainly.
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

LIFE = r"""
import random, signal, sys
sys.path.insert(0, sys.argv[1])
from exactness import *
from fused_networks import PAGES, Chosen, chosen_loss
from signalled import LIBRARY, At, tracing

backend, attempts, number = sys.argv[2], int(sys.argv[3]), getattr(signal, sys.argv[4])
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
    if len(sys.argv) > 5:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def of(model, optimizer):
    state = copy.deepcopy(optimizer.state_dict()["state"])
    return {"parameters": [p.detach().clone() for p in model.parameters()], "state": state}


plain, model = Grows(), Grows()
theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
config = {**PAGES, "backend": backend, "step_aside": False, "draft_share": 0.5}
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

SLOW = pytest.mark.slow


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
    arguments = [str(Path(__file__).parent), backend, str(attempts), number, *clips]
    done = subprocess.run(
        [sys.executable, "-c", LIFE, *arguments],
        capture_output=True,
        text=True,
        timeout=120 + 2 * attempts,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    in_gradients, in_step, made = map(int, done.stdout.split())
    assert in_gradients > attempts // 4
    assert 0 < made <= in_step


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
