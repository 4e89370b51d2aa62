"""Idioms read from the autograd graph of a forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dynoffload.experiments.graph_idioms import GraphIdioms, idioms_of_node
from dynoffload.profiler.idioms import Idioms, idioms_of

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("compute", "operator"),
    [
        (lambda x: torch.addmm(x, x, x), aten.addmm.default),
        (lambda x: F.softmax(x, 0), aten._softmax.default),
        (lambda x: F.layer_norm(x, (4,)), aten.native_layer_norm.default),
        (lambda x: F.max_pool2d(x[None], 2), aten.max_pool2d_with_indices.default),
        (lambda x: F.conv1d(x[None], x[:, :, None]), aten.convolution.default),
        (lambda x: F.embedding(torch.zeros(2, dtype=torch.int64), x), aten.embedding.default),
        (
            lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3),
            aten._scaled_dot_product_flash_attention_for_cpu.default,
        ),
        (lambda x: x.relu_(), aten.relu.default),
        (lambda x: x.t(), aten.t.default),
    ],
)
def test_a_node_is_known_by_its_name(compute: Any, operator: Any) -> None:
    node = compute(torch.ones(4, 4, requires_grad=True) * 1).grad_fn
    names = {node.name(), *(after.name() for after, _ in node.next_functions if after)}
    assert idioms_of(operator) in {idioms_of_node(name) for name in names}


@pytest.mark.parametrize("name", ["AccumulateGrad", "_TwiceBackward", "NoSuchBackward0", ""])
def test_what_is_no_operator_counts_nothing(name: str) -> None:
    assert idioms_of_node(name) == Idioms()


@dataclass
class _Output:
    loss: Tensor
    more: object = None


def test_each_block_has_the_mean_of_its_calls() -> None:
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    counter, x = GraphIdioms(), torch.ones(2, 4)
    for number in (0, 0, 1):
        counter.begin([number])
        x = layers[number](x)
    counter.begin(["a", "b"])  # two experts of one call share it
    x = F.silu(x).sigmoid()
    found = counter.count(_Output(x.sum()))
    linear = idioms_of(aten.addmm.default)
    assert found[0] == found[1] == linear
    assert found["a"] == found["b"]
    assert found["a"].stream == 1
    _Output(x.sum()).loss.backward()  # type: ignore[no-untyped-call]  # the graph is as it was


def test_without_a_graph_nothing_is_known() -> None:
    counter = GraphIdioms()
    counter.begin([0])
    with torch.no_grad():
        assert counter.count(nn.Linear(4, 4)(torch.ones(2, 4))) == {}
    layer = nn.Linear(4, 4)
    counter.begin([1])
    hidden = checkpoint(layer, torch.ones(2, 4, requires_grad=True), use_reentrant=True)
    assert counter.count(hidden) == {}


def test_an_output_without_an_end_and_a_view_without_a_node_are_passed_over() -> None:
    counter, base = GraphIdioms(), torch.zeros(2, 4)
    counter.begin([0])
    hidden = nn.Linear(4, 4)(torch.ones(2, 4))
    with torch.no_grad():
        view = base[:1]
    base.add_(hidden)
    with pytest.raises(RuntimeError, match="view was created in no_grad mode"):
        assert view.grad_fn
    output = _Output(hidden.sum())
    output.more = [view, output]
    assert counter.count(output)[0].reduction >= 1
