"""Paging steps aside by what activations and gradients take together: most activations are alive
before a backward, and most gradients after it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from exactness import Loop, Twin, assert_same
from torch import Tensor, nn
from torch.optim import AdamW

from dynoffload.memory.heap import live_bytes
from dynoffload.runtime.counting import ordinary_bytes
from dynoffload.runtime.session import Session

WIDTH, DEPTH, ROWS = 256, 8, 256
WHOLE = 4 * 4 * DEPTH * WIDTH * (WIDTH + 1)
"""Bytes of parameters, gradients and state of `Stack`."""
SAVED = 4 * DEPTH * ROWS * WIDTH
"""Bytes of its saved activations, but for the input and the loss."""
ASIDE = {"pilot": None, "config": {"step_aside": True}}


class Stack(nn.Module):
    """Layers one after the other, each of which is called ``times``."""

    def __init__(self, depth: int = DEPTH, times: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[rows, WIDTH]`` for the same."""
        for _ in range(self.times):
            for layer in self.layers:
                x = torch.tanh(layer(x))
        return x


class Branch(Stack):
    """Samples of an even number of rows use half of the layers."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[rows, WIDTH]`` for the same."""
        for layer in self.layers if len(x) % 2 else self.layers[: DEPTH // 2]:
            x = torch.tanh(layer(x))
        return x


def samples(count: int, rows: int = ROWS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, WIDTH, generator=generator) for _ in range(count)]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def trained(pair: Twin, budget: int, *loops: Loop) -> list[bool]:
    """Train by each loop in turn, and return for each whether it is paged then."""
    paged = []
    with pair.paged(budget, **ASIDE) as session:
        for loop in loops:
            losses = [
                loop.run(*side, samples(loop.steps * loop.accumulate), loss_of)
                for side in pair.sides
            ]
            assert_same(losses[0], losses[1], "losses")
            paged.append(session.paging)
        assert session.stats["peak_fast_bytes"].max() <= budget
    pair.assert_same()
    return paged


def twin(depth: int = DEPTH, times: int = 1) -> Twin:
    torch.manual_seed(0)
    return Twin(Stack(depth, times), lambda p: AdamW(p, lr=1e-3))


def watched(session: Session) -> Callable[[], int]:
    """Return a function that returns the most bytes of the heap, over forwards and gradients."""
    peaks = [0]

    def look(*_: object) -> None:
        peaks.append(live_bytes() or 0)

    for parameter in session.model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    session.model.register_forward_hook(look)
    return lambda: max(peaks)


def test_what_is_not_alive_together_need_not_fit_together() -> None:
    """And what the heap holds is not more than the budget."""
    pair, budget = twin(), WHOLE + SAVED // 2
    with pair.paged(budget, **ASIDE) as session:
        pair.train(loss_of, samples(4))
        assert not session.paging
        before = (live_bytes() or 0) - ordinary_bytes(pair.model, pair.optimizer)
        most = watched(session)
        pair.train(loss_of, samples(3))
        assert not session.paging
        assert session.stats["peak_fast_bytes"].max() <= budget
    pair.assert_same()
    temporaries = 4 * 4 * ROWS * WIDTH  # gradients of activations, and samples
    assert not before or WHOLE <= most() - before <= budget + temporaries


def test_frozen_weights_that_backward_reads_have_no_gradients() -> None:
    """So all activations below them are alive at one time beside what the first layer keeps."""
    torch.manual_seed(0)
    model = Stack()
    for layer in list(model.layers)[1:]:
        layer.requires_grad_(False)
    whole = sum(p.nbytes * (4 if p.requires_grad else 1) for p in model.parameters())
    for share, paged in ((0.5, True), (1.2, False)):
        pair = Twin(copy.deepcopy(model), lambda p: AdamW([q for q in p if q.requires_grad]))
        assert trained(pair, whole + int(share * SAVED), Loop(6)) == [paged]


