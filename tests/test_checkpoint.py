"""A run that is saved and resumed goes on bit for bit, wherever it is resumed.

Each test trains a reference plainly and without a pause, and compares with a run that was saved in
the middle and loaded into new objects made of another seed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emulated import DEVICE, accelerated
from exactness import (
    SMALL_PAGES,
    assert_same,
    assert_same_training,
    footprint_of,
    least_budget,
    needs_pager,
    small,
    small_loss,
    small_samples,
)
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

import dynoffload
from dynoffload.errors import CheckpointError, ConfigError
from dynoffload.runtime.session import Session

SAMPLES = small_samples(16)
STEPS, SAVED_AT = 7, 4
BACKENDS = [pytest.param("pager", marks=needs_pager), "mapped"]
Make = Callable[[Iterable[nn.Parameter]], Optimizer]


def matrices(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Freeze what is no matrix, and return what is."""
    return [p for p in parameters if p.requires_grad_(p.dim() == 2).requires_grad]


OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adam-amsgrad-tensor-lr": lambda p: torch.optim.Adam(
        p, lr=torch.tensor(1e-2), amsgrad=True, foreach=False
    ),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-3),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1e-1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2, t0=2.0),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "muon": lambda p: torch.optim.Muon(matrices(p), lr=1e-2),
}

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 5], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 5),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.5, 1.0, 6),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 6, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 2e-2, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.02, total_steps=20),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 5), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.5, 1.0, 3), lr_scheduler.ExponentialLR(o, 0.8)], [3]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 1e-3, anneal_epochs=5),
}
"""By the name of the class; those of several schedulers hold some of the others."""


class Run:
    """A model, its optimizer and scheduler, and the numbers that a loop draws."""

    def __init__(self, make: Make, scheduler: str = "StepLR", seed: int = 0) -> None:
        self.model: nn.Module = small(seed)
        self.optimizer = make(self.model.parameters())
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.losses: list[Tensor] = []
        self.drawn: list[float] = []
        self.rates: list[float] = []

    @property
    def extra(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler}

    def steps(self, start: int, stop: int) -> None:
        """Make steps: dropout, Python and numpy all draw numbers."""
        for step in range(start, stop):
            loss = small_loss(self.model, SAMPLES[step])
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
                self.scheduler.step(loss.detach())
            else:
                self.scheduler.step()
            self.losses.append(loss.detach().clone())
            self.rates += map(float, self.scheduler.get_last_lr()[:1])
            self.drawn += [random.random(), float(np.random.standard_normal())]

    @contextmanager
    def paged(self, backend: str, share: float = 0.3, **config: Any) -> Iterator[Session]:
        """Page the model under a share of its footprint."""
        if backend == "plain":
            yield None  # type: ignore[misc]
            return
        options = {**SMALL_PAGES, "step_aside": False, **config}
        below, device = contextlib.nullcontext(), None
        if backend == "emulated":
            below, device = accelerated(elsewhere=True), DEVICE
        else:
            options["backend"] = backend
        wished = int(footprint_of(self.model) * share)
        budget, _ = least_budget(self.model, self.optimizer, wished, SMALL_PAGES)
        with (
            below,
            dynoffload.offload(
                self.model,
                self.optimizer,
                budget=budget,
                pilot=None,
                device=device,
                config=options,
            ) as session,
        ):
            yield session
        for step in session.log.steps:
            assert step.peak_fast_bytes <= budget


def seed_all(seed: int) -> None:
    """Seed every generator."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@functools.cache
def uninterrupted(make: Make, scheduler: str = "StepLR") -> Run:
    """Return the reference."""
    seed_all(1)
    run = Run(make, scheduler)
    run.steps(0, STEPS)
    return run


def save_in_the_middle(
    path: Path, make: Make, backend: str, scheduler: str = "StepLR", **options: Any
) -> None:
    """Train to the middle and save."""
    seed_all(1)
    run = Run(make, scheduler)
    with run.paged(backend) as session:
        run.steps(0, SAVED_AT)
        if session is None:
            dynoffload.save_checkpoint(run.model, run.optimizer, path, extra=run.extra, **options)
        else:
            session.save(path, extra=run.extra, **options)


def resume(
    path: Path, make: Make, backend: str, scheduler: str = "StepLR", share: float = 0.3
) -> Run:
    """Load into new objects, with other numbers in all of them, and train to the end."""
    seed_all(99)
    run = Run(make, scheduler, seed=7)
    with run.paged(backend, share) as session:
        if session is None:
            dynoffload.load_checkpoint(run.model, run.optimizer, path, extra=run.extra)
        else:
            session.load(path, extra=run.extra)
        run.steps(SAVED_AT, STEPS)
    return run


def assert_resumed(run: Run, reference: Run) -> None:
    """Assert that the second half was the reference's."""
    assert_same(run.losses, reference.losses[SAVED_AT:], "losses")
    assert run.drawn == reference.drawn[2 * SAVED_AT :]
    assert_same_training(run.model, run.optimizer, reference.model, reference.optimizer)
    assert_same(run.scheduler.get_last_lr(), reference.scheduler.get_last_lr(), "rates")


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        pytest.param("plain", "pager", marks=needs_pager),
        pytest.param("pager", "mapped", marks=needs_pager),
        ("mapped", "emulated"),
        ("emulated", "plain"),
    ],
)
def test_saved_and_resumed_anywhere(saved: str, resumed: str, tmp_path: Path) -> None:
    """Under another budget, on another device, with and without a session."""
    make = OPTIMIZERS["adamw"]
    save_in_the_middle(tmp_path / "run", make, saved, max_shard_size="40kB")
    assert_resumed(resume(tmp_path / "run", make, resumed, share=0.5), uninterrupted(make))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_resumes(name: str, tmp_path: Path) -> None:
    """Saved under a budget, resumed under another."""
    make = OPTIMIZERS[name]
    save_in_the_middle(tmp_path / "run", make, "auto")
    assert_resumed(resume(tmp_path / "run", make, "auto", share=0.5), uninterrupted(make))


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_resumes(name: str, tmp_path: Path) -> None:
    """Its rate changes after the save, so that one that started anew would differ."""
    make = OPTIMIZERS["sgd-momentum"]
    save_in_the_middle(tmp_path / "run", make, "plain", name)
    reference = uninterrupted(make, name)
    assert_resumed(resume(tmp_path / "run", make, "plain", name), reference)
    assert len(set(reference.rates[SAVED_AT - 1 :])) > 1, "this shows nothing"


