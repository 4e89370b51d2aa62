"""A pilot that steers is corrected within the forward, fetches what is worth it, changes no bit."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from exactness import Loop, Twin, compare_runs, needs_pager
from torch import Tensor, nn
from torch.optim import AdamW

import dynoffload
from dynoffload.experiments import zoo
from dynoffload.pilot.pilot import Pilot
from dynoffload.pilot.train import train_pilot
from dynoffload.planning.blocks import Block, Vocabulary
from dynoffload.planning.footprint import footprint
from dynoffload.profiler import RoutingProbe, load_trace
from dynoffload.profiler.idioms import Idioms
from dynoffload.runtime.adoption.units import Unit
from dynoffload.runtime.migration import host_time
from dynoffload.runtime.migration.forecast import Forecast
from dynoffload.runtime.migration.gates import Standing, Trial

PAGES: dict[str, Any] = {"page_bytes": 4096, "min_paged_bytes": None}
SHAPE = {"rows": 1, "length": 6}


def _samples(count: int, seed: int = 0) -> list[Any]:
    return list(islice(zoo.samples("moe", seed=seed, **SHAPE), count))


def _loss(model: nn.Module, sample: Any) -> Tensor:
    loss: Tensor = model(*sample.args).loss
    return loss


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Pilot]:
    """The bytes of a step, and a pilot that knows how far its network's hints are right."""
    folder = tmp_path_factory.mktemp("traces")
    model = zoo.build("moe", "tiny-wide")
    optimizer = AdamW(model.parameters(), lr=1e-3)
    paths = dynoffload.profile(
        model, _samples(16, seed=5), out=folder, optimizer=optimizer, progress=False
    )
    total = max(footprint(load_trace(path)) for path in paths)
    pilot = train_pilot(folder, progress=False).pilot
    return total, pilot


def _told_by(model: nn.Module, answer: Any) -> None:
    """Have the probes of ``model`` answer otherwise."""
    probes: list[RoutingProbe] = model.routing_probes()  # type: ignore[operator]
    changed = [replace(one, predict=answer(one)) for one in probes]
    model.routing_probes = lambda: changed  # type: ignore[assignment]


def _liar(seed: int) -> Any:
    """Return probes that say anything, or nothing, or fail."""
    chance = random.Random(seed)

    def answer(probe: RoutingProbe) -> Any:
        count = len(probe.blocks)

        def predict(x: Tensor) -> Tensor | None:
            kind = chance.randrange(5)
            if kind == 0:
                return None
            if kind == 1:
                raise ArithmeticError("a probe that fails")
            if kind == 2:
                return torch.zeros(count + 1)
            return torch.tensor([chance.random() for _ in range(count)])

        return predict

    return answer


@needs_pager
@pytest.mark.parametrize(
    ("share", "lies", "autocast"), [(3, False, None), (10, True, torch.bfloat16)]
)
def test_whatever_is_hinted_changes_no_bit(
    profiled: tuple[int, Pilot], share: int, lies: bool, autocast: torch.dtype | None
) -> None:
    total, pilot = profiled
    twin = Twin(zoo.build("moe", "tiny-wide"), lambda p: AdamW(p, lr=1e-3))
    if lies:
        _told_by(twin.model, _liar(share))
    loop = Loop(steps=4, autocast=autocast)
    budget = total // share
    session = compare_runs(
        twin, loop, _samples(12, share), _loss, budget, pilot=pilot, config=PAGES
    )
    assert session.stats["bytes_in"].sum() > 0
    assert session.stats["accuracy"].notna().all()


def _trained(profiled: tuple[int, Pilot], answer: Any = None) -> tuple[int, int, str]:
    """Return how many visits the plans foresaw, how many of blocks that the pilot knows they did
    not, and what steered last."""
    total, pilot = profiled
    model = zoo.build("moe", "tiny-wide")
    if answer is not None:
        _told_by(model, answer)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    drawn = _samples(8)
    with dynoffload.offload(
        model, optimizer, budget=total // 4, pilot=pilot, config=PAGES
    ) as session:
        migrator = session._paging.migrator  # type: ignore[union-attr]
        known = {path for block in pilot.vocabulary.blocks for path in block.visits}
        visit, missed = migrator.visit, 0

        def counted(unit: Unit) -> None:
            nonlocal missed
            before = migrator.missed
            visit(unit)
            missed += bool(known.intersection(unit.members)) and migrator.missed > before

        migrator.visit = counted  # type: ignore[method-assign]
        for sample in drawn:
            _loss(model, sample).backward()
            optimizer.step()
            optimizer.zero_grad()
        return migrator.anchored, missed, session._forecast.source


@needs_pager
def test_what_routers_say_is_planned(
    profiled: tuple[int, Pilot], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_time, "SHARE", 10.0)  # these steps are short
    monkeypatch.setattr(host_time.HostTime, "affords_plan", True)
    monkeypatch.setattr(
        Trial, "observe", lambda self, step, on_demand: on_demand
    )  # whatever it costs
    foreseen, missed, _ = _trained(profiled)
    _, missed_mute, _ = _trained(profiled, lambda probe: lambda x: None)
    assert missed < 0.05 * missed_mute
    assert missed < 0.02 * foreseen


