"""Time per step over budgets: both sides of each policy, who is fastest, and what cannot run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from exactness import needs_pager
from torch.optim import AdamW

from dynoffload.errors import ConfigError
from dynoffload.estimation.calibration import Fitted
from dynoffload.experiments import zoo
from dynoffload.experiments.baselines.cgroup import why_unavailable
from dynoffload.experiments.contest import Contestant, Side, Turns, Way, measure
from dynoffload.experiments.harness import carry_out, rendered
from dynoffload.experiments.simulation_fit import Material
from dynoffload.experiments.step_time import Params, StepTime, errors, reasons, standing
from dynoffload.experiments.step_time_policies import (
    BOUND,
    PILOT,
    POLICIES,
    SYSTEM,
    by_operators,
    replayed,
    simulated,
)
from dynoffload.experiments.trainer import Spec
from dynoffload.experiments.workers import WorkerError
from dynoffload.profiler import Trace, load_trace, profile
from dynoffload.simulation import Link, Machine
from dynoffload.simulation.overhead import Division, RuntimeOverhead
from dynoffload.simulation.recorded import network_of, recorded

LINK = Link(1e9, 1e9, 1.5e9, latency_s=1e-4, fault_s=2e-5)
FIT = Fitted(Machine(LINK, 1), RuntimeOverhead(visit_s=2e-5), 0.02)
POLICIES_RUN = ("repeat", "on-demand", BOUND)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Two policies that run and one that is only simulated, under two budgets, the second of which
    is too small for the largest update; and where the files lie."""
    path = tmp_path_factory.mktemp("step-time") / "found.json"
    params = Params(
        network=("moe",),
        preset="tiny",
        budgets=("1/2", "0.0625"),
        policies=POLICIES_RUN,
        steps=5,
        spill_dir=Path("/var/tmp"),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepTime, "fit", FIT)
        return carry_out(StepTime, params, path), path


def policies_of(result: dict[str, Any], case: str) -> dict[str, Any]:
    policies: dict[str, Any] = next(r for r in result["rows"] if r["case"] == case)["policies"]
    assert policies.keys() == set(POLICIES_RUN)
    return policies


@pytest.mark.slow
def test_every_policy_has_both_sides_or_says_why_not(found: tuple[dict[str, Any], Path]) -> None:
    half, small = (policies_of(found[0], case) for case in ("moe, 1/2", "moe, 1/16"))
    for key in ("repeat", "on-demand"):
        own = half[key]
        assert own["losses_equal"] is True
        assert own["measured"]["why"] == own["simulated"]["why"] == ""
        assert len(own["measured"]["steps_s"]) >= 5
        assert own["measured"]["seconds"] == median(own["measured"]["steps_s"])
        assert own["simulated"]["seconds"] > 0
        for side in ("measured", "simulated"):
            assert small[key][side]["seconds"] is None
            assert "bytes" in small[key][side]["why"]
    bound = half[BOUND]
    assert bound["measured"] is None
    assert bound["losses_equal"] is None
    assert bound["simulated"]["seconds"] > 0
    assert "no measured policy runs under this budget" in small[BOUND]["simulated"]["why"]


