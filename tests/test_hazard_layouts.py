"""Hazard: parameters that are no plain dense block of real numbers.

The graph: transposed weights and convolutions in channels-last; weights with gaps between rows, or
expanded from one row; complex weights, with lazy conjugates; parameters without elements, with one,
and of a size that fills no page; sparse gradients; parameters over a part of a larger tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from exactness import HOME
from hazards import (
    Side,
    batch,
    compared,
    each_backend_in_time,
    hazard,
    loss_of,
    stepwise,
    trained,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, AdamW


def _of(*sizes: int) -> Tensor:
    """Return a tensor of normal numbers; arithmetic on a part of it would close the gaps."""
    return torch.randn(sizes) / 8


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: _of(64, 64).t(),
    "with gaps": lambda: _of(64, 128)[:, :64],
    "every other": lambda: _of(64, 128)[:, ::2],
    "a part": lambda: _of(192, 64)[64:128],
    "permuted": lambda: _of(8, 64, 8).permute(1, 0, 2).reshape(64, 64).t(),
}


class Weights(nn.Module):
    def __init__(self, make: Callable[[], Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(make()) for _ in range(4))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(F.linear(x, weight))
        return self.head(x)


@compared(each_backend_in_time)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("foreach", [False, True])
def test_strides(side: Side, layout: str, foreach: bool) -> None:
    model = Weights(LAYOUTS[layout])
    optimizer = AdamW(model.parameters(), lr=1e-2, foreach=foreach)
    side.see("strides", [p.stride() for p in model.parameters()])
    with side.offload(model, optimizer):
        for step in range(4):
            side.step(loss_of(model, step), optimizer)
        side.see("strides", [p.stride() for p in model.parameters()])
    side.see("strides", [p.stride() for p in model.parameters()])


@compared(each_backend_in_time)
@pytest.mark.parametrize("when", ["before", "inside"])
def test_channels_last(side: Side, when: str) -> None:
    model = nn.Sequential(
        *(part for _ in range(3) for part in (nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())),
        nn.Flatten(),
        nn.Linear(16 * 16, 10),
    )
    if when == "before":
        model = model.to(memory_format=torch.channels_last)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    with side.offload(model, optimizer):
        for step in range(5):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(4, 16, 4, 4, generator=generator).to(HOME)
            if step == 2 and when == "inside":
                model.to(memory_format=torch.channels_last)
            if step > 2 or when == "before":
                x = x.contiguous(memory_format=torch.channels_last)
            side.step(F.cross_entropy(model(x), batch(step, rows=4)[1]), optimizer)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(48, 48, dtype=torch.complex64) / 7) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x @ weight.conj() + x @ weight.mH
            x = x / (1 + x.abs())
        return x.imag.square().mean() + x.real.mean()


@stepwise(each_backend_in_time, Complex)
@pytest.mark.parametrize("foreach", [False, True])
def test_complex_parameters(side: Side, model: Any, optimizer: Any, step: int) -> None:
    x = torch.randn(4, 48, generator=torch.Generator().manual_seed(step), dtype=torch.complex64)
    side.step(model(x.to(HOME)), optimizer)


@each_backend_in_time
@pytest.mark.parametrize("lazy", ["conj", "neg"])
def test_a_parameter_with_a_lazy_bit(backend: str, lazy: str) -> None:
    """``p.data`` is a conjugate, or the negative, of what lies in memory."""

    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            base = torch.randn(48, 48, dtype=torch.complex64)
            self.weight = nn.Parameter(base.conj() if lazy == "conj" else base.conj().imag)
            self.others = nn.ParameterList(nn.Parameter(torch.randn(48, 48) / 7) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for other in self.others:
                x = torch.tanh(x @ other)
            return (x.to(self.weight.dtype) @ self.weight).abs().mean()

    def loss(model: Any, step: int) -> Tensor:
        return model(batch(step, rows=4, width=48)[0])

    optimizer = partial(SGD, lr=1e-2, momentum=0.9, foreach=False)
    hazard(backend, trained(Lazy, loss=loss, optimizer=optimizer, share=0.8), moves=False)


class Odd(nn.Module):
    """Parameters of 0, 1, 3, 1,025 and 4,097 elements among larger ones."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(0,), (1,), (3,), (1025,), (4097,), (0, 64), (64, 64), (64, 64)]
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(size)) for size in sizes)
        self.empty = nn.Linear(64, 0)
        self.scalar = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        total = self.empty(x).sum() * self.scalar
        for part in self.parts:
            total = total + (part * self.scalar).square().sum() / (1 + part.numel())
        return total + (x @ self.parts[6] @ self.parts[7]).square().mean()


@each_backend_in_time
@pytest.mark.parametrize(
    "options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str
)
def test_odd_and_empty_sizes(backend: str, options: dict[str, bool]) -> None:
    program = trained(
        Odd,
        loss=lambda model, step: model(batch(step)[0]),
        optimizer=partial(AdamW, lr=1e-2, **options),
        share=0.5,
    )
    hazard(backend, program)


@each_backend_in_time
@pytest.mark.parametrize("how", ["embedding", "bag"])
@pytest.mark.parametrize("kind", [SGD, Adagrad])
def test_sparse_gradients(backend: str, how: str, kind: type[SGD | Adagrad]) -> None:
    """Of a large embedding; they stay as autograd made them, and the update runs in ``step()``."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            make = nn.Embedding if how == "embedding" else nn.EmbeddingBag
            self.words = make(200, 64, sparse=True)
            self.inner = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.words(tokens)
            for layer in self.inner:
                x = torch.tanh(layer(x))
            return x.square().mean()

    def loss(model: Any, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        return model(torch.randint(0, 200, (3, 5), generator=generator))

    program = trained(Words, loss=loss, optimizer=partial(kind, lr=1e-1), share=0.6, states=1)
    hazard(backend, program, moves=False)


def _words() -> nn.Module:
    return nn.Sequential(nn.Embedding(200, 64, sparse=True), nn.Linear(64, 64))


@stepwise(each_backend_in_time, _words, steps=6, share=0.8, moves=False, aside=False)
def test_an_optimizer_that_takes_no_sparse_gradients(
    side: Side, model: Any, optimizer: Any, step: int
) -> None:
    """The error is the optimizer's, at the step; nothing has moved, and the next step goes on."""
    model[0].sparse = step != 1
    model(torch.tensor([1, 5, 5])).square().mean().backward()
    side.fails("step", optimizer.step)
    optimizer.zero_grad()