def test_no_scheduler_of_torch_is_forgotten() -> None:
    known = {
        name
        for module in (lr_scheduler, torch.optim.swa_utils)
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler)
    }
    assert set(SCHEDULERS) == known - {"LRScheduler", "_LRScheduler"}


# In the middle of things


@pytest.mark.parametrize("backend", BACKENDS)
def test_rolling_back_in_a_session_drops_updates_and_gradients(
    backend: str, tmp_path: Path
) -> None:
    """Saved with updates pending, which it makes; loaded with others pending, which it forgets."""
    make = OPTIMIZERS["adamw"]
    reference = uninterrupted(make)
    seed_all(1)
    run = Run(make)
    with run.paged(backend) as session:
        run.steps(0, SAVED_AT)
        session.save(tmp_path / "run", extra=run.extra)
        run.steps(0, 3)
        small_loss(run.model, SAMPLES[0]).backward()
        run.optimizer.step()
        session.load(tmp_path / "run", extra=run.extra)
        assert all(parameter.grad is None for parameter in run.model.parameters())
        run.losses, run.drawn = [], []
        run.steps(SAVED_AT, STEPS)
    assert_resumed(run, reference)


def test_saving_in_the_middle_of_a_step_changes_nothing(tmp_path: Path) -> None:
    """Between backward and step gradients stay, and are not saved."""
    make = OPTIMIZERS["sgd-momentum"]
    plain, run = Run(make), Run(make)
    for one in (plain, run):
        seed_all(1)
        with one.paged("plain" if one is plain else "auto") as session:
            one.steps(0, 3)
            small_loss(one.model, SAMPLES[3]).backward()
            if session is not None:
                session.save(tmp_path / "run", extra=one.extra)
                assert any(parameter.grad is not None for parameter in one.model.parameters())
            one.optimizer.step()
            one.optimizer.zero_grad()
            one.steps(4, 6)
    assert_same_training(run.model, run.optimizer, plain.model, plain.optimizer)
    dynoffload.load_checkpoint(run.model, run.optimizer, tmp_path / "run", extra=run.extra)
    assert all(parameter.grad is None for parameter in run.model.parameters())


def test_a_session_that_has_stepped_aside_saves_and_loads(tmp_path: Path) -> None:
    make = OPTIMIZERS["adamw"]
    reference = uninterrupted(make)
    seed_all(1)
    run = Run(make)
    with run.paged("auto", share=20, step_aside=True) as session:
        run.steps(0, SAVED_AT)
        assert not session.paging
        session.save(tmp_path / "run", extra=run.extra)
        run.steps(0, 2)
        session.load(tmp_path / "run", extra=run.extra)
        run.losses, run.drawn = [], []
        run.steps(SAVED_AT, STEPS)
    assert_resumed(run, reference)


def test_nested_sessions_save_their_own(tmp_path: Path) -> None:
    """Of a model, its own optimizer; the other is not in it, and another's optimizer is refused."""
    runs = [Run(OPTIMIZERS["adamw"], seed=seed) for seed in (1, 2)]
    for at, run in enumerate(runs):
        seed_all(at)
        run.steps(0, 2)
    references = copy.deepcopy([(run.model, run.optimizer.state_dict()) for run in runs])
    with runs[0].paged("auto") as first, runs[1].paged("auto") as second:
        first.save(tmp_path / "first")
        second.save(tmp_path / "second")
        with pytest.raises(ConfigError, match="not the optimizer of the offload"):
            dynoffload.save_checkpoint(runs[0].model, runs[1].optimizer, tmp_path / "third")
        for run in runs:
            run.steps(2, 4)
        first.load(tmp_path / "first")
        dynoffload.load_checkpoint(runs[1].model, runs[1].optimizer, tmp_path / "second")
    for run, (model, state) in zip(runs, references, strict=True):
        assert_same(run.model.state_dict(), model.state_dict(), "model")
        assert_same(run.optimizer.state_dict(), state, "optimizer")


def test_the_model_alone_inside_a_block(tmp_path: Path) -> None:
    """Saved and loaded without the optimizer: its state, and updates under way, stay."""
    make = OPTIMIZERS["adamw"]
    plain, run = Run(make), Run(make)
    for one in (plain, run):
        seed_all(1)
        with one.paged("plain" if one is plain else "auto"):
            one.steps(0, 2)
            dynoffload.save_checkpoint(one.model, None, tmp_path / "run")
            one.steps(2, 4)
            dynoffload.load_checkpoint(one.model, None, tmp_path / "run")
            one.steps(4, 6)
    assert_same_training(run.model, run.optimizer, plain.model, plain.optimizer)
    with pytest.raises(CheckpointError, match="saved without an optimizer"):
        dynoffload.load_checkpoint(run.model, run.optimizer, tmp_path / "run")
