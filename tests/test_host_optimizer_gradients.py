"""Gradients that leave: clipped, unscaled and checked as they would be on the device."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from host_reference import Odd, Pair, Reference, odd, words
from torch import Tensor, nn

from dynoffload.errors import ConfigError
from dynoffload.host_optimizer import GradScaler, HostOptimizer
from dynoffload.host_optimizer.link import CpuLink


class TwoDtypes(Odd):
    """Norms are stacked by dtype, as torch groups them."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden.float()

    def forward(self, x: Tensor) -> Tensor:
        rows = self.hidden(self.embedding(x).float())
        return rows.square().mean() + self.out.weight.square().mean()


@pytest.mark.parametrize(
    ("make", "accumulate", "norm_type", "bounds"),
    [
        (odd, 1, 2.0, [0.1]),
        (odd, 2, 2.0, [0.1]),
        (odd, 1, torch.inf, [0.1]),
        (odd, 2, 1.0, [0.1]),
        (odd, 1, 2.0, [torch.inf, 1.0, 0.1]),  # first without a bound, to see the norm
        (lambda: odd(torch.float32), 1, 2.0, [torch.inf, 1.0, 0.1]),
        (TwoDtypes, 1, 2.0, [0.1]),
    ],
)
def test_clipping_is_torchs(
    make: Any, accumulate: int, norm_type: float, bounds: list[float]
) -> None:
    pair = Pair(model=make())
    for number, sample in enumerate(words(4), 1):
        if accumulate == 1:
            assert pair.ours.clip_grad_norm_(0.1) == 0.0, "there is no gradient yet"
        pair.backward(sample, scale=100.0)
        if number % accumulate == 0:
            for bound in bounds:
                pair.clip(bound, norm_type)
            pair.step()
            pair.zero_grad()
    pair.assert_same()


def test_clipping_without_a_finite_norm() -> None:
    pair = Pair()
    (pair.model(words(1)[0]) * float("nan")).backward()
    with pytest.raises(RuntimeError, match="is nan"):
        pair.ours.clip_grad_norm_(1.0, error_if_nonfinite=True)


def test_gradients_that_are_zeroed() -> None:
    """Zeros are a gradient: momentum goes on, and what comes is added to them."""
    pair = Pair("momentum")
    pair.train(words(2))
    for more in (False, True):
        pair.backward(words(1)[0])
        pair.ours.zero_grad(set_to_none=False)
        pair.theirs.zero_grad(set_to_none=False)
        if more:
            pair.backward(words(1, seed=1)[0])
        pair.step()
    pair.assert_same()


def test_a_gradient_that_somebody_puts_there() -> None:
    pair = Pair()
    for model in (pair.model, pair.reference):
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.25)
    held = pair.model.out.weight.grad
    assert held is not None
    pair.step()
    pair.assert_same()
    assert bool((held == 0.25).all())


# Loss scales


def scale_plainly(reference: Reference, model: nn.Module, scale: float, clip: float | None) -> bool:
    """Unscale as the semantics say: in single precision, and clip there."""
    gradients = {
        p: p.grad.float() * (1.0 / scale) for p in model.parameters() if p.grad is not None
    }
    if not all(bool(g.isfinite().all()) for g in gradients.values()):
        return False
    if clip is not None:
        stand_ins = [nn.Parameter(torch.zeros_like(g)) for g in gradients.values()]
        for one, g in zip(stand_ins, gradients.values(), strict=True):
            one.grad = g
        torch.nn.utils.clip_grad_norm_(stand_ins, clip, foreach=False)
    for p, master in reference.masters.items():
        master.grad = gradients.get(p)
        p.grad = None
    reference.inner.step()
    with torch.no_grad():
        for p in gradients:
            p.copy_(reference.masters[p])
    return True


@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_scaler(clip: float | None) -> None:
    """float16: the first scales overflow, and those steps are left out; then they are made."""
    pair = Pair(dtype=torch.float16)
    scaler = GradScaler("cpu", init_scale=2.0**22, growth_interval=3)
    made = []
    for sample in words(12):
        scale = scaler.get_scale()
        for model in (pair.model, pair.reference):
            scaler.scale(model(sample)).backward()
        if clip is not None:
            scaler.unscale_(pair.ours)
            pair.ours.clip_grad_norm_(clip)
        scaler.step(pair.ours)
        scaler.update()
        made.append(scale_plainly(pair.theirs, pair.reference, scale, clip))
        pair.theirs.zero_grad()
        assert (scaler.get_scale() < scale) == (not made[-1])
        pair.assert_same()
    assert set(made) == {True, False}


