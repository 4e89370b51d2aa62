"""What training would take, said before it is begun; beside what it then takes."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exactness import SMALL_PAGES, assert_same, needs_pager
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import dynoffload
from dynoffload.errors import BackendError, BudgetError, ConfigError, TraceError
from dynoffload.estimation import Calibration, Estimate, estimates
from dynoffload.estimation.hollow import hollowed
from dynoffload.estimation.measuring import measure, update_seconds
from dynoffload.estimation.result import OVER, UNDER
from dynoffload.memory import heap
from dynoffload.simulation import Link, Machine
from dynoffload.simulation.overhead import RuntimeOverhead
from dynoffload.units import MiB

CALIBRATION = Calibration(
    Machine(Link(1e9, 1e9, 1.2e9, latency_s=1e-4), fast_bytes=1),
    RuntimeOverhead(visit_s=1e-4),
    "round",
    1.0,
)


class Net(nn.Module):
    """Layers of which a sample runs some, a tied weight, statistics and noise."""

    def __init__(self, depth: int = 6, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norm = nn.BatchNorm1d(width)
        self.noise = nn.Dropout(0.5)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, runs: int) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers[:runs]:
            x = x + torch.relu(layer(x))
        return nn.functional.cross_entropy(self.head(self.noise(self.norm(x))), tokens)


BATCHES = [(torch.arange(n, n + 24) % 256, 2 + n % 5) for n in range(10)]


def net(device: str = "cpu", **sizes: int) -> tuple[Net, AdamW]:
    """Return a network and its optimizer."""
    torch.manual_seed(1)
    with torch.device(device):
        model = Net(**sizes)
    return model, AdamW(model.parameters(), lr=1e-3)


def silent(*_: Any) -> None:
    """Say nothing."""


def told(model: nn.Module, batches: Any, budget: Any, optimizer: Any, **more: Any) -> Estimate:
    """Return an estimate on a machine of round figures."""
    given = {"optimizer": optimizer, "calibration": CALIBRATION, **more}
    return estimates(model, batches, budgets=[budget], **given)[0]


def anonymous_bytes() -> int:
    """Return the memory of this process that nothing else has."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


# Weights that take no memory


def test_weights_on_meta_compute_and_take_no_memory() -> None:
    model, optimizer = net("meta", depth=24, width=2048)
    whole = sum(one.nbytes for one in model.parameters())
    objects, before = list(model.parameters()), anonymous_bytes()
    assert whole > 384 * MiB
    with torch.no_grad(), hollowed(model):
        assert model.head.weight is model.embedding.weight
        assert not any(one.is_meta for one in (*model.parameters(), *model.buffers()))
        assert torch.equal(model.norm.weight, torch.ones(2048))  # small: as it begins
        assert 0.015 < float(model.layers[3].weight.std()) < 0.025
        assert bool(model(*BATCHES[0]).isfinite())
        assert anonymous_bytes() - before < 64 * MiB
    assert all(one.is_meta for one in (*model.parameters(), *model.buffers()))
    assert all(a is b for a, b in zip(objects, model.parameters(), strict=True))
    assert optimizer.param_groups[0]["params"][0] is objects[0]


def test_a_system_without_shared_pages_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from dynoffload.estimation import hollow

    def refused(*_: Any) -> int:
        raise OSError("not here")

    monkeypatch.setattr(hollow.os, "memfd_create", refused)
    with torch.device("meta"):
        model = nn.Linear(512, 512)
    with pytest.raises(BackendError, match="need Linux's memfd_create"), hollowed(model):
        pytest.fail("the block must not begin")
    assert model.weight.is_meta


# Measuring


def test_an_optimizer_that_cannot_step_alone_is_named() -> None:
    class Closed(SGD):
        def step(self, closure: Any = None) -> Any:
            return closure()

    model, _ = net()
    with pytest.raises(ConfigError, match="a step of Closed"):
        update_seconds(Closed(model.parameters(), lr=0.1))
    for batches, words in (([], "no batch"), ([iter([torch.ones(2)])], "a batch is an iterator")):
        with pytest.raises(ConfigError, match=words):
            measure(model, batches, None, silent)


