"""The experiment on the experts of one layer: what it counts, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

from dynoffload.errors import ConfigError
from dynoffload.experiments import moe_layer
from dynoffload.experiments.harness import carry_out
from dynoffload.experiments.moe_layer import Layers, Params
from dynoffload.experiments.moe_layer_ways import OURS, ROUTED, ways_of

SMALL = Params(("conf3",), fewer_tokens=256, narrower=16, rounds=5)


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return carry_out(Layers, SMALL)


def test_less_than_half_is_saved(result: dict[str, Any]) -> None:
    layers = result["rows"]
    assert [row["activation"] for row in layers] == ["swiglu", "silu"]
    for row in layers:
        elements = row["tokens"] * row["k"] * row["width"] * 4  # bytes of (L·k, d) in float32
        parts = {"swiglu": (8, 18), "silu": (4, 10)}[row["activation"]]  # h = 4·d
        for name, part in zip((OURS, ROUTED), parts, strict=True):
            saved = row["ways"][name]["saved"]
            assert part * elements <= saved <= (part + 1) * elements, (name, saved / elements)
        assert row["saved"] < 0.46
        assert all(way["peak"] > way["saved"] > 0 for way in row["ways"].values())


def test_a_way_that_computes_something_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(layer: object) -> object:
        ways = ways_of(layer)  # type: ignore[arg-type]
        right = ways["grouped_mm"]
        ways["grouped_mm"] = lambda tokens, chosen, gates: right(tokens, chosen, gates) * 1.01
        return ways

    monkeypatch.setattr(moe_layer, "ways_of", wrong)
    with pytest.raises(ConfigError, match="grouped_mm differs from eager by 1"):
        carry_out(Layers, SMALL)