def test_an_accumulated_gradient_is_alive_beside_the_next_forward() -> None:
    assert trained(twin(), WHOLE + SAVED // 2, Loop(6, accumulate=2)) == [True]
    assert trained(twin(), WHOLE + 2 * SAVED, Loop(6, accumulate=2)) == [False]


@pytest.mark.parametrize("kept", [{"accumulate": 2}, {"set_to_none": False}])
def test_it_comes_back_before_a_forward_beside_more_gradients(kept: dict[str, int]) -> None:
    """The loop has begun to accumulate, or to keep gradients as zeros."""
    modes = trained(twin(), WHOLE + SAVED // 2, Loop(5), Loop(2, **kept))
    assert modes == [False, True]
    assert trained(twin(), WHOLE + 2 * SAVED, Loop(5), Loop(2, **kept)) == [False, False]


@pytest.mark.parametrize("consumed", [False, True])
def test_a_gradient_zeroed_between_forward_and_backward_is_alive_in_the_forward(
    consumed: bool,
) -> None:
    """Also where an update in backward has consumed it, as in resident mode it would be there."""
    pair, budget, paged = twin(), WHOLE + SAVED // 2, []
    config = {"step_aside": True, "optimizer_in_backward": consumed}
    with pair.paged(budget, pilot=None, config=config) as session:
        for x in samples(8):
            for model, optimizer in pair.sides:
                loss = loss_of(model, x)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            paged.append(session.paging)
        for _, optimizer in pair.sides:
            optimizer.zero_grad()
    assert all(paged)
    pair.assert_same()


def test_a_layer_called_again_has_its_gradient_from_its_first_use_in_backward() -> None:
    """Autograd adds up what its uses contribute before it stores the sum."""
    pair = twin(depth=2, times=4)
    whole = sum(4 * p.nbytes for p in pair.model.parameters())
    assert trained(pair, whole + SAVED // 2, Loop(6)) == [True]


def test_a_step_that_trains_less_leaves_room_for_one_that_trains_all() -> None:
    """Gradients that no measured step made are counted as if they were there from the start."""

    torch.manual_seed(0)
    pair = Twin(Branch(), lambda p: AdamW(p, lr=1e-3))
    budget = WHOLE + 3 * SAVED // 8
    with pair.paged(budget, **ASIDE) as session:
        pair.train(loss_of, samples(5))
        assert not session.paging
        pair.train(loss_of, samples(3, ROWS // 2 + 1))
        assert session.stats["peak_fast_bytes"].max() <= budget
        assert not session.paging
    pair.assert_same()


def test_samples_that_differ_have_room_to_differ_again() -> None:
    """Activations may grow once more by as much as measured steps differed."""

    for share, fits in ((0.6, False), (1.2, True)):
        torch.manual_seed(0)
        pair = Twin(Branch(), lambda p: AdamW(p, lr=1e-3))
        with pair.paged(WHOLE + int(share * SAVED), **ASIDE) as session:
            pair.train(loss_of, [x for one in samples(4, ROWS + 1) for x in (one, one[1:])])
            assert session.paging is not fits
        pair.assert_same()


def test_rows_of_one_tensor_are_alive_as_one() -> None:
    """Each of them keeps the same memory."""

    class Rows(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            scale = self.layers[0].bias
            return torch.stack([x[row] * scale for row in range(0, len(x), 4)])

    torch.manual_seed(0)
    pair = Twin(Rows(), lambda p: AdamW(p, lr=1e-3))
    assert trained(pair, WHOLE + SAVED, Loop(6)) == [False]


def test_a_larger_sample_comes_back_where_its_activations_would_pass_the_budget() -> None:
    pair, budget = twin(), WHOLE + SAVED // 2
    with pair.paged(budget, **ASIDE) as session:
        pair.train(loss_of, samples(5))
        assert not session.paging
        pair.train(loss_of, samples(1, ROWS + ROWS // 8))
        assert session.paging
        assert session.stats["peak_fast_bytes"].max() <= budget
    pair.assert_same()
