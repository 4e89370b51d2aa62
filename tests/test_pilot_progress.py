"""The bar of the pilot's jobs: nothing at all of a short job, a bar of a long one."""

from __future__ import annotations

import pytest

from dynoffload.pilot import progress
from dynoffload.pilot.progress import progress_bar


@pytest.fixture(params=[True, False], ids=["terminal", "pipe"])
def terminal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Let the bar think that somebody looks, or that nobody does; return which."""
    monkeypatch.setenv("TERM", "xterm")
    if request.param:
        monkeypatch.setenv("FORCE_COLOR", "1")
    else:
        monkeypatch.delenv("FORCE_COLOR", raising=False)
    return bool(request.param)


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("wanted", [True, False])
def test_a_short_job_prints_nothing(capsys: pytest.CaptureFixture[str], wanted: bool) -> None:
    with progress_bar(wanted) as report:
        report("learning", 1, 2)
        report("learning", 2, 2)
    assert tuple(capsys.readouterr()) == ("", "")


def test_a_long_job_shows_what_it_does_on_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", -1.0)
    with progress_bar(True) as report:
        report("learning", 1, 2)
    out, err = capsys.readouterr()
    assert out == ""
    if terminal:
        assert "learning" in err
    else:
        assert err == "learning\n"
