"""Time per step over budgets: both sides of each policy, who is fastest, and what cannot run."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from exactness import needs_pager
from torch.optim import AdamW

from dynoffload import config
from dynoffload.errors import ConfigError
from dynoffload.experiments import step_time, zoo
from dynoffload.experiments.baselines import BASELINES
from dynoffload.experiments.baselines.cgroup import why_unavailable
from dynoffload.experiments.baselines.recomputing import DTR
from dynoffload.experiments.simulation_fit import Fit, Material
from dynoffload.experiments.step_time_policies import (
    BOUND,
    PILOT,
    POLICIES,
    PUBLISHED,
    SYSTEM,
    NoEndError,
    Side,
    Watched,
    described,
    replayed,
    simulated,
)
from dynoffload.experiments.step_time_rows import (
    merged,
    plain_row,
    row_of,
    said,
    standing,
    summary,
)
from dynoffload.experiments.step_time_runs import Contestant, Measured, Turns, measure
from dynoffload.experiments.step_time_views import page_of, reasons, write_figure
from dynoffload.experiments.trainer import Spec
from dynoffload.experiments.workers import WorkerError, worker
from dynoffload.profiler import Trace, load_trace, profile
from dynoffload.simulation import Link, Machine, simulate
from dynoffload.simulation.overhead import Division, RuntimeOverhead
from dynoffload.simulation.recorded import network_of, recorded

LINK = Link(1e9, 1e9, 1.5e9, latency_s=1e-4, fault_s=2e-5)
FIT = Fit(Machine(LINK, 1), RuntimeOverhead(visit_s=2e-5), 0.02)
ROW = {
    *("network", "policy", "budget_fraction", "budget_bytes", "measured_s", "steps_s"),
    *("simulated_s", "over_plain", "bytes_in", "bytes_out", "infeasible", "losses_equal"),
}
POLICIES_RUN = ("repeat", "on-demand", BOUND)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Two policies that run and one that is only simulated, under two budgets, the second of which
    is too small for the largest update; and where the files lie."""
    folder = tmp_path_factory.mktemp("step-time")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_time, "_fit", lambda *args: FIT)
        result = step_time.run(
            folder / "found.json",
            network=("moe",),
            preset="tiny",
            budgets=("1/2", "0.0625"),
            policies=POLICIES_RUN,
            steps=5,
            page=folder / "found.md",
            spill_dir=Path("/var/tmp"),
        )
    return result, folder


def of(result: dict[str, Any], budget: str, policy: str) -> dict[str, Any]:
    return next(r for r in result["rows"] if (r["budget"], r["policy"]) == (budget, policy))


@pytest.mark.slow
def test_every_row_has_both_sides_or_says_why_not(found: tuple[dict[str, Any], Path]) -> None:
    result = found[0]
    assert len(result["rows"]) == 2 * (1 + len(POLICIES_RUN))
    assert all(row.keys() >= ROW for row in result["rows"])
    plain = of(result, "1/2", "plain")
    for policy in ("repeat", "on-demand"):
        row = of(result, "1/2", policy)
        assert row["infeasible"] == {"measured": None, "simulated": None}
        assert row["losses_equal"] is True
        assert len(row["steps_s"]) == result["steps"] >= 5
        assert row["measured_s"] == median(row["steps_s"])
        assert row["over_plain"]["measured"] == row["measured_s"] / plain["measured_s"]
        assert row["over_plain"]["simulated"] == row["simulated_s"] / plain["simulated_s"]
        small = of(result, "1/16", policy)
        assert small["measured_s"] is small["simulated_s"] is None
        for why in small["infeasible"].values():
            assert "cannot hold the largest update" in why
    # On demand the same bytes move whatever the load, if the simulated steps are the measured ones.
    demanded = of(result, "1/2", "on-demand")
    for key in ("bytes_in", "bytes_out"):
        assert demanded[key]["simulated"] == pytest.approx(demanded[key]["measured"], rel=0.05)


