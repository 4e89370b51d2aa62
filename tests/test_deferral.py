"""Updates are deferred, and nobody can tell: whatever is read in between has its new value.

Each test takes one way in which a user reads or writes a parameter, its gradient or its state while
updates wait. What happens before ``step()``, and in loops of other forms, is for the tests of
hazards.
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
from exactness import SMALL_PAGES, small, small_loss, small_samples
from hazards import Side, compared, guarded, hazard, stepwise, trained
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import dynoffload
from dynoffload.errors import BudgetError, StepLostError
from dynoffload.runtime.session import Session

pytestmark = pytest.mark.timeout(120)

SAMPLES = small_samples(40, seed=3)


def pending(session: Session) -> int:
    """Return how many updates wait."""
    assert session._paging is not None
    assert session._paging.updates is not None
    return len(session._paging.updates.pending.by_slot)


def train_step(side: Side, model: nn.Module, optimizer: Optimizer, number: int, **how: Any) -> None:
    """Make a training step without a look at anything."""
    torch.manual_seed(number)
    loss = small_loss(model, SAMPLES[number])
    loss.backward()
    optimizer.step()
    side.see("loss", loss)
    if how.get("zero", True):
        optimizer.zero_grad()


def while_updates_wait(
    backend: str, do: Callable[[Side, Any, Any], None], *, zero: bool = True
) -> None:
    """Train, and ``do`` something after some of the steps, while updates wait."""

    def program(side: Side) -> None:
        model = small()
        optimizer = AdamW(model.parameters(), lr=1e-2, fused=True)
        with side.offload(model, optimizer, share=0.33) as session:
            for number in range(6):
                train_step(side, model, optimizer, number, zero=zero)
                if 2 <= number < 4:
                    assert session is None or pending(session) > 2, "this shows nothing"
                    do(side, model, optimizer)
                    optimizer.zero_grad()

    hazard(backend, program)


@pytest.mark.parametrize("defer", ["auto", "never"])
@compared(guarded)
def test_updates_wait_after_the_step(side: Side, defer: str) -> None:
    """Most parameters have not been updated yet, until somebody flushes them."""
    model = small()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    with side.offload(model, optimizer, defer_updates=defer) as session:
        for number in range(4):
            train_step(side, model, optimizer, number)
            if session is not None:
                assert (pending(session) > 0) == (defer == "auto" and number > 0)
                session.flush()
                assert not pending(session)


def saved(value: Any) -> bytes:
    """Return what `torch.save` makes of a value."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


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
    "a state tensor": lambda m, o: {k: v.clone() for k, v in o.state[m.embedding.weight].items()},
    "foreach norm": lambda m, o: torch.stack(torch._foreach_norm(list(m.parameters()))),
    "functional call": lambda m, o: torch.func.functional_call(
        m.head, dict(m.head.named_parameters()), torch.ones(2, 32)
    ).detach(),
    # These hold the interpreter's lock, which the update needs: they must let go of it.
    "bytes": lambda m, o: [p.detach().numpy().tobytes() for p in m.parameters()],
    "pickle of the model": lambda m, o: dict(pickle.loads(pickle.dumps(m)).state_dict()),
    "repr": lambda m, o: repr(m.embedding.weight),
    "torch.save": lambda m, o: saved((m.state_dict(), o.state_dict())),
    "evaluation in inference mode": lambda m, o: score(m),
}


@guarded
@pytest.mark.parametrize("read", READS)
def test_what_is_read_has_its_new_value(backend: str, read: str) -> None:
    """Accesses outside of modules wait for the update of what they touch, in each step anew."""
    while_updates_wait(backend, lambda side, m, o: side.see(read, READS[read](m, o)))


@compared(guarded)
def test_a_thread_that_reads_while_another_trains(side: Side) -> None:
    """Under the interpreter's lock."""
    model = small()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            for parameter in model.parameters():
                assert parameter.detach().numpy().tobytes()

    with side.offload(model, optimizer):
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            for number in range(10):
                train_step(side, model, optimizer, number)
        finally:
            stop.set()
            watcher.join(100)
        assert not watcher.is_alive()


