"""Hazard: several models, optimizers and blocks at one time.

The graph: a generator and a discriminator (GAN) in nested blocks, whose losses go through both,
with one of them frozen by turns or not; one block for two models; two optimizers over one model.
"""

from __future__ import annotations

import pytest
from hazards import Mlp, Side, batch, compared, each_backend, loss_of
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW


@compared(each_backend)
@pytest.mark.parametrize("frozen", [True, False])
def test_two_models_in_nested_blocks(side: Side, frozen: bool) -> None:
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


@compared(each_backend)
def test_the_blocks_end_in_another_order(side: Side) -> None:
    """The outer model trains on after the inner block has ended, through the plain one."""
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


@compared(each_backend, aside=False)
def test_one_block_for_both_models(side: Side) -> None:
    """They are called by themselves: the root's own forward never runs."""
    both = nn.ModuleDict({"first": Mlp(classes=64), "second": Mlp()})
    optimizer = AdamW(both.parameters(), lr=1e-2)
    with side.offload(both, optimizer):
        for step in range(6):
            side.step(loss_of(lambda x: both["second"](both["first"](x)), step), optimizer)


@compared(each_backend)
def test_two_optimizers_over_one_model(side: Side) -> None:
    """The one that the block was not told of steps whole."""
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
