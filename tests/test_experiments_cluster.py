"""What is committed of the cluster is what the code computes, and says what it says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from dynoffload.errors import ConfigError
from dynoffload.experiments import cluster
from dynoffload.experiments.cluster import Options, computed
from dynoffload.experiments.cluster_views import lines, row_of
from dynoffload.experiments.comparing import BEGIN, END

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
NUMBERS = RESULTS / "cluster.json"
SMALL = Options((2,), 0.25, 0, 50.0, 5.0, ranks=8, experts=16, tokens=2048)


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(NUMBERS.read_text("utf-8"))
    return found


def near(ours: Any, theirs: Any, path: str = "") -> None:
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs), path
        for key in theirs:
            near(ours[key], theirs[key], f"{path}.{key}")
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), path
        for number, one in enumerate(theirs):
            near(ours[number], one, f"{path}[{number}]")
    elif isinstance(theirs, float):
        assert math.isclose(ours, theirs, rel_tol=1e-6, abs_tol=1e-9), path
    else:
        assert ours == theirs, path


@pytest.mark.skipif(not NUMBERS.is_file(), reason="not a checkout")
def test_committed_numbers_are_computed_ones(committed: dict[str, Any]) -> None:
    options = committed["options"]
    found = computed(Options(**{**options, "sequences": tuple(options["sequences"])}))
    near(json.loads(json.dumps(found)), committed)


@pytest.mark.skipif(not NUMBERS.is_file(), reason="not a checkout")
def test_the_page_says_what_the_numbers_say(committed: dict[str, Any]) -> None:
    page = (RESULTS / "cluster.md").read_text("utf-8")
    table = page.partition(f"{BEGIN}\n")[2].partition(f"\n{END}")[0]
    assert table == "\n".join(lines(committed))
    shown = committed["published"]
    assert f"at most {shown['speedup_most']:.2f}" in page
    assert f"{shown['speedup_mean']:.2f} on average over shares" in page
    case = next(
        case
        for case in committed["steps"]
        if (case["network"], case["routing"], case["sequences"]) == ("nodes", "even", 32)
    )
    one, eight = (row_of(case, parts, "none") for parts in (1, 8))
    times = [1e3 * row["expert_layers_s"] for row in (one, eight)]
    assert (
        f"{times[0]:.0f} → {times[1]:.0f} ms, with a bound of {1e3 * eight['bound_s']:.0f}" in page
    )
    flat = {
        (case["routing"], case["sequences"]): row_of(case, 1, "none")["seconds"]
        for case in committed["steps"]
        if case["network"] == "flat"
    }
    more = sorted(flat["skewed", n] / flat["even", n] - 1 for n in (2, 32))
    assert f"costs {more[0]:.0%}"[:-1] + f" to {more[1]:.0%} of a flat step" in page


def test_steps_add_up_and_parts_keep_their_work() -> None:
    found = computed(SMALL)
    for case in found["steps"]:
        assert [row["parts"] for row in case["rows"]] == [n for n in (1, 2, 4, 8) for _ in range(5)]
        for row in case["rows"]:
            sums = row["even_s"] + row["experts_s"] + row["exposed_s"]
            assert sums == pytest.approx(row["seconds"])
            assert row["expert_layers_s"] >= row["bound_s"] * (1 - 1e-9)
        assert (case["busiest"] > 1.5) is (case["routing"] == "skewed")
    for rows in found["layers"].values():
        for row in rows:
            assert row["speedup"]["none"]["1"] == 1
            most = max(n for table in row["speedup"].values() for n in table.values())
            assert most <= 1 / max(row["share"], 1 - row["share"]) * (1 + 1e-9)
    saved = found["published"]["memory_range"]
    for parts, low, high in (("2", 0.13, 0.30), ("8", 0.34, 0.75)):
        assert low < saved[parts][0] < found["published"]["memory"][parts] < saved[parts][1] < high


def test_the_command_writes_page_and_figure(tmp_path: Path) -> None:
    page, numbers = (tmp_path / name for name in ("page.md", "n.json"))
    page.write_text(f"# A\n{BEGIN}\n{END}\nend\n")
    result = cluster.run(numbers, sequences=(2,), ranks=4, experts=4, page=page)
    assert "\n".join(lines(result)) in page.read_text()
    text = numbers.with_suffix(".svg").read_text("utf-8")
    for words in ("1T on 256 GPUs, 2 sequences", "memory by the formula", "it fills, and drains"):
        assert words in text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tokens": 0}, "--tokens 0 is too few"),
        ({"sequences": (2, 0)}, "--sequences 0 is too few"),
        ({"sequences": ()}, "names none"),
        ({"between_gb": 0.0}, "--between-gb 0"),
        ({"skew": -1.0}, "--skew -1"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        cluster.run(figure=False, **options)