def test_timing_an_optimizer_takes_little_memory_and_steps_no_other() -> None:
    """A part of a large parameter stands for it; what a scheduler has wrapped is let be."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(100_000, 1024), nn.Linear(1024, 1024))
    optimizer = AdamW(model.parameters())
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    heap.give_back()
    before = anonymous_bytes()
    found = update_seconds(optimizer)
    heap.give_back()  # what other tests of this process left in pieces may hold it
    assert anonymous_bytes() - before < 160 * MiB
    assert found > 0
    assert not optimizer.state


class Counting(nn.Module):
    """Replaces a buffer, draws numbers everywhere, and writes into its weight if it is told to."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 64))
        self.norm = nn.BatchNorm1d(64)
        self.register_buffer("count", torch.zeros(1))
        self.writes = False

    def forward(self, x: Tensor) -> Tensor:
        self.count = torch.cat([self.count, torch.ones(1)])
        random.random()
        np.random.rand()
        if self.writes:
            with torch.no_grad():
                self.weight.mul_(0.5)
        return nn.functional.dropout(self.norm(x @ self.weight)).sum()


@needs_pager
def test_estimating_changes_nothing_or_is_refused() -> None:
    """Weights, statistics, buffers, gradients, hooks, random numbers and optimizer state."""
    model, hooked = Counting(), []
    optimizer = AdamW(model.parameters())
    model.weight.register_post_accumulate_grad_hook(hooked.append)
    model.weight.grad = torch.full_like(model.weight, 2.0)
    buffer, before = model.count, copy.deepcopy(dict(model.state_dict()))
    batches = [torch.randn(8, 64)]

    def drawn() -> list[Any]:
        return [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]

    states = drawn()
    found = told(model, batches, "8MiB", optimizer)
    assert found.optimizer >= 2 * found.gradients > 0
    assert found.activations > 0
    assert_same(drawn(), states, "random numbers")
    assert model.count is buffer
    assert_same(dict(model.state_dict()), before, "weights and statistics")
    assert bool((model.weight.grad == 2.0).all())
    assert model.norm.weight.grad is None
    assert not optimizer.state
    assert not hooked
    model(*batches).backward()
    assert len(hooked) == 1
    model.writes = True
    with pytest.raises(ConfigError, match="forward writes into weight"):
        told(model, batches, "8MiB", optimizer)
    model.writes = False
    model(*batches).backward()
    assert len(hooked) == 2


def ones(module: nn.Module) -> None:
    """Fill what a module owns."""
    for one in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        nn.init.ones_(one)


@pytest.mark.parametrize("what", ["error", "kept"])
def test_a_step_that_fails_leaves_a_model_on_meta_as_it_was(what: str) -> None:
    """Whatever holds tensors of it: a traceback, or an attribute."""

    class Failing(nn.Module):
        kept: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(256, 256), nn.Linear(256, 256)
            self.register_buffer("scale", torch.ones(256))

        def forward(self, x: Tensor) -> Tensor:
            view = self.first.weight[:2]
            x = self.second(self.first(x)) * self.scale + view.sum()
            if what == "error":
                raise ValueError("in the middle")
            self.kept = x
            return x.square().mean()

    with torch.device("meta"):
        model = Failing()
    dynoffload.materialize(model, ones)
    optimizer = AdamW(model.parameters())
    objects = [*model.parameters(), *model.buffers()]
    with contextlib.ExitStack() as stack:
        if what == "error":
            stack.enter_context(pytest.raises(ConfigError, match="in the middle"))
        found = told(model, [torch.ones(2, 256)], "8MiB", optimizer)
        assert found.feasible
    now = [*model.parameters(), *model.buffers()]
    assert all(a is b for a, b in zip(now, objects, strict=True))
    assert all(one.is_meta for one in now)


def test_what_tensors_on_meta_share_they_share_meanwhile() -> None:
    with torch.device("meta"):
        model = nn.ModuleList([nn.BatchNorm1d(512), nn.BatchNorm1d(512), nn.Linear(512, 512)])
        model[1].running_mean = model[0].running_mean
        model[2].weight = nn.Parameter(torch.empty(512, 512).T)
    with hollowed(model):
        assert model[1].running_mean is model[0].running_mean
        assert model[2].weight.stride() == (1, 512)
        assert model[2].weight[0].std() > 0
    assert model[1].running_mean is model[0].running_mean
    assert model[2].weight.stride() == (1, 512)


# Estimates


