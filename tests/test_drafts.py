"""Updates made in backward count if nothing has changed by ``step()``, else leave no trace."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import Twin, footprint_of, needs_pager, small, small_loss, small_samples
from hazards import Side, hazard, trained
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from dynoffload.errors import SpillError, StepLostError
from dynoffload.memory.pager import Pager
from dynoffload.runtime.updates.pending import PendingUpdates
from dynoffload.runtime.updates.speculative import SpeculativeUpdates

pytestmark = [needs_pager, pytest.mark.timeout(60)]

SAMPLES = small_samples(40, seed=5)
Between = Callable[[nn.Module, Optimizer, int], Any]


def nothing(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Do what most loops do between backward and step."""


class Tally:
    """How many drafts were made, and how many of them counted or were dropped."""

    made = taken = dropped = 0


@pytest.fixture
def tally(monkeypatch: pytest.MonkeyPatch) -> Tally:
    """Count the drafts of a test."""
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

    monkeypatch.setattr(SpeculativeUpdates, "make", counting_make)
    monkeypatch.setattr(SpeculativeUpdates, "take", counting_take)
    monkeypatch.setattr(SpeculativeUpdates, "_drop", counting_drop)
    return tally


def adamw(parameters: Any) -> Optimizer:
    """Return an optimizer of which every update can be drafted."""
    return AdamW(parameters, lr=1e-2)


def train(
    make: Any = adamw, between: Between = nothing, after: Between = nothing, steps: int = 12
) -> None:
    """Train two copies, doing something after each backward and step, and compare everything."""

    def program(side: Side) -> None:
        model = small()
        optimizer = make(model.parameters())
        with side.offload(model, optimizer, share=0.4, draft_share=1.0):
            for step in range(steps):
                torch.manual_seed(step)
                loss = small_loss(model, SAMPLES[step % len(SAMPLES)])
                loss.backward()
                between(model, optimizer, step)
                optimizer.step()
                side.see("after the step", after(model, optimizer, step))
                optimizer.zero_grad()
                side.see("loss", loss)

    hazard("pager", program, budgeted=between is nothing)


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
def test_drafts_count_where_nothing_changes(make: Any, tally: Tally) -> None:
    train(make)
    assert tally.taken > 20
    assert tally.taken == tally.made
    assert tally.dropped == 0


def test_an_optimizer_that_writes_gradients_gets_no_draft(tally: Tally) -> None:
    """The gradient that is left after ``step()`` is the plain one too."""
    train(
        lambda p: SGD(p, lr=1e-2, momentum=0.9, nesterov=True, foreach=True),
        after=lambda model, *_: [p.grad for p in model.parameters()],
        steps=8,
    )
    assert tally.made == tally.taken == 0


def clip(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def write_unseen(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    for parameter in model.parameters():
        parameter.data.numpy()[...] *= 0.999


def write_gradients_unseen(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.numpy()[...] *= 0.5


def drop_some_gradients(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    for parameter in list(model.parameters())[step % 3 :: 3]:
        parameter.grad = None


def change_rate(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    optimizer.param_groups[0]["lr"] = 1e-3 * (1 + step % 3)


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
    optimizer.zero_grad()


BETWEEN = [
    *(clip, write_gradients_unseen, drop_some_gradients, write_unseen, change_rate, write_state),
    *(replace_state, put_state_elsewhere, write_counts_unseen, transpose, evaluate),
    *(backward_again, skip_step),
]


@pytest.mark.parametrize("between", BETWEEN, ids=lambda f: f.__name__)
def test_whatever_happens_before_step(between: Between, tally: Tally) -> None:
    """Every third step something is done, so that drafts have been taken up again by then."""

    def sometimes(model: nn.Module, optimizer: Optimizer, step: int) -> None:
        if step % 3 == 2:
            between(model, optimizer, step)

    train(between=sometimes)
    assert tally.taken > 0
    assert tally.made == tally.taken + tally.dropped
    if between not in (evaluate, drop_some_gradients):
        assert tally.dropped > 0, "nothing was in vain: this would show nothing"


def test_loops_that_always_clip_do_without_more_and_more(
    tally: Tally, caplog: pytest.LogCaptureFixture
) -> None:
    """And without a word: to clip is no mistake."""
    caplog.set_level(logging.INFO, logger="dynoffload")
    made: list[int] = []

    def count(model: nn.Module, optimizer: Optimizer, step: int) -> None:
        clip(model, optimizer, step)
        made.append(tally.made)

    train(between=count, steps=40)
    made = made[40:]  # of the paged side
    steps = [n for n in range(1, len(made)) if made[n] > made[n - 1]]
    gaps = [after - before for before, after in itertools.pairwise(steps)]
    assert tally.taken == 0
    assert not [line for line in caplog.messages if "backward" in line]
    assert len(steps) >= 2
    assert all(gap >= 2 ** (number + 1) for number, gap in enumerate(gaps)), gaps


def test_a_closed_block_leaves_no_draft_behind() -> None:
    """A backward whose ``step()`` comes after the block makes the plain update."""
    twin = Twin(small(), adamw)
    with twin.paged(footprint_of(twin.model) // 2, config={"draft_share": 1.0}):
        for step in range(5):
            for model, optimizer in twin.sides:
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
    twin = Twin(small(), adamw)
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
        train(steps=8)
    assert caplog.text.count("no more updates are made in backward") == 1


class Two(nn.Module):
    """Two layers, of which the second runs when it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(64, 64, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.a(x)
        return (self.b(x) if both else x).square().sum()


def test_memory_of_a_parameter_whose_update_waits_can_be_given_to_another() -> None:
    """The step that updates it at once must not wait for the update that it holds up."""

    def each(side: Side, model: Any, optimizer: Any, step: int) -> None:
        model(torch.ones(4, 64), step < 2).backward()
        if step == 2:
            model.a.weight.data = model.b.weight.data
        optimizer.step()
        optimizer.zero_grad()

    program = trained(Two, each, steps=3, share=3, draft_share=0.0)
    hazard("pager", program, moves=False)


@pytest.mark.parametrize(("owner", "name"), [(Pager, "acquire"), (PendingUpdates, "run_on")])
def test_a_draft_that_fails_leaves_its_twins_empty(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State may be lent by then, and can be lent again only if its twin has nothing."""
    twin = Twin(small(), adamw)
    make, real = SpeculativeUpdates.make, getattr(owner, name)
    drafting, hits = False, 0

    def making(self: SpeculativeUpdates, slot: Any) -> None:
        nonlocal drafting
        drafting = True
        try:
            make(self, slot)
        finally:
            drafting = False

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal hits
        if drafting and number == 5 and not hits:
            hits += 1
            raise SpillError(errno.EIO, "the disk fails")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(SpeculativeUpdates, "make", making)
    monkeypatch.setattr(owner, name, failing)
    config = {"draft_share": 1.0, "policy": "repeat"}
    with twin.paged(footprint_of(twin.model), config=config):
        for number in range(8):
            for model, optimizer in twin.sides:
                for _ in range(2 if number == 5 else 1):
                    torch.manual_seed(number)
                    optimizer.zero_grad()
                    with contextlib.suppress(SpillError):
                        small_loss(model, SAMPLES[0]).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert hits == 1
    twin.assert_same()