GRADIENTS: dict[str, Callable[[Any], Any]] = {
    "read under the interpreter's lock": lambda gradient: gradient.numpy().tobytes(),
    "zeroed": lambda gradient: gradient.zero_(),
    "left": lambda gradient: None,
}


@guarded
@pytest.mark.parametrize("use", GRADIENTS)
def test_a_gradient_after_the_step(backend: str, use: str) -> None:
    """An update that waits consumes the gradient of its step, whatever becomes of it."""

    def do(side: Side, model: nn.Module, optimizer: Optimizer) -> None:
        used = [None if p.grad is None else GRADIENTS[use](p.grad) for p in model.parameters()]
        side.see(use, used)

    while_updates_wait(backend, do, zero=False)


@torch.no_grad()
def clamp(model: nn.Module, optimizer: Optimizer) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.05, 0.05)
        parameter.data.lerp_(torch.ones_like(parameter), 0.001)


def replace_unread(model: nn.Module, optimizer: Optimizer) -> None:
    for parameter in model.parameters():
        parameter.data = torch.full_like(parameter, 0.01)


def change_state(model: nn.Module, optimizer: Optimizer) -> None:
    for number, state in enumerate(optimizer.state.values()):
        if number % 2:
            state["exp_avg"] = torch.zeros_like(state["exp_avg"])
        else:
            state["exp_avg_sq"].mul_(0.5)


