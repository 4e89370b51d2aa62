"""How sessions begin and end: refusals, what is left behind, other processes, other sessions.

Errors come before any training state is touched and name what to do. However a block or a process
ends, no file stays on the disk, and over many sessions no thread, descriptor or mapping stays in
the process.
"""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from exactness import (
    SMALL_PAGES,
    Loop,
    LyingPilot,
    Twin,
    arena_ranges,
    assert_ordinary,
    assert_same,
    bits,
    footprint_of,
    needs_pager,
    small,
    small_loss,
    small_samples,
)
from torch import nn
from torch.optim import AdamW

import dynoffload
from dynoffload.around import is_around
from dynoffload.config import OffloadConfig
from dynoffload.errors import BackendError, BudgetError, ConfigError, PilotError, SpillError
from dynoffload.memory import spill
from dynoffload.memory.spill import SpillFile
from dynoffload.runtime.counting import images_bytes
from dynoffload.runtime.sizing import sizing_of
from dynoffload.units import format_bytes

BACKENDS = [pytest.param("pager", marks=needs_pager), "mapped"]
SAMPLES = small_samples(40)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of most tests here."""
    return AdamW(parameters, lr=1e-2)


def third(model: nn.Module) -> int:
    """Return a third of the footprint."""
    return footprint_of(model) // 3


class Resources(NamedTuple):
    """What a process holds of the system."""

    descriptors: int
    threads: int
    arenas: int

    @classmethod
    def now(cls) -> Resources:
        """Return what this process holds."""
        gc.collect()
        return cls(
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
            len(arena_ranges()),
        )


class Untouched:
    """A model and optimizer that a refused block must leave exactly as they were."""

    def __init__(self) -> None:
        self.model = small()
        self.optimizer = adamw(self.model.parameters())
        for sample in SAMPLES[:2]:
            small_loss(self.model, sample).backward()
            self.optimizer.step()
        self.resources = Resources.now()
        self.before = self.look()

    def look(self) -> Any:
        """Return addresses and bits of everything."""
        tensors = [*self.model.parameters()]
        tensors += [p.grad for p in self.model.parameters() if p.grad is not None]
        for state in self.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        hooks = [(len(m._forward_pre_hooks), is_around(m)) for m in self.model.modules()]
        return [(t.data_ptr(), bits(t)) for t in tensors], hooks, type(self.optimizer.state)

    @contextmanager
    def stays(self) -> Iterator[None]:
        """Assert that what happens inside changes nothing and leaves nothing."""
        yield
        assert self.look() == self.before
        assert Resources.now() == self.resources

    def offload(self, **arguments: Any) -> Any:
        """Begin a block that must be refused."""
        arguments = {"budget": third(self.model), "config": SMALL_PAGES, **arguments}
        with dynoffload.offload(self.model, self.optimizer, **arguments):
            pytest.fail("the block must not begin")


# Refusals


@pytest.fixture
def untouched() -> Untouched:
    """A model in the middle of training."""
    return Untouched()


class Foreign(LyingPilot):
    """A pilot whose own check refuses."""

    def check(self, network: str) -> None:
        raise PilotError(f"this pilot was trained for another network than {network[:6]}")


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no spill directory": ({"spill_dir": "nowhere"}, SpillError, "nowhere does not exist: create"),
    **{
        f"a directory that is {one!r}": (
            {"spill_dir": one},
            ConfigError,
            r"spill_dir=.* is no directory: pass a path, or None",
        )
        for one in (3, "", b"/tmp")
    },
    "no pilot": ({"pilot": "none.pilot"}, PilotError, r"none\.pilot"),
    "a corrupt pilot": ({"pilot": __file__}, PilotError, r"test_lifecycle\.py"),
    "a foreign pilot": ({"pilot": Foreign(small(), [])}, PilotError, "another network"),
    "not a pilot": ({"pilot": object()}, ConfigError, "vocabulary"),
    "too small a budget": (
        {"budget": "20KiB"},
        BudgetError,
        r"a budget of 20KiB cannot .*: embedding\.weight needs .* raise the budget to at least",
    ),
    "no budget": ({"budget": None}, ConfigError, "no budget"),
    "unknown": ({"config": {"page_byte": 1}}, ConfigError, r"'page_byte' in .* are .*page_bytes"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_wrong_argument_is_refused(untouched: Untouched, what: str) -> None:
    """By name, with the remedy; nothing of it is unpickled, and nothing was touched."""
    arguments, error, told = REFUSED[what]
    with untouched.stays(), pytest.raises(error, match=told):
        untouched.offload(**arguments)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_full_spill_directory(
    untouched: Untouched, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """The free space is looked at first; need, have and remedy are named."""
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10_000))
    with untouched.stays(), pytest.raises(SpillError, match=r"9\.77 KiB free but .* needs .*KiB"):
        untouched.offload(config={**SMALL_PAGES, "backend": backend})


def test_a_spill_directory_too_full_for_rollback(
    untouched: Untouched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is counted with the other before either is made."""
    model, optimizer, budget = untouched.model, untouched.optimizer, third(untouched.model)
    config = OffloadConfig.of(SMALL_PAGES)
    images = images_bytes(model, optimizer)
    free = sizing_of(model, optimizer, budget, config).spill_bytes + images // 2
    usage = shutil.disk_usage("/")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
        patch.setattr(spill, "_unnamed", lambda *_: pytest.fail("a file was made"))
        told = f"{format_bytes(free)} free but training needs .* and rollback needs "
        with (
            untouched.stays(),
            pytest.raises(SpillError, match=f"{told}{format_bytes(images)}: free space there"),
        ):
            untouched.offload(config={**SMALL_PAGES, "rollback": True})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("after", [0, 30])
