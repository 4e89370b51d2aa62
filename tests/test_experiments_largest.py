"""The search for the largest that fits: what it tries, what it says, and one in earnest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynoffload.errors import ConfigError
from dynoffload.experiments import capacity, largest, max_batch
from dynoffload.experiments.baselines.cgroup import why_unavailable
from dynoffload.experiments.comparing import BEGIN, END
from dynoffload.experiments.largest import WAYS, Search, Try, Way
from dynoffload.experiments.largest_views import draw, table_of
from dynoffload.experiments.trainer import PLAIN, Spec
from dynoffload.reporting.canvas import write_figure


def _search(most: int = 64, **options: Any) -> Search:
    settings = {"share": 0.5, "steps": 1, "slowest": 4.0, "meta": True, **options}
    return Search(
        lambda size: Spec("moe", "tiny", sizes={"layers": size}), 100, most=most, **settings
    )


def _holding(monkeypatch: pytest.MonkeyPatch, limits: dict[str, int]) -> list[tuple[str, int]]:
    """Have every way hold as much as ``limits`` say, by its title; return what is tried."""
    tried: list[tuple[str, int]] = []

    def attempt(search: Search, way: Way, size: int, room: Any) -> Try:
        tried.append((way.title, size))
        why = "" if size <= limits[way.title] else "killed"
        return Try(size, why) if why else Try(size, why, 0.5 * size, ("0x1p+0",))

    monkeypatch.setattr(largest, "_try", attempt)
    monkeypatch.setattr(largest, "_before", lambda search: 7)
    return tried


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 11, 15, 16])
def test_the_largest_is_found(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    plain, ours = WAYS["plain"].title, WAYS["repeat"].title
    tried = _holding(monkeypatch, {plain: 2, ours: limit})
    found = largest.measure(_search(), ["repeat"], lambda *_: None)
    rows = found["ways"]
    assert rows["plain"]["largest"] == 2  # measured though nobody asked: the others stand beside it
    assert rows["repeat"]["largest"] == limit
    assert rows["repeat"]["over_plain"] == limit / 2
    assert rows["repeat"]["ended_by"] == "killed"
    assert rows["repeat"]["seconds_over_plain"] == pytest.approx(1.0)
    assert len(tried) == len(set(tried))  # nothing is tried twice


def test_paces_are_told_of_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A way that slows down with its size; the figure and the table show where."""

    def attempt(search: Search, way: Way, size: int, room: Any) -> Try:
        if way is WAYS["plain"]:
            return Try(size, "" if size <= 2 else "killed", 0.5 * size if size <= 2 else 0.0)
        return Try(size, "" if size <= 16 else "too slow", 0.5 * size * (1 + size / 4))

    monkeypatch.setattr(largest, "_try", attempt)
    monkeypatch.setattr(largest, "_before", lambda search: 7)
    found = largest.measure(_search(), ["repeat"], lambda *_: None)
    plain, ours = found["ways"]["plain"], found["ways"]["repeat"]
    assert plain["within"] == {"2": 2, "4": 2, "8": 2}
    assert ours["within"] == {"2": 4, "4": 8, "8": 16}  # 24 keeps a pace of 7, but has failed
    assert [one["pace"] for one in ours["tries"][:3]] == [1.25, 1.5, 2.0]
    table = table_of("layers", found)
    assert len(table) == 2 + 2 + 2
    assert table[-1].endswith("equal, bit for bit")
    assert [cell.strip() for cell in table[3].split("|")][6:9] == ["4", "8", "16"]
    assert table[3].rstrip(" |").endswith("too slow")


def test_what_is_too_slow_when_small_is_tried_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rematerialisation pays for every operator, which weighs most in the smallest steps."""

    def attempt(search: Search, way: Way, size: int, room: Any) -> Try:
        slow = way is WAYS["repeat"] and not 4 <= size <= 11
        return Try(size, "a step of so much" if slow or size > 40 else "", 0.5 * size)

    monkeypatch.setattr(largest, "_try", attempt)
    monkeypatch.setattr(largest, "_before", lambda search: 7)
    row = largest.measure(_search(), ["repeat"], lambda *_: None)["ways"]["repeat"]
    assert (row["largest"], row["ended_by"]) == (11, "a step of so much")
    assert [one["size"] for one in row["tries"]] == [1, 2, 4, 8, 10, 11, 12, 16]


def test_what_a_process_takes_before_is_the_least_of_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first process that reads a library's files is charged with them."""
    charged = iter([900, 500, 600])

    @contextmanager
    def worker(*_: Any) -> Iterator[Any]:
        yield SimpleNamespace(before={"charged_bytes": next(charged)})

    monkeypatch.setattr(largest, "worker", worker)
    monkeypatch.setattr(largest, "memory_group", lambda limit: nullcontext())
    assert largest._before(_search()) == 500


