"""Hazard: several models, optimizers and blocks at one time.

The graph: a generator and a discriminator (GAN) in nested blocks, whose losses go through both,
with one of them frozen by turns or not; one optimizer over two models, of which one is managed, or
both, as parts of a module that holds them; two optimizers over one model.
"""

from __future__ import annotations

import pytest
from hazards import Mlp, Side, batch, each_backend, hazard, loss_of
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW


@each_backend
@pytest.mark.parametrize("frozen", [True, False])
def test_two_models_in_nested_blocks(backend: str, frozen: bool) -> None:
    def program(side: Side) -> None:
        generator, critic = Mlp(classes=64), Mlp(classes=1)
        its = AdamW(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
        theirs = AdamW(critic.parameters(), lr=1e-3)
        with side.offload(generator, its), side.offload(critic, theirs):
            for step in range(4):
                noise, real = batch(2 * step)[0], batch(2 * step + 1)[0]
                fake = generator(noise)
                loss = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(real)).mean()
                side.step(loss, theirs)
                critic.requires_grad_(not frozen)
                side.step(F.softplus(-critic(fake)).mean(), its)
                critic.requires_grad_(True)
                if step != 2:
                    theirs.zero_grad()

    hazard(backend, program)


@each_backend
def test_the_blocks_end_in_another_order(backend: str) -> None:
    """The outer model trains on after the inner block has ended, through the plain one."""

    def program(side: Side) -> None:
        first, second = Mlp(classes=64), Mlp()
        its, theirs = AdamW(first.parameters(), lr=1e-2), AdamW(second.parameters(), lr=1e-2)

        def step(number: int) -> None:
            x, y = batch(number)
            loss = F.cross_entropy(second(first(x)), y)
            loss.backward()
            for optimizer in (its, theirs):
                optimizer.step()
                optimizer.zero_grad()
            side.see("loss", loss)

        with side.offload(first, its):
            with side.offload(second, theirs):
                for number in range(3):
                    step(number)
            for number in range(3, 5):
                step(number)
        step(5)
        side.see_state(second, theirs)

    hazard(backend, program)


@each_backend
def test_one_optimizer_over_two_models(backend: str) -> None:
    """Only the first is managed; the other's parameters stay where they are."""

    def program(side: Side) -> None:
        first, second = Mlp(classes=64), Mlp()
        optimizer = AdamW([*first.parameters(), *second.parameters()], lr=1e-2)
        with side.offload(first, optimizer):
            for step in range(4):
                side.step(loss_of(lambda x: second(first(x)), step), optimizer)
        side.see_state(second)

    hazard(backend, program)


@each_backend
def test_one_block_for_both_models(backend: str) -> None:
    """They are called by themselves: the root's own forward never runs."""

    def program(side: Side) -> None:
        both = nn.ModuleDict({"first": Mlp(classes=64), "second": Mlp()})
        optimizer = AdamW(both.parameters(), lr=1e-2)
        with side.offload(both, optimizer):
            for step in range(6):
                side.step(loss_of(lambda x: both["second"](both["first"](x)), step), optimizer)

    hazard(backend, program, aside=False)


@each_backend
def test_two_optimizers_over_one_model(backend: str) -> None:
    """The one that the block was not told of steps whole."""

    def program(side: Side) -> None:
        model = Mlp()
        optimizer = AdamW(model.layers.parameters(), lr=1e-2)
        other = SGD(model.head.parameters(), lr=1e-2, momentum=0.9)
        third = SGD([model.layers[0].weight], lr=1e-3)
        with side.offload(model, optimizer):
            for step in range(4):
                loss = loss_of(model, step)
                loss.backward()
                optimizer.step()
                other.step()
                third.step()
                optimizer.zero_grad()
                other.zero_grad()
                side.see("loss", loss)
        side.see("other", other.state_dict())

    hazard(backend, program)