def test_a_disk_that_fills_up_while_the_block_begins(
    untouched: Untouched, monkeypatch: pytest.MonkeyPatch, backend: str, after: int
) -> None:
    """What was adopted already goes back to its place; the error is the disk's."""
    grow, calls = SpillFile.grow, []

    def full(file: SpillFile, size: int) -> None:
        calls.append(size)
        if len(calls) > after:
            raise SpillError(28, "the disk is full")
        grow(file, size)

    before = {name: bits(p) for name, p in untouched.model.named_parameters()}
    monkeypatch.setattr(SpillFile, "grow", full)
    with pytest.raises(SpillError, match="disk is full"):
        untouched.offload(config={**SMALL_PAGES, "backend": backend})
    monkeypatch.undo()
    assert {name: bits(p) for name, p in untouched.model.named_parameters()} == before
    assert_ordinary(untouched.model, untouched.optimizer)
    assert Resources.now() == untouched.resources
    with dynoffload.offload(untouched.model, untouched.optimizer, budget=third(untouched.model)):
        pass


def test_an_optimizer_of_another_model(untouched: Untouched) -> None:
    """Nothing would ever be updated."""
    untouched.optimizer = adamw(small().parameters())
    untouched.before = untouched.look()
    with untouched.stays(), pytest.raises(ConfigError, match=r"model\.parameters\(\)"):
        untouched.offload()