@pytest.mark.slow
def test_what_is_only_simulated_is_shown_by_that_side(found: tuple[dict[str, Any], Path]) -> None:
    row = of(found[0], "1/2", BOUND)
    assert row["simulated_s"] > 0
    assert row["measured_s"] is row["over_plain"]["measured"] is None
    assert row["infeasible"] == {"measured": None, "simulated": None}
    assert row["losses_equal"] is None
    refused = of(found[0], "1/16", BOUND)["infeasible"]
    assert refused["measured"] is None
    assert "no measured policy runs under this budget" in refused["simulated"]


@pytest.mark.slow
def test_the_files_are_written(found: tuple[dict[str, Any], Path]) -> None:
    result, folder = found
    assert json.loads((folder / "found.json").read_text()) == result
    page = (folder / "found.md").read_text()
    assert "![Time over budgets](found.svg)" in page
    assert "moe, 1/16: last order (measured), last order (simulated), on demand (measured)" in page
    assert "moe, 1/16, measured: no policy runs" in page
    assert (folder / "found.svg").stat().st_size > 5000


# Rows, and what comes of them


def made(budget: str = "1/4", **times: float | str) -> list[dict[str, Any]]:
    """Return rows of given times over plain training's, or reasons, of both sides."""
    share, beside = Fraction(budget), (0.1, 0.1)
    rows = [plain_row("net", share, 1 << 20, beside, beside)]
    for key, value in times.items():
        policy = key.replace("_", "-")
        side = Side(value) if isinstance(value, str) else Side("", (0.1 * value,), 2e6, 1e6)
        own = Measured(side, losses_equal=True) if POLICIES[policy].runs else None
        rows.append(row_of("net", policy, share, 1 << 20, own, side, beside, beside))
    return rows


def result_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    about = {"footprint_bytes": 4 << 20, "operators": 7, "plain_s": 0.1}
    return {
        "networks": {"net": about},
        "policies": described(),
        "rows": rows,
        "summary": summary(rows),
        "published": step_time.FASTER,
        "steps": 6,
        "repeat": 1,
        "slowest": 60.0,
        "preset": "tiny",
        "learned": 9,
        "calibration": "fitted.json",
        "link": {"read_bps": 1e9, "write_bps": 1e9},
    }


def test_the_pilot_stands_against_the_best_of_the_others() -> None:
    rows = made(pilot=2.0, repeat=3.0, dtr=5.0, os_paging=8.0, clairvoyant=1.1)
    own = standing(rows[1:], "measured")
    assert own is not None
    assert (own["fastest"], own["best_other"]) == ("pilot", "repeat")
    assert own["ratio"] == pytest.approx(1.5)
    assert own["over_published"] == pytest.approx(2.5)
    assert own["loses"] == []
    ranked = standing(rows[1:], "simulated")
    assert ranked is not None
    assert ranked["fastest"] == "pilot"  # what knows every step is none of the policies
    assert "the pilot wins against last order, 1.50 times" in said(result_of(rows))[0]


def test_where_the_pilot_loses_it_is_said() -> None:
    rows = made(pilot=4.0, repeat=3.0, dtr="too little", os_paging="too little")
    own = standing(rows[1:], "measured")
    assert own is not None
    assert (own["fastest"], own["loses"], own["over_published"]) == ("repeat", ["repeat"], None)
    told = said(result_of(rows))
    assert "the pilot loses against last order, 0.75 times" in told[0]
    assert any("nothing to set beside the published 1.38" in line for line in told)


def test_losses_that_differ_are_cried_out() -> None:
    rows = made(pilot=2.0, repeat=3.0)
    assert "bit for bit" in said(result_of(rows))[-1]
    rows[-1]["losses_equal"] = False
    assert "LOSSES DIFFER" in said(result_of(rows))[-1]


def test_a_run_that_fails_has_no_time_beside_one_that_did_not() -> None:
    good = Measured(Side("", (1.0, 2.0, 3.0), 10, 20), True, {"budget": 1})
    other = Measured(Side("", (5.0,), 30, 40), True, {"budget": 1})
    both = merged([good, other])
    assert both.side.steps_s == (1.0, 2.0, 3.0, 5.0)
    assert (both.side.bytes_in, both.side.seconds) == (20, 2.5)
    failed = merged([good, Measured(Side("killed"), False)])
    assert (failed.side.seconds, failed.side.why) == (None, "killed")
    assert failed.losses_equal is False


