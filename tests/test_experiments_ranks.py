"""The experiment ``ranks``: bits and budgets."""

from __future__ import annotations

from pathlib import Path

import pytest
from exactness import needs_pager

from dynoffload.experiments.harness import carry_out
from dynoffload.experiments.ranks import Params, Ranks


@needs_pager
def test_ranks_train_to_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    params = Params(("ddp",), ("layerdrop",), steps=4, spill_dir=tmp_path)
    (trained,) = carry_out(Ranks, params)["rows"]
    assert trained["exact"]
    assert trained["kept"]
    first, second = trained["ranks"]
    assert first["last_loss"] != second["last_loss"], "ranks have the same samples"
    assert first["plain"] != second["plain"], "ranks took the same paths"
    assert all(one["bytes_in"] > 0 for one in trained["ranks"])
