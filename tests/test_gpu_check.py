"""The check for machines with a GPU, over an emulated one: it passes what is exact, and nothing
else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import DEVICE, Emulated, accelerated
from torch import Tensor, nn

from dynoffload.experiments import gpu_check, gpu_check_training
from dynoffload.experiments.gpu_check import check, main, passed
from dynoffload.experiments.gpu_check_cases import Case, Kind, cases
from dynoffload.experiments.gpu_check_training import shortcoming, train_case
from dynoffload.experiments.loops import Loop
from dynoffload.experiments.processes import WorkerError
from dynoffload.units import KiB, MiB

CPU = torch.device("cpu")
PLAIN = Loop("AdamW foreach", steps=2)
EXACT: dict[str, Any] = {"verdict": "exact", "why": ""}


@pytest.fixture(autouse=True)
def few_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check_training, "SCRATCH", 4 * KiB)
    monkeypatch.setattr("dynoffload.experiments.late.WIDTH", 16)


class Subject:
    """A network of three layers with dropout, in the place of one of the zoo."""

    def build(self) -> nn.Module:
        return nn.Sequential(
            *(nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Dropout(0.1)) for _ in range(3))
        )

    def loss(self, model: nn.Module, number: int) -> Tensor:
        x = torch.randn(4, 24, generator=torch.Generator().manual_seed(number))
        loss: Tensor = model(x).square().mean()
        return loss


@pytest.fixture
def subject(monkeypatch: pytest.MonkeyPatch) -> Subject:
    """Return the network of every case."""
    one = Subject()
    monkeypatch.setattr(
        gpu_check_training,
        "_subject",
        lambda *_: (lambda: one.build(), lambda model, number: one.loss(model, number)),
    )
    return one


def run(case: Case) -> dict[str, Any]:
    """Return the row of a case on the emulated accelerator."""
    with accelerated():
        return train_case(case, CPU, named=DEVICE)


@pytest.mark.parametrize(
    "case",
    [
        Case("small", replace(PLAIN, clip="norm", accumulate=2)),
        Case("small", Loop("AdamW fused", autocast="float16", steps=3), files=True, lies=1),
        Case("small", PLAIN, Kind.RACES, seed=3, files=True, starts_there=True),
    ],
    ids=["host memory", "lies and a file", "late"],
)
def test_what_is_exact_is_said_to_be(subject: Subject, case: Case) -> None:
    row = run(case)
    assert row.items() >= EXACT.items(), row
    assert row["bytes_in"] > 0
    assert row["bytes_out"] > 0
    assert 0 < row["peak_fast_bytes"] <= row["budget"]
    assert bool(row["delays"]) == (case.kind is Kind.RACES)
    assert bool(row["asked"]) == (case.lies is not None)


@pytest.mark.parametrize("files", [False, True])
def test_a_workspace_that_libraries_keep_is_no_room(
    subject: Subject, files: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given in the first plain training and held from then on, as cuBLAS's is; the budget has
    it on top, and the network is paged within what it had without."""
    case = Case("small", replace(PLAIN, steps=4), files=files)
    without = run(case)
    workspace, models = 32 * MiB, 4 * sum(p.nbytes for p in subject.build().parameters())
    held = iter([0, workspace, workspace])  # before the first, before the second, before the block
    peaks = iter([0, workspace + models, workspace, workspace + models])
    monkeypatch.setattr(gpu_check_training, "_held_bytes", lambda device: next(held))
    monkeypatch.setattr(gpu_check_training, "_peak_bytes", lambda device: next(peaks))
    with accelerated() as queues:
        queues.given = queues.peak = workspace
        row = train_case(case, CPU, named=DEVICE)
    assert row.items() >= EXACT.items(), row
    assert row["budget"] == without["budget"] + workspace
    assert row["bytes_in"] > 0
    assert row["peak_allocated"] <= row["budget"]


def _another_sample(true: Callable[..., Tensor]) -> Callable[..., Tensor]:
    calls = iter(range(100))
    return lambda model, number: true(model, number + (next(calls) == 5))  # 4 are plain ones


def _never_the_same(true: Callable[..., Tensor]) -> Callable[..., Tensor]:
    calls = iter(range(100))
    return lambda model, number: true(model, next(calls))


