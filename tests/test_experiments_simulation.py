"""The comparison of simulated with real steps: what counts as a hit, the fit, the page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynoffload.experiments import simulated_run, simulation
from dynoffload.experiments.comparing import Table
from dynoffload.experiments.harness import rendered
from dynoffload.experiments.processes import WorkerError
from dynoffload.experiments.simulated_run import Task
from dynoffload.experiments.simulation import (
    Params,
    Simulated,
    said,
)
from dynoffload.experiments.simulation_fit import PHASES, Material, Real, fitted, simulated
from dynoffload.simulation import Link, Machine
from dynoffload.simulation.overhead import RuntimeOverhead
from dynoffload.simulation.recorded import Network, Parameter, Piece, Recorded

SIZING = {
    "budget": 40_000,
    "pool_bytes": 40_960,
    "page_bytes": 4096,
    "reserve_bytes": 4096,
    "chunk_bytes": 4096,
    "min_paged_bytes": 1,
    "min_moved_bytes": 1,
    "kept_bytes": 0,
}
ROOMY = {**SIZING, "pool_bytes": 1 << 20}
LINK = Link(1e8, 1e8, 2e8)
MOVES = {4096: 0.0}
PACE = 0.02


def material(paths: int) -> Material:
    """A chain of modules with a parameter of 8000 bytes each, and steps of 10 ms a module. Some are
    called twice, and some save something: calls, updates and saved tensors are told apart."""
    owners = {f"layer{n}": (n,) for n in range(paths)}
    network = Network(tuple(Parameter(f"layer{n}.weight", 8000) for n in range(paths)), owners)
    saved = {n: (n,) * (n % 3 > 0) for n in range(paths)}
    forward = tuple(
        Piece(0.005, (n,), visits=(f"layer{n}",) * (1 + n % 2), saves=saved[n])
        for n in range(paths)
    )
    backward = tuple(
        Piece(0.005, (n,), borrows=(n,), reads=saved[n], ends=saved[n], completes=(n,))
        for n in reversed(range(paths))
    )
    states = {n: {"exp_avg": 8000} for n in range(paths)}
    step = Recorded(forward, backward, dict.fromkeys(range(paths), 640), {}, {}, 0.001, states)
    return Material(network, (step,) * 6, (None,) * 6, 24_000 * paths)


def real_of(phases: list[tuple[float, float, float]], moved: int = 0) -> Real:
    steps = [
        {
            "seconds": sum(step),
            "bytes_in": moved,
            "bytes_out": moved,
            **dict(zip(PHASES, step, strict=True)),
        }
        for step in phases
    ]
    return Real((steps,), SIZING, ((0.00108, 8000),), "pager", LINK, (), PACE, MOVES)


def test_the_fit_finds_what_the_runtime_takes() -> None:
    """Steps made by known costs, of chains of several lengths and in hours in which the runtime is
    quicker or slower, are predicted for another chain and hour."""
    true = RuntimeOverhead(visit_s=4e-3, ask_s=1e-3, update_s=2e-3, settle_s=5e-4)
    machine = Machine(Link(1e8, 1e8, 2e8, latency_s=1e-3), 1, interference=0.2)
    cases = []
    for paths, slower in ((3, 1.0), (5, 1.3), (8, 0.8), (12, 1.2)):
        for sizing, policy in ((ROOMY, "repeat"), (SIZING, "repeat"), (SIZING, "on-demand")):
            made = simulated(material(paths), sizing, policy, machine, true.times(slower))
            real = real_of([tuple(phase.seconds for phase in step) for step in made.phases])
            real = replace(real, sizing=sizing, pace_s=slower * PACE)
            cases.append((material(paths), real, policy))
    found = fitted(cases, LINK, warmup=2)
    assert found.machine.link.latency_s == pytest.approx(1e-3, rel=1e-6)
    theirs, ours = (
        simulated(material(9), SIZING, "repeat", of, work).steps[-1].seconds
        for of, work in ((machine, true.times(1.5)), (found.machine, found.at(1.5 * PACE, MOVES)))
    )
    without = simulated(material(9), SIZING, "repeat", machine, RuntimeOverhead()).steps[-1].seconds
    assert without < 0.9 * theirs
    assert ours == pytest.approx(theirs, rel=0.02)
    for cost in ("visit_s", "update_s", "ask_s", "settle_s"):
        assert getattr(found.work, cost) == pytest.approx(getattr(true, cost), rel=0.2), cost


def row(seconds: float, moved: float, policy: str = "repeat") -> dict[str, Any]:
    real = {"seconds": 0.2, "bytes_in": 1e8, "bytes_out": 1e8}
    ours = {"seconds": 0.2 * (1 + seconds), "bytes_in": 1e8 * (1 + moved), "bytes_out": 1e8}
    return {
        "network": "moe",
        "share": 0.25,
        "policy": policy,
        "real": real,
        "simulated": ours,
        "seconds_error": seconds,
        "bytes_error": moved,
        "bytes_spread": 0.01,
    }


def test_a_miss_is_counted_whichever_way_it_errs() -> None:
    assert said([row(0.05, 0.0), row(-0.25, 0.01), row(0.08, -0.03)]) == [
        "step time: median error 8.0%, worst 25.0% (at most 20%: missed), 2 of 3 within",
        "its median error is asked to be at most 10%: holds",
        "bytes moved: median error 1.0%, worst 3.0% (at most 2%: missed), 2 of 3 within",
    ]


def test_table_and_figure_show_what_misses(tmp_path: Path) -> None:
    rows = [row(0.3, 0.0), row(0.0, 0.05, "pilot")]
    made_by = {"command": "dynoffload experiment simulation", "commit": "0123456789ab"}
    result = {"params": {}, "made_by": made_by, "summary": {}, "rows": rows}
    shown, *lines = Simulated(Params()).parts(result)
    assert isinstance(shown, Table)
    assert [cell for cells in shown.rows for cell in cells if "miss" in cell] == [
        "+30.0% miss",
        "+5.0% miss",
    ]
    assert "1 of 2 within" in str(lines[0])
    path = tmp_path / "simulation.json"
    path.write_text(json.dumps(result), encoding="utf-8")
    rendered(Simulated, path)
    assert "on-demand" in path.with_suffix(".svg").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_setting_is_trained_plainly_and_under_a_budget() -> None:
    task = Task("tree (fit)", 2)
    found = simulation._child(simulated_run.timed, task)
    assert len(found["times"]) == 2
    assert all(seconds > 0 for step in found["times"] for seconds in step)
    with pytest.raises(WorkerError, match=r"'tree .fit., budgeted' failed: .*budget"):
        simulation._child(simulated_run.budgeted, replace(task, budget=1))
