"""The harness, once for all experiments: processes, turns, resuming, JSON, page and figure."""

from __future__ import annotations

import json
import math
import operator
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from dynoffload.errors import ConfigError
from dynoffload.experiments import harness
from dynoffload.experiments.comparing import BEGIN, END
from dynoffload.experiments.harness import Experiment, Row, carry_out, option, rendered, turns
from dynoffload.experiments.processes import Process, Renewed, WorkerError, at_once, fresh

PAGE = f"""# Squares

<!-- table: other -->
{END}
prose
{BEGIN}
earlier
{END}
after
"""


@dataclass(frozen=True)
class Params:
    most: int = option(3, "the largest number")
    names: tuple[str, ...] = option((), "words")
    machine: Path | None = option(None, "a description, or a folder of them")
    spill_dir: Path | None = option(None, "somewhere", place=True)


COLUMNS = {"number": lambda row: row["case"], "square": lambda row: str(row["square"])}


class Squares(Experiment[Params]):
    parameters = Params
    title = "squares"
    columns = COLUMNS
    measured: ClassVar[list[int]] = []
    failing = -1

    def cases(self) -> Mapping[str, int]:
        if self.params.most < 1:
            raise ConfigError("most is too small")
        return {str(number): number for number in range(1, self.params.most + 1)}

    def run(self, case: int) -> Row:
        if case == self.failing:
            raise WorkerError("interrupted")
        self.measured.append(case)
        return {"square": case**2, "before": len(self.rows)}

    def summary(self, rows: Sequence[Row]) -> dict[str, Any]:
        return {"sum": sum(row["square"] for row in rows)}

    def parts(self, result: Mapping[str, Any]) -> list[Any]:
        other = harness.table("other", {"sum": lambda row: str(row["sum"])}, [result["summary"]])
        return [*super().parts(result), other, f"sum {result['summary']['sum']}"]

    def draw(self, figure: Any, color: Mapping[str, str], result: Mapping[str, Any]) -> None:
        axes = figure.subplots()
        axes.plot([row["square"] for row in result["rows"]], color=color["plan"], label="drawn")
        axes.legend()


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this were the code of a commit."""
    made_by = {"command": "dynoffload squares", "commit": "0123456789ab", "machine": {}}
    monkeypatch.setattr(harness, "provenance", lambda: dict(made_by))
    monkeypatch.setattr(Squares, "measured", [])


def test_an_experiment_gives_json_table_page_and_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "squares.json"
    path.with_suffix(".md").write_text(PAGE, encoding="utf-8")
    result = carry_out(Squares, Params(), path)
    assert [row["square"] for row in result["rows"]] == [1, 4, 9]
    assert result["summary"] == {"sum": 14}
    assert result["made_by"]["commit"] == "0123456789ab"
    assert json.loads(path.read_text()) == result
    assert result["params"] == {"most": 3, "names": [], "machine": None, "spill_dir": None}
    page = path.with_suffix(".md").read_text()
    assert "<!-- table: other -->\n| sum |\n| --- |\n| 14 |\n<!-- end" in page
    assert f"{BEGIN}\n| number | square |\n| --- | ---: |\n| 1 | 1 |" in page
    assert "- sum 14\n- Made by `dynoffload squares`, commit 0123456789ab" in page
    assert "earlier" not in page
    assert page.endswith("\nafter\n")
    assert "drawn" in path.with_suffix(".svg").read_text()
    shown = capsys.readouterr().out
    assert "squares" in shown
    assert "sum 14" in shown
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        "squares.json",
        "squares.md",
        "squares.svg",
    ]


def test_a_run_that_was_ended_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "squares.json"
    monkeypatch.setattr(Squares, "failing", 2)
    with pytest.raises(WorkerError, match="interrupted"):
        carry_out(Squares, Params(), path)
    assert not path.exists()
    monkeypatch.setattr(Squares, "failing", -1)
    result = carry_out(Squares, Params(spill_dir=tmp_path), path)
    assert Squares.measured == [1, 2, 3]
    assert [row["before"] for row in result["rows"]] == [0, 1, 2]
    assert carry_out(Squares, Params(), path)["rows"] == result["rows"]
    assert Squares.measured == [1, 2, 3]
    carry_out(Squares, Params(), path, restart=True)
    assert Squares.measured == [1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize("change", ["commit", "dirty", "params", "damage"])
def test_only_rows_of_the_same_code_and_parameters_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    path = tmp_path / "squares.json"
    commit = "0123456789ab-dirty" if change == "dirty" else "0123456789ab"
    made_by = {"command": "dynoffload squares", "commit": commit, "machine": {}}
    monkeypatch.setattr(harness, "provenance", lambda: dict(made_by))
    carry_out(Squares, Params(), path)
    if change == "commit":
        made_by["commit"] = "ba9876543210"
    if change == "damage":
        path.write_text(path.read_text()[:-20])
    carry_out(Squares, Params(most=2 if change == "params" else 3), path)
    assert len(Squares.measured) == (5 if change == "params" else 6)


def test_rows_of_another_input_of_the_same_name_are_not_kept(tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    (given / "machine.json").write_text("slow")
    params = Params(most=1, machine=given)
    for text, measured in (("slow", 1), ("slow", 1), ("fast", 2)):
        (given / "machine.json").write_text(text)
        carry_out(Squares, params, tmp_path / "squares.json")
        assert len(Squares.measured) == measured


def test_what_was_measured_is_rendered_again(tmp_path: Path) -> None:
    path = tmp_path / "squares.json"
    result = carry_out(Squares, Params(names=("a",), spill_dir=tmp_path), path)
    path.with_suffix(".md").write_text(PAGE, encoding="utf-8")
    assert rendered(Squares, path) == result
    assert Squares.measured == [1, 2, 3]
    assert "| 3 | 9 |" in path.with_suffix(".md").read_text()
    for other in ('{"rows": []}', '{"params": {}, "rows": [], "summary": {}}'):
        path.write_text(other)
        with pytest.raises(ConfigError, match="holds no result of this experiment"):
            rendered(Squares, path)


def test_a_page_without_a_place_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    page = tmp_path / "squares.md"
    page.write_text("# Squares\n")
    with pytest.raises(ConfigError, match="put these lines where the table goes"):
        carry_out(Squares, Params(), tmp_path / "squares.json")
    assert Squares.measured == []
    page.write_text(PAGE.replace("other", "another"))
    with pytest.raises(ConfigError, match="a place for a table 'another'; there are squares, "):
        carry_out(Squares, Params(), tmp_path / "squares.json")


def test_wrong_parameters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too small"):
        carry_out(Squares, Params(most=0), tmp_path / "squares.json")


def test_equal_steps_are_compared_in_turns() -> None:
    a, b = ("a", True), ("b", True)
    lead_a, lead_b = ("a", False), ("b", False)
    found = [lead_a, a, a, lead_b, b, b, lead_b, b, b, lead_a, a, a]
    assert list(turns("ab", warmup=1, rounds=2, per_turn=2, lead=1)) == [lead_a, lead_b, *found]


def test_a_process_answers_and_stays() -> None:
    with Process("one") as process:
        number = process.call(os.getpid)
        assert number not in (os.getpid(), fresh("other", os.getpid))
        assert process.call(os.getpid) == number
        with pytest.raises(WorkerError, match=r"'one' failed: (?s:.*)ZeroDivisionError: "):
            process.call(operator.truediv, 1, 0)
        assert process.call(os.getpid) == number
    assert not Path("/proc", str(number)).exists()


def test_a_process_that_dies_or_hangs_is_named() -> None:
    with pytest.raises(WorkerError, match="'one' ended with code 3"):
        fresh("one", os._exit, 3)
    with Process("one") as process:
        process.kill()
        with pytest.raises(WorkerError, match="'one' was killed by signal 9"):
            process.call(os.getpid)
    with pytest.raises(WorkerError, match="'one' gave no answer within 1"):
        fresh("one", time.sleep, 60, patience=1.0)


def test_a_process_that_failed_is_replaced() -> None:
    processes = Renewed("a case")
    first = processes.call(os.getpid)
    assert processes.call(os.getpid) == first
    with pytest.raises(WorkerError, match="'a case' ended with code 3"):
        processes.call(os._exit, 3)
    assert processes.call(os.getpid) != first
    processes.close()


def test_the_first_of_several_processes_that_fails_ends_all() -> None:
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"(?s)'rank 1 of two' failed: .*ValueError"):
        at_once("two", time.sleep, [600, -1])
    with pytest.raises(WorkerError, match=r"'rank . of two' gave no answer within 2"):
        at_once("two", time.sleep, [600, 600], patience=2.0)
    assert time.monotonic() - start < 300


def test_several_processes_answer_in_order() -> None:
    assert at_once("two", math.sqrt, [4.0, 9.0]) == [2.0, 3.0]


class Counted(Squares):
    one_thread = True

    def run(self, case: int) -> Row:
        return {"square": 0, "threads": torch.get_num_threads()}


def test_threads_are_as_many_as_the_experiment_asks_for() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        rows = carry_out(Counted, Params(most=1))["rows"]
        assert (rows[0]["threads"], torch.get_num_threads()) == (1, 2)
    finally:
        torch.set_num_threads(before)