@needs_pager
def test_bytes_and_peaks_are_those_of_training() -> None:
    """On demand, so that no transfer depends on when another ends."""
    model, optimizer = net()
    whole = 4 * sum(one.nbytes for one in model.parameters())
    budget = int(0.4 * whole)
    config = {**SMALL_PAGES, "policy": "on-demand", "step_aside": False}
    ours = told(model, BATCHES[:6], budget, optimizer, config=config)
    assert ours.feasible
    assert ours.fast_peak <= budget
    with dynoffload.offload(model, optimizer, budget=budget, config=config) as session:
        file = 0
        for tokens, runs in (BATCHES[:6] * 3)[:16]:
            model(tokens, runs).backward()
            optimizer.step()
            optimizer.zero_grad()
            file = max(file, session.spill_bytes)
        steps = session.log.steps[4:16]
    for key in ("bytes_in", "bytes_out"):
        real = sum(getattr(step, key) for step in steps) / len(steps)
        assert getattr(ours, key) == pytest.approx(real, rel=0.05), key
    assert ours.fast_peak == pytest.approx(max(s.peak_fast_bytes for s in steps), rel=0.1)
    assert ours.file_peak == file


@needs_pager
def test_a_model_on_meta_is_estimated_as_one_in_memory() -> None:
    kinds = [net("cpu"), net("meta")]
    found = [told(model, BATCHES[:3], "400KiB", optimizer) for model, optimizer in kinds]
    for key in ("parameters", "gradients", "optimizer", "activations", "file_peak", "feasible"):
        assert getattr(found[0], key) == getattr(found[1], key), key
    assert found[1].bytes_in == pytest.approx(found[0].bytes_in, rel=0.2)
    assert "random numbers" in found[1].assumptions[0]
    assert all(one.is_meta for one in kinds[1][0].parameters())


@needs_pager
def test_budgets_that_are_too_small_say_what_offload_says() -> None:
    model, optimizer = net()
    found = estimates(
        model,
        BATCHES[:2],
        budgets=[100_000, "1MiB", "64MiB"],
        optimizer=optimizer,
        calibration=CALIBRATION,
    )
    with pytest.raises(BudgetError) as caught, dynoffload.offload(model, optimizer, budget=100_000):
        pytest.fail("the block must not begin")
    assert (found[0].feasible, found[0].reason) == (False, str(caught.value))
    with dynoffload.offload(model, optimizer, budget=found[0].least):
        pass
    assert found[1].feasible
    assert not found[1].resident
    assert found[1].step_s > found[1].plain_s
    assert found[2].resident
    assert (found[2].step_s, found[2].bytes_in) == (found[2].plain_s, 0)
    assert found[2].fast_peak < 64 * MiB
    assert len({(one.parameters, one.gradients, one.optimizer) for one in found}) == 1


def test_what_cannot_be_estimated_is_refused() -> None:
    model, optimizer = net()
    for config, words in (
        ({"backend": "mapped"}, "mapped-file backend cannot be estimated"),
        ({"rollback": True}, "rollback=True cannot be estimated"),
        ({"defer_updates": "never"}, "defer_updates='never' cannot be estimated"),
        ({"page_activations": False}, "page_activations=False cannot be estimated"),
    ):
        with pytest.raises(ConfigError, match=words):
            told(model, BATCHES, "1MiB", optimizer, config=config)
    other = AdamW(nn.Linear(2, 2).parameters())
    with pytest.raises(ConfigError, match="none of the optimizer's parameters belong to this Net"):
        told(model, BATCHES, "1MiB", other)
    with (
        dynoffload.offload(model, optimizer, budget="2MiB"),
        pytest.raises(ConfigError, match=r"this Net is inside an offload\(\) block"),
    ):
        told(model, BATCHES, "1MiB", optimizer)


def test_pairs_are_batches_of_a_loss_function() -> None:
    """Of (x, y) forward gets what it takes, and the loss function all."""
    model = nn.Linear(8, 1)
    pairs = [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(2)]
    seen = []

    def loss(output: Tensor, batch: Any) -> Tensor:
        seen.append(batch)
        return nn.functional.mse_loss(output, batch[1])

    measured = measure(model, pairs, loss, lambda *_: None)
    assert len(measured.steps) == 2
    assert {id(batch) for batch in seen} == {id(pair) for pair in pairs}


