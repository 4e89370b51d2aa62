"""Updates are deferred, and nobody can tell: whatever is read in between has its new value.

Each test takes one way in which a user reads or writes a parameter, its gradient or its state while
updates wait, does it on a paged model and on a plain copy, and compares bits. What happens before
``step()``, and in loops of other forms, is for the tests of hazards.
"""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from exactness import (
    Twin,
    assert_same,
    footprint_of,
    needs_pager,
    small,
    small_loss,
    small_samples,
)
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from dynoffload.runtime.session import Session

pytestmark = [needs_pager, pytest.mark.timeout(25)]

SAMPLES = small_samples(40, seed=3)


def pending(session: Session) -> int:
    """Return how many updates wait."""
    assert session._paging is not None
    assert session._paging.updates is not None
    return len(session._paging.updates.pending.by_slot)


def backward(model: nn.Module, step: int) -> Tensor:
    """Run forward and backward on one sample; return the loss."""
    loss = small_loss(model, SAMPLES[step])
    loss.backward()
    return loss.detach()


class Pair:
    """The twins in the middle of training: the first inside a session, updates pending."""

    def __init__(self, twin: Twin, session: Session) -> None:
        self.twin, self.session = twin, session
        self.step_number = 0

    def step(self, *, zero: bool = True, **how: Any) -> None:
        """Make one training step in both."""
        losses = []
        for model, optimizer in self.both():
            torch.manual_seed(self.step_number)
            losses.append(backward(model, self.step_number))
            optimizer.step(**how)
            if zero:
                optimizer.zero_grad()
        assert_same(losses[0], losses[1], f"loss {self.step_number}")
        self.step_number += 1

    def both(self) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
        """Return (model, optimizer) of the paged and of the plain one."""
        return [(self.twin.model, self.twin.optimizer), (self.twin.reference, self.twin.its)]

    def same(
        self, do: Callable[[Any, Any], Any], what: str = "result", *, waiting: bool = True
    ) -> None:
        """Do something to both, while updates are ``waiting``, and compare what it returns."""
        assert pending(self.session) or not waiting, "nothing is pending: this would show nothing"
        actual, expected = (do(model, optimizer) for model, optimizer in self.both())
        assert_same(actual, expected, what)