@pytest.mark.slow
def test_the_files_are_written(
    found: tuple[dict[str, Any], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    result, path = found
    assert json.loads(path.read_text()) == json.loads(json.dumps(result))
    assert path.with_suffix(".svg").stat().st_size > 5000
    who = [line for line in reasons(result["rows"]) if line.startswith("moe, 1/16: last order (m")]
    assert len(who) == 1
    assert "last order (simulated), on demand (measured), on demand (simulated): " in who[0]
    rendered(StepTime, path)
    assert "none runs" in capsys.readouterr().out


# What comes of rows


def made(budget: str = "1/4", **times: float | str) -> dict[str, Any]:
    """Return a row of given times over plain training's, or reasons, of both sides."""

    def side(value: float | str) -> dict[str, Any]:
        if isinstance(value, str):
            return {"seconds": None, "why": value, "note": ""}
        moved = {"bytes_in": 2e6, "bytes_out": 1e6}
        return {"seconds": 0.1 * value, "why": "", "note": "", **moved}

    policies = {
        key: {
            "measured": side(value) if POLICIES[key].runs else None,
            "simulated": side(value),
            "losses_equal": True if POLICIES[key].runs else None,
        }
        for key, value in ((name.replace("_", "-"), value) for name, value in times.items())
    }
    return {
        "case": f"net, {budget}",
        "network": "net",
        "budget": budget,
        "budget_bytes": 1 << 20,
        "footprint_bytes": 4 << 20,
        "operators": 7,
        "policies": policies,
        "plain_s": {"measured": 0.1, "simulated": 0.1},
    }


def test_the_pilot_stands_against_the_best_of_the_others() -> None:
    row = made(pilot=2.0, repeat=3.0, dtr=1.9, os_paging=8.0, clairvoyant=1.1)
    own = standing(row, "measured")
    assert own["fastest"] == ["dtr", "pilot"]  # a tie
    assert own["pilot_over_best"] == pytest.approx(1.9 / 2)
    ranked = standing(row, "simulated")  # of the runtime alone, and not what knows every step
    assert ranked["fastest"] == ["pilot"]
    assert ranked["pilot_over_best"] == pytest.approx(1.5)
    none = standing(made(pilot="too little", dtr="too little"), "measured")
    assert none == {"fastest": [], "pilot_over_best": None}


def test_simulated_times_are_off() -> None:
    rows = [made(pilot=2.0, dtr="no"), made(pilot=3.0)]
    rows[1]["policies"]["pilot"]["simulated"]["seconds"] = 0.33
    off = errors(rows)
    assert off.keys() == {"pilot"}
    assert off["pilot"] == pytest.approx({"cells": 2, "median": 0.05, "worst": 0.1})


def test_reasons_that_differ_in_their_numbers_share_a_line() -> None:
    why = {"1/4": "it needs 3 MiB of 2", "1/8": "it needs 3 MiB of 1", "1/16": "it was killed"}
    rows = [made(budget, pilot=told, repeat=told, dtr=1.0) for budget, told in why.items()]
    both = "pilot (measured), pilot (simulated), last order (measured), last order (simulated)"
    assert reasons(rows) == [
        f"net, 1/4, 1/8: {both}: it needs 3 MiB of 2",
        f"net, 1/16: {both}: it was killed",
    ]


def test_table_and_figure_name_every_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times: Mapping[str, Any] = {key.replace("-", "_"): 1.5 + n for n, key in enumerate(POLICIES)}
    rows = [made("1", **times), made("1/16", **{**times, "dtr": "it needs 3 of 2"})]
    rows[1]["policies"]["repeat"]["losses_equal"] = False
    standings = {
        row["case"]: {s: standing(row, s) for s in ("measured", "simulated")} for row in rows
    }
    result = {
        "params": {},
        "made_by": {"command": "dynoffload", "commit": "0123"},
        "summary": {"standings": standings, "errors": errors(rows)},
        "rows": rows,
    }
    path = tmp_path / "small.json"
    path.write_text(json.dumps(result))
    rendered(StepTime, path)
    printed, drawn = capsys.readouterr().out, path.with_suffix(".svg").read_text()
    for policy in POLICIES.values():
        assert policy.title in printed
        assert policy.title in drawn
    assert "1/16" in drawn
    assert "cannot run" in printed
    assert "not measured" in printed
    assert "NO" in printed


@needs_pager
def test_what_was_fitted_before_is_taken(tmp_path: Path) -> None:
    path = Path(__file__).parents[1] / "docs" / "results" / "simulation.json"
    known = json.loads(path.read_text())["summary"]
    found = StepTime(Params(calibration=path, spill_dir=tmp_path)).fit
    pace = found.pace_s / known["pace_s"]  # as quick as the machine is now
    assert found.work.save_s > 0
    assert found.work.save_s == pytest.approx(pace * known["work"]["save_s"])
    assert found.machine.interference == known["interference"] > 0
    assert found.machine.link.read_bps != known["link"]["read_bps"]  # measured now


def test_rows_that_are_resumed_and_new_ones_have_one_fit() -> None:
    fit = replace(FIT, work=replace(FIT.work, moves={4096: 1e-5}))
    one = StepTime(Params())
    one.rows = [json.loads(json.dumps({"fit": asdict(fit)}))]
    assert one.fit == fit


# The simulated side


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> tuple[Material, list[Trace]]:
    """Four steps of the tiny mixture of experts, said to take round figures."""
    model = zoo.build("moe", "tiny")
    samples = list(islice(zoo.samples("moe", seed=0, rows=1, length=16), 4))
    folder = tmp_path_factory.mktemp("traces")
    optimizer = AdamW(model.parameters(), fused=True)
    paths = profile(model, samples, out=folder, optimizer=optimizer, progress=False)
    traces, network = [load_trace(path) for path in paths], network_of(model)
    steps = tuple(recorded(trace, network).timed(0.02, 0.03, 0.01) for trace in traces)
    return Material(network, steps, (None,) * 4, 5 << 20), traces


def test_policies_that_are_simulated_by_operators(
    recording: tuple[Material, list[Trace]],
) -> None:
    """Where all fits they take what plain steps take; where it does not, more, and who cannot run
    says why."""
    material, traces = recording
    work = replayed(material, traces)
    keys = [key for key, one in POLICIES.items() if one.strategy is not None]
    assert {SYSTEM, "dtr", "intervals", "capuchin", "replay"} == set(keys)
    for budget, fits in ((32 << 20, True), (5 << 18, False)):
        sides = {key: by_operators(key, work, budget, FIT, [2, 3]) for key in keys}
        for key, side in sides.items():
            if fits:
                assert side.seconds == pytest.approx(0.06, rel=1e-2), key
                assert side.bytes_in < 1000  # the sample alone
            elif key == "dtr":
                assert "recomputation alone cannot run this" in side.why
                assert side.seconds is None
            else:
                assert side.seconds is not None, side.why
                assert side.seconds > 0.06
                assert side.bytes_in > 0


def test_who_knows_every_step_is_the_runtime_told_its_orders(
    recording: tuple[Material, list[Trace]],
) -> None:
    """Where a wrong prediction costs something, it takes longer than a right one."""
    material, traces = recording
    work = replayed(material, traces)
    names = Division.__dataclass_fields__.keys() - {"draft_share"}
    pages = {"page_bytes": 4096, "chunk_bytes": 65536, "min_paged_bytes": 4096}
    few = {"reserve_bytes": 131072, "min_moved_bytes": 4096, "kept_bytes": 131072}
    sizing = dict.fromkeys(names, 2 << 20) | pages | few

    def side(key: str, known: Material) -> Side:
        return simulated(key, known, work, 2 << 20, sizing, "", FIT, [2, 3])

    told = replace(material, orders=tuple(step.order() for step in material.steps))
    backwards = replace(material, orders=tuple(step.order()[::-1] for step in material.steps))
    known = side(BOUND, material)
    assert known.seconds is not None, known
    assert known == side(PILOT, told)
    assert known.seconds < (side(PILOT, backwards).seconds or 0.0)


def test_a_simulation_without_an_end_is_stopped(
    recording: tuple[Material, list[Trace]],
) -> None:
    material, traces = recording
    work = replayed(material, traces)
    side = simulated("dtr", material, work, 32 << 20, None, "", FIT, [2, 3], patience=0.05)
    assert side.why == "'dtr, simulated' gave no answer within 50.0 ms"
    assert simulated("dtr", material, work, 32 << 20, None, "", FIT, [2, 3], patience=500).seconds


def test_what_the_simulation_does_not_know_is_not_called_infeasible(
    recording: tuple[Material, list[Trace]],
) -> None:
    """As where a budget is so large that no parameter is paged, and activations alone are."""
    material, traces = recording
    names = Division.__dataclass_fields__.keys() - {"draft_share"}
    sizing = dict.fromkeys(names, 1 << 20) | {"min_paged_bytes": 1 << 30}
    work = replayed(material, traces)
    side = simulated("repeat", material, work, 1 << 30, sizing, "", FIT, [2, 3])
    assert (side.seconds, side.why) == (None, "")
    assert side.note.startswith("not simulated: no parameter has 1073741824 bytes")


# The measured side


def test_who_fails_in_the_middle_leaves_the_turns() -> None:
    class Dies:
        patience = 0.0
        steps: tuple[Any, ...] = ()

        def step(self, *, measured: bool = True) -> None:
            raise WorkerError("'x' failed: needs 3, has 2")

    one = Contestant("x", Way(Spec("moe", "tiny")), lambda: 12.0)
    dying: Any = Dies()
    one._worker = dying
    one.step()
    one.step()
    assert (one.why, dying.patience) == ("needs 3, has 2", 12.0)
    assert one.result(dying) == Side("needs 3, has 2")


@pytest.mark.skipif(bool(why_unavailable(swap=True)), reason=why_unavailable(swap=True))
def test_paging_by_the_system_is_plain_training_in_a_group_with_swap() -> None:
    """Its losses are those of plain training, and neither group nor swap file is left."""
    where, told = Path("/var/tmp"), []
    spec = Spec("moe", "tiny", shape={"length": 16}, spill_dir=str(where))
    turns = Turns(rounds=1, warmup=1, per_turn=1)
    ways = {SYSTEM: Way(spec, limit=400 << 20, swap_bytes=256 << 20)}
    _, found, _ = measure(spec, ways, turns, told.append)
    assert found[SYSTEM].why == ""
    assert len(found[SYSTEM].steps_s) == 1
    assert found[SYSTEM].losses_equal is True
    assert not list(where.glob(f".dynoffload-swap-{os.getpid()}-*"))
    assert f"dynoffload-swap-{os.getpid()}" not in Path("/proc/swaps").read_text()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"network": ("llama",)}, "network names 'llama'; there are moe, tree"),
        ({"preset": "huge"}, "no preset 'huge'"),
        ({"policies": ("pilots",)}, "policies names 'pilots'"),
        ({"budgets": ("1/0",)}, "'1/0' in budgets is no share above 0"),
        ({"budgets": ("much",)}, "write 1/4"),
        ({"budgets": ()}, "there are no budgets"),
        ({"steps": 4}, "at least 5"),
    ],
)
def test_what_cannot_be_asked_is_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Params(**wrong)