@pytest.mark.parametrize(
    ("batch", "loss", "kind", "words"),
    [
        (torch.ones(4, 3), None, ConfigError, "forward of Linear failed on batch 0 .*multiplied"),
        ((torch.ones(4, 8), 1), None, ConfigError, "forward of Linear failed .*takes 2 positional"),
        (torch.ones(4, 8), lambda y, _: y.nosuch, ConfigError, "loss function of Linear .*nosuch"),
        (torch.ones(4, 8), None, TraceError, "the model returned Tensor"),
        (torch.ones(4, 8), lambda y, _: y, TraceError, r"returned a tensor of shape \(4, 1\)"),
        (torch.ones(4, 8), lambda *_: 3.0, TraceError, "the loss function returned float"),
        (torch.ones(4, 8), lambda y, _: y.sum().detach(), TraceError, "without a gradient"),
    ],
)
def test_a_batch_without_a_loss_is_told(
    batch: Any, loss: Any, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        measure(nn.Linear(8, 1), [batch], loss, silent)


class Fused(nn.Module):
    """Experts in one parameter, of which one runs."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(experts, 256, 256) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.experts[0]).square().mean()


@needs_pager
@pytest.mark.parametrize("budget", ["4MiB", "24MiB"])
def test_what_is_paged_by_experts_is_feasible_where_it_trains(budget: str) -> None:
    """Whole it may not fit; then bytes and times are not estimated, and that is said."""
    model = Fused(16)
    optimizer = AdamW(model.parameters())
    config = {"step_aside": False}
    found = told(model, [torch.randn(4, 256)], budget, optimizer, config=config)
    with dynoffload.offload(model, optimizer, budget=budget, config=config):
        model(torch.randn(4, 256)).backward()
        optimizer.step()
    assert found.feasible
    assert found.timed is (budget == "24MiB")
    words = "as paged whole" if found.timed else "bytes and times are not estimated"
    assert any("experts" in note and words in note for note in found.assumptions)


@needs_pager
def test_where_nothing_is_paged_no_time_is_made_up() -> None:
    model = nn.Linear(16, 16)
    found = told(
        model,
        [torch.randn(4, 16)],
        "8MiB",
        AdamW(model.parameters()),
        loss=lambda output, batch: output.sum(),
        config={"step_aside": False},
    )
    assert found.feasible
    assert not found.timed
    assert any("so none is paged" in note for note in found.assumptions)


@needs_pager
@pytest.mark.parametrize("over", [0.9, 1.25])
def test_paging_steps_aside_where_the_runtime_does(over: float) -> None:
    model, optimizer = net()
    batches = [(torch.arange(24), 6)]
    first = told(model, batches, "64MiB", optimizer)
    assert first.resident
    budget = int(over * first.fast_peak)
    found = told(model, batches, budget, optimizer)
    with dynoffload.offload(model, optimizer, budget=budget, pilot=None) as session:
        for _ in range(20):
            model(*batches[0]).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert session.paging is not found.resident
    assert found.own_s >= 0


# How sure it is


def test_the_range_covers_what_was_compared_with_real_trainings() -> None:
    """The shares by which estimates lie off are those of the published comparison, no less and
    hardly more."""
    path = Path(__file__).parents[1] / "docs" / "results" / "estimates.json"
    rows = json.loads(path.read_text("utf-8"))["rows"]
    off = [row["estimated"]["step_s"] / row["real"]["step_s"] - 1 for row in rows]
    assert max(off) <= OVER < max(off) + 0.01
    assert min(off) >= -UNDER > min(off) - 0.01
    for row in rows:
        estimated, real = row["estimated"]["step_s"], row["real"]["step_s"]
        assert estimated / (1 + OVER) <= real <= estimated / (1 - UNDER)


class Sleepy(nn.Module):
    """Takes longer every second time, as on a machine that others use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        time.sleep(0.1 * (self.calls % 2))
        loss: Tensor = self.layers(x).square().mean()
        return loss


@needs_pager
def test_a_disturbed_probe_is_warned_of_and_widens_the_range() -> None:
    model = Sleepy()
    optimizer = AdamW(model.parameters())
    config = {"min_paged_bytes": 512, "step_aside": False}
    found = told(model, [(torch.ones(2, 64),)], "200kB", optimizer, config=config)
    assert found.timed, found
    assert any("the probe was disturbed" in note for note in found.assumptions)
    assert found.spread > 0.25
    assert found.step_low_s <= found.step_s <= found.step_high_s
    assert found.step_high_s - found.step_low_s >= 0.25 * found.step_s
