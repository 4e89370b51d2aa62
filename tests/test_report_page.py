"""The HTML page: complete in itself, safe for any name, and bounded for any length of run."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from synthetic_runlog import synthetic_log

from dynoffload.errors import ConfigError
from dynoffload.reporting import write_report, write_run
from dynoffload.reporting.canvas import COLOR
from dynoffload.telemetry import RunLog, StepBlocks

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Checks that tags nest, and collects what a page would load and the text it shows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: Counter[str] = Counter()
        self.loads: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for name, value in attrs:
            if name == "id" and value:
                self.ids[value] += 1
            if name in ("src", "href", "xlink:href", "action", "data") and value:
                self.loads.append(value)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(log: RunLog, directory: Path) -> tuple[str, Page]:
    text = write_report(log, directory / "page.html").read_text()
    return text, Page(text)


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Page]:
    return page_of(synthetic_log(12), tmp_path_factory.mktemp("page"))


def test_the_page_needs_nothing_but_itself(usual: tuple[str, Page]) -> None:
    text, page = usual
    assert page.tags["script"] == page.tags["link"] == page.tags["img"] == 0
    assert all(target.startswith("#") for target in page.loads)
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    # What is left of the network are the names of XML, which nothing fetches.
    addresses = set(re.findall(r"https?://[^\"' <]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def test_figures_and_numbers_are_on_the_page_in_its_own_colours(usual: tuple[str, Page]) -> None:
    text, page = usual
    assert page.tags["svg"] == 4  # the run, its steps, two of them in detail
    repeated = [name for name, count in page.ids.items() if count > 1]
    assert not [name for name in repeated if re.fullmatch(r"[mp][0-9a-f]{10}", name)]
    assert not any(placeholder in text for placeholder in COLOR.values())
    drawn = set(re.findall(r"var\(--([a-z]+)\)", "".join(re.findall(r"<svg.*?</svg>", text, re.S))))
    declared = set(re.findall(r"--([a-z]+):", text[: text.index("</style>")]))
    assert {"fast", "budget", "stall", "plan", "evict"} <= drawn <= declared
    assert not re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", text)
    words = " ".join(page.text.split())
    for expected in (
        "MoELanguageModel, 12 steps: median step",
        "Waiting for data",
        "Order predicted",
        "budget 305.2 MiB",
        "A typical step",
        "The step that waited longest",
        "run, not predicted there",
    ):
        assert expected in words


def test_names_are_data_not_markup(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>&\"'"
    log = synthetic_log(4, model=evil)
    log.policy = evil
    log.blocks[-1] = StepBlocks(3, (evil,), (evil + "2",))
    log.stalls = [type(s)(s.start, s.end, evil) for s in log.stalls]
    _, page = page_of(log, tmp_path)
    assert page.tags["script"] == 0
    assert evil in page.text


def test_a_run_of_no_step_has_a_page(tmp_path: Path) -> None:
    _, page = page_of(synthetic_log(0), tmp_path)
    assert page.tags["h1"] == 1
    assert "before its first step" in page.text


def test_a_long_run_makes_no_larger_page(tmp_path: Path) -> None:
    log = synthetic_log(300, layers=1)
    text, page = page_of(log, tmp_path)
    assert len(text) < 1_500_000
    assert page.tags["tr"] < 300
    assert "100 in the middle left out" in page.text
    assert "each bar or point: the mean of 5 steps" in page.text


def test_write_run_puts_trace_and_log_beside_the_page(tmp_path: Path) -> None:
    log = synthetic_log(0)
    files = write_run(log, tmp_path / "out" / "run.html")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "run.html",
        "run.perfetto.json.gz",
        "run.runlog.json.gz",
    ]
    assert repr(RunLog.load(files.log)) == repr(log)


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"folder is a directory: name the page"):
        write_run(synthetic_log(steps=1), tmp_path / "folder")
    with pytest.raises(ConfigError, match=r"no report can be written to .*file/run\.html"):
        write_run(synthetic_log(steps=1), tmp_path / "file" / "run.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.filterwarnings("error")
def test_a_run_that_predicted_and_moved_nothing_has_a_page(tmp_path: Path) -> None:
    log = synthetic_log(1, policy="on-demand")
    log.steps = [replace(step, bytes_in=0, bytes_out=0, wasted_bytes=0) for step in log.steps]
    _, page = page_of(log, tmp_path)
    assert "No step of this run had a prediction" in page.text
    assert page.tags["svg"] == 3
