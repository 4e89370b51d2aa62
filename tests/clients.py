"""What the tests of clients share: no tests here.

A client runs the loop itself, so a test trains one model by it plainly and a copy under a quarter
of the footprint, and compares all that comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from exactness import SMALL_PAGES, footprint_of
from torch import Tensor, nn

from dynoffload.memory.pager import probe
from dynoffload.runtime.session import Session

each_backend = pytest.mark.parametrize(
    "backend",
    [
        pytest.param("pager", marks=pytest.mark.skipif(bool(probe()), reason=probe() or "never")),
        "mapped",
    ],
)


class Recurrent(nn.Module):
    """Layers with a dropout, some 70 kB; returns the loss as transformers do."""

    def __init__(self, width: int = 32, words: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(layers)
        )
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return logits ``[rows, tokens, words]``, and the loss where there are labels."""
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + self.dropout(layer(x))
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return {"loss": loss, "logits": logits}


def network() -> Recurrent:
    """Return a network, the same one each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Recurrent()


def samples(count: int = 24, length: int = 12) -> list[dict[str, Tensor]]:
    """Return ``count`` sequences with their labels."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 64, (count, length + 1), generator=generator)
    return [{"input_ids": row[:-1], "labels": row[1:]} for row in rows]


def quarter(backend: str = "auto", make: Callable[[], nn.Module] = network) -> dict[str, Any]:
    """Return the arguments of a callback that pages ``make()`` under a quarter of its footprint."""
    config = {**SMALL_PAGES, "step_aside": False, "backend": backend}
    return {"budget": footprint_of(make()) // 4, "config": config}


def assert_paged(session: Session | None, steps: int | None = None) -> None:
    """Assert that a session moved bytes, kept its budget, and recorded ``steps`` steps."""
    assert session is not None
    log = session.log
    assert sum(step.bytes_in for step in log.steps) > 0, "nothing was paged"
    assert max(step.peak_fast_bytes for step in log.steps) <= log.budget
    if steps is not None:
        assert len(log.steps) == steps


def without_times(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a client logged, less what differs from run to run."""
    timed = ("runtime", "per_second", "time")
    return {key: value for key, value in values.items() if not any(t in key for t in timed)}
