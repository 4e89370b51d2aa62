"""The baseline DTR: the bits of plain PyTorch under budgets that drop activations.

Budgets lie between what a step holds at least (parameters, gradients, optimizer state) and what it
takes if nothing is dropped, as the baseline's own ledger counts it in a run with room for all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from exactness import Loop, Twin, assert_same
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

from dynoffload.errors import BudgetError
from dynoffload.experiments import zoo
from dynoffload.experiments.baselines.dtr import recomputing
from dynoffload.runtime.counting import whole_bytes

SGD_ = partial(SGD, lr=1e-2, momentum=0.9)
SHAPES: dict[str, dict[str, int]] = {
    "moe": {"rows": 2, "length": 96},
    "tree": {"min_nodes": 24, "max_nodes": 64},
    zoo.TRUNK: {"rows": 1, "min_length": 16, "max_length": 24, "min_depth": 4, "max_depth": 8},
}


def zoo_loss(model: nn.Module, sample: Any) -> Tensor:
    """Return the loss of one sample."""
    loss: Tensor = model(*sample.args).loss
    return loss


class Pictures(nn.Module):
    """Convolutions with batch normalization, in-place ReLU, in-place sums, and a checkpoint."""

    def __init__(self, width: int = 16, layers: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.Dropout2d(0.1),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[rows, 10]`` for ``[rows, 3, height, width]``."""
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            y = checkpoint(block, x, use_reentrant=False) if number == 1 else block(x)
            y += x
            x = F.relu(y, inplace=True)
        return self.head(x.mean((2, 3)))


