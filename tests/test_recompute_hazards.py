"""Small graphs that a careless recomputation would get wrong, and the choice of what is dropped.

Each runs under several budgets, with the checksums of what is made again compared.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from exactness import Twin, assert_same
from hypothesis import given
from hypothesis import strategies as st
from test_recompute import DTR, SGD_, Layers
from torch import Tensor, nn
from torch.nn import functional as F

import dynoffload
from dynoffload.errors import BudgetError
from dynoffload.runtime.counting import whole_bytes
from dynoffload.runtime.recompute.heuristic import in_order
from dynoffload.runtime.recompute.records import Operator, Record


def tight(model: nn.Module, run: Callable[[nn.Module], Any]) -> None:
    """Assert that ``run`` gives what it gives in plain PyTorch, under each of some budgets that
    hold what cannot be dropped, of which one at least drops something."""
    reference = copy.deepcopy(model)
    torch.manual_seed(0)
    expected = run(reference)
    drawn = torch.get_rng_state()
    least = whole_bytes(model, None)
    peak, operators = 1 << 40, 0
    for share in (1.0, 0.95, 0.9, 0.8, 0.6, 0.4, 0.2, 0.1):
        ours = copy.deepcopy(model)
        budget = int(least + share * (peak - least))
        torch.manual_seed(0)
        try:
            with dynoffload.offload(ours, budget=budget, config={**DTR, "debug": True}) as session:
                found = run(ours)
        except BudgetError:
            break
        assert_same(found, expected, f"results at {share}")
        assert_same(torch.get_rng_state(), drawn, f"random numbers at {share}")
        for (name, p), q in zip(ours.named_parameters(), reference.parameters(), strict=True):
            assert_same(p.grad, q.grad, f"{name} at {share}")
        operators += session._making.operators
        assert session._ledger.peak <= budget
        peak = min(peak, session._ledger.peak)
    assert operators > 0, "nothing was made again"


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


BETWEEN = [_written_views, _written_buffer, _drawn, _indexed, _hidden_write]


@pytest.mark.parametrize("between", BETWEEN, ids=lambda f: f.__name__)
def test_writes_draws_and_parts(between: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """Writes into what something was made from, through views too; random numbers of any
    generator; results of unknown size, parts of one storage."""
    torch.manual_seed(0)
    model = Layers(between)

    def run(model: nn.Module) -> Tensor:
        loss: Tensor = model(torch.linspace(-1, 1, 4096).reshape(64, 64)).square().sum()
        loss.backward()
        return loss.detach()

    tight(model, run)


def test_backward_inside_of_autocast() -> None:
    """What ran in float32 there, as in a part where autocast is off, is made again in float32."""

    def between(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            x = torch.tanh(x.float() @ model.layers[0].weight.float())
        return x * model.scale

    torch.manual_seed(0)
    model = Layers(between)

    def run(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss: Tensor = model(torch.linspace(-1, 1, 4096).reshape(64, 64)).square().sum()
            loss.backward()
        return loss.detach()

    tight(model, run)


def test_double_backward_and_a_retained_graph() -> None:
    """A gradient penalty and the same graph twice, while another graph waits for its backward."""
    torch.manual_seed(0)
    model = Layers(lambda model, x: torch.tanh(x * model.scale))

    def run(model: nn.Module) -> list[Tensor]:
        x = torch.linspace(-1, 1, 4096).reshape(64, 64).requires_grad_()
        waiting = model(x * 2).sum()
        out = model(x).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        out.backward(retain_graph=True)
        (slope.square().sum() + out).backward()
        waiting.backward()
        assert x.grad is not None
        return [slope.detach(), x.grad]

    tight(model, run)


@pytest.mark.parametrize("lists", [False, True])
def test_a_write_that_autograd_sees_raises_as_it_does_in_plain_training(lists: bool) -> None:
    def spoil(model: nn.Module, x: Tensor) -> Tensor:
        y = x.exp()
        if lists:
            with torch.no_grad():
                torch._foreach_add_([y], 1.0)
        else:
            y.add_(1)
        return y

    model = Layers(spoil, count=1)
    for block in (None, dynoffload.offload(model, budget="10MB", config=DTR)):
        if block is not None:
            block.__enter__()
        out = model(torch.zeros(64, 64)).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()
        if block is not None:
            block.__exit__(None, None, None)


def test_backward_after_the_block() -> None:
    """A graph that outlives the block makes again what it lacks."""
    torch.manual_seed(0)
    model = Layers(lambda model, x: torch.tanh(x * model.scale))
    reference = copy.deepcopy(model)
    x = torch.linspace(-1, 1, 4096).reshape(64, 64)
    reference(x).sum().backward()
    with dynoffload.offload(model, budget=whole_bytes(model, None) + 64_000, config=DTR) as session:
        out = model(x).sum()
    before = session._making.operators
    out.backward()
    assert session._making.operators > before
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert_same(p.grad, q.grad, "gradient")


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
    with dynoffload.offload(twin.model, twin.optimizer, budget=budget, config=DTR) as session:
        found = run(twin.model, twin.optimizer)
        assert session._making.operators > 0
    assert_same(found, expected, "slopes")
    twin.assert_same()


def _graph(sizes: Sequence[int], edges: Sequence[Sequence[int]], seconds: Sequence[float]) -> Any:
    """Return the storages and records of a made-up graph: each is made from those before it that
    ``edges`` names."""
    storages: list[torch.UntypedStorage] = []
    records: list[Record] = []
    for size, sources, cost in zip(sizes, edges, seconds, strict=True):
        storage = torch.empty(size, dtype=torch.uint8).untyped_storage()
        inputs = tuple(dict.fromkeys(records[s % len(records)] for s in sources if records))
        operator = Operator(None, (), {}, inputs, (), None, cost, size, "")
        record = Record(storage, operator)
        operator.outputs[0] = weakref.ref(record)
        for source in inputs:
            source.add_user(operator)
        storages.append(storage)
        records.append(record)
    return storages, records


@given(st.data())
def test_the_lowest_score_leaves_first(data: st.DataObject) -> None:
    """c(e*) / (m s), reckoned anew for all before each choice, by a search of the whole graph."""
    count = data.draw(st.integers(2, 9))
    sizes = data.draw(st.lists(st.integers(1, 50), min_size=count, max_size=count))
    edges = data.draw(
        st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=count, max_size=count)
    )
    seconds = data.draw(st.lists(st.floats(0.1, 9), min_size=count, max_size=count))
    used = data.draw(st.lists(st.floats(0, 9), min_size=count, max_size=count))
    storages, records = _graph(sizes, edges, seconds)
    for record, at in zip(records, used, strict=True):
        record.used_at = at

    def reached(start: Record, step: Callable[[Record], list[Record]]) -> set[Record]:
        found: set[Record] = set()
        ahead = step(start)
        while ahead:
            one = ahead.pop()
            if one not in found and one.here() is None:
                found.add(one)
                ahead += step(one)
        return found

    def parents(record: Record) -> list[Record]:
        assert record.operator is not None
        return list(record.operator.inputs)

    def children(record: Record) -> list[Record]:
        return [one for one in records if record in parents(one)]

    def score(record: Record) -> float:
        near = reached(record, parents) | reached(record, children) | {record}
        total = sum(one.operator.seconds for one in near if one.operator)
        return total / (record.nbytes * (10.0 - record.used_at))

    left = list(records)
    for record in in_order(records, 10.0):
        assert score(record) == pytest.approx(min(map(score, left)))
        left.remove(record)
        record.leave()
    assert not left
    del storages
