"""The checks for machines with a GPU, over an emulated one: they pass what is exact, and nothing
else."""

from __future__ import annotations

import json
import os
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import DEVICE, Emulated, Waited, accelerated
from torch import Tensor, nn

from dynoffload.errors import BackendError, ConfigError
from dynoffload.experiments import gpu_check, gpu_check_cases, gpu_check_host
from dynoffload.experiments.gpu_check import check, main, passed, sanitize
from dynoffload.experiments.gpu_check_cases import Case, Verdict, cases, late, train_case
from dynoffload.experiments.gpu_check_host import HostCase, host_cases, train_host_case
from dynoffload.experiments.late import Late
from dynoffload.experiments.loops import Loop
from dynoffload.runtime import target
from dynoffload.units import KiB, MiB

CPU = torch.device("cpu")
PLAIN = Loop("AdamW foreach", steps=2)


@pytest.fixture(autouse=True)
def few_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check_cases, "SCRATCH", 4 * KiB)
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
    found = Subject()
    monkeypatch.setattr(gpu_check_cases, "_subject", lambda case, device: found)
    return found


def run(case: Case) -> dict[str, Any]:
    """Return the row of a case on the emulated accelerator."""
    with accelerated():
        return train_case(case, CPU, named=DEVICE)


# One case


@pytest.mark.parametrize(
    "case",
    [
        Case("small", replace(PLAIN, clip="norm", accumulate=2)),
        Case("small", Loop("AdamW fused", autocast="float16", steps=3), files=True, lies=1),
        Case("small", PLAIN, late=3, files=True, starts_there=True),
    ],
    ids=["host memory", "lies and a file", "late"],
)
def test_what_is_exact_is_said_to_be(subject: Subject, case: Case) -> None:
    row = run(case)
    assert (row["verdict"], row["why"]) == ("exact", "")
    assert row["bytes_in"] > 0
    assert row["bytes_out"] > 0
    assert 0 < row["peak_fast_bytes"] <= row["budget"]
    assert row["host_bytes"] > 0
    assert bool(row["delays"]) == (case.late is not None)


