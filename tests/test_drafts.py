"""Updates made in backward count if nothing has changed by ``step()``, else leave no trace."""

from __future__ import annotations

import errno
import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from exactness import Twin, assert_same, footprint_of, needs_pager, small, small_loss, small_samples
from fused_networks import paging_of
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from dynoffload.errors import SpillError, StepLostError
from dynoffload.memory.pager import Pager
from dynoffload.runtime.updates.runner import UpdateRunner
from dynoffload.runtime.updates.speculative import SpeculativeUpdates

pytestmark = [needs_pager, pytest.mark.timeout(60)]

SAMPLES = small_samples(40, seed=5)
Between = Callable[[nn.Module, Optimizer, int], None]


def nothing(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Do what most loops do between backward and step."""


class Tally:
    """How many drafts were made, and how many of them counted or were dropped."""

    made = taken = dropped = 0


@contextmanager
def counted(patch: pytest.MonkeyPatch) -> Iterator[Tally]:
    """Count the drafts made inside."""
    tally = Tally()
    make, take, drop = SpeculativeUpdates.make, SpeculativeUpdates.take, SpeculativeUpdates._drop

    def counting_make(self: SpeculativeUpdates, slot: Any) -> None:
        before = self.has(slot)
        make(self, slot)
        tally.made += self.has(slot) - before

    def counting_take(self: SpeculativeUpdates, slot: Any, group: Any) -> bool:
        taken = take(self, slot, group)
        tally.taken += taken
        return taken

    def counting_drop(self: SpeculativeUpdates, draft: Any) -> None:
        tally.dropped += 1
        drop(self, draft)

    with patch.context() as inner:
        inner.setattr(SpeculativeUpdates, "make", counting_make)
        inner.setattr(SpeculativeUpdates, "take", counting_take)
        inner.setattr(SpeculativeUpdates, "_drop", counting_drop)
        yield tally


def train(
    twin: Twin,
    between: Between = nothing,
    steps: int = 20,
    share: float = 1.0,
    budget: float = 0.4,
) -> None:
    """Train both copies, doing ``between`` after each backward, and compare everything."""
    nbytes = int(footprint_of(twin.model) * budget)
    config = {"policy": "repeat", "draft_share": share}
    with twin.paged(nbytes, config=config):
        for step in range(steps):
            losses = []
            for model, optimizer in ((twin.model, twin.optimizer), (twin.reference, twin.its)):
                torch.manual_seed(step)
                loss = small_loss(model, SAMPLES[step % len(SAMPLES)])
                loss.backward()
                between(model, optimizer, step)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            assert_same(losses[0], losses[1], f"loss {step}")
    twin.assert_same()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: AdamW(p, lr=1e-2),
        lambda p: AdamW(p, lr=1e-2, fused=True),
        lambda p: Adam(p, lr=1e-2, weight_decay=0.1, foreach=True, maximize=True),
        lambda p: SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1),
    ],
    ids="adamw fused adam sgd".split(),
)
def test_drafts_count_where_nothing_changes(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with counted(monkeypatch) as tally:
        train(Twin(small(), make), steps=12)
    assert tally.taken > 20
    assert tally.taken == tally.made
    assert tally.dropped == 0


def test_an_optimizer_that_writes_gradients_gets_no_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient that is left after ``step()`` is the plain one too."""
    twin = Twin(small(), lambda p: SGD(p, lr=1e-2, momentum=0.9, nesterov=True, foreach=True))
    left: list[list[torch.Tensor]] = [[], []]
    with counted(monkeypatch) as tally, twin.paged(footprint_of(twin.model) // 2):
        for step in range(8):
            pairs = ((twin.model, twin.optimizer), (twin.reference, twin.its))
            for number, (model, optimizer) in enumerate(pairs):
                torch.manual_seed(step)
                small_loss(model, SAMPLES[step]).backward()
                optimizer.step()
                grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
                left[number] += grads
                optimizer.zero_grad()
    assert_same(left[0], left[1], "gradients after step()")
    twin.assert_same()
    assert tally.made == tally.taken == 0


def clip(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def write_gradients_unseen(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.numpy()[...] *= 0.5


def drop_some_gradients(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    for number, parameter in enumerate(model.parameters()):
        if number % 3 == step % 3:
            parameter.grad = None


def write_parameters_unseen(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    for parameter in model.parameters():
        parameter.data.numpy()[...] *= 0.999


def change_rate(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * (1 + step % 3)


def write_state(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.9)
        state["step"].add_(1)


def replace_state(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    for state in optimizer.state.values():
        state["exp_avg_sq"] = state["exp_avg_sq"] * 2


def put_state_elsewhere(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].data = torch.zeros_like(state["exp_avg"])


def write_counts_unseen(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    for number, state in enumerate(optimizer.state.values()):
        if number % 2:
            state["step"].data.fill_(1)
        else:
            state["step"].numpy()[...] = 1


def transpose(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    for parameter in model.parameters():
        if parameter.dim() == 2 and parameter.shape[0] == parameter.shape[1]:
            parameter.data = parameter.data.t()


def evaluate(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    with torch.no_grad():
        small_loss(model, SAMPLES[-1])


def backward_again(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    small_loss(model, SAMPLES[-2]).backward()


def skip_step(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    if step % 2:
        optimizer.zero_grad()


BETWEEN = [
    clip,
    write_gradients_unseen,
    drop_some_gradients,
    write_parameters_unseen,
    change_rate,
    write_state,
    replace_state,
    put_state_elsewhere,
    write_counts_unseen,
    transpose,
    evaluate,
    backward_again,
    skip_step,
]


@pytest.mark.parametrize("between", BETWEEN, ids=lambda f: f.__name__)
def test_whatever_happens_before_step(between: Between, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third step something is done, so that drafts have been taken up again by then."""

    def sometimes(model: nn.Module, optimizer: Optimizer, step: int) -> None:
        if step % 3 == 2:
            between(model, optimizer, step)

    with counted(monkeypatch) as tally:
        train(Twin(small(), lambda p: AdamW(p, lr=1e-2)), sometimes, steps=12)
    assert tally.taken > 0
    assert tally.made == tally.taken + tally.dropped
    if between not in (evaluate, drop_some_gradients):
        assert tally.dropped > 0, "nothing was in vain: this would show nothing"


def test_loops_that_always_clip_do_without_more_and_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And without a word: to clip is no mistake."""
    caplog.set_level(logging.INFO, logger="dynoffload")
    made: list[int] = []
    with counted(monkeypatch) as tally:

        def count(model: nn.Module, optimizer: Optimizer, step: int) -> None:
            clip(model, optimizer, step)
            if not made or len(made) <= step:
                made.append(tally.made)

        train(Twin(small(), lambda p: AdamW(p, lr=1e-2)), count, steps=40)
    steps = [n for n in range(1, len(made)) if made[n] > made[n - 1]]
    gaps = [after - before for before, after in itertools.pairwise(steps)]
    assert tally.taken == 0
    assert not [line for line in caplog.messages if "backward" in line]
    assert len(steps) >= 2
    assert all(gap >= 2 ** (number + 1) for number, gap in enumerate(gaps)), gaps


def test_a_closed_block_leaves_no_draft_behind() -> None:
    """A backward whose ``step()`` comes after the block makes the plain update."""
    twin = Twin(small(), lambda p: AdamW(p, lr=1e-2))
    with twin.paged(footprint_of(twin.model) // 2, config={"draft_share": 1.0}):
        for step in range(5):
            for model, optimizer in ((twin.model, twin.optimizer), (twin.reference, twin.its)):
                torch.manual_seed(step)
                small_loss(model, SAMPLES[step]).backward()
                if step < 4:
                    optimizer.step()
                    optimizer.zero_grad()
    twin.optimizer.step()
    twin.its.step()
    twin.assert_same()


def interrupted_run(
    patch: pytest.MonkeyPatch, name: str, at: int, *, loses: bool = False
) -> tuple[Twin, list[tuple[int, str]]]:
    """Train under drafts; the ``at``-th call of the pager's ``name`` in step 5 ends in Ctrl-C."""
    twin = Twin(small(), lambda p: AdamW(p, lr=1e-2))
    real, calls, caught = getattr(Pager, name), 0, []

    def cut(self: Pager, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        answer = real(self, *args, **kwargs)
        calls += 1
        if calls == at:
            raise KeyboardInterrupt
        return answer

    budget = footprint_of(twin.model) // 2
    with twin.paged(budget, loses=loses, config={"draft_share": 1.0}):
        for step in range(8):
            with patch.context() as inner:
                if step == 5:
                    inner.setattr(Pager, name, cut)
                torch.manual_seed(step)
                try:
                    small_loss(twin.model, SAMPLES[step]).backward()
                    twin.optimizer.step()
                except KeyboardInterrupt:
                    caught.append((step, "interrupt"))
                except StepLostError as error:
                    caught.append((step, "lost" if "the step is lost" in str(error) else "?"))
            twin.optimizer.zero_grad()
    return twin, caught


def test_a_step_cut_off_between_drafts_is_declared_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    _, caught = interrupted_run(monkeypatch, "exchange", 2, loses=True)
    assert caught == [(5, "interrupt"), (6, "lost"), (7, "lost")]


@pytest.mark.parametrize("name", ["lend", "withdraw"])
def test_a_backward_cut_off_while_drafting_leaves_no_trace(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin, caught = interrupted_run(monkeypatch, name, 2)
    assert caught == [(5, "interrupt")]
    for step in (0, 1, 2, 3, 4, 6, 7):
        torch.manual_seed(step)
        small_loss(twin.reference, SAMPLES[step]).backward()
        twin.its.step()
        twin.its.zero_grad()
    twin.assert_same()


def test_no_place_for_twins_costs_nothing_but_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: Pager, region: int) -> int:
        raise SpillError(28, "no place for a twin")

    monkeypatch.setattr(Pager, "twin", full)
    with caplog.at_level("WARNING"):
        train(Twin(small(), lambda p: AdamW(p, lr=1e-2)), steps=8)
    assert caplog.text.count("no more updates are made in backward") == 1


def test_memory_of_a_parameter_whose_update_waits_can_be_given_to_another() -> None:
    """The step that updates it at once must not wait for the update that it holds up."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(64, 64, bias=False)
            self.b = nn.Linear(64, 64, bias=False)

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            x = self.a(x)
            return (self.b(x) if both else x).square().sum()

    torch.manual_seed(0)
    twin = Twin(Two(), lambda p: AdamW(p, lr=1e-2))
    config = {"min_paged_bytes": 4096, "draft_share": 0.0}
    with twin.paged(400 * 1024, config=config):
        for both in (True, True, False):
            for model, optimizer in ((twin.model, twin.optimizer), (twin.reference, twin.its)):
                model(torch.ones(4, 64), both).backward()
                if not both:
                    model.a.weight.data = model.b.weight.data  # type: ignore[union-attr]
                optimizer.step()
                optimizer.zero_grad()
    assert_same(twin.model.a.weight.detach(), twin.reference.a.weight.detach(), "a")  # type: ignore
    assert_same(twin.model.b.weight.detach(), twin.reference.b.weight.detach(), "b")  # type: ignore


@pytest.mark.parametrize(
    ("owner", "name", "step"),
    [(Pager, "acquire", 5), (UpdateRunner, "run_on", 5)],
)
def test_a_draft_that_fails_leaves_its_twins_empty(
    owner: type, name: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State may be lent by then, and can be lent again only if its twin has nothing."""
    twin = Twin(small(), lambda p: AdamW(p, lr=1e-2))
    make, real = SpeculativeUpdates.make, getattr(owner, name)
    twins: set[int] = set()
    fails = drafting = False
    hits = 0

    def making(self: SpeculativeUpdates, slot: Any) -> None:
        nonlocal drafting
        drafting, before = True, set(self._drafts)
        twins.update(self._chosen.get(slot, {}).values())
        try:
            make(self, slot)
        finally:
            drafting = False
        if before != set(self._drafts):
            twins.difference_update(self._chosen[slot].values())

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal fails, hits
        if fails and drafting:
            fails, hits = False, hits + 1
            raise SpillError(errno.EIO, "the disk fails")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(SpeculativeUpdates, "make", making)
    monkeypatch.setattr(owner, name, failing)
    config = {"draft_share": 1.0, "policy": "repeat"}
    with twin.paged(footprint_of(twin.model), config=config) as session:
        for number in range(8):
            fails = number == step
            for model, optimizer in ((twin.model, twin.optimizer), (twin.reference, twin.its)):
                torch.manual_seed(number)
                try:
                    small_loss(model, SAMPLES[0]).backward()
                except SpillError:
                    assert not twins & set(paging_of(session).device.resident())
                    optimizer.zero_grad()
                    torch.manual_seed(number)
                    small_loss(model, SAMPLES[0]).backward()
                optimizer.step()
                optimizer.zero_grad()
            twins.clear()
    assert hits == 1
    twin.assert_same()
