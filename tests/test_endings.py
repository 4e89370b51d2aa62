"""A block ends as a whole: each part of its end runs, though one before it raises."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from emulated import DEVICE, accelerated
from exactness import (
    SMALL_PAGES,
    Loop,
    Small,
    Twin,
    assert_ordinary,
    compare_runs,
    footprint_of,
    needs_pager,
    small,
    small_loss,
    small_samples,
)
from fused_networks import Chosen, chosen_loss
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

import dynoffload
from dynoffload.distributed.status import RankStatus, StatusStore
from dynoffload.errors import ConfigError
from dynoffload.managed import is_managed
from dynoffload.planning.schedule import Schedule
from dynoffload.runtime.adoption.relocation import Homes, Restoration
from dynoffload.runtime.paging import Paging
from dynoffload.units import KiB

BACKENDS = [pytest.param("pager", marks=needs_pager), "mapped"]
CONFIG: dict[str, Any] = {**SMALL_PAGES, "step_aside": False}


class Late(Exception):
    """What a part of the end raises."""


def step(model: Any, optimizer: SGD) -> None:
    """Train by one sample."""
    small_loss(model, small_samples(1)[0]).backward()
    optimizer.step()


class Whole(Optimizer):
    """Makes its step at once, and keeps what it keeps in a list."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        self.moments = [torch.zeros_like(one) for one in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for moment, one in zip(self.moments, self.param_groups[0]["params"], strict=True):
            if one.grad is not None:
                one.sub_(moment.mul_(0.9).add_(one.grad), alpha=1e-2)


class Growing(Small):
    """Registers a buffer in each of its first calls."""

    def forward(self, tokens: Tensor) -> Tensor:
        made = len([*self.buffers()])
        if made < 6:
            self.register_buffer(f"seen{made}", torch.full((2048,), 1.0 + made))
        return super().forward(tokens) * sum(buffer.mean() for buffer in self.buffers())


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Optimizer]]] = {
    "parameters": (small, AdamW),
    "late buffers": (Growing, AdamW),
    "state of a whole step": (small, Whole),
    "experts": (Chosen, AdamW),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NETWORKS)
def test_the_end_hardly_writes(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in memory is given back first and makes room, so that a full disk loses nothing."""
    make, optimizer_of = NETWORKS[name]
    twin = Twin(make(), lambda parameters: optimizer_of(parameters))
    samples: list[Any] = small_samples(7)
    if name == "experts":
        samples = [(n, [n % 6, (n + 2) % 6]) for n in range(7)]
    run, written = Restoration.run, []

    def counted(restoration: Restoration, *given: Any) -> str:
        device = restoration._device
        device.follow([], Schedule(()))  # else the last step's plan and reserve may still evict
        device.reserve(0)
        before = device.counters()
        where = run(restoration, *given)
        after = device.counters()
        written.append((after.bytes_out - before.bytes_out, after.bytes_in - before.bytes_in))
        return where

    monkeypatch.setattr(Restoration, "run", counted)
    compare_runs(
        twin,
        Loop(steps=7),
        samples,
        chosen_loss if name == "experts" else small_loss,
        footprint_of(twin.model) // 3,
        config={**CONFIG, "backend": backend},
    )
    [(out, into)] = written
    assert into > 0, "all was in memory"
    # A row is whole before its slices go, so that one slice of another may have to make way.
    assert out <= (8 * KiB if name == "experts" else 0)


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """Have this process be the first of two, of which there is no other."""
    assert FakeStore is not None  # its import makes the backend known
    wait = datetime.timedelta(minutes=5)
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2, timeout=wait)
    yield
    dist.destroy_process_group()


def test_a_watch_that_cannot_tell_the_others_ends_no_less(
    two_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small()
    optimizer = SGD(model.parameters(), lr=0.1)

    def put(store: StatusStore, status: RankStatus, left: str | None = None) -> None:
        if left is not None:
            raise Late("of the watch")

    monkeypatch.setattr(StatusStore, "put", put)
    with (
        pytest.raises(Late, match="of the watch"),
        dynoffload.offload(model, optimizer, budget="1MiB", config=CONFIG),
    ):
        step(model, optimizer)
    assert not is_managed(model)
    assert_ordinary(model, optimizer)


@pytest.mark.parametrize("part", ["end of paging", "page"])
def test_what_comes_after_a_part_that_fails(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page of a run is written though the block's end has failed, and the other way round."""
    model = small()
    optimizer = SGD(model.parameters(), lr=0.1)
    page, ended = tmp_path / "run.html", []
    dynoffload.config.set_defaults(
        report=tmp_path / "gone" / "run.html" if part == "page" else page,
        on_end=lambda session, files: ended.append(session),
    )
    if part == "page":
        (tmp_path / "gone").touch()
    else:
        close = Paging.close

        def closing(paging: Paging, **how: Any) -> str:
            close(paging, **how)
            raise Late("of paging")

        monkeypatch.setattr(Paging, "close", closing)
    try:
        with (
            pytest.raises((Late, ConfigError)),
            dynoffload.offload(model, optimizer, budget="1MiB", config=CONFIG),
        ):
            step(model, optimizer)
    finally:
        dynoffload.config.clear_defaults()
    assert len(ended) == 1
    assert page.exists() is (part != "page")
    assert_ordinary(model, optimizer)


def test_what_was_moved_comes_home_though_paging_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    close, leave, left = Paging.close, Homes.leave, []

    def closing(paging: Paging, **how: Any) -> str:
        close(paging, **how)
        raise Late("of paging")

    def leaving(homes: Homes) -> str:
        left.append(homes._moves)
        return leave(homes)

    monkeypatch.setattr(Paging, "close", closing)
    monkeypatch.setattr(Homes, "leave", leaving)
    with (
        accelerated(elsewhere=True),
        pytest.raises(Late),
        dynoffload.offload(model, budget="1MiB", device=DEVICE, config=CONFIG),
    ):
        pass
    assert left == [True]