def test_far_up_it_is_found_to_a_sixteenth(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ours = WAYS["plain"].title, WAYS["repeat"].title
    _holding(monkeypatch, {plain: 3, ours: 777})
    found = largest.measure(_search(most=4096), ["repeat"], lambda *_: None)
    assert 777 * 15 / 16 <= found["ways"]["repeat"]["largest"] <= 777


def test_what_has_no_end_ends_at_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ours = WAYS["plain"].title, WAYS["repeat"].title
    _holding(monkeypatch, {plain: 3, ours: 10**9})
    row = largest.measure(_search(most=32), ["repeat"], lambda *_: None)["ways"]["repeat"]
    assert (row["largest"], row["ended_by"]) == (32, "nothing: 32 is the largest that was tried")


def test_what_cannot_be_searched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _holding(monkeypatch, {WAYS["plain"].title: 0})
    with pytest.raises(ConfigError, match="plain training does not fit 100 B at size 1: killed"):
        largest.measure(_search(), [], lambda *_: None)
    with pytest.raises(ConfigError, match="no way 'plan'"):
        largest.measure(_search(), ["plan"], lambda *_: None)
    with pytest.raises(ConfigError, match=r"share=1\.5"):
        _search(share=1.5)


def test_losses_of_one_size_are_compared() -> None:
    def ways(*losses: tuple[str, ...]) -> dict[str, Any]:
        rows = ({"tries": [{"size": 2, "losses": each}]} for each in losses)
        return {str(number): row for number, row in enumerate(rows)}

    assert largest._same_losses(ways(("0x1p+0", "0x1p+1"), ("0x1p+0",), ()))
    assert not largest._same_losses(ways(("0x1p+0", "0x1p+1"), ("0x1p+0", "0x1p+2")))


def test_the_figure_has_every_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limits = {way.title: 2 * (number + 1) for number, way in enumerate(WAYS.values())}
    _holding(monkeypatch, limits)
    found = largest.measure(_search(), list(WAYS), lambda *_: None)
    write_figure(
        lambda figure, color: draw(figure, color, [("a search", "rows", found)]),
        tmp_path / "figure.svg",
        height=3.0,
    )
    text = (tmp_path / "figure.svg").read_text()
    for way in WAYS.values():
        assert text.count(f">{way.title}</text>") == 2  # beside its bar, and in the legend


def _page(folder: Path) -> Path:
    page = folder / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    return page


def test_both_experiments_write_their_pages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limits = {way.title: 2 * (number + 1) for number, way in enumerate(WAYS.values())}
    _holding(monkeypatch, limits)
    page = _page(tmp_path)
    found = capacity.run(tmp_path / "c.json", page=page, most=64)
    assert found["ways"]["repeat"]["over_plain"] == 6.0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before")
    assert "old" not in text
    assert "| dynoffload, last order | 12 | 6.00 |" in text
    assert (tmp_path / "c.svg").exists()
    found = max_batch.run(tmp_path / "m.json", page=page, most=64)
    assert set(found["networks"]) == {"evoformer", "esmfold"}
    for one in found["networks"].values():
        assert (one["over_plain"], one["over_system"], one["over_dtr"]) == (6.0, 3.0, 2.0)
        assert one["within"]["2"]["over_system"] == pytest.approx(3.0)
    text = page.read_text(encoding="utf-8")
    assert text.count("### rows of ") == 2
    assert text.count("| dynoffload, last order | 12 |") == 2


def test_a_page_without_marks_is_refused_before_anything_is_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tried = _holding(monkeypatch, {})
    (tmp_path / "bare.md").write_text("no marks", encoding="utf-8")
    for run in (capacity.run, max_batch.run):
        with pytest.raises(ConfigError, match="put these lines where the table goes"):
            run(page=tmp_path / "bare.md")
        with pytest.raises(ConfigError, match="cannot read"):
            run(page=tmp_path / "missing.md")
    assert not tried


def test_ways_that_count_get_a_budget_and_others_none() -> None:
    search = _search()
    assert search.of(WAYS["plain"], 3) == Spec("moe", "tiny", PLAIN, sizes={"layers": 3})
    ours = search.of(WAYS["on-demand"], 3)
    assert (ours.budget, ours.config, ours.meta) == (50, {"policy": "on-demand"}, True)


@pytest.mark.slow
@pytest.mark.skipif(bool(why_unavailable()), reason=f"no memory groups: {why_unavailable()}")
def test_ten_times_the_layers_of_plain_training(tmp_path: Path) -> None:
    """In earnest: plain training is killed where dynoffload goes on, with the same losses."""
    result = capacity.run(
        tmp_path / "capacity.json",
        memory="192MiB",
        tokens=16,
        steps=1,
        slowest=1e6,
        most=24,
        ways="on-demand",
        spill_dir=tmp_path,
    )
    plain, ours = result["ways"]["plain"], result["ways"]["on-demand"]
    assert 1 <= plain["largest"] <= 3
    assert "for want of memory" in plain["ended_by"]
    assert ours["largest"] == 24
    assert result["losses_equal"]
    assert (tmp_path / "capacity.svg").stat().st_size > 1000
