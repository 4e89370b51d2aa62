"""What an estimate knows of a machine: what was fitted, and what is measured each time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from exactness import needs_pager

from dynoffload.config import clear_defaults, defaults, set_defaults
from dynoffload.errors import BackendError, ConfigError
from dynoffload.estimation import overhead_probe
from dynoffload.estimation.calibration import Fitted
from dynoffload.estimation.overhead_probe import probe_overhead
from dynoffload.simulation.overhead import COSTS
from dynoffload.units import KiB, MiB


def test_a_calibration_is_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "simulation.json"
    work = {**dict.fromkeys(COSTS, 0.0), "update_s": 2e-4}
    link = {"read_bps": 2e20, "write_bps": 1e9, "latency_s": 1e-4, "fault_s": 2e-5}
    known = {"link": link, "work": work, "interference": 0.1, "pace_s": 0.5}
    path.write_text(json.dumps(known), "utf-8")
    found, shipped = (Fitted.of(one).measured(tmp_path) for one in (path, None))
    assert found.machine.interference == 0.1
    assert 1e-4 < found.pace_s < 0.5  # of a network of twenty layers
    assert found.work.update_s == pytest.approx(2e-4 * found.pace_s / 0.5)
    assert (found.machine.link.latency_s, found.machine.link.fault_s) == (1e-4, 2e-5)
    for one in (found, shipped):  # what changes from hour to hour is measured
        assert 1e6 < one.machine.link.read_bps < 1e12
        assert 1e-8 < one.work.move_s(4 * KiB) < one.work.move_s(1 * MiB) < 1e-1
    assert str(path) in found.said
    assert "--calibration" in shipped.said
    for content, told in (
        ("{}", "'link' is not in it"),
        (json.dumps({**known, "work": {}}), "'visit_s' is not in it"),
        ("no json", "is no calibration"),
    ):
        path.write_text(content, "utf-8")
        with pytest.raises(ConfigError, match=told):
            Fitted.of(path)
    with pytest.raises(ConfigError, match="missing cannot be read"):
        Fitted.of(tmp_path / "missing")


def test_what_is_shipped_is_what_was_fitted() -> None:
    found, shipped = (
        Fitted.of(Path(__file__).parents[1] / "docs" / "results" / "simulation.json"),
        Fitted.of(None),
    )
    for key in COSTS:
        assert getattr(shipped.work, key) == pytest.approx(getattr(found.work, key), rel=0.05), key
    assert shipped.pace_s == pytest.approx(found.pace_s, rel=0.05)
    ours, theirs = shipped.machine, found.machine
    assert ours.interference == pytest.approx(theirs.interference, rel=0.05)
    for key in ("latency_s", "fault_s"):
        assert getattr(ours.link, key) == pytest.approx(getattr(theirs.link, key), rel=0.05), key


@needs_pager
def test_the_pace_is_that_of_the_runtime_whoever_asks(tmp_path: Path) -> None:
    """Neither the random numbers nor the defaults of the caller's process are touched, or used."""
    before = torch.get_rng_state()
    set_defaults(profile_dir=tmp_path / "traces", policy="on-demand")
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.no_grad(), torch.device("meta"):
            found = probe_overhead(tmp_path)
        assert defaults().policy == "on-demand"
    finally:
        torch.set_default_dtype(torch.float32)
        clear_defaults()
    assert torch.equal(torch.get_rng_state(), before)
    assert not (tmp_path / "traces").exists()
    assert 1e-4 < found.seconds < 1.0
    assert 0 <= found.least <= 1 <= found.most


def test_a_pace_that_cannot_be_told_is_no_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead_probe, "_steps", lambda *_: [0.5])
    with pytest.raises(BackendError, match="overhead cannot be measured"):
        probe_overhead(Path.cwd())
