"""The experiment on the optimizer on the host: the same training up to the delay, and rates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynoffload.errors import ConfigError
from dynoffload.experiments import host_optimizer


@pytest.mark.slow
def test_kinds_of_updates_part_where_they_are_delayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first loss after an update shows the delay: the second step's, or the warm-up's."""
    monkeypatch.setattr(host_optimizer, "TILES", (4096, 16384))
    result = host_optimizer.run(
        steps=11,
        warmup=3,
        seeds=1,
        length=8,
        elements=10_000,
        threads=1,
        spill_dir=tmp_path,
    )
    json.dumps(result, allow_nan=False)
    normal, delayed, later = (result["curves"][name][0] for name in result["curves"])
    assert normal[0] == delayed[0]
    assert normal[1] != delayed[1]
    assert later[:4] == normal[:4]
    assert later[4] != normal[4]
    assert [(row["tile_bytes"], row["file"]) for row in result["rates"]] == [
        (4096, False),
        (16384, False),
        (4096, True),
        (16384, True),
    ]
    assert all(row["elements_per_s"] > 0 for row in result["rates"])


def test_too_few_steps() -> None:
    with pytest.raises(ConfigError, match="must be more than"):
        host_optimizer.run(steps=5)
