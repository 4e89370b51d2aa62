"""How tests train networks with fused experts, under a budget and plainly: no tests here.

A way in which users train or interfere is a generator: what comes before its first ``yield`` is
done before ``step()``, what comes after it before ``zero_grad()``, and what it yields is compared.
The networks reach their experts in three ways: a user's own by indexing the parameter, a Mixtral of
transformers whose eager loop is given parts, and one that takes the parameter whole (grouped_mm).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from fused_networks import PAGES, Chosen, chosen_loss, fused_of, mixtral, mixtral_loss
from hazards import Side, hazard
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

Loss = Callable[[int], Tensor]
Case = Callable[[nn.Module, Optimizer, Loss, int], Iterator[Any]]

HITS = [[0, 1], [2], [1, 4], [0, 3], [2, 4], [4], [1, 3], [5, 0]]


def chosen_step(model: nn.Module, step: int) -> Tensor:
    """Return the loss of a step's sample, which hits the experts of `HITS`."""
    return chosen_loss(model, (step, HITS[step % len(HITS)]))


def transformers_mixtral(implementation: str) -> nn.Module:
    """Return a Mixtral; skip without transformers."""
    pytest.importorskip("transformers")
    return mixtral(implementation)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], Tensor]]] = {
    "indexed": (Chosen, chosen_step),
    "parts": (partial(transformers_mixtral, "eager"), mixtral_loss),
    "whole": (partial(transformers_mixtral, "grouped_mm"), mixtral_loss),
}


def fused(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that hold one matrix for each expert."""
    return [p for p in model.parameters() if p.dim() == 3]


def gradients_of(model: nn.Module) -> list[Tensor]:
    """Return copies of their gradients."""
    return [p.grad.clone() for p in fused(model) if p.grad is not None]


def adamw(model: nn.Module) -> Optimizer:
    """Return an optimizer of all parameters."""
    return AdamW(model.parameters(), lr=1e-2)


def matched(
    backend: str,
    network: str,
    case: Case,
    *,
    make: Callable[[nn.Module], Optimizer] = adamw,
    steps: int = 7,
    share: float = 0.5,
    bounded: bool = False,
    **config: Any,
) -> Side:
    """Train a network by ``case`` on both sides, and compare all there is to see."""
    build, loss_of = NETWORKS[network]

    def program(side: Side) -> None:
        model = build()
        optimizer = make(model)
        with side.offload(model, optimizer, share=share, **PAGES, **config) as session:
            if session is not None:
                assert len(fused_of(session)) == len(fused(model)), "nothing is paged by slices"
            for number in range(steps):
                torch.manual_seed(number)
                run = case(model, optimizer, partial(loss_of, model), number)
                side.see("before the step", next(run))
                optimizer.step()
                side.see("after it", list(run))
                optimizer.zero_grad()

    return hazard(backend, program, moves=share < 1, budgeted=bounded)


def plain(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """Gradients are read after the step."""
    value = loss(number)
    value.backward()
    yield value
    yield [p.grad.sum() for p in fused(model) if p.grad is not None]


def clipped(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """The norm of all gradients reads them whole, and scaling writes them."""
    loss(number).backward()
    yield nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def clipped_by_value(model: nn.Module, optimizer: Optimizer, loss: Loss, number: int) -> Any:
    """Each gradient in place."""
    loss(number).backward()
    yield nn.utils.clip_grad_value_(model.parameters(), 1e-3)
