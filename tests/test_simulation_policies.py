"""Policies on a simulated machine: recorded steps of a network that routes, and of one that does
not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from phase_bound import least_seconds
from torch import nn
from torch.optim import AdamW

from dynoffload.errors import ConfigError, TraceError
from dynoffload.experiments import zoo
from dynoffload.profiler import CostModel, Trace, load_trace, profile
from dynoffload.profiler.costs import Kind
from dynoffload.simulation import (
    Link,
    Machine,
    Simulation,
    Workload,
    load_machines,
    simulate,
    workload,
)
from dynoffload.units import GiB

LINK = Link(read_bps=5e8, write_bps=5e8, mixed_bps=8e8, fault_s=2e-5)
COSTS = CostModel({"float32": 2e10}, 5e9, dict.fromkeys(Kind, 1e-5), source="round figures")
"""Of one core; so that what is compared does not hang on how busy the machine was."""


def recorded(model: nn.Module, samples: list[Any], **options: Any) -> list[Trace]:
    with TemporaryDirectory() as folder:
        kinds = {kind: options.pop(kind, False) for kind in ("foreach", "fused")}
        optimizer = AdamW(model.parameters(), **kinds)
        options |= {"optimizer": optimizer, "progress": False}
        return [load_trace(path) for path in profile(model, samples, out=folder, **options)]


@cache
def routed() -> Workload:
    """Four steps of a mixture of experts that take different experts."""
    samples = list(islice(zoo.samples("moe", seed=0, rows=1, length=24), 4))
    return workload(recorded(zoo.build("moe", "tiny"), samples), COSTS)


class Chain(nn.Module):
    """The same layers in each step, whose activations are larger than their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss of ``[rows, 16]``."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


@cache
def static() -> Workload:
    """Four steps of `Chain`."""
    torch.manual_seed(0)
    return workload(recorded(Chain(), [torch.randn(512, 16) for _ in range(4)]), COSTS)


def peak(work: Workload) -> int:
    return max(work.peak(step) for step in work.steps)


def run(work: Workload, share: float, *, planned: bool, **changes: Any) -> Simulation:
    """Simulate under a share of what the steps take with everything in memory."""
    machine = Machine(changes.pop("link", LINK), int(share * peak(work)) + 1, **changes)
    return simulate(work, machine, planned=planned)


@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_optimizers_that_work_on_lists_need_one_parameter_at_a_time(kind: str) -> None:
    """No use of theirs needs all parameters, and together they last as long as the calls."""
    traces = recorded(Chain(), [torch.randn(8, 16) for _ in range(2)], **{kind: True})
    assert any(f"_{kind}_" in operator.name for operator in traces[-1].operators)
    work = workload(traces, COSTS)
    whole = sum(work.sizes[region] for region in work.persistent)
    needs = [
        sum(work.sizes[region] for region in {*use.regions, *use.creates})
        for step in work.steps
        for use in step.uses
    ]
    assert max(needs) < whole / 4
    assert work.seconds == pytest.approx(sum(COSTS.time(trace).seconds for trace in traces))
    found = simulate(work, Machine(LINK, 2 * max(needs)), planned=False)
    assert not found.infeasible
    assert peak(work) > whole


@pytest.mark.parametrize("planned", [False, True])
def test_with_room_for_everything_nothing_moves(planned: bool) -> None:
    """After the first step, which reads what lies below."""
    found = run(static(), 1.02, planned=planned)
    assert not found.infeasible
    for step in found.steps[1:]:
        given = sum(static().steps[0].sizes[region] for region in static().steps[0].given)
        assert step.bytes_in <= given
        assert step.seconds == pytest.approx(step.compute_s + step.stall_s)


@pytest.mark.parametrize(("bandwidth", "slack"), [(2e9, 1.01), (5e8, 1.1)])
@pytest.mark.parametrize("share", [0.5, 0.25, 0.125])
def test_plans_stay_near_the_bound(share: float, bandwidth: float, slack: float) -> None:
    """Transfers hide behind work: no plan is faster than the bound, and these are hardly slower."""
    work = routed()
    link = Link(bandwidth, bandwidth, 2 * bandwidth)
    found = run(work, share, planned=True, link=link)
    capacity = int(share * peak(work)) + 1
    for step, result in list(zip(work.steps, found.steps, strict=True))[1:-1]:
        sizes = [step.sizes.get(region, nbytes) for region, nbytes in enumerate(work.sizes)]
        least = sum(
            least_seconds(step.uses[a:b], sizes, capacity, bandwidth, bandwidth)
            for a, b in step.phases.values()
        )
        assert least <= result.seconds <= slack * least


def test_steps_of_two_networks_are_no_workload() -> None:
    (one,) = recorded(Chain(), [torch.randn(2, 16)])
    with pytest.raises(TraceError, match="traces of two networks"):
        workload([one, replace(one, network="other")])
    with pytest.raises(TraceError, match="no traces"):
        workload([])


MACHINE = """
fast_bytes = "2GiB"
overlap = false
workers = 3

[link]
read_bps = "1GiB"
write_bps = 5e8
fault_s = 1e-5
"""


def test_machines_are_read_from_toml(tmp_path: Path) -> None:
    """Texts with units; a link is full-duplex where nothing else is said. What stands at the top
    holds for all tiers; one may have a capacity of its own."""
    path = tmp_path / "machine.toml"
    path.write_text(MACHINE)
    link = Link(float(GiB), 5e8, GiB + 5e8, fault_s=1e-5)
    assert load_machines(path)["link"] == Machine(link, 2 * GiB, overlap=False, workers=3)
    path.write_text(
        'fast_bytes = "2GiB"\n'
        "[links.host]\nread_bps = 2e10\nwrite_bps = 2e10\n"
        "[links.disk]\nread_bps = 2e9\nwrite_bps = 1e9\nmixed_bps = 2e9\nslow_bytes = 1e9\n"
    )
    assert load_machines(path) == {
        "host": Machine(Link(2e10, 2e10, 4e10), 2 * GiB),
        "disk": Machine(Link(2e9, 1e9, 2e9), 2 * GiB, slow_bytes=10**9),
    }


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (("workers = 3", "worker = 3"), "'worker' is no key of a machine"),
        (("workers = 3", "workers = 0"), "workers is 0; it must be at least 1"),
        (("workers = 3", "workers = 2.5"), "workers is 2.5, which is no whole number"),
        (("overlap = false", "overlap = 1"), "overlap is 1, which is no true or false"),
        (("read_bps", "speed"), "'speed' is no key of a link"),
        (('read_bps = "1GiB"\n', ""), "lacks read_bps"),
        (("fault_s = 1e-5", "fault_s = -1.0"), "fault_s is -1.0; it must be seconds from 0 on"),
        (("[link]", "[bus]"), "has no table [link]"),
        (('fast_bytes = "2GiB"\n', ""), "lacks fast_bytes"),
        (("overlap = false", "overlap ="), "cannot read the machine of"),
    ],
)
def test_a_wrong_machine_is_named(wrong: tuple[str, str], told: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    assert wrong[0] in MACHINE
    path.write_text(MACHINE.replace(*wrong))
    with pytest.raises(ConfigError) as refused:
        load_machines(path)
    assert told in str(refused.value)
    assert str(path) in str(refused.value)