def test_page_and_figure_name_every_policy(tmp_path: Path) -> None:
    """From a result that was written and read again."""
    times = {key.replace("-", "_"): 1.5 + n for n, key in enumerate(POLICIES)}
    rows = made("1", **times) + made("1/16", **{**times, "dtr": "it needs 3 of 2"})
    (tmp_path / "small.json").write_text(json.dumps(result_of(rows)))
    result = json.loads((tmp_path / "small.json").read_text())
    page = page_of(result, "small.svg")
    write_figure(result, tmp_path / "small.svg")
    drawn = (tmp_path / "small.svg").read_text()
    for policy in POLICIES.values():
        assert policy.title in page
        assert policy.title in drawn
    assert "only simulated" in page
    assert "--budgets 1,1/16 --policies pilot,repeat," in page
    assert "--calibration fitted.json --json PATH" in page
    assert "Only simulated: intervals (Sentinel), swap or recompute (Capuchin), clairvoyant" in page
    assert "net, 1/16: rematerialisation (DTR) (measured): it needs 3 of 2" in page
    assert len(reasons(result)) == 2


def test_a_reason_that_differs_in_its_numbers_is_told_once() -> None:
    why = {"1/4": "it needs 3 MiB of 2", "1/8": "it needs 3 MiB of 1", "1/16": "it was killed"}
    times = dict.fromkeys((key.replace("-", "_") for key in POLICIES), 1.5)
    rows = [row for budget in why for row in made(budget, **{**times, "dtr": why[budget]})]
    measured = [line for line in reasons(result_of(rows)) if "(measured)" in line]
    assert measured == [
        "net, 1/4: rematerialisation (DTR) (measured): it needs 3 MiB of 2; so too under 1/8",
        "net, 1/16: rematerialisation (DTR) (measured): it was killed",
    ]


def test_the_figure_names_budgets(tmp_path: Path) -> None:
    times = dict.fromkeys((key.replace("-", "_") for key in POLICIES), 1.5)
    write_figure(result_of(made("1", **times) + made("1/16", **times)), tmp_path / "small.svg")
    drawn = (tmp_path / "small.svg").read_text()
    assert "1/16" in drawn


@needs_pager
def test_what_was_fitted_before_is_taken(tmp_path: Path) -> None:
    path = Path(__file__).parents[1] / "docs" / "results" / "simulation.json"
    known = json.loads(path.read_text())
    found = step_time._fit(path, tmp_path, str(tmp_path), lambda *_: None)
    pace = found.pace_s / known["pace_s"]  # as quick as the machine is now
    assert found.work.save_s > 0
    assert found.work.save_s == pytest.approx(pace * known["work"]["save_s"])
    assert found.machine.interference == known["interference"] > 0
    assert found.machine.link.read_bps != known["link"]["read_bps"]  # measured now


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


def test_operators_take_what_plain_steps_take(recording: tuple[Material, list[Trace]]) -> None:
    material, traces = recording
    work = replayed(material, traces)
    for step in work.steps:
        spans = [step.uses[start:stop] for start, stop in step.phases.values()]
        taken = [sum(use.seconds for use in span) for span in spans]
        assert taken == pytest.approx([0.02, 0.03, 0.01])
        assert min(use.seconds for use in step.uses) >= 0
    assert material.steps[0].seconds == pytest.approx((0.02, 0.03, 0.01))


def test_policies_that_are_simulated_by_operators(
    recording: tuple[Material, list[Trace]],
) -> None:
    """Where all fits they take what plain steps take; where it does not, more, and who cannot run
    says why."""
    material, traces = recording
    work = replayed(material, traces)
    keys = [key for key, one in POLICIES.items() if one.strategy is not None]
    assert {*PUBLISHED, "intervals", "capuchin", "replay"} == set(keys)
    for budget, fits in ((32 << 20, True), (5 << 18, False)):
        sides = {key: simulated(key, material, work, budget, None, "", FIT, [2, 3]) for key in keys}
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
    """By its own clock, and by the real one."""
    material, traces = recording
    work = replayed(material, traces)
    side = simulated("dtr", material, work, 32 << 20, None, "", FIT, [2, 3], slowest_s=0.05)
    assert "a step takes more than 50.0 ms" in side.why
    with pytest.raises(NoEndError, match="came to no end within"):
        simulate(work, Machine(FIT.machine.link, 32 << 20), Watched(inner=DTR(), patience_s=-1))