def test_a_backend_that_is_refused(untouched: Untouched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for by name, it is an error; by default the other takes its place."""
    monkeypatch.setattr("dynoffload.runtime.opening.probe", lambda: "no userfaultfd")
    with untouched.stays(), pytest.raises(BackendError, match=r"no userfaultfd; use .*mapped"):
        untouched.offload(config={**SMALL_PAGES, "backend": "pager"})
    with dynoffload.offload(untouched.model, budget="1MiB", config=SMALL_PAGES) as session:
        assert session.backend == "mapped"


# Several blocks


@pytest.mark.parametrize("shared", ["the model", "a part", "the whole", "the optimizer"])
def test_blocks_that_share_something(shared: str) -> None:
    """A managed model, a part of one, a model around one, or its optimizer cannot be managed twice;
    the outer block goes on."""
    inner, other = small(1), small(2)
    outer = nn.Sequential(inner)
    optimizer = adamw([*inner.parameters(), *other.parameters()])
    first, second = {
        "the model": ((inner,), (inner,)),
        "a part": ((outer,), (inner,)),
        "the whole": ((inner,), (outer,)),
        "the optimizer": ((inner, optimizer), (other, optimizer)),
    }[shared]
    told = {"the optimizer": "already belongs to an", "the model": "already inside an"}.get(
        shared, "pass one module that holds"
    )
    options: dict[str, Any] = {"budget": third(inner), "config": SMALL_PAGES}
    with dynoffload.offload(*first, **options):
        with pytest.raises(ConfigError, match=told):
            dynoffload.offload(*second, **options).start()
        Loop(steps=2).run(inner, optimizer, SAMPLES, small_loss)
    assert_ordinary(outer)
    assert all(group["params"] for group in optimizer.param_groups)


# Nothing is left


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_sessions_leave_nothing_in_the_process(backend: str) -> None:
    """Descriptors, threads and large mappings are the same after 10 sessions as after 2."""
    model = small()
    optimizer = adamw(model.parameters())
    counts = []
    for number in range(10):
        config = {**SMALL_PAGES, "backend": backend, "step_aside": number % 2 == 0}
        with dynoffload.offload(model, optimizer, budget=third(model), config=config):
            Loop(steps=2).run(model, optimizer, SAMPLES, small_loss)
        counts.append((Resources.now(), len(Path("/proc/self/maps").read_text().splitlines())))
    first, last = counts[2], counts[-1]
    assert last[0] == first[0]
    assert last[1] <= first[1] + 16, "address ranges pile up"


def test_a_view_that_outlives_the_block_stays_one() -> None:
    """It and its parameter share their memory; once they are gone, so is the device."""
    model = small()
    optimizer = adamw(model.parameters())
    before = Resources.now()
    with dynoffload.offload(model, optimizer, budget=third(model), config=SMALL_PAGES):
        Loop(steps=3).run(model, optimizer, SAMPLES, small_loss)
        views = [p.detach() for p in model.parameters()]
        gradients = [torch.ones_like(p) for p in model.parameters()]
    for view, parameter in zip(views, model.parameters(), strict=True):
        assert_same(view, parameter.detach(), "view")
        view.add_(1.0)
        assert_same(view, parameter.detach(), "view")
    assert all(torch.isfinite(p).all() for p in model.parameters())
    del views, view, gradients, model, optimizer, parameter
    gc.collect()
    assert Resources.now() == before


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("disk", ["has room", "is full"])
def test_what_does_not_fit_in_memory_at_the_end(
    backend: str, disk: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It stays usable: mapped from the spill directory, or else where it was; training goes on."""
    monkeypatch.setattr("dynoffload.runtime.adoption.relocation.available_bytes", lambda: 0)
    twin = Twin(small(), adamw)

    def train(steps: range) -> None:
        for step in steps:
            for model, optimizer in twin.sides:
                torch.manual_seed(step)
                small_loss(model, SAMPLES[step]).backward()
                optimizer.step()
                optimizer.zero_grad()

    config = {**SMALL_PAGES, "step_aside": False, "backend": backend}
    budget = third(twin.model)
    with caplog.at_level("WARNING"), monkeypatch.context() as patch:
        with dynoffload.offload(twin.model, twin.optimizer, budget=budget, config=config):
            train(range(4))
            if disk == "is full":
                usage = shutil.disk_usage("/")._replace(free=0)
                patch.setattr(shutil, "disk_usage", lambda path: usage)
    if disk == "is full":
        assert "under the budget still" in caplog.text
        assert "free space there" in caplog.text
    else:
        assert "mapped from" in caplog.text
        assert_ordinary(twin.model, twin.optimizer)
    train(range(4, 8))
    twin.assert_same()