@contextmanager
def training(
    make: Callable[..., torch.optim.Optimizer] = AdamW,
    model: nn.Module | None = None,
    steps: int = 3,
    zero: bool = True,
    lr: float = 1e-2,
    **options: Any,
) -> Iterator[Pair]:
    """Yield a pair after some steps; at the end go on training and compare everything."""
    twin = Twin(model or small(), lambda p: make(p, lr=lr, **options))
    with twin.paged(footprint_of(twin.model) // 3) as session:
        pair = Pair(twin, session)
        for _ in range(steps):
            pair.step(zero=zero)
        yield pair
        for _ in range(3):
            pair.step()
    twin.assert_same()


def test_updates_wait_after_the_step() -> None:
    """The step is over and most parameters have not been updated yet."""
    with training(fused=True) as pair:
        paged = [p for p in pair.twin.model.parameters() if p.numel() * 4 >= 1024]
        assert pending(pair.session) > len(paged) // 4
        pair.session.flush()
        assert not pending(pair.session)
        pair.twin.assert_same()


def test_never_deferring_leaves_nothing_waiting() -> None:
    """``defer_updates="never"`` makes every update inside the step."""
    twin = Twin(small(), lambda p: AdamW(p, lr=1e-2))
    config = {"defer_updates": "never"}
    with twin.paged(footprint_of(twin.model) // 3, config=config) as session:
        pair = Pair(twin, session)
        for _ in range(4):
            pair.step()
            assert not pending(session)
    twin.assert_same()


# Reading


def score(model: nn.Module) -> float:
    """Return the loss of a pass that is not trained on."""
    model.eval()
    with torch.inference_mode():
        loss = small_loss(model, SAMPLES[30]).item()
    model.train()
    return loss


READS: dict[str, Callable[[Any, Any], Any]] = {
    "norm of each parameter": lambda m, o: [p.norm() for p in m.parameters()],
    "an element": lambda m, o: m.embedding.weight[3, 4].item(),
    "model.state_dict": lambda m, o: {k: v.clone() for k, v in m.state_dict().items()},
    "optimizer.state_dict": lambda m, o: copy.deepcopy(o.state_dict()),
    "a state tensor": lambda m, o: {
        key: value.clone() for key, value in o.state[m.embedding.weight].items()
    },
    "foreach norm": lambda m, o: torch.stack(torch._foreach_norm(list(m.parameters()))),
    "functional call": lambda m, o: torch.func.functional_call(
        m.head, dict(m.head.named_parameters()), torch.ones(2, 32)
    ).detach(),
    # These hold the interpreter's lock, which the update needs: they must let go of it.
    "bytes": lambda m, o: [p.detach().numpy().tobytes() for p in m.parameters()],
    "pickle of the model": lambda m, o: dict(pickle.loads(pickle.dumps(m)).state_dict()),
    "repr": lambda m, o: repr(m.embedding.weight),
    "torch.save": lambda m, o: (
        torch.save((m.state_dict(), o.state_dict()), file := io.BytesIO()) or file.getvalue()
    ),
    "evaluation in inference mode": lambda m, o: score(m),
}


@pytest.mark.parametrize("read", READS)
def test_what_is_read_has_its_new_value(read: str) -> None:
    """Accesses outside of modules wait for the update of what they touch, in each step anew."""
    with training() as pair:
        for _ in range(2):
            pair.same(READS[read], read)
            pair.step()


def test_a_thread_that_reads_while_another_trains() -> None:
    """Under the interpreter's lock."""
    twin = Twin(small(), lambda p: AdamW(p, lr=1e-2))
    stop = threading.Event()
    reads: list[Any] = []

    def watch() -> None:
        while not stop.is_set():
            reads.extend(p.detach().numpy().tobytes() for p in twin.model.parameters())

    with twin.paged(footprint_of(twin.model) // 3) as session:
        pair = Pair(twin, session)
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            for _ in range(10):
                pair.step()
        finally:
            stop.set()
            watcher.join(100)
        assert not watcher.is_alive()
    twin.assert_same()
    assert reads


# Between step() and zero_grad()


GRADIENTS: dict[str, Callable[[Any], Any]] = {
    "read under the interpreter's lock": lambda gradient: gradient.numpy().tobytes(),
    "zeroed": lambda gradient: gradient.zero_(),
    "left": lambda gradient: None,
}


@pytest.mark.parametrize("use", GRADIENTS)
def test_a_gradient_after_the_step(use: str) -> None:
    """An update that waits consumes the gradient of its step, whatever becomes of it."""

    def used(model: nn.Module, optimizer: Any) -> list[Any]:
        return [None if p.grad is None else GRADIENTS[use](p.grad) for p in model.parameters()]

    with training() as pair:
        for _ in range(3):
            pair.step(zero=False)
            pair.same(used, use)


# Writing


@torch.no_grad()
def clamp(model: nn.Module, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.05, 0.05)
        parameter.data.lerp_(torch.ones_like(parameter), 0.001)


def replace_unread(model: nn.Module, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.data = torch.full_like(parameter, 0.01)


def replace_state(model: nn.Module, optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])


def write_state(model: nn.Module, optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["exp_avg_sq"].mul_(0.5)


def clear_state(model: nn.Module, optimizer: Any) -> None:
    optimizer.state.clear()


WRITES = [clamp, replace_unread, replace_state, write_state, clear_state]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_what_is_written_comes_after_the_update(write: Callable[[Any, Any], None]) -> None:
    """What the user puts in the place of a tensor is not reached by the update of the old one."""
    with training() as pair:
        for _ in range(2):
            pair.same(write)
            pair.step()
            pair.same(lambda m, o: [p.norm() for p in m.parameters()], waiting=False)
            pair.step()


# Steps


def test_a_parameter_that_is_not_used_waits_for_many_steps() -> None:
    """Its update is made with the learning rate of its own step, however late."""
    model = small()
    with training(model=model) as pair:
        pair.step()
        for m, _ in pair.both():  # whoever calls these experts by turns leaves the others waiting
            for layer in m.layers:
                for expert in layer.experts:
                    expert.requires_grad_(False)
        for _ in range(3):
            for _, optimizer in pair.both():
                for group in optimizer.param_groups:
                    group["lr"] *= 0.5
            pair.step()
        for m, _ in pair.both():
            m.requires_grad_(True)


def test_an_update_behind_the_back_leaves_the_optimizer_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While another thread's read has an update made, the loop sees its own groups and state."""
    twin = Twin(small(), lambda p: AdamW(p, lr=1e-2))
    groups = [list(group["params"]) for group in twin.optimizer.param_groups]
    begun, go_on = threading.Event(), threading.Event()
    with twin.paged(footprint_of(twin.model) // 3) as session:
        pair = Pair(twin, session)
        pair.step()
        pair.step(zero=False)
        assert session._paging is not None
        assert session._paging.updates is not None
        updates = session._paging.updates
        step = updates.runner.step

        def slow(optimizer: Any) -> None:
            if threading.current_thread().name == "dynoffload-guard":
                begun.set()
                assert go_on.wait(100)
            step(optimizer)

        with monkeypatch.context() as patch:
            patch.setattr(updates.runner, "step", slow)
            watcher = threading.Thread(target=lambda: twin.model.embedding.weight.norm())
            watcher.start()
            assert begun.wait(100)
            assert [group["params"] for group in twin.optimizer.param_groups] == groups
            for _, optimizer in pair.both():
                optimizer.zero_grad()  # must reach the model's gradients, not the update's
            assert all(parameter.grad is None for parameter in twin.model.parameters())
            waiting = threading.Thread(target=lambda: twin.optimizer.state_dict())
            waiting.start()
            waiting.join(0.2)
            assert waiting.is_alive(), "the state was given out before its update was made"
            go_on.set()
            watcher.join(100)
            waiting.join(100)
            assert not watcher.is_alive()
            assert not waiting.is_alive()
        for _ in range(5):
            pair.step()
    twin.assert_same()


# Unusual shapes of a step


def test_a_gradient_without_a_forward_of_its_module() -> None:
    """A prompt that is only added: the second backward comes while its first update is pending."""

    class Prompt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prompt = nn.Parameter(torch.linspace(0, 1, 2048).view(64, 32))
            self.frozen = nn.Linear(32, 32).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(x + self.prompt).square().mean()

    torch.manual_seed(0)
    twin = Twin(Prompt(), lambda p: SGD([q for q in p if q.requires_grad], lr=0.5, momentum=0.9))
    with twin.paged(128 * 1024):
        for step in range(4):
            for model, optimizer in ((twin.model, twin.optimizer), (twin.reference, twin.its)):
                losses = [model(torch.full((64, 32), float(i + step))) for i in range(3)]
                for loss in losses:
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
    twin.assert_same()