@pytest.mark.parametrize("files", [False, True])
def test_a_workspace_that_libraries_keep_is_no_room(
    subject: Subject, files: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given in the first plain training and held from then on, as cuBLAS's is; the budget has
    it on top, and the network is paged within what it had without."""
    case = Case("small", replace(PLAIN, steps=4), files=files)
    without = run(case)
    workspace, models = 32 * MiB, 0
    build = subject.build
    held = iter([0, workspace, workspace])  # before the first, before the second, before the block

    def built() -> nn.Module:
        nonlocal models
        model = build()
        models = 4 * sum(p.nbytes for p in model.parameters())
        return model

    peaks = iter([0, workspace + models, workspace, workspace + models])
    monkeypatch.setattr(subject, "build", built)
    monkeypatch.setattr(gpu_check_cases, "_held_bytes", lambda device: next(held))
    monkeypatch.setattr(gpu_check_cases, "_peak_bytes", lambda device: next(peaks))
    with accelerated() as queues:
        queues.given = queues.peak = workspace
        row = train_case(case, CPU, named=DEVICE)
    assert (row["verdict"], row["why"]) == ("exact", "")
    assert row["budget"] == without["budget"] + workspace
    assert row["bytes_in"] > 0
    assert row["peak_allocated"] <= row["budget"]


def test_what_garbage_holds_is_not_counted_as_held() -> None:
    model = nn.Linear(2, 2)
    model.itself = [model]
    gone = weakref.ref(model)
    del model
    gpu_check_cases._held_bytes(CPU)
    assert gone() is None


def test_one_other_bit_fails(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample that is another one inside the block."""
    true = subject.loss

    def loss(model: nn.Module, number: int) -> Tensor:
        return true(model, number + (number == 1 and bool(model._forward_pre_hooks)))

    monkeypatch.setattr(subject, "loss", loss)
    row = run(Case("small", PLAIN))
    assert row["verdict"] == "FAILED"
    assert row["why"].startswith("step 1.losses")


def test_what_differs_from_itself_is_told_apart(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    true, calls = subject.loss, iter(range(100))
    monkeypatch.setattr(subject, "loss", lambda model, number: true(model, next(calls)))
    row = train_case(Case("small", PLAIN), CPU)
    assert row["verdict"] == "not deterministic"
    assert "plain training differs from itself" in row["why"]


def test_what_plain_training_cannot_do_is_not_run(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> nn.Module:
        raise NotImplementedError("no kernel")

    monkeypatch.setattr(subject, "build", build)
    row = train_case(Case("small", PLAIN), CPU)
    assert row["verdict"] == "not run"
    assert "no kernel" in row["why"]


@pytest.mark.parametrize("what", ["paged", "late", "asked"])
def test_a_case_that_shows_nothing_fails(what: str) -> None:
    found = {"budget": 9, "peak_fast_bytes": 1, "bytes_in": 1, "delays": 1, "peak_allocated": 0}
    case, pilot = Case("moe", PLAIN, late=1, lies=1), Pilot(1)
    assert gpu_check_cases._shortcoming(case, found, {"pilot": pilot}) == ""
    if what == "paged":
        found["bytes_in"] = 0
    elif what == "late":
        found["delays"] = 0
    else:
        pilot.asked = 0
    assert what in gpu_check_cases._shortcoming(case, found, {"pilot": pilot})


class Pilot:
    """What was asked so often."""

    def __init__(self, asked: int) -> None:
        self.asked = asked


def test_the_budget_binds_regions_and_where_bytes_are_counted_the_allocator() -> None:
    found = {"budget": 9, "peak_fast_bytes": 10, "bytes_in": 1, "delays": 0, "peak_allocated": 9}
    counted = Case("moe", PLAIN, looks=False)
    assert "more than the budget" in gpu_check_cases._shortcoming(counted, found, {})
    found |= {"peak_fast_bytes": 9}
    assert gpu_check_cases._shortcoming(counted, found, {}) == ""
    found |= {"peak_allocated": 10}
    assert "the allocator gave 10" in gpu_check_cases._shortcoming(counted, found, {})
    assert gpu_check_cases._shortcoming(Case("moe", PLAIN), found, {}) == ""


# Late queues


def test_late_queues_and_poison_show_a_moment_that_nobody_waits_for(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The accelerator does not wait; that it would be found as a race is not looked at here."""
    monkeypatch.setattr(gpu_check_cases, "SCRATCH", MiB)
    monkeypatch.setattr(Emulated, "after", lambda self, moment: Waited(0.0))
    monkeypatch.setattr(Emulated, "access", lambda *args, **how: None)
    case = Case("small", PLAIN, late=0)
    try:
        row = run(case)
    except Exception as error:  # poison may also be more than an operator takes
        row = {"verdict": "FAILED", "why": str(error)}
    assert row["verdict"] == "FAILED", row


def test_late_queues_give_back_what_they_took() -> None:
    queues = Emulated(0, delay_s=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "open_streams", lambda device: queues)
        with late(1) as made:
            opened = target.open_streams(CPU)  # type: ignore[attr-defined]
            assert made == [opened]
            assert isinstance(opened, Late)
            storage = torch.UntypedStorage(0)
            opened.fill(storage, 64)
            assert set(storage.tolist()) == {0xFB}
            memory = opened.host(4096)
            assert set(memory.tolist()) == {0xFB}
            for _ in range(20):
                memory[:64].fill_(7)
                opened.after(opened.copy_in(storage, memory[:64], [opened.now()]))
                assert set(storage.tolist()) == {7}
                out = opened.copy_out(memory[64:128], storage, [opened.now()])
                opened.after(out)
                out.wait()
                assert set(memory[64:128].tolist()) == {7}
            opened.empty(storage)
            opened.release(memory, held=False)
            assert opened.delays > 10
            assert queues.host_bytes > 0
    queues.close()
    assert queues.races == []
    assert queues.host_bytes == queues.given == 0


# All cases


def test_the_cases_have_every_kind() -> None:
    every = cases(2)
    assert len({case.describe() for case in every}) == len(every)
    assert all(case.loop.steps == 2 for case in every)
    kinds = [(case.files, case.late is not None, case.lies is not None) for case in every]
    assert set(kinds) >= {
        *((files, late, False) for files in (True, False) for late in (True, False)),
        *((files, False, True) for files in (True, False)),
    }
    loops = [case.loop for case in every]
    assert {loop.autocast for loop in loops} == {"", "bfloat16", "float16"}
    assert {loop.checkpointing for loop in loops} == {"", "reentrant", "not reentrant"}
    assert {loop.clip for loop in loops} == {"", "norm", "value"}
    assert any(loop.accumulate > 1 for loop in loops)
    networks = {case.network for case in every}
    assert len([name for name in networks if name.startswith("transformers:")]) == 3
    assert {"moe", "tree", "depths", "early-lstm", "evoformer"} < networks
    assert any(not case.looks for case in every)
    assert any(case.tiles for case in every)
    assert {case.files for case in host_cases()} == {True, False}


@pytest.mark.parametrize("case", host_cases(), ids=lambda case: case.describe())
def test_the_optimizer_on_the_host_is_what_it_is_defined_to_be(
    case: HostCase, tmp_path: Path
) -> None:
    assert train_host_case(case, CPU, str(tmp_path)) == {"verdict": "exact", "why": ""}


def test_another_update_on_the_host_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check_host, "_LR", 1e-3)
    plain = gpu_check_host._by_definition

    def other(case: HostCase, device: torch.device) -> dict[str, Any]:
        monkeypatch.setattr(gpu_check_host, "_LR", 2e-3)
        found = plain(case, device)
        monkeypatch.setattr(gpu_check_host, "_LR", 1e-3)
        return found

    monkeypatch.setattr(gpu_check_host, "_by_definition", other)
    row = train_host_case(HostCase(), CPU)
    assert row["verdict"] == "FAILED"
    assert row["why"].startswith("trained")


@pytest.mark.slow
def test_tiles_are_trained_too() -> None:
    (case,) = (case for case in cases(2) if case.tiles)
    assert run(case)["verdict"] == "exact"


def test_every_kind_has_to_be_shown() -> None:
    """One exact case is not enough."""
    one = check(lambda case: {"verdict": "exact", "why": ""}, cases(2), 60.0, lambda row: None)
    assert passed(one)
    for wanted in ("late", "files", "tiles"):
        shows = [
            (row[wanted] is not None) if wanted == "late" else bool(row[wanted]) for row in one
        ]
        assert any(shows)
        without = [
            {**row, "verdict": "not run"} if so else row for row, so in zip(one, shows, strict=True)
        ]
        assert not passed(without), wanted


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(2), ids=lambda case: case.describe())
def test_every_case(case: Case) -> None:
    if case.network.startswith("transformers"):
        pytest.importorskip("transformers")
    assert run(case)["verdict"] == "exact"


# Rows


def test_what_cannot_be_run_is_listed_and_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "find_spec", lambda name: None)
    chosen = [Case("transformers:llama", PLAIN), Case("moe", PLAIN), Case("tree", PLAIN)]
    answers = iter([{"verdict": "exact", "why": ""}, {"why": "the process ended with code -9"}])
    told: list[Any] = []
    rows = check(lambda case: next(answers), chosen, 60.0, told.append)
    assert told == rows
    assert [row["verdict"] for row in rows] == ["not run", "exact", "FAILED"]
    assert rows[0]["why"] == "transformers is not installed"
    assert not passed(rows)
    assert passed(rows[:2])
    assert not passed(rows[:1])
    (late_row,) = check(lambda case: {}, [Case("moe", PLAIN)], -1.0, told.append)
    assert (late_row["verdict"], late_row["why"]) == ("not run", "the -1 s were over")


SCRIPT = """#!/bin/sh
for word in "$@"; do
  case "$word" in --one) exit {ours};; --plain) exit {plain};; esac
done
exit 3
"""


@pytest.mark.parametrize(
    ("ours", "plain", "verdict"),
    [(0, 0, "exact"), (86, 0, "FAILED"), (86, 86, "not run"), (1, 0, "FAILED"), (5, 0, "not run")],
)
def test_the_sanitizers_word_is_taken_where_plain_training_is_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: int, plain: int, verdict: str
) -> None:
    program = tmp_path / gpu_check.SANITIZER
    program.write_text(SCRIPT.format(ours=ours, plain=plain))
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    row = sanitize(torch.device("cuda"), "memcheck", None, 20.0)
    assert row["verdict"] == verdict, row


def test_without_the_sanitizer_it_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    row = sanitize(torch.device("cuda"), "memcheck", None, 20.0)
    assert (row["verdict"], row["why"]) == ("not run", "compute-sanitizer is not on the path")
    assert sanitize(CPU, "memcheck", None, 20.0)["verdict"] == "not run"


# The program


def test_without_an_accelerator_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    assert main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "needs an accelerator" in line
    with pytest.raises(BackendError, match="needs an accelerator"):
        gpu_check.accelerator()


class Here:
    """`Cases` without a process."""

    def __init__(self, device: torch.device, spill_dir: str | None, patience: float) -> None:
        pass

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def train(self, case: Case | HostCase) -> dict[str, Any]:
        exact = isinstance(case, HostCase) or case.late is None
        return {"verdict": Verdict.EXACT.value, "why": ""} if exact else {"why": "it broke"}


def test_the_program_writes_what_it_has_and_says_whether_it_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "accelerator", lambda: CPU)
    monkeypatch.setattr(gpu_check, "Cases", Here)
    monkeypatch.setattr(gpu_check, "environment", dict)
    path = tmp_path / "rows" / "check.json"
    assert main(["--json", str(path), "--only", "moe: AdamW foreach; host memory"]) == 1
    found = json.loads(path.read_text())
    assert sorted(row["verdict"] for row in found["rows"]) == [*["FAILED"] * 2, *["exact"] * 2]
    assert found["summary"] == {"exact": 2, "FAILED": 2, "not deterministic": 0, "not run": 0}
    assert found["passed"] is False
    said = capsys.readouterr().out
    assert "it broke" in said
    assert "NOT PASSED" in said
    assert main(["--only", "lying pilot 0"]) == 0
    assert main(["--only", "no such case"]) == 1
    assert "no case has" in capsys.readouterr().err


def test_a_process_that_fails_is_replaced() -> None:
    with gpu_check.Cases(CPU, None, 60.0) as cases:
        cases._started().kill()
        assert "killed by signal 9" in cases.train(HostCase())["why"]
        assert cases.train(HostCase())["verdict"] == Verdict.EXACT.value


def test_an_unknown_selection_is_refused() -> None:
    with pytest.raises(ConfigError, match="no case has"):
        gpu_check._run_all(CPU, gpu_check._parser().parse_args(["--only", "nothing such"]))