def _no_kernel(true: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def loss(model: nn.Module, number: int) -> Tensor:
        raise NotImplementedError("no kernel")

    return loss


@pytest.mark.parametrize(
    ("change", "verdict", "said"),
    [
        (_another_sample, "FAILED", "step 1.losses"),
        (_never_the_same, "not deterministic", "plain training differs from itself"),
        (_no_kernel, "not run", "NotImplementedError: no kernel"),
    ],
)
def test_what_is_not_exact_is_told_apart(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, change: Any, verdict: str, said: str
) -> None:
    monkeypatch.setattr(subject, "loss", change(subject.loss))
    row = run(Case("small", PLAIN)) if verdict == "FAILED" else train_case(Case("a", PLAIN), CPU)
    assert row["verdict"] == verdict
    assert said in row["why"]


def test_a_kernel_that_has_no_deterministic_algorithm_is_named(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is trained all the same, and judged by whether plain training repeats itself."""
    true = subject.loss

    def loss(model: nn.Module, number: int) -> Tensor:
        if torch.get_deterministic_debug_mode() == 2:
            raise RuntimeError("kthvalue CUDA does not have a deterministic implementation, but")
        return true(model, number)

    said = "(kthvalue CUDA does not have a deterministic implementation)"
    monkeypatch.setattr(subject, "loss", loss)
    row = run(Case("small", PLAIN))
    assert row.items() >= {**EXACT, "kernel": said}.items()
    monkeypatch.setattr(subject, "loss", _never_the_same(loss))
    row = train_case(Case("small", PLAIN), CPU)
    assert (row["verdict"], row["why"][-len(said) :]) == ("not deterministic", said)
    assert torch.get_deterministic_debug_mode() == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        ({"bytes_in": 0}, "nothing was paged"),
        ({"delays": 0}, "nothing was late"),
        ({"asked": 0}, "the pilot was not asked"),
        ({"peak_fast_bytes": 10}, "more than the budget"),
    ],
)
def test_a_case_that_shows_nothing_or_passes_the_budget_fails(
    change: dict[str, int], said: str
) -> None:
    found = {"budget": 9, "peak_fast_bytes": 9, "bytes_in": 1, "delays": 1, "asked": 1}
    found |= {"peak_allocated": 10, **change}
    why = shortcoming(Case("moe", PLAIN, Kind.RACES, lies=1), found)
    assert said in why
    assert bool(said) == bool(why)
    assert "the allocator gave 10" in shortcoming(
        Case("moe", PLAIN, Kind.COUNTED), found | {"peak_fast_bytes": 9}
    )


# Late queues


def test_late_queues_and_poison_show_a_moment_that_nobody_waits_for(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The accelerator does not wait; that it would be found as a race is not looked at here."""
    monkeypatch.setattr(gpu_check_training, "SCRATCH", MiB)
    monkeypatch.setattr(Emulated, "after", lambda self, moment: moment)
    monkeypatch.setattr(Emulated, "access", lambda *args, **how: None)
    try:
        row = run(Case("small", PLAIN, Kind.RACES))
    except Exception as error:  # poison may also be more than an operator takes
        row = {"verdict": "FAILED", "why": str(error)}
    assert row["verdict"] == "FAILED", row


# All cases


def test_the_optimizer_on_the_host_is_what_it_is_defined_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is told from what would clip otherwise."""
    hosted = [case for case in cases(3) if case.kind is Kind.HOST_OPTIMIZER]
    assert {case.files for case in hosted} == {True, False}
    for case in hosted:
        assert train_case(case, CPU, str(tmp_path)) == {**EXACT, "kernel": ""}
    definition = gpu_check_training._Training._by_definition

    def otherwise(self: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gpu_check_training, "_CLIP", 1e-3)
            return definition(self)

    monkeypatch.setattr(gpu_check_training._Training, "_by_definition", otherwise)
    clipped = next(case for case in hosted if case.loop.clip)
    assert train_case(clipped, CPU)["verdict"] == "FAILED"


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(2), ids=lambda case: case.describe())
def test_every_case(case: Case) -> None:
    if case.network.startswith("transformers"):
        pytest.importorskip("transformers")
    row = train_case(case, CPU) if case.kind is Kind.HOST_OPTIMIZER else run(case)
    assert row["verdict"] == "exact", row


def test_every_kind_has_to_be_shown() -> None:
    """One exact case is not enough."""
    rows = check(lambda case: EXACT, cases(2), 60.0, lambda row: None)
    assert {row["kind"] for row in rows} == {kind.value for kind in Kind}
    assert passed(rows)
    for kind in Kind:
        without = [
            {**row, "verdict": "not run"} if row["kind"] == kind.value else row for row in rows
        ]
        assert not passed(without), kind


def test_what_cannot_be_run_is_listed_and_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "find_spec", lambda name: None)
    chosen = [Case("transformers:llama", PLAIN), Case("moe", PLAIN), Case("tree", PLAIN)]
    answers = iter([EXACT, {"why": "the process ended with code -9"}])
    rows = check(lambda case: next(answers), chosen, 60.0, lambda row: None)
    assert [row["verdict"] for row in rows] == ["not run", "exact", "FAILED"]
    assert rows[0]["why"] == "transformers is not installed"
    assert [passed(rows), passed(rows[:2]), passed(rows[:1])] == [False, True, False]
    (over,) = check(lambda case: {}, [Case("moe", PLAIN)], -1.0, lambda row: None)
    assert (over["verdict"], over["why"]) == ("not run", "the -1 s were over")


# The program


def test_without_an_accelerator_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    assert main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "needs an accelerator" in line


def test_the_program_writes_what_it_has_and_says_whether_it_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "accelerator", lambda: CPU)
    monkeypatch.setattr(gpu_check, "environment", dict)

    class Here:  # in the place of a process
        def __init__(self, name: str, **options: Any) -> None: ...

        def call(self, function: Any, case: Case, *where: Any) -> dict[str, Any]:
            if case.kind is Kind.RACES:
                raise WorkerError("it broke")
            return EXACT

        def close(self) -> None: ...

    monkeypatch.setattr(gpu_check, "Renewed", Here)
    path = tmp_path / "rows" / "check.json"
    assert main(["--json", str(path), "--only", "moe: AdamW foreach; "]) == 1
    found = json.loads(path.read_text())
    assert [row["verdict"] for row in found["rows"]] == [
        "FAILED" if row["kind"] == Kind.RACES.value else "exact" for row in found["rows"]
    ]
    assert found["passed"] is False
    said = capsys.readouterr().out
    assert "it broke" in said
    assert "4 exact, 2 FAILED, 0 not deterministic, 0 not run: NOT PASSED" in said
    assert main(["--only", "lying pilot 0"]) == 0
    assert main(["--only", "no such case"]) == 1
    assert "no case has" in capsys.readouterr().err
