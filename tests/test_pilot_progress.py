"""The bar of the pilot's jobs: nothing at all of a short job, a bar of a long one."""

from __future__ import annotations

import pytest

from dynoffload.pilot import progress
from dynoffload.pilot.progress import progress_bar


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize(("wanted", "patience"), [(True, 9.0), (False, -1.0), (True, -1.0)])
def test_only_a_long_job_shows_what_it_does_and_on_stderr(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    terminal: bool,
    wanted: bool,
    patience: float,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    else:
        monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setattr(progress, "PATIENCE", patience)
    with progress_bar(wanted) as report:
        report("learning", 1, 2)
        report("learning", 2, 2)
    out, err = capsys.readouterr()
    assert out == ""
    if wanted and patience < 0 and terminal:
        assert "learning" in err
    else:
        assert err == ("learning\n" if wanted and patience < 0 else "")
