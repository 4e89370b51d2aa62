"""Parameters whose update, whole, is larger than the pool are updated by ranges of elements."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from exactness import SMALL_PAGES, Loop, LyingPilot, Twin, assert_same, compare_runs, least_budget
from fused_networks import Chosen, Experts, chosen_loss
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_exact_property import OPTIMIZERS, configs, loops, orders
from torch import Tensor, nn
from torch.nn import functional as F

import dynoffload
from dynoffload.config import OffloadConfig
from dynoffload.planning.reference import Reference, Visit
from dynoffload.runtime.experts.parts import stand_ins
from dynoffload.runtime.sizing import sizing_of
from dynoffload.simulation.training import Slot, Unit

WORDS, WIDTH = 3001, 24  # no whole number of pages


class Words(nn.Module):
    """An embedding, some layers, and a head that shares its weight or not."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        """Return (..., words)."""
        x = self.embed(words)
        for layer in self.layers:
            x = x + layer(x).tanh()
        made: Tensor = self.head(x)
        return made


def loss_of(model: nn.Module, words: Tensor) -> Tensor:
    """Return the loss of each next word."""
    return F.cross_entropy(model(words[:-1]).float(), words[1:])


def samples(count: int, seed: int = 0) -> list[Tensor]:
    """Return sequences of words."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(WORDS, (8,), generator=generator) for _ in range(count)]


def words(optimizer: str = "adamw foreach", *, tied: bool = True, seed: int = 0) -> Twin:
    """Return a network in two copies."""
    torch.manual_seed(seed)
    return Twin(Words(tied=tied), OPTIMIZERS[optimizer])


