"""With a budget that holds everything, paging steps aside; a larger sample brings it back.

Stepping aside must change nothing but speed: the tensors become ordinary, no hook is left in the
way, and the bits stay those of plain PyTorch, also over the moment in which it happens.
"""

from __future__ import annotations

import errno
import time
from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest
import torch
from exactness import (
    SMALL_PAGES,
    Loop,
    Twin,
    arena_ranges,
    assert_same,
    footprint_of,
    least_budget,
    needs_pager,
    small,
    small_loss,
)
from fused_networks import PAGES, Chosen, chosen_loss
from torch import Tensor, nn
from torch.optim import AdamW

import dynoffload
from dynoffload.around import is_around
from dynoffload.errors import BudgetError, SpillError
from dynoffload.runtime.adopting import Adoption
from dynoffload.runtime.session import Session
from dynoffload.units import MiB, format_bytes

LARGE = 64 << 20
ASIDE = {"config": {"step_aside": True}}


def row(length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return tokens and targets of one sample."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 64, (2, length), generator=generator)
    return tokens[0], tokens[1]


def twin() -> Twin:
    """Return the networks of these tests."""
    return Twin(small(), lambda p: AdamW(p, lr=1e-2))


def steps(pair: Twin, lengths: list[int]) -> None:
    """Train both copies on samples of the given lengths, and compare the losses."""
    for number, length in enumerate(lengths):
        losses = []
        for model, optimizer in pair.sides:
            loop = Loop(steps=1, seeded=True)
            losses += loop.run(model, optimizer, [row(length, number)], small_loss)
        assert_same(losses[0], losses[1], f"loss {number} of {length} tokens")


def is_in_arena(session: Session) -> bool:
    """Return whether any parameter lies in a device's memory."""
    addresses = [parameter.data_ptr() for parameter in session.model.parameters()]
    return any(start <= at < end for at in addresses for start, end in arena_ranges())


def test_it_steps_aside_when_everything_fits() -> None:
    """After a few measured steps; from then on tensors are ordinary and modules bare, and what it
    takes is counted as before: all tensors as they are, and activations as measured."""
    pair = twin()
    with pair.paged(LARGE, **ASIDE) as session:
        assert is_in_arena(session)
        named = f"<Session of Small under {format_bytes(LARGE)} on the {session.backend}"
        assert repr(session) == f"{named}, paging>"
        steps(pair, [8] * 6)
        assert repr(session) == f"{named}, not paging>"
        assert not is_in_arena(session)
        inner = [m for m in pair.model.modules() if m is not pair.model]
        assert not any(m._forward_pre_hooks or m._forward_hooks or is_around(m) for m in inner)
        before = session.log.steps[-1]
        assert footprint_of(pair.model) < before.peak_fast_bytes <= LARGE
        samples = len(session.log.memory)
        pair.model.register_buffer("more", torch.zeros(1000))
        pair.reference.register_buffer("more", torch.zeros(1000))
        for _ in range(4):
            steps(pair, [8])
            assert session.log.steps[-1].peak_fast_bytes == before.peak_fast_bytes + 4000
            time.sleep(0.03)  # samples of memory are a little less apart
        assert len(session.log.memory) > samples
        assert len(session.stats) == 10
    pair.assert_same()


def test_it_comes_back_for_a_larger_sample() -> None:
    """What was measured for short samples says nothing of long ones; then it may go again."""
    pair = twin()
    with pair.paged(LARGE, **ASIDE) as session:
        steps(pair, [4] * 6)
        assert not session.paging
        seen: list[bool] = []
        watched = pair.model.embedding.register_forward_hook(lambda *_: seen.append(session.paging))
        steps(pair, [16])
        assert seen == [True]
        steps(pair, [16, 4, 9, 16, 4, 9])
        assert not session.paging, "what is measured by now fits"
        steps(pair, [16, 3])
        assert seen[-2:] == [False, False]
        watched.remove()
    pair.assert_same()


def test_what_was_thawed_while_aside_and_does_not_fit_is_refused_when_it_comes_back() -> None:
    """Before the sample, and freezing it again is a way on."""
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 1024), nn.Linear(1024, 8))
    model[1].requires_grad_(False)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    config = {**SMALL_PAGES, "step_aside": True}
    budget, _ = least_budget(model, optimizer, int(1.6 * MiB), config)
    with dynoffload.offload(model, optimizer, budget=budget, pilot=None, config=config) as session:

        def step(rows: int) -> None:
            model(torch.ones(rows, 128)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(6):
            step(2)
        assert not session.paging
        model[1].requires_grad_(True)
        with pytest.raises(
            BudgetError, match=r"1\.weight, which was added or thawed since the block"
        ):
            model(torch.ones(4, 128))
        assert not session.paging
        model[1].requires_grad_(False)
        step(4)
        assert session.paging
        assert max(session.stats["peak_fast_bytes"]) <= budget


class Deep(nn.Module):
    """A network as deep as its sample says, in a number that looks like any other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(128, 128)

    def forward(self, sample: tuple[Tensor, int]) -> Tensor:
        """Return one number for ``[rows, 128]``."""
        x, depth = sample
        for _ in range(depth):
            x = torch.tanh(self.layer(x))
        return x.square().mean()


@pytest.mark.parametrize("alive", [1, 2], ids=["one graph", "two graphs"])
def test_it_comes_back_for_a_sample_that_turns_out_deeper(alive: int) -> None:
    """Nothing about its inputs is larger: what its forward leaves in memory tells, also after a
    forward that failed. Micro-batches hold one graph at a time. What the loop frees between two
    forwards hides nothing."""
    budget, x = 2 * MiB, torch.randn(64, 128)
    model = Deep()
    optimizer = AdamW(model.parameters())
    config = {"page_bytes": 4096, "min_paged_bytes": 1024}
    with dynoffload.offload(model, optimizer, budget=budget, config=config) as session:
        paged = []

        def train(*depths: int) -> None:
            for depth in depths:
                model((x, depth)).backward()
                paged.append(session.paging)
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(8):
            train(*[16] * 8)  # of which eight graphs would pass the budget
        assert paged[0]
        assert not any(paged[-32:])
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model((torch.randn(64, 100), 2))
        others = [torch.ones(8 * MiB // 4)]
        losses = []
        for _ in range(alive):
            losses.append(model((x, 100 // alive)))
            paged.append(session.paging)
            others.clear()
        sum(losses).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert not any(paged[-alive:])
        train(100)
        assert paged[-1]
        peaks = session.stats["peak_fast_bytes"].tolist()
        assert peaks[-2] >= 100 * x.nbytes > budget  # told as it was
        assert max(*peaks[:-2], peaks[-1]) <= budget


def test_a_graph_that_is_alive_keeps_it_from_stepping_aside() -> None:
    """Saved activations of a forward whose backward is still to come stay served."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(64, 64).requires_grad_(False)
            self.scale = nn.Parameter(torch.ones(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            return (self.frozen(x).sin().tanh() + self.scale).sum()

    torch.manual_seed(0)
    pair = Twin(Half(), lambda p: AdamW([q for q in p if q.requires_grad], lr=1e-2))
    x = torch.randn(64, 64)
    outer: list[Tensor] = []
    with pair.paged(LARGE, **ASIDE):
        for model, optimizer in pair.sides:
            leaf = x.clone().requires_grad_()
            late = model(leaf)
            for _ in range(6):
                model(x).backward()
                optimizer.step()
                optimizer.zero_grad()
            late.backward()
            assert leaf.grad is not None
            outer.append(leaf.grad)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(outer[0], outer[1], "gradient of the late backward")
    pair.assert_same()


def test_a_view_that_is_held_keeps_it_from_stepping_aside() -> None:
    """A view made while it pages stays a view of the parameter."""
    pair = twin()
    with pair.paged(LARGE, **ASIDE) as session:
        steps(pair, [8])
        views: list[Any] = [m.head.weight.detach() for m in (pair.model, pair.reference)]
        steps(pair, [8] * 5)
        assert session.paging
        assert_same(views[0].clone(), views[1].clone(), "view")
        views.clear()
        steps(pair, [8] * 3)
        assert not session.paging
    pair.assert_same()


@needs_pager
def test_it_stays_where_only_what_is_touched_fits() -> None:
    """Experts that no sample has hit lie in the file, and would come into memory: to see that, none
    is brought, and none of the updates is made that wait for them."""
    model = Chosen(16)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    budget = footprint_of(model) // 2
    with dynoffload.offload(model, optimizer, budget=budget, pilot=None, config=PAGES) as session:
        for step in range(8):
            chosen_loss(model, (step, [1])).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not session.stats["bytes_in"].any()
        assert session.paging
        assert session.stats["peak_fast_bytes"].max() <= budget


class Branches(nn.Module):
    """Layers of which a sample says which it takes."""

    def __init__(self, count: int = 12, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: Tensor, taken: list[int]) -> Tensor:
        """Return ``[rows, width]`` for the same."""
        for number in taken:
            x = x + torch.tanh(self.layers[number](x))
        return x


def train(pair: Twin, taken: list[int], step: int) -> None:
    """Make one step of both, over layers of `Branches`."""
    for model, optimizer in pair.sides:
        generator = torch.Generator().manual_seed(step)
        out = model(torch.randn(4, 256, generator=generator), taken)
        if taken:
            out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def parameter_bytes(pair: Twin) -> int:
    return sum(p.nbytes for p in pair.model.parameters())


TAKES = {"AdamW": 4.0, "momentum": 3.0, "Adafactor": 2.1}
"""Times the parameters: with gradients and state."""


@pytest.mark.parametrize("optimizer", TAKES)
@pytest.mark.parametrize("first", [[], [0, 1]])
def test_what_has_no_gradient_and_no_state_yet_is_counted(first: list[int], optimizer: str) -> None:
    """Branches that come late, or steps before any gradient, do not make it pass the budget; and
    where all that may come fits, paging steps aside before it has come."""
    options = {"momentum": 0.9} if optimizer == "momentum" else {}
    kind = torch.optim.SGD if optimizer == "momentum" else getattr(torch.optim, optimizer)
    for share, fits in ((0.8, False), (1.3, True)):
        pair = Twin(Branches(), lambda p: kind(p, lr=1e-2, **options))
        budget = int(share * TAKES[optimizer] * parameter_bytes(pair))
        away = []
        with pair.paged(budget, **ASIDE) as session:
            for step in range(10):
                train(pair, first if step < 6 else list(range(12)), step)
                away.append(not session.paging)
            assert session.stats["peak_fast_bytes"].max() <= budget
        assert away[5] is fits, away
        assert any(away) is fits, away
        pair.assert_same()


def layers_trained(pair: Twin, numbers: list[int]) -> None:
    """Freeze all layers but those of these numbers."""
    for model in (pair.model, pair.reference):
        for number, layer in enumerate(model.layers):
            layer.requires_grad_(number in numbers)


def test_layers_trained_in_turn_keep_their_state() -> None:
    """What was trained before is frozen, but its state is still there: the budget is not passed."""
    pair = Twin(Branches(), lambda p: AdamW(p, lr=1e-2))
    layers_trained(pair, [0, 1, 2])
    budget = int(2.4 * parameter_bytes(pair))
    away = []
    with pair.paged(budget, pilot=None, **ASIDE) as session:
        for step in range(20):
            first = step // 5 * 3
            layers_trained(pair, [first, first + 1, first + 2])
            train(pair, list(range(12)), step)
            away.append(not session.paging)
        assert session.stats["peak_fast_bytes"].max() <= budget
    assert any(away[:5])
    assert not any(away[10:]), away
    pair.assert_same()


def test_what_is_frozen_in_every_other_step_brings_it_back_once() -> None:
    """All of it fits, so that it need not page again each time that it is thawed."""
    pair = Twin(Branches(), lambda p: AdamW(p, lr=1e-2))
    away = []
    with pair.paged(6 * parameter_bytes(pair), pilot=None, **ASIDE) as session:
        for step in range(20):
            layers_trained(pair, [0, 1] if step % 2 else list(range(12)))
            train(pair, list(range(12)), step)
            away.append(not session.paging)
    turns = sum(before is not after for before, after in pairwise(away))
    assert away[-1]
    assert turns <= 3, away
    pair.assert_same()


def test_a_session_whose_stepping_aside_fails_is_watched_as_one_that_is_aside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair, whole = twin(), Adoption.restore

    def cut_off(self: Adoption, *args: Any) -> Any:
        whole(self, *args)
        raise SpillError(errno.EIO, "cut off")

    with pair.paged(LARGE, loses=True, **ASIDE) as session:
        steps(pair, [8] * 2)
        weights, state = deepcopy(pair.model.state_dict()), deepcopy(pair.optimizer.state_dict())
        monkeypatch.setattr(Adoption, "restore", cut_off)
        with pytest.raises(SpillError, match="cut off"):
            Loop(steps=6).run(pair.model, pair.optimizer, [row(8)] * 6, small_loss)
        monkeypatch.setattr(Adoption, "restore", whole)
        pair.optimizer.load_state_dict(state)
        pair.model.load_state_dict(weights)
        before = len(session.log.steps)
        steps(pair, [8] * 3)
        assert len(session.log.steps) == before + 3
    pair.assert_same()