def pictures_loss(model: nn.Module, seed: int) -> Tensor:
    """Return the loss of random pictures."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 3, 12 + seed % 5, 12, generator=generator)
    return F.cross_entropy(model(x), torch.randint(0, 10, (4,), generator=generator))


class Layers(nn.Module):
    """Layers over ``[64, 64]``, with something done between them."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor], count: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(count))
        self.scale = nn.Parameter(torch.ones(64))
        self.register_buffer("count", torch.ones(64))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[64, 64]`` for the same."""
        for layer in self.layers:
            x = self.between(self, torch.sigmoid(layer(x)))
        return x


def train(twin: Twin, budget: int, loss_of: Callable[..., Tensor], samples: Sequence[Any]) -> Any:
    """Train under ``budget`` and without, compare every bit, and return the session."""
    loop = Loop(steps=len(samples))
    torch.manual_seed(0)
    expected = loop.run(twin.reference, twin.its, samples, loss_of)
    drawn = torch.get_rng_state()
    torch.manual_seed(0)
    with recomputing(twin.model, twin.optimizer, budget) as session:
        losses = loop.run(twin.model, twin.optimizer, samples, loss_of)
        assert_same(torch.get_rng_state(), drawn, "state of the random numbers")
    assert_same(losses, expected, "losses")
    twin.assert_same()
    assert len(session.log.steps) == len(samples)
    assert max(step.peak_fast_bytes for step in session.log.steps) <= budget
    return session


@pytest.mark.parametrize(
    ("network", "share", "optimizer"),
    [
        ("moe", 0.3, partial(AdamW, lr=1e-3, fused=True)),
        ("tree", 0.7, partial(AdamW, lr=1e-3, foreach=True)),
        (zoo.TRUNK, 0.5, SGD_),
        ("pictures", 0.7, SGD_),
    ],
)
def test_the_bits_are_those_of_plain_training(network: str, share: float, optimizer: Any) -> None:
    """Losses, gradients, weights, state, buffers and the stream of random numbers; the peak stays
    within the budget."""
    if network == "pictures":
        build, samples, loss_of = Pictures, list(range(3)), pictures_loss
    else:
        build, loss_of = partial(zoo.build, network, "tiny"), zoo_loss
        samples = list(islice(zoo.samples(network, seed=3, **SHAPES[network]), 3))
    torch.manual_seed(1)
    twin = Twin(build(), optimizer)
    least = whole_bytes(twin.model, twin.optimizer)
    with_room = train(copy.deepcopy(twin), 1 << 40, loss_of, samples)
    assert with_room.making.operators == 0
    peak = max(step.peak_fast_bytes for step in with_room.log.steps)
    session = train(twin, int(least + share * (peak - least)), loss_of, samples)
    assert session.making.operators > 0, "nothing was made again"


def test_a_budget_that_is_too_small_is_refused() -> None:
    """Before anything is touched, or where an operator makes more than there is room for."""
    model = Pictures()
    optimizer = AdamW(model.parameters())
    need = whole_bytes(model, optimizer)
    with pytest.raises(BudgetError, match="dtr moves nothing"):
        recomputing(model, optimizer, need - 1).__enter__()
    assert not optimizer.state
    with (
        pytest.raises(BudgetError, match="cannot be dropped"),
        recomputing(model, optimizer, need + 250_000),
    ):
        model(torch.zeros(64, 3, 32, 32))


# Small graphs that a careless recomputation would get wrong


def _written_views(model: nn.Module, x: Tensor) -> Tensor:
    x = torch.tanh(x) * 3 + 1
    y = x.exp()  # saves its result
    x[::2] *= 2  # what y was made from
    x[:, 1:].copy_(x[:, :-1].clone())
    return (y * x.t()).t()


def _written_buffer(model: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(model.count, Tensor)
    y = torch.tanh(x + model.count)  # to be made again with the buffer as it was
    with torch.no_grad():
        model.count.add_(0.01)
    return y * model.count.clone()


def _drawn(model: nn.Module, x: Tensor) -> Tensor:
    x = F.dropout(x, 0.3)
    x = x + torch.randn_like(x) * 0.1
    noise = torch.empty_like(x).uniform_(generator=torch.Generator().manual_seed(3))
    return F.rrelu(x * noise, training=True) + torch.bernoulli(x.detach().abs().clamp(0, 1))


def _indexed(model: nn.Module, x: Tensor) -> Tensor:
    rows = (x[:, 0] > x[:, 0].median()).nonzero()[:, 0]
    out = torch.zeros_like(x).index_add_(0, rows, torch.tanh(x[rows]))
    parts = torch.stack([part.sin() for part in out.chunk(4, dim=1)]).unbind()
    return torch.cat(parts, dim=1) + x[x > 0].mean()


def _hidden_write(model: nn.Module, x: Tensor) -> Tensor:
    y = torch.tanh(x)  # saves its result
    z = y * 3 + 1
    y.data.mul_(0.5)  # of which z was made; backward reads it
    z.data.mul_(0.5)
    return torch.tanh(z)


def _cast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.t()
        with torch.autocast("cpu", enabled=False):
            y = torch.tanh(y.float() @ x)
    return y * model.scale


def _plain(model: nn.Module, x: Tensor) -> Tensor:
    return torch.tanh(x * model.scale)


def once(model: nn.Module) -> Any:
    """Return a loss, after its backward."""
    loss: Tensor = model(torch.linspace(-1, 1, 4096).reshape(64, 64)).square().sum()
    loss.backward()
    return loss.detach()


def twice(model: nn.Module) -> Any:
    """A gradient penalty and the same graph twice, while another graph waits for its backward."""
    x = torch.linspace(-1, 1, 4096).reshape(64, 64).requires_grad_()
    waiting = model(x * 2).sum()
    out = model(x).sum()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    out.backward(retain_graph=True)
    (slope.square().sum() + out).backward()
    waiting.backward()
    assert x.grad is not None
    return [slope.detach(), x.grad]


BETWEEN = [_written_views, _written_buffer, _drawn, _indexed, _hidden_write, _cast]


@pytest.mark.parametrize(
    ("between", "run"),
    [*((between, once) for between in BETWEEN), (_plain, twice)],
    ids=lambda function: function.__name__,
)
def test_graphs(between: Callable[..., Tensor], run: Callable[[nn.Module], Any]) -> None:
    """Writes, through views too; random numbers of any generator; parts of one storage; several
    backwards. Under each of some budgets, of which one at least drops something."""
    torch.manual_seed(0)
    model = Layers(between)
    reference = copy.deepcopy(model)
    torch.manual_seed(0)
    expected = run(reference)
    drawn = torch.get_rng_state()
    least = whole_bytes(model, SGD(model.parameters()))
    peak, operators = 1 << 40, 0
    for share in (1.0, 0.95, 0.9, 0.8, 0.6, 0.4, 0.2, 0.1):
        ours = copy.deepcopy(model)
        budget = int(least + share * (peak - least))
        torch.manual_seed(0)
        try:
            with recomputing(ours, SGD(ours.parameters()), budget) as session:
                found = run(ours)
        except BudgetError:
            break
        assert_same(found, expected, f"results at {share}")
        assert_same(torch.get_rng_state(), drawn, f"random numbers at {share}")
        for (name, p), q in zip(ours.named_parameters(), reference.parameters(), strict=True):
            assert_same(p.grad, q.grad, f"{name} at {share}")
        operators += session.making.operators
        peak = min(peak, session.ledger.peak)
    assert operators > 0, "nothing was made again"


def test_a_graph_from_before_a_step_is_made_from_the_weights_that_it_had() -> None:
    """Its backward stops before the weights, which the step has changed meanwhile."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            middle = self.layer(x)
            late = middle
            for _ in range(8):
                late = torch.tanh(late) + torch.sigmoid(late)
            return middle, late

    torch.manual_seed(0)
    twin = Twin(Late(), SGD_)
    budget = whole_bytes(twin.model, twin.optimizer) + 16_384 * 12

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        slopes = []
        for _ in range(3):
            middle, late = model(torch.linspace(-1, 1, 4096).reshape(64, 64))
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.1)
            optimizer.step()
            (slope,) = torch.autograd.grad(late.sum(), middle)
            slopes.append(slope)
        return slopes

    expected = run(twin.reference, twin.its)
    with recomputing(twin.model, twin.optimizer, budget) as session:
        found = run(twin.model, twin.optimizer)
        assert session.making.operators > 0
    assert_same(found, expected, "slopes")
    twin.assert_same()
