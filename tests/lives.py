"""Lives of random graphs: all that is drawn about one, and the life itself, plainly and paged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from days import OPTIMIZERS, live
from exactness import SMALL_PAGES, LyingPilot, Twin, assert_same, footprint_of, least_budget
from graphs import Graph, Plan, graphs
from hypothesis import strategies as st

from dynoffload.memory.pager import probe


@dataclass(frozen=True)
class Life:
    """A graph, and how it is trained.

    Attributes:
        plan: the graph and its days.
        optimizer: a key of `OPTIMIZERS`.
        share: of the footprint, which is the budget where that is enough.
        backend: "pager" or "mapped".
        page: bytes.
        aside: whether paging may step aside.
        precision: "single", "half" for weights in bfloat16, or "autocast" to it.
        lies: what the pilot predicts, or None for no pilot.
        seed: of the weights.
    """

    plan: Plan
    optimizer: str
    share: float
    backend: str
    page: int
    aside: bool
    precision: str
    lies: Sequence[Sequence[int]] | None
    seed: int

    @property
    def days(self) -> list[str]:
        """Return all days; the last has nothing to tell."""
        return [*self.plan.days, "plain"]

    @property
    def rollback(self) -> bool:
        """Return whether a step that is cut off would be undone."""
        return self.seed % 3 == 1

    @property
    def autocast(self) -> bool:
        """Return whether autocast is on; some nodes mix dtypes themselves."""
        mixing = any(node.kind in ("function", "reentrant") for node in self.plan.nodes)
        return self.precision == "autocast" and not mixing

    def twin(self) -> Twin:
        """Return the network in two copies."""
        network = Graph(self.plan, self.seed)
        if self.precision == "half":
            network.to(torch.bfloat16)
        return Twin(network, OPTIMIZERS[self.optimizer])

    def conditions(self, twin: Twin) -> dict[str, Any]:
        """Return what `offload` is given beside the copy that is to be paged."""
        config: dict[str, Any] = {
            **SMALL_PAGES,
            "page_bytes": self.page,
            "min_paged_bytes": 512,
            "backend": self.backend,
            "rollback": self.rollback,
        }
        wanted = int(footprint_of(twin.model) * self.share)
        budget, _ = least_budget(twin.model, twin.optimizer, wanted, config, flat=True)
        pilot = None if self.lies is None else LyingPilot(twin.model, self.lies)
        config["step_aside"] = self.aside
        return {"budget": budget, "pilot": pilot, "config": config}


LIVES = st.builds(
    Life,
    plan=graphs(),
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    share=st.floats(0.05, 1.2),
    backend=st.just("mapped") if probe() else st.sampled_from(["pager", "pager", "mapped"]),
    page=st.sampled_from([4096, 8192]),
    aside=st.booleans(),
    precision=st.sampled_from(["single", "single", "half", "autocast"]),
    lies=st.none() | st.lists(st.lists(st.integers(-3, 20), max_size=12), max_size=3),
    seed=st.integers(0, 1000),
)


def compare(life: Life) -> None:
    """Live twice, and assert that nothing differs."""
    twin = life.twin()
    conditions = life.conditions(twin)
    budget = conditions["budget"]
    days = list(enumerate(life.days))
    expected = [live(twin.reference, twin.its, d, n, life.autocast) for n, d in days]
    with twin.paged(**conditions) as session:
        for number, day in days:
            found = live(twin.model, twin.optimizer, day, number, life.autocast)
            assert_same(found, expected[number], f"day {number}, {day}")
    twin.assert_same()
    for network in (twin.model, twin.reference):
        assert isinstance(network, Graph)
    assert_same(twin.model.held, twin.reference.held, "gradients that are still kept")
    for step in session.log.steps:
        assert step.peak_fast_bytes <= budget, f"step {step.step} took {step.peak_fast_bytes} bytes"