@needs_pager
def test_a_pilot_that_comes_to_know_within_the_step_goes_on_steering(
    profiled: tuple[int, Pilot], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_time, "SHARE", 10.0)  # these steps are short
    monkeypatch.setattr(host_time.HostTime, "affords_plan", True)
    monkeypatch.setattr(Trial, "observe", lambda self, step, on_demand: on_demand)
    worse = lambda self, *_: vars(self).update(pilot=0.1, last_order=0.9, steps=9)  # noqa: E731
    monkeypatch.setattr(Standing, "observe", worse)  # before the first operator
    assert _trained(profiled)[2] == "the pilot"
    assert _trained(profiled, lambda probe: lambda x: None)[2] == "the last order"


class _Gated(nn.Module):
    """Blocks behind gates, whose probes call the gates, and draw, as none should."""

    def __init__(self, gates: int = 8, width: int = 64) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(width, width) for _ in range(gates))
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(gates))

    def routing_probes(self) -> list[RoutingProbe]:
        """Return one for each gate, which calls it."""

        def told(gate: nn.Module) -> Any:
            return lambda x: torch.sigmoid(nn.functional.dropout(gate(x), 0.5).mean().reshape(1))

        return [
            RoutingProbe(f"gates.{n}", (f"blocks.{n}",), told(gate))
            for n, gate in enumerate(self.gates)
        ]

    def forward(self, x: Tensor) -> Tensor:
        """Return a number."""
        for gate, block in zip(self.gates, self.blocks, strict=True):
            if float(gate(x).detach().mean()) > 0:
                x = nn.functional.dropout(block(x), 0.1)
        return x.sum()


def test_probes_that_call_modules_and_draw_are_no_part_of_the_forward() -> None:
    torch.manual_seed(0)
    twin = Twin(_Gated(), lambda p: torch.optim.SGD(p, lr=1e-2))
    session = compare_runs(
        twin,
        Loop(steps=6),
        list(torch.randn(6, 4, 64)),
        nn.Module.__call__,
        400 * 1024,
        pilot="auto",
        config=PAGES,
    )
    ran = session.log.blocks[-1].actual
    assert [name for name in ran if "gates" in name] == [f"gates.{n}" for n in range(8)]


class _Failing(_Gated):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:3]:
            x = block(x)
        if self.fails:
            raise ArithmeticError("half way")
        return self.blocks[3](x).sum()


@pytest.mark.parametrize("inside", [False, True])
def test_a_forward_that_fails_teaches_nothing(
    inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while another error is handled."""
    monkeypatch.setattr(host_time, "SHARE", 10.0)  # these steps are short
    monkeypatch.setattr(host_time.HostTime, "affords_plan", True)
    model = _Failing()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    config = {**PAGES, "step_aside": False}

    def train() -> None:
        with contextlib.suppress(ArithmeticError):
            model(torch.randn(4, 64)).backward()
        optimizer.step()
        optimizer.zero_grad()

    with dynoffload.offload(model, optimizer, budget=400 * 1024, config=config) as session:
        for model.fails in (False, True, False):
            if inside:
                try:
                    raise KeyError("handled while the forward runs")
                except KeyError:
                    train()
            else:
                train()
        pilot = session._forecast._pilot
        assert pilot is not None
        first, second = (order for _, order in pilot._latest)
        assert len(first) == 4
        assert first == second


@needs_pager
def test_probes_that_cannot_be_had_stop_nothing(
    profiled: tuple[int, Pilot], caplog: pytest.LogCaptureFixture
) -> None:
    total, pilot = profiled
    model = zoo.build("moe", "tiny-wide")

    def broken() -> list[RoutingProbe]:
        raise ArithmeticError("not yet")

    model.routing_probes = broken  # type: ignore[assignment]
    optimizer = AdamW(model.parameters(), lr=1e-3)
    with dynoffload.offload(model, optimizer, budget=total // 4, pilot=pilot, config=PAGES):
        for sample in _samples(2):
            _loss(model, sample).backward()
            optimizer.step()
    assert "the network gives no routing hints: ArithmeticError: not yet" in caplog.text


class _Nested:
    """A predictor whose one block is a module with what it calls; it predicts nothing."""

    def __init__(self) -> None:
        zeros = Idioms(0, 0, 0, 0, 0, 0)
        first = Block(0, "0", "", ("0.0", "0.1"), 0, 0, zeros)
        second = replace(first, index=1, path="1", visits=("1",))
        self.vocabulary = Vocabulary("", (first, second))

    def predict(self, sample: Any) -> None:
        return None

    def check(self, fingerprint: str) -> None:
        return None


def test_hooks_that_are_replaced_in_mid_call_leave_no_block_twice() -> None:
    """A call looks its hooks up once: one that an earlier hook removes still runs."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    forecast = Forecast(model, "pilot", _Nested(), None)

    def renew(*_: Any) -> None:
        forecast.unwatch()
        forecast.watch([])

    forecast.watch([])
    forecast.begin((torch.zeros(1, 2),), {})
    for hook in (model[0].register_forward_pre_hook, model[0][0].register_forward_hook):  # type: ignore[index, operator]
        handle = hook(renew)
        model[0](torch.zeros(1, 2))
        handle.remove()
    model(torch.zeros(1, 2))
    forecast.end()
    assert forecast.actual[-2:] == [0, 1]