def test_a_budget_that_the_runtime_refuses_is_not_simulated(
    recording: tuple[Material, list[Trace]],
) -> None:
    material, traces = recording
    work = replayed(material, traces)
    side = simulated("repeat", material, work, 1000, None, "needs more", FIT, [2, 3])
    assert (side.seconds, side.why) == (None, "needs more")


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
    rows = made(pilot=2.0, repeat=3.0)
    own = Measured(Side("", (0.2,)), losses_equal=True)
    rows.append(row_of("net", "on-demand", Fraction("1/4"), 1 << 20, own, side, (0.1,), (0.1,)))
    assert rows[-1]["infeasible"] == {"measured": None, "simulated": None}
    page = page_of(result_of(rows), "x.svg")
    assert "| on demand * | 200.0 ms | 2.00 | not simulated |" in page
    assert "on demand *: not simulated: no parameter" in page


# The measured side


def test_all_policies_and_baselines_are_measured() -> None:
    runs = {key for key, one in POLICIES.items() if one.runs}
    assert runs == {*config.POLICIES, *BASELINES, SYSTEM}


def test_steps_that_count_come_after_warm_up_and_after_a_wait() -> None:
    turns = Turns(rounds=2)
    assert (turns.steps, turns.counted) == (10, [3, 4, 5, 7, 8, 9])


def test_a_worker_that_does_not_answer_is_ended() -> None:
    spec = Spec("moe", "tiny", shape={"length": 16})
    with (
        pytest.raises(WorkerError, match=r"'slow' gave no answer within 50\.0 ms"),
        worker("slow", spec, patience=0.05),
    ):
        pass


def test_who_fails_in_the_middle_leaves_the_turns() -> None:
    class Dies:
        patience = 0.0
        steps: tuple[Any, ...] = ()

        def step(self, *, measured: bool = True) -> None:
            raise WorkerError("the worker 'x' ended with code 1: warned\nneeds 3, has 2")

    one = Contestant("x", lambda: 12.0)
    dying: Any = Dies()
    one._worker = dying
    one.step()
    one.step()
    assert (one.why, dying.patience) == ("needs 3, has 2", 12.0)
    assert one.result(dying).side == Side("needs 3, has 2")


@pytest.mark.skipif(bool(why_unavailable(swap=True)), reason=why_unavailable(swap=True))
def test_paging_by_the_system_is_plain_training_in_a_group_with_swap() -> None:
    """Its losses are those of plain training, and neither group nor swap file is left."""
    where, told = Path("/var/tmp"), []
    spec = Spec("moe", "tiny", shape={"length": 16}, spill_dir=str(where))
    turns = Turns(rounds=1, warmup=1, per_turn=1)
    _, found = measure(spec, [SYSTEM], 64 << 20, turns, None, told.append, footprint=64 << 20)
    assert found[SYSTEM].side.why == ""
    assert len(found[SYSTEM].side.steps_s) == 1
    assert found[SYSTEM].losses_equal is True
    assert not list(where.glob(f".dynoffload-swap-{os.getpid()}-*"))
    assert f"dynoffload-swap-{os.getpid()}" not in Path("/proc/swaps").read_text()


def test_where_nothing_can_be_limited_the_row_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    spec = Spec("moe", "tiny", shape={"length": 16})
    turns = Turns(rounds=1, warmup=1, per_turn=1)
    _, found = measure(spec, [SYSTEM], 64 << 20, turns, None, lambda _: None, footprint=1)
    assert "are set by root alone" in found[SYSTEM].side.why


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
        ({"repeat": 0}, "repeat=0"),
    ],
)
def test_what_cannot_be_asked_is_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        step_time.run(**wrong)
