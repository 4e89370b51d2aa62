"""Programs: every operator in one visit, under a name that another sample would give it too."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dynoffload.experiments import zoo
from dynoffload.profiler import Phase, Program, Recorder, Trace, Visit, resolve


def _step(model: nn.Module, *args: Any, optimizer: str = "none") -> Trace:
    torch.manual_seed(0)
    traces: list[Trace] = []
    made = None
    if optimizer != "none":
        made = torch.optim.AdamW(model.parameters(), fused=optimizer == "fused", foreach=False)
        for parameter in model.parameters():  # The first step also makes the state.
            parameter.grad = torch.zeros_like(parameter)
        made.step()
    model.zero_grad()
    with Recorder(model, made, on_step=traces.append):
        output = model(*args)
        getattr(output, "loss", output).sum().backward()
        if made is not None:
            made.step()
    return traces[0]


@cache
def _zoo_traces(name: str) -> tuple[Trace, ...]:
    model = zoo.build(name, "tiny")
    samples = itertools.islice(zoo.samples(name), 3)
    return tuple(_step(model, *sample.args, optimizer="loop") for sample in samples)


def _paths(program: Program, phase: Phase) -> list[str]:
    return [visit.path for visit in program.visits if visit.phase is phase]


def _visit(program: Program, path: str, phase: Phase) -> Visit:
    (visit,) = [v for v in program.visits if v.path == path and v.phase is phase]
    return visit


@pytest.mark.parametrize("name", zoo.NETWORKS)
def test_no_operator_is_lost_or_counted_twice(name: str) -> None:
    for trace in _zoo_traces(name):
        program = resolve(trace)
        stops = [0]
        for visit in program.visits:
            start, stop = visit.operators
            assert start == stops[-1]
            assert stop > start
            assert {op.phase for op in trace.operators[start:stop]} == {visit.phase}
            stops.append(stop)
        assert stops[-1] == len(trace.operators)
        total = np.sum([op.idioms for op in trace.operators], axis=0)
        assert np.sum([visit.idioms for visit in program.visits], axis=0).tolist() == total.tolist()


@pytest.mark.parametrize("name", zoo.NETWORKS)
def test_visits_are_of_modules_that_own_parameters(name: str) -> None:
    model = zoo.build(name, "tiny")
    owners = {n.rpartition(".")[0] for n, _ in model.named_parameters()}
    for trace in _zoo_traces(name):
        program = resolve(trace)
        assert set(_paths(program, Phase.FORWARD)) <= owners
        assert set(_paths(program, Phase.BACKWARD)) <= owners
        assert set(_paths(program, Phase.OPTIMIZER)) <= owners


@pytest.mark.parametrize("name", zoo.NETWORKS)
def test_every_region_a_visit_names_is_in_the_program(name: str) -> None:
    for trace in _zoo_traces(name):
        program = resolve(trace)
        used = {region for visit in program.visits for region in visit.regions}
        assert used <= set(program.regions)
        kinds = {program.regions[region].kind for region in used}
        assert {"parameter", "gradient", "state"} <= kinds <= set(_NAMED)
        assert all(key == info.name for key, info in program.regions.items())


_NAMED = ("parameter", "gradient", "state", "buffer")


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
    program = resolve(trace)
    assert _paths(program, Phase.FORWARD) == [
        "",
        "layers.0.norm", "layers.0.left", "layers.0.right",
        "layers.1.norm", "layers.1.left", "layers.1.right",
        "",
    ]  # fmt: skip

    def inside(path: str) -> list[str]:
        start, stop = _visit(program, path, Phase.FORWARD).operators
        return [op.name.split(".")[1] for op in trace.operators[start:stop]]

    assert inside("layers.0.norm") == ["native_layer_norm"]
    assert inside("layers.0.left") == ["t", "addmm"]
    # The activation and the factor lie between two owners; the residual ends the layer.
    assert inside("layers.0.right") == ["tanh", "detach", "mul", "t", "addmm", "sub"]
    backward = _paths(program, Phase.BACKWARD)
    assert backward[0] == backward[-1] == ""
    assert [p for p in backward if p] == [
        f"layers.{i}.{part}" for i in (1, 0) for part in ("right", "left", "norm")
    ]


def test_a_helper_inside_an_owner_belongs_to_it() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.act = nn.Sequential(nn.Sigmoid())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(x * self.weight) * self.weight

    program = resolve(_step(nn.Sequential(Gate(), nn.Linear(4, 4)), torch.ones(2, 4)))
    assert _paths(program, Phase.FORWARD) == ["0", "1"]
    assert _paths(program, Phase.BACKWARD) == ["1", "0"]


def test_a_tied_head_is_visited() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(8, 4)
            self.head = nn.Linear(4, 8, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(tokens))

    program = resolve(_step(Tied(), torch.tensor([1, 2])))
    assert _paths(program, Phase.FORWARD) == ["embedding", "head"]
    assert _visit(program, "head", Phase.FORWARD).regions == ("embedding.weight",)


def test_activation_bytes_are_what_outlives_the_visit() -> None:
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

    program = resolve(_step(Net(), torch.ones(2, 4)))
    first, second = (v for v in program.visits if v.phase is Phase.FORWARD)
    assert first.activation_bytes == 4 * 2 * 1000
    # exp's result and the sum's, each 8,000 bytes, the output, and the loss made of it.
    assert second.activation_bytes >= 2 * 4 * 2 * 1000 + 4 * 2
    assert second.activation_bytes < 2 * 4 * 2 * 1000 + 100


@pytest.mark.parametrize(("optimizer", "paths"), [("loop", ["0", "2"]), ("fused", [""])])
def test_the_optimizer_is_visited_by_owner(optimizer: str, paths: list[str]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    program = resolve(_step(model, torch.ones(2, 4), optimizer=optimizer))
    assert _paths(program, Phase.OPTIMIZER) == paths
    visit = _visit(program, paths[-1], Phase.OPTIMIZER)
    assert {"2.weight", "2.weight:grad", "2.weight:exp_avg"} <= set(visit.regions)
