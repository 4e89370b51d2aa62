"""Every operator of forward belongs to one call of a module with parameters."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dynoffload.experiments import zoo
from dynoffload.planning.calls import summarize_calls
from dynoffload.profiler import Phase, Recorder, Trace
from dynoffload.profiler.columns import Columns
from dynoffload.profiler.owners import forward_owners


def _step(model: nn.Module, *args: Any) -> Trace:
    traces: list[Trace] = []
    optimizer = torch.optim.AdamW(model.parameters()) if list(model.parameters()) else None
    with Recorder(model, optimizer, on_step=traces.append):
        output = model(*args)
        getattr(output, "loss", output).sum().backward()
        if optimizer is not None:
            optimizer.step()
    return traces[0]


@pytest.mark.parametrize(("name", "shape"), [("tree", {"max_nodes": 24}), ("moe", {"length": 8})])
def test_no_operator_is_lost_and_owners_have_parameters(name: str, shape: dict[str, int]) -> None:
    model = zoo.build(name, "tiny")
    owners = {n.rpartition(".")[0] for n, _ in model.named_parameters()}
    for sample in itertools.islice(zoo.samples(name, **shape), 2):
        trace = _step(model, *sample.args)
        summary = summarize_calls(trace)
        forward = [op.idioms for op in trace.operators if op.phase is Phase.FORWARD]
        assert summary.call_idioms.sum(axis=0).tolist() == np.sum(forward, axis=0).tolist()
        assert summary.owner_paths <= owners
        kinds = {region.name: region.kind for region in trace.regions}
        named = {kinds[summary.names[number]] for number in summary.region.tolist()}
        assert {"parameter", "gradient", "state"} <= named
        assert not named & {"activation", "input"}


class Layer(nn.Module):
    """Norm, a gated product with glue between, and a residual: glue in all three places."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.left = nn.Linear(4, 4)
        self.act = nn.Tanh()
        self.right = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        y = self.left(y)
        y = self.act(y)
        y = y * 3
        y = self.right(y)
        return x - y


class Stack(nn.Module):
    """Two layers and a root with a parameter of its own, used before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(4))
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.offset
        for layer in self.layers:
            x = layer(x)
        return (x * self.offset).exp()


def test_glue_goes_to_the_next_owner_within_its_module_else_to_the_last() -> None:
    trace = _step(Stack(), torch.ones(2, 4))
    owner = forward_owners(trace, Columns.of(trace.operators)).tolist()
    stretches = [
        (trace.calls[call].path, [op.name.split(".")[1] for _, op in group])
        for call, group in itertools.groupby(
            zip(owner, trace.operators, strict=True), key=lambda pair: pair[0]
        )
        if call >= 0
    ]
    assert [path for path, _ in stretches] == [
        "",
        "layers.0.norm", "layers.0.left", "layers.0.right",
        "layers.1.norm", "layers.1.left", "layers.1.right",
        "",
    ]  # fmt: skip
    inside = dict(stretches)
    assert inside["layers.0.norm"] == ["native_layer_norm"]
    assert inside["layers.0.left"] == ["t", "addmm"]
    # The activation and the factor lie between two owners; the residual ends the layer.
    assert inside["layers.0.right"] == ["tanh", "detach", "mul", "t", "addmm", "sub"]


def _owners(trace: Trace) -> list[str]:
    owner = forward_owners(trace, Columns.of(trace.operators)).tolist()
    return [trace.calls[call].path for call, _ in itertools.groupby(owner) if call >= 0]


def test_a_helper_inside_an_owner_belongs_to_it() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.act = nn.Sequential(nn.Sigmoid())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(x * self.weight) * self.weight

    assert _owners(_step(nn.Sequential(Gate(), nn.Linear(4, 4)), torch.ones(2, 4))) == ["0", "1"]


def test_a_tied_head_is_an_owner_and_has_the_weight() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(8, 4)
            self.head = nn.Linear(4, 8, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(tokens))

    trace = _step(Tied(), torch.tensor([1, 2]))
    assert _owners(trace) == ["embedding", "head"]
    summary = summarize_calls(trace)
    owned = {(summary.names[a], summary.names[b]) for a, b in summary.owned.tolist()}
    assert {("head", "embedding.weight"), ("embedding", "embedding.weight:exp_avg")} <= owned


def test_activation_bytes_are_what_outlives_the_operators_of_a_call() -> None:
    """One linear keeps its output; the exponential after it keeps its own and lets go of none."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 1000, bias=False)
            self.second = nn.Linear(1000, 1, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x)
            hidden = hidden.exp() + 1  # Neither operand of the sum is needed, but exp's result is.
            return self.second(hidden)

    summary = summarize_calls(_step(Net(), torch.ones(2, 4)))
    kept = dict(zip(summary.paths, summary.call_activations.tolist(), strict=True))
    assert kept["first"] == 4 * 2 * 1000
    # exp's result and the sum's, each 8,000 bytes, the output, and the loss made of it.
    assert 2 * 4 * 2 * 1000 + 4 * 2 <= kept["second"] < 2 * 4 * 2 * 1000 + 100


def test_a_network_without_parameters_is_the_root_s() -> None:
    trace = _step(nn.Sequential(nn.Tanh(), nn.Sigmoid()), torch.ones(3, requires_grad=True))
    assert _owners(trace) == [""]
