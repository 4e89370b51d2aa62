"""Random graphs, budgets, plans and mishaps: the bits are those of plain PyTorch.

Each case draws a network node by node, what happens on each day of its training, an optimizer, a
budget and a pilot that lies. An error in the middle of a forward or a backward is one that the user
catches; training goes on. In some cases the disk fails too: training goes on, or a step is declared
lost and the last checkpoint makes up for it, or bytes cannot be had and the process says so and
ends; see faulty_graphs.py. Nowhere may it end in other bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from failing_disk import Server
from faulty_graphs import KINDS, STRUCK, Fault, live_struck
from hypothesis import HealthCheck, Phase, given, settings
from lives import LIVES, Life, compare

HEALTH = [HealthCheck.too_slow, HealthCheck.data_too_large]
SHORT = {"deadline": None, "derandomize": True, "suppress_health_check": HEALTH}
LONG = {"deadline": None, "suppress_health_check": HEALTH}
ONCE = {"phases": [Phase.generate]}
"""Which call fails in a life depends on time: a smaller life need not fail in the same way."""

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A process whose disk can be made to fail."""
    with Server("faulty_graphs.py", tmp_path_factory.mktemp("faulty")) as started:
        yield started


@settings(max_examples=32, **SHORT)
@given(LIVES)
def test_no_graph_changes_a_bit(life: Life) -> None:
    """Thirty-two lives."""
    compare(life)


def live_all(server: Server, lives: settings) -> list[dict[str, Any]]:
    """Live with a failing disk, and return how each life ended."""
    ended: list[dict[str, Any]] = []

    @lives
    @given(STRUCK)
    def one(struck: tuple[Life, Fault]) -> None:
        ended.append(live_struck(server, *struck))

    one()
    return ended


def assert_disks_failed(ended: Sequence[dict[str, Any]], share: float, kinds: int) -> None:
    """Assert in which share of lives a fault was met, and how many kinds of faults were."""
    met = [found for found in ended if found["outcome"] == "ended" or found["hits"]]
    assert len(met) >= share * len(ended), f"the disk failed in {len(met)} of {len(ended)} lives"
    assert len({(found["case"].call, found["case"].how) for found in met}) >= kinds


def test_no_graph_changes_a_bit_by_a_failing_disk(server: Server) -> None:
    """Twelve more with a failing disk."""
    ended = live_all(server, settings(max_examples=12, **SHORT, **ONCE))
    assert_disks_failed(ended, 0.7, 3)  # of so few; more at length
    assert any(found["outcome"] == "exact" and found["hits"] for found in ended)


@pytest.mark.slow
@settings(max_examples=4000, **LONG)
@given(LIVES)
def test_none_of_thousands_of_graphs_changes_a_bit(life: Life) -> None:
    """The same at length."""
    compare(life)


@pytest.mark.slow
def test_none_of_a_thousand_changes_a_bit_by_a_failing_disk(server: Server) -> None:
    """The same at length with a failing disk."""
    ended = live_all(server, settings(max_examples=1000, **LONG, **ONCE))
    assert_disks_failed(ended, 0.9, len(KINDS))
    assert {found["outcome"] for found in ended} >= {"exact", "lost"}
