"""No operator is unknown that the training of a network of transformers executes."""

from __future__ import annotations

import pytest
import torch

from dynoffload.experiments.architectures import ARCHITECTURES, Architecture
from dynoffload.experiments.harness import carry_out
from dynoffload.experiments.idioms import Idioms, Params


@pytest.mark.slow
def test_each_operator_of_every_architecture_is_known() -> None:
    """Forward, backward and AdamW; at least forty architectures."""
    pytest.importorskip("transformers")
    result = carry_out(Idioms, Params())
    found = result["summary"]
    assert [row["architecture"] for row in result["rows"]] == list(ARCHITECTURES)
    assert len(ARCHITECTURES) >= 40
    assert all(row["steps"] == 2 for row in result["rows"])
    assert found["unknown"] == {}
    assert sum(found["rules"].values()) == len(found["operator_rules"]) > 150


def test_an_unknown_operator_is_told_with_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a network that runs an operator of a stranger."""
    with torch.library._scoped_library("dynoffload_test", "FRAGMENT") as library:
        library.define("mystery(Tensor a) -> Tensor")
        library.impl("mystery", torch.neg, "CompositeExplicitAutograd")

        class Strange(torch.nn.Linear):
            config = None

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = super().forward(x)
                return y - torch.ops.dynoffload_test.mystery(y.detach())

        strange = Architecture("", lambda g, c: {"x": torch.ones(2, 3)}, loss=_sum)
        monkeypatch.setattr(Architecture, "build", lambda self: Strange(3, 2))
        monkeypatch.setitem(ARCHITECTURES, "strange", strange)
        found = carry_out(Idioms, Params(architectures=("strange",)))["summary"]
    assert found["unknown"] == {"dynoffload_test.mystery.default": ["strange"]}
    assert found["rules"]["unknown"] == 1


def _sum(output: torch.Tensor) -> torch.Tensor:
    return output.sum()