@pytest.mark.parametrize("bad", [1.0, float("inf"), float("nan")])
def test_a_scaler_looks_at_gradients_that_were_added_up(bad: float) -> None:
    pair = Pair("sgd")
    before = pair.model.out.weight.detach().clone()
    scaler = GradScaler("cpu", init_scale=1.0)
    for factor in (1.0, bad):
        scaler.scale(pair.model(words(1)[0]) * factor).backward()
    scaler.step(pair.ours)
    assert torch.equal(pair.model.out.weight, before) == (bad != 1.0)


def test_a_norm_that_overflows_leaves_no_step_out() -> None:
    """In float16 the norm of finite elements may be infinite."""
    parameter = nn.Parameter(torch.zeros(100, dtype=torch.float16))
    optimizer = HostOptimizer([parameter], torch.optim.SGD, lr=1e-4, threads=1)
    scaler = GradScaler("cpu", init_scale=1.0)
    assert torch.full_like(parameter, 60000.0).norm().isinf()
    scaler.scale((parameter * 60000.0).sum()).backward()
    scaler.step(optimizer)
    assert float(parameter[0].detach()) == -6.0


def test_a_scaler_is_of_the_device_at_hand() -> None:
    here = torch.accelerator.current_accelerator(check_available=True)
    scaler = GradScaler(init_scale=4.0)
    assert scaler.is_enabled()
    assert float(scaler.scale(torch.ones((), device=here or "cpu"))) == 4.0


def test_a_scaler_serves_others_as_they_are() -> None:
    model = odd(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(words(1)[0])).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert optimizer.state


def test_torchs_scaler_is_refused() -> None:
    pair = Pair(dtype=torch.float16)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(pair.model(words(1)[0])).backward()
    with pytest.raises(ConfigError, match=r"use dynoffload\.host_optimizer\.GradScaler"):
        scaler.step(pair.ours)


# On their way


class Held(CpuLink):
    """Copies that are not over until somebody waits for them."""

    def __init__(self) -> None:
        self.moments: list[_Late] = []

    def copy_out(self, target: Any, source: Any, after: Sequence[Any]) -> Any:
        super().copy_out(target, source, after)
        self.moments.append(_Late(source.nbytes))
        return self.moments[-1]


@dataclass
class _Late:
    nbytes: int
    over: bool = False

    def reached(self) -> bool:
        return self.over

    def wait(self) -> None:
        self.over = True


def test_a_gradient_is_held_until_it_has_left_and_no_longer() -> None:
    """Its memory must not go to others while it is copied; only four tiles' are under way, and none
    after the step."""
    gone: list[int] = []

    def made(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        weakref.finalize(parameter.grad.untyped_storage(), gone.append, 0)

    model, link = odd(), Held()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(made)
    optimizer = HostOptimizer(
        model.parameters(), torch.optim.AdamW, threads=1, queues=link, tile_bytes=4096
    )
    for sample in words(2):
        model(sample).backward()
    held = [moment for moment in link.moments if not moment.over]
    assert 0 < sum(moment.nbytes for moment in held) <= 4 * 4096
    optimizer.step()
    assert len(gone) == 2 * (sum(1 for _ in model.parameters()) - 2)  # two are never used


def test_two_optimizers_of_one_model() -> None:
    """Each takes the gradients of its own parameters."""
    model = odd()
    first = HostOptimizer(model.hidden.parameters(), torch.optim.SGD, lr=0.1)
    second = HostOptimizer(model.out.parameters(), torch.optim.SGD, lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    model(words(1)[0]).backward()
    first.step()
    second.step()
    changed = {
        name
        for (name, p), old in zip(model.named_parameters(), before, strict=True)
        if not torch.equal(p, old)
    }
    assert changed == {"hidden.weight", "hidden.bias", "out.weight", "out.bias"}
    assert model.embedding.weight.grad is not None
