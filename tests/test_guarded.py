"""Guarded tensors: torch calls for what touches them, and they are otherwise what they were."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from emulated import DEVICE, Emulated, accelerated
from exactness import Twin, assert_same
from test_accelerator_training import budget_for, mlp, mlp_loss
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW

from dynoffload.memory.accelerator.guarded import guard, is_guarded, unguard
from dynoffload.runtime.residency import Residency

SAMPLE = torch.randn(8, 48, generator=torch.Generator().manual_seed(1))


class Labelled(torch.Tensor):
    """A user subclass."""


@contextmanager
def block(watched: bool = True) -> Iterator[tuple[Twin, Emulated]]:
    """Train a step, and yield both models while one is paged; most of it is absent."""
    twin = Twin(mlp(), partial(AdamW, lr=1e-2))
    with (
        accelerated(elsewhere=True, watched=watched) as queues,
        twin.paged(budget_for(twin, 3), device=DEVICE),
    ):
        for model, optimizer in ((twin.model, twin.optimizer), (twin.reference, twin.its)):
            mlp_loss(model, SAMPLE).backward()
            optimizer.step()
        yield twin, queues
    twin.assert_same()


def saved(value: Any) -> Any:
    """Return what `torch.save` and `torch.load` make of a value."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


ASKS: dict[str, Callable[[nn.Parameter], Any]] = {
    "repr": repr,
    "repr of data": lambda p: repr(p.data),
    "repr of a view": lambda p: repr(p.detach()[:2]),
    "list": lambda p: p.tolist(),
    "format": lambda p: f"{p.detach()[0, 0]:.3f}",
    "shallow copy": copy.copy,
    "normalized": lambda p: F.batch_norm(p.detach(), None, None, training=True),
    "split": lambda p: torch.unsafe_chunk(p.detach(), 3)[1],
    "item": lambda p: p[0, 0].item(),
    "copy": copy.deepcopy,
    "copy of data": lambda p: copy.deepcopy(p.data),
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "saved": saved,
    "saved data": lambda p: saved(p.data),
    "saved gradient": lambda p: saved(p.grad),
    "a parameter of it": nn.Parameter,
    "a parameter of its data": lambda p: nn.Parameter(p.data),
    "a buffer of it": lambda p: nn.Buffer(p.data),
    "a user subclass": lambda p: p.detach().as_subclass(Labelled) + 1,
    "a subclass with a graph": lambda p: torch.autograd.grad(p.as_subclass(Labelled).sum(), p)[0],
    "scripted": lambda p: torch.jit.trace(lambda x: x @ x.T, torch.ones(2, 2))(p.detach()),
    "in numpy": lambda p: torch.from_numpy(p.detach().cpu().clone().numpy()),
    "batched": lambda p: torch.func.vmap(lambda row: row.sum())(p.detach()),
    "a function's gradient": lambda p: torch.func.grad(lambda w: w.square().sum())(p.detach()),
}


@pytest.mark.parametrize("ask", ASKS)
def test_what_is_asked_is_answered_as_plainly(ask: str) -> None:
    with block() as (twin, _):
        models = twin.model, twin.reference
        found, expected = (
            [ASKS[ask](p) for p in model.parameters() if p.dim() == 2] for model in models
        )
        assert any(map(is_guarded, twin.model.parameters())), "nothing is paged"
        if isinstance(expected[0], torch.Tensor):
            assert all(isinstance(one, type(its)) for one, its in zip(found, expected, strict=True))
            assert all(
                isinstance(one, nn.Parameter) == isinstance(its, nn.Parameter)
                for one, its in zip(found, expected, strict=True)
            )
            found = [one.detach().as_subclass(torch.Tensor).clone() for one in found]
            expected = [one.detach().as_subclass(torch.Tensor) for one in expected]
            assert_same(found, expected, ask)
        else:
            assert found == expected


