"""Backward is planned where activation checkpointing computes segments of the forward again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from exactness import Loop, Mlp, Twin, batch, compare_runs, needs_pager
from fused_networks import mixtral, mixtral_loss, paging_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import dynoffload
from dynoffload.planning.reference import Reference, Visit
from dynoffload.runtime.adoption.units import Unit
from dynoffload.runtime.migration.migrator import Phase
from dynoffload.runtime.migration.segments import Segments

PAGES: dict[str, Any] = {"page_bytes": 4096, "min_paged_bytes": 4096, "policy": "repeat"}


@dataclass(frozen=True)
class Held:
    """A frozen parameter of a plan."""

    region: int
    gradient: None = None
    states: dict[str, int] = field(default_factory=dict, hash=False)


class Attention(nn.Module):
    """Three layers that read one input, and a fourth that reads their result."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = x.tanh()
        return x + self.o(F.softmax(self.q(y) @ self.k(y).T / 8, -1) @ self.v(y))


class Checkpointed(nn.Module):
    """Blocks of two layers. ``how`` says what is checkpointed: each block, each twice, pairs of
    blocks, no block, or the first layer alone."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        kind = Attention if how == "attention" else partial(Mlp, depth=1, classes=64)
        self.blocks = nn.Sequential(*(kind() for _ in range(6)))
        self.head = nn.Linear(64, 10)
        self.how, self.stored = how, None
        self.inside: Callable[[Tensor], Any] = lambda x: None

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "alone":
            return checkpoint(self.first, x, use_reentrant=False)
        x = F.gelu(self.first(x))
        self.inside(x)
        if self.how == "two at a time":
            x = checkpoint_sequential(self.blocks, 3, x, use_reentrant=False)
        elif self.how == "plain":
            x = self.blocks(x)
        else:
            for block in self.blocks:
                for _ in range(1 + (self.how == "twice")):
                    x = checkpoint(block, x, use_reentrant=self.how == "reentrant")
        return self.head(x)


def _loss(model: nn.Module, step: int) -> Tensor:
    x, y = batch(step)
    return F.cross_entropy(model(x), y)


@needs_pager
@pytest.mark.parametrize("how", ["", "reentrant", "twice", "two at a time", "attention"])
def test_every_use_of_a_backward_that_recomputes_is_in_its_plan(how: str) -> None:
    """From the third step on: earlier ones show which units run again."""
    torch.manual_seed(0)
    model = Checkpointed(how)
    optimizer = SGD(model.parameters(), lr=1e-3)
    with dynoffload.offload(model, optimizer, budget=200_000, config=PAGES) as session:
        migrator = paging_of(session).migrator
        for step in range(4):
            loss = _loss(model, step)
            anchored, missed = migrator.anchored, migrator.missed
            loss.backward()
            assert migrator.phase is Phase.BACKWARD
            anchored, missed = migrator.anchored - anchored, migrator.missed - missed
            optimizer.step()
            optimizer.zero_grad()
            if step >= 2:
                again = {"twice": 24, "two at a time": 8, "attention": 24}.get(how, 12)
                shared = 12 if how == "attention" else 0  # told of by another's hook
                assert missed == 0
                # Each is visited as it is computed again, and as backward leaves it.
                assert anchored >= 2 * again - shared
        assert session.stats["bytes_in"].iloc[-1] > 0


@needs_pager
@pytest.mark.parametrize("how", ["reentrant", "twice", "two at a time"])
def test_such_plans_change_no_bit(how: str) -> None:
    torch.manual_seed(0)
    twin = Twin(Checkpointed(how), lambda p: SGD(p, lr=1e-2))
    session = compare_runs(twin, Loop(steps=6), list(range(6)), _loss, 200_000, config=PAGES)
    assert session.stats["prefetched_bytes"].iloc[-1] > 0


@needs_pager
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_experts_that_are_hit_again_are_in_the_plan(implementation: str) -> None:
    """A call reads its experts together, as by `grouped_mm`, or one by one."""
    model: Any = mixtral(implementation, num_hidden_layers=4)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.requires_grad_(False)
    model.model.embed_tokens.weight.requires_grad_()
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    with dynoffload.offload(model, optimizer, budget=400_000, config=PAGES) as session:
        migrator = paging_of(session).migrator
        for step in range(4):
            loss = mixtral_loss(model, 0)
            missed = migrator.missed
            loss.backward()
            if step >= 2:
                assert migrator.missed == missed
            optimizer.step()
            optimizer.zero_grad()


@needs_pager
def test_a_network_that_no_longer_recomputes_is_planned_as_it_runs() -> None:
    """What the last backward did not compute again is not expected in the next."""
    torch.manual_seed(0)
    model = Checkpointed("")
    optimizer = SGD(model.parameters(), lr=1e-3)
    with dynoffload.offload(model, optimizer, budget=200_000, config=PAGES) as session:
        migrator = paging_of(session).migrator
        for step in range(6):
            if step == 3:
                model.how = "plain"
            _loss(model, step).backward()
            assert migrator.recomputes is (0 < step < 4)
            optimizer.step()
            optimizer.zero_grad()


@needs_pager
@pytest.mark.parametrize("how", ["", "reentrant"])
@pytest.mark.parametrize("kept", ["losses", "an output"])
def test_a_graph_that_is_kept_keeps_no_session(how: str, kept: str) -> None:
    """A loss that nobody detached, or an output that a module stores."""
    model: Any = Checkpointed(how)
    optimizer = SGD(model.parameters(), lr=1e-3)
    losses = []
    if kept == "an output":
        model.inside = lambda x, model=model: setattr(model, "stored", x)
    with dynoffload.offload(model, optimizer, budget=200_000, config=PAGES) as session:
        paging = weakref.ref(paging_of(session))
        for step in range(4):
            losses.append(_loss(model, step))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
    network = weakref.ref(model)
    if kept == "an output":
        model.inside = None
        losses.clear()
    del model, optimizer, session
    gc.collect()
    assert paging() is None
    assert network() is None


@needs_pager
def test_a_view_without_a_graph_is_no_error() -> None:
    """Autograd refuses to name the node of a view that was made under no_grad, and then changed."""

    def look(x: Tensor) -> None:
        made = x.detach().requires_grad_() * 1
        with torch.no_grad():
            view = made[:4]
            made.add_(1)
            model.first(view)

    model = Checkpointed("")
    model.inside = look
    optimizer = SGD(model.parameters(), lr=1e-3)
    with dynoffload.offload(model, optimizer, budget=200_000, config=PAGES) as session:
        for step in range(4):
            _loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert paging_of(session).migrator.recomputes


@needs_pager
@pytest.mark.parametrize("how", ["", "alone"])
def test_the_hook_of_a_node_that_outlives_its_step_fires_once_a_backward(how: str) -> None:
    """A prompt is computed once, and takes part in several backwards."""
    model = Checkpointed(how)
    prompt = nn.Parameter(torch.randn(8, 64)) * 2
    optimizer = SGD(model.parameters(), lr=1e-3)
    with dynoffload.offload(model, optimizer, budget=200_000, config=PAGES) as session:
        migrator = paging_of(session).migrator
        with patch.object(migrator, "leave_backward", wraps=migrator.leave_backward) as leave:
            for step in range(6):
                leave.reset_mock()
                model(prompt).square().mean().backward(retain_graph=True)
                optimizer.step()
                optimizer.zero_grad()
                heard = [call.args for call in leave.call_args_list]
                assert len(heard) == len(set(heard))
                assert bool(heard) is (step > 0)


def test_segments_are_known_where_backwards_follow_each_other() -> None:
    """Two losses make two backwards, without a forward between."""
    unit = Unit(0, "a", nn.Identity(), ())
    segments = Segments()
    segments.begin_backward([unit])
    segments.ran(unit)
    segments.begin_backward([])
    segments.ran(unit)
    segments.end_backward()
    assert segments.spans([Visit(unit)]) == [range(1)]


def test_segments_are_those_of_the_last_backward() -> None:
    """Whatever expert a segment begins or ends with, and if the root has parameters, too."""
    paths = ("", "a.router", "a.mix[0]", "a.mix[1]", "b.mix[0]", "b.mix[1]", "b.out", "head")
    root, router, one, two, three, four, out, head = (
        Unit(at, path, nn.Identity(), (), at if "[" in path else None)
        for at, path in enumerate(paths)
    )
    segments = Segments()
    order = [root, router, two, three, out, head]
    assert segments.spans([Visit(unit) for unit in order]) == []
    segments.begin_backward(order)
    for unit in (three, out, router, two):
        segments.ran(unit)
    assert not segments
    segments.end_backward()
    order = [root, router, one, two, four, three, out, head]
    assert segments.spans([Visit(unit) for unit in order]) == [range(1, 4), range(4, 7)]
    segments.begin_backward(order)
    segments.end_backward()
    assert segments.spans([Visit(unit) for unit in order]) == []


def test_the_input_of_a_segment_is_used_as_it_is_computed_again() -> None:
    """It is read first, before any parameter."""
    parameters: list[Any] = [Held(0), Held(1), Held(2)]
    units = [Unit(at, str(at), nn.Identity(), (slot,)) for at, slot in enumerate(parameters)]
    visits: list[Visit[Any]] = [Visit(unit, (10 + number,)) for number, unit in enumerate(units)]
    reference: Reference[Any] = Reference()
    reference.add_backward(visits, [range(1, 3)])
    assert [use.regions for use in reference.uses] == [(11, 1), (2,), (12, 2), (11, 1), (10, 0)]
    assert reference.again == {1: [0], 2: [1]}