def clear_state(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.state.clear()


@pytest.mark.parametrize(
    "write", [clamp, replace_unread, change_state, clear_state], ids=lambda w: w.__name__
)
@stepwise(guarded, small, steps=6, share=0.33, budgeted=False)
def test_what_is_written_comes_after_the_update(
    side: Side,
    model: nn.Module,
    optimizer: Optimizer,
    step: int,
    write: Callable[[nn.Module, Optimizer], None],
) -> None:
    """What the user puts in the place of a tensor is not reached by the update of the old one."""
    train_step(side, model, optimizer, step)
    if step % 2:
        write(model, optimizer)
    if step % 4 == 1:
        side.see("norms", [p.norm() for p in model.parameters()])


@stepwise(guarded, small, steps=6)
def test_a_parameter_that_is_not_used_waits_for_many_steps(
    side: Side, model: Any, optimizer: Any, step: int
) -> None:
    """Its update is made with the learning rate of its own step, however late."""
    train_step(side, model, optimizer, step)
    for layer in model.layers:
        # Whoever calls them by turns leaves the others waiting.
        layer.experts.requires_grad_(not 1 <= step < 4)
    optimizer.param_groups[0]["lr"] *= 0.5


@guarded
def test_an_update_behind_the_back_leaves_the_optimizer_alone(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another thread's read has an update made, the loop sees its own groups and state."""

    def program(side: Side) -> None:
        model = small()
        optimizer = AdamW(model.parameters(), lr=1e-2)
        groups = [list(group["params"]) for group in optimizer.param_groups]
        with side.offload(model, optimizer) as session:
            train_step(side, model, optimizer, 0)
            train_step(side, model, optimizer, 1, zero=False)
            if session is not None:
                look(session, model, optimizer, groups)
            optimizer.zero_grad()
            for number in range(2, 6):
                train_step(side, model, optimizer, number)

    def look(session: Session, model: nn.Module, optimizer: Optimizer, groups: Any) -> None:
        begun, go_on = threading.Event(), threading.Event()
        assert session._paging is not None
        assert session._paging.updates is not None
        runner = session._paging.updates.pending
        plain = runner.step

        def slow(shadow: Optimizer) -> None:
            if threading.current_thread().name == "dynoffload-guard":
                begun.set()
                assert go_on.wait(100)
            plain(shadow)

        with monkeypatch.context() as patch:
            patch.setattr(runner, "step", slow)
            watcher = threading.Thread(target=lambda: model.embedding.weight.norm())  # type: ignore[union-attr, operator]
            watcher.start()
            assert begun.wait(100)
            assert [group["params"] for group in optimizer.param_groups] == groups
            optimizer.zero_grad()  # must reach the model's gradients, not the update's
            assert all(parameter.grad is None for parameter in model.parameters())
            waiting = threading.Thread(target=optimizer.state_dict)
            waiting.start()
            waiting.join(0.2)
            assert waiting.is_alive(), "the state was given out before its update was made"
            go_on.set()
            for thread in (watcher, waiting):
                thread.join(100)
                assert not thread.is_alive()

    hazard(backend, program)


class Prompt(nn.Module):
    """A parameter that is only added, beside what is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.linspace(0, 1, 2048).view(64, 32))
        self.frozen = nn.Linear(32, 32).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x + self.prompt).square().mean()


@guarded
def test_a_gradient_without_a_forward_of_its_module(backend: str) -> None:
    """The second backward comes while the first one's update waits."""

    def each(side: Side, model: nn.Module, optimizer: Optimizer, step: int) -> None:
        losses = [model(torch.full((64, 32), float(i + step))) for i in range(3)]
        for loss in losses:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        side.see("losses", losses)

    def sgd(parameters: Any) -> Optimizer:
        return SGD([next(iter(parameters))], lr=0.5, momentum=0.9)

    hazard(backend, trained(Prompt, each, optimizer=sgd, share=1.5), moves=False)


class Two(nn.Module):
    """Two layers, of which the second runs when it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(64, 64, bias=False) for _ in range(2))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = self.a(x)
        return (self.b(x) if both else x).square().sum()


@stepwise(guarded, Two, steps=3, share=3, moves=False)
def test_memory_of_a_parameter_whose_update_waits_is_given_to_another(
    model: Any, optimizer: Any, step: int
) -> None:
    """The step that updates it at once must not wait for the update that it holds up."""
    model(torch.ones(4, 64), step < 2).backward()
    if step == 2:
        model.a.weight.data = model.b.weight.data
    optimizer.step()
    optimizer.zero_grad()


# Updates that fail behind the back


class Reading(nn.Module):
    """Reads a weight of a module that it does not call, so nobody announces the use."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.read.weight


@contextmanager
def reading(backend: str) -> Iterator[tuple[Any, nn.Module, Optimizer]]:
    """Yield a block in which a module's weight is read behind the back, and its third gradient."""
    model = Reading()
    optimizer = AdamW(model.parameters(), lr=1e-2, foreach=False)
    config = {**SMALL_PAGES, "backend": backend, "step_aside": False}
    with dynoffload.offload(model, optimizer, budget="128KiB", config=config) as session:
        for step in range(3):
            model(torch.ones(2, 64)).sum().backward()
            if step < 2:
                optimizer.step()
                optimizer.zero_grad()
        yield session, model, optimizer


@guarded
@pytest.mark.parametrize("trains", [True, False])
def test_a_forward_on_a_value_that_lacks_its_update_raises(backend: str, trains: bool) -> None:
    """The update fails behind its back; it ends on the old value, and must not return it."""
    with reading(backend) as (_, model, optimizer):
        optimizer.param_groups[0]["eps"] = "no number"
        optimizer.step()
        told = "a step, an update that it had put off, or a load was cut off.* is lost"
        with torch.set_grad_enabled(trains), pytest.raises(StepLostError, match=told):
            model(torch.ones(2, 64))


@guarded
def test_an_update_that_cannot_begin_is_lost_where_somebody_may_write(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sleeps on the access goes on, and may write: made later, it would be of that."""

    def show(regions: Any) -> Any:
        raise BudgetError("no room")

    with reading(backend) as (session, model, optimizer):
        weight: Any = model.read.weight  # type: ignore[union-attr]
        old = weight.detach().clone()
        optimizer.step()
        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(session._paging.device, "show", show)
            weight.mul_(2)
        assert torch.equal(weight, 2 * old)
        with pytest.raises(StepLostError) as caught:
            model(torch.ones(2, 64))
        assert isinstance(caught.value.__cause__, BudgetError)