class Wrapper(torch.Tensor):
    """A tensor that wraps another, and computes with it."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*[one.inner if isinstance(one, cls) else one for one in args])


@pytest.mark.parametrize("order", [1, -1])
def test_operators_on_tensors_of_two_sessions_and_wrappers(order: int) -> None:
    with block() as (one, _):
        other = Twin(mlp(), partial(AdamW, lr=1e-2))
        with other.paged(budget_for(other, 3), device=DEVICE):
            for model in (one.model, other.model):
                mlp_loss(model, SAMPLE)
            pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
            theirs = zip(one.reference.parameters(), other.reference.parameters(), strict=True)
            found = [torch.mul(*pair[::order]).detach() for pair in pairs]
            assert_same(found, [torch.mul(*pair).detach() for pair in theirs], "products")
            wrapped = [Wrapper(torch.ones_like(p)) * p.detach() for p in one.model.parameters()]
            assert_same(wrapped, [p.detach() for p in one.reference.parameters()], "wrapped")


def test_views_that_stay_are_not_guarded_after_the_block() -> None:
    with block() as (twin, _):
        kept = [p.detach()[:1] for p in twin.model.parameters()]
        state = twin.model.state_dict()
        made = [nn.Parameter(p.data) for p in twin.model.parameters()]
        found = [one.clone() for one in (*kept, *state.values())]
    assert [type(one) for one in (*kept, *state.values())] == [torch.Tensor] * len(found)
    assert_same([*kept, *state.values()], found, "kept")
    assert {type(one) for one in made} == {nn.Parameter}


def test_copies_are_not_guarded() -> None:
    with block() as (twin, _):
        for p in twin.model.parameters():
            for one in (p, nn.Parameter(p.data), copy.copy(p)):
                for made in (copy.deepcopy(one), pickle.loads(pickle.dumps(one)), saved(one)):
                    assert type(made) is nn.Parameter
            assert type(p.detach().clone()) is torch.Tensor


def test_a_block_leaves_plain_tensors() -> None:
    with block() as (twin, _):
        parameters = list(twin.model.parameters())
        assert any(map(is_guarded, parameters))
    for p in parameters:
        assert type(p) is nn.Parameter
        assert type(p.grad) in (torch.Tensor, type(None))
        assert not torch._C._dispatch_keys(p).has(torch._C.DispatchKey.Python)


def test_operators_on_other_tensors_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the block nor in a graph whose ends are paged."""
    seen: list[str] = []
    call = Residency._call

    def counted(self: Residency, kind: Any, args: Any, kwargs: Any) -> Any:
        seen.append(str(kind.func))
        return call(self, kind, args, kwargs)

    monkeypatch.setattr(Residency, "_call", counted)
    with block() as (twin, _):
        seen.clear()
        x = torch.randn(8, 48, requires_grad=True)
        x.exp().sum().backward()
        assert seen == []
        weight = twin.model[0][0].weight
        weight.sum()  # its update has waited
        seen.clear()
        weight.exp()
        weight.detach().mul(2.0)
        assert seen == ["aten.exp.default", "aten.detach.default", "aten.mul.Tensor"]


def test_after_an_operator_on_other_tensors_lacked_memory_there_is_room() -> None:
    """It is not called again, as it is not seen. The next forward finds what it needs."""
    with block() as (twin, queues):
        full = queues.full_for
        full.add("aten.relu.default")
        with pytest.raises(torch.OutOfMemoryError, match=r"aten.relu"):
            mlp_loss(twin.model, SAMPLE)
        assert not full
        for model, optimizer in ((twin.model, twin.optimizer), (twin.reference, twin.its)):
            optimizer.zero_grad()
            mlp_loss(model, SAMPLE).backward()
            optimizer.step()


def test_weights_trade_places_with_user_tensors() -> None:
    """By ``data``, as some moving averages do. What had been ordinary is guarded then."""
    with block() as (twin, _):
        for model in (twin.model, twin.reference):
            others = [p.detach().clone() + 1 for p in model.parameters()]
            for p, other in zip(model.parameters(), others, strict=True):
                p.data, other.data = other.data, p.data
            mlp_loss(model, SAMPLE)
            for p, other in zip(model.parameters(), others, strict=True):
                other.mul_(0.5)
                p.data, other.data = other.data, p.data
        mlp_loss(twin.model, SAMPLE)
    assert "data" not in vars(torch.Tensor)


def test_a_tensor_is_guarded_and_let_go() -> None:
    tensor = torch.ones(3)
    view = tensor[1:]
    assert guard(tensor) is tensor
    assert is_guarded(tensor)
    assert not is_guarded(view)
    tensor.add_(1)
    assert view.tolist() == [2, 2]
    assert tensor.tolist() == [2, 2, 2]
    assert unguard(tensor) is tensor
    assert type(tensor) is torch.Tensor