def of_table(pair: Twin) -> float:
    """Return the bytes of the largest parameter."""
    return max(p.nbytes for p in pair.model.parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_the_least_budget_is_little_more_than_the_parameter(tied: bool) -> None:
    pair = words(tied=tied)
    budget, _ = least_budget(pair.model, pair.optimizer, 1, SMALL_PAGES, flat=True)
    assert budget <= 1.3 * of_table(pair)
    session = compare_runs(pair, Loop(steps=5), samples(5), loss_of, budget, config=SMALL_PAGES)
    assert max(step.peak_fast_bytes for step in session.log.steps) <= budget


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    share=st.floats(1.0, 3.0),
    tied=st.booleans(),
    lies=st.none() | orders,
    loop=loops,
    config=configs,
    in_backward=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_no_case_changes_a_bit(
    optimizer: str,
    share: float,
    tied: bool,
    lies: list[list[int]] | None,
    loop: Loop,
    config: dict[str, Any],
    in_backward: bool,
    seed: int,
) -> None:
    """Optimizers, budgets, loops and wrong predictions."""
    pair = words(optimizer, tied=tied, seed=seed)
    if optimizer.endswith("tensor lr"):
        loop = replace(loop, scheduler=None)
    suits = loop.set_to_none and not loop.zero_first and loop.accumulate == 1
    if in_backward and suits and loop.clip is None and not optimizer.startswith("adafactor"):
        config = {**config, "optimizer_in_backward": True}
    wanted = int(of_table(pair) * share)
    budget, _ = least_budget(pair.model, pair.optimizer, wanted, config, flat=True)
    pilot = None if lies is None else LyingPilot(pair.model, lies)
    given = samples(loop.steps * loop.accumulate, seed)
    compare_runs(pair, loop, given, loss_of, budget, config=config, pilot=pilot)


def test_steps_are_planned(caplog: pytest.LogCaptureFixture) -> None:
    """No use of the plan needs more than the pool; an ``Embedding`` and a ``Linear`` share it."""
    pair = words()
    budget, _ = least_budget(pair.model, pair.optimizer, 1, SMALL_PAGES, flat=True)
    session = compare_runs(pair, Loop(steps=6), samples(6), loss_of, budget)
    assert session.sizing is not None
    assert session.sizing.flat == ("embed.weight",)
    assert not caplog.messages
    late = session.log.steps[3:]
    assert sum(step.prefetched_bytes for step in late) > 0.5 * sum(step.bytes_in for step in late)


def test_updates_are_planned_one_by_one() -> None:
    """A forward applies them slice by slice, before it uses all slices at once."""
    reference: Reference[Slot] = Reference()
    slots = [
        Slot(number, number, 4096, 10 + number, {"m": 20 + number}, is_slice=True, is_flat=True)
        for number in range(3)
    ]
    for slot in slots:
        slot.owed = slot.gradient
    visit = Visit(Unit(0, "head", tuple(slots)))
    reference.add_forward([visit], lambda slot: True)
    reference.add_backward([visit])
    assert [use.regions for use in reference.uses] == [
        *((n, 20 + n, 10 + n) for n in range(3)),
        (0, 1, 2),
        (0, 1, 2),
        *[()] * 3,
    ]
    assert [use.creates for use in reference.uses[5:]] == [(10,), (11,), (12,)]
    assert reference.forward == {0: [0]}
    assert reference.updates == {0: [0], 1: [1], 2: [2]}


def test_a_checkpoint_of_it_is_that_of_plain_training(tmp_path: Path) -> None:
    """Parameters and state are saved from the pool, and loaded into it."""
    pair = words()
    budget, _ = least_budget(pair.model, pair.optimizer, 1, SMALL_PAGES, flat=True)
    given = samples(4)
    pair.train(loss_of, given[:0])
    with pair.paged(budget) as session:
        pair.train(loss_of, given[:2])
        dynoffload.save_checkpoint(pair.model, pair.optimizer, tmp_path / "saved")
        assert session.paging
        pair.train(loss_of, given[2:3])
        dynoffload.load_checkpoint(pair.model, pair.optimizer, tmp_path / "saved")
        saved = {name: p.detach().clone() for name, p in pair.model.named_parameters()}
    again = words()
    again.train(loss_of, given[:2])
    for name, parameter in again.reference.named_parameters():
        assert_same(saved[name], parameter.detach(), name)


def test_a_model_of_transformers(caplog: pytest.LogCaptureFixture) -> None:
    """GPT-2 ties its head; its vocabulary has a prime factor of 1,733."""
    config = transformers.GPT2Config(
        n_layer=1, n_embd=12, n_head=2, vocab_size=50257, n_positions=8, use_cache=False
    )
    torch.manual_seed(0)
    pair = Twin(transformers.GPT2LMHeadModel(config), OPTIMIZERS["adamw fused"])
    budget, _ = least_budget(pair.model, pair.optimizer, 1, None, flat=True)
    assert budget <= 1.3 * of_table(pair)
    given = [torch.randint(50257, (1, 8)) for _ in range(4)]

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        made: Tensor = model(tokens, labels=tokens).loss
        return made

    options = {"page_bytes": None, "min_paged_bytes": None}
    compare_runs(pair, Loop(steps=4, seeded=True), given, loss, budget, config=options)


def test_what_must_stay_whole_is_refused() -> None:
    """Before-images, and optimizers that look at a parameter as a whole, need all of it."""
    pair = words()
    for optimizer, config in (
        (pair.optimizer, {"rollback": True}),
        (torch.optim.Adafactor(pair.model.parameters()), {}),
        (pair.optimizer, {"slices": False}),
    ):
        budget, _ = least_budget(pair.model, optimizer, 1, {**SMALL_PAGES, **config}, flat=True)
        assert budget > 2 * of_table(pair)


def test_a_larger_budget_is_accepted_too() -> None:
    """Also where what stays in memory takes half of it."""
    model = Words()
    model.register_buffer("table", torch.zeros(100_000))
    optimizer = OPTIMIZERS["adamw foreach"](model.parameters())
    budget, _ = least_budget(model, optimizer, 1, SMALL_PAGES, flat=True)
    options = OffloadConfig.of(SMALL_PAGES)
    found = [sizing_of(model, optimizer, int(budget * 1.02**n), options).flat for n in range(100)]
    assert (found[0], found[-1]) == (("embed.weight",), ())


class HalfFlat(Experts):
    """Experts of which one parameter has slices of whole pages, and the other is flat."""

    asks_for_parts = True

    def __init__(self) -> None:
        super().__init__(count=6, width=32)
        self.down = nn.Parameter(torch.randn(6, 33, 100) / 8)

    def forward(self, x: Tensor, hit: list[int]) -> Tensor:
        """Return the same shape."""
        parts = {"up": self.up, "down": self.down, **stand_ins(self)}
        out = torch.zeros_like(x)
        for number in hit:
            down = parts["down"][number][:32, :64]
            out = out + F.linear(F.gelu(F.linear(x, parts["up"][number])), down)
        return out


def test_a_flat_parameter_beside_experts() -> None:
    """Its slices are not experts."""
    torch.manual_seed(0)
    model = Chosen()
    model.experts = HalfFlat()
    pair = Twin(model, OPTIMIZERS["adamw foreach"])
    config = {"page_bytes": 4096, "min_paged_bytes": 2048}
    budget, _ = least_budget(pair.model, pair.optimizer, 1, config, flat=True)
    given = [(number, [number % 4, (number // 2) % 3]) for number in range(6)]
    session = compare_runs(pair, Loop(steps=6), given, chosen_loss, budget, config=config)
    assert session.sizing is not None
    assert session.sizing.flat == ("experts.down",)
