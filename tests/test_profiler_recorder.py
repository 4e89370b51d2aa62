"""The recorder: it changes nothing, loses nothing, and knows where each operator belongs."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from exactness import assert_same
from torch import nn
from torch.utils.checkpoint import checkpoint

from dynoffload.around import is_around
from dynoffload.errors import TraceError
from dynoffload.experiments import zoo
from dynoffload.profiler import Operator, Phase, Recorder, Trace


class Branching(nn.Module):
    """Runs a number of its blocks that depends on the data; its head is tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.act = nn.Tanh()
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((4,), 0.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.scale
        for block in self.blocks[: int(tokens[0]) % 3 + 1]:
            x = x + self.act(block(x))
        return self.head(x).square().mean()


def _tokens(first: int) -> torch.Tensor:
    return torch.tensor([first, 3, 5])


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, keep: bool = False) -> None:
    for step in range(3):
        model(_tokens(step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=not keep)


@contextmanager
def recording(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any
) -> Iterator[list[Trace]]:
    """Yield the list into which the traces of the block go."""
    made: list[Trace] = []
    with Recorder(model, optimizer, on_step=made.append, **options):
        yield made


def _record(model: nn.Module, *, keep: bool = False, **options: Any) -> list[Trace]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with recording(model, optimizer, **options) as traces:
        _train(model, optimizer, keep)
    return traces


def _at(trace: Trace, phase: Phase, name: str) -> list[Operator]:
    return [op for op in trace.operators if op.phase is phase and op.name.startswith(name)]


def _names(trace: Trace, indices: tuple[int, ...]) -> list[str]:
    return [trace.regions[i].name for i in indices]


SHAPES: dict[str, dict[str, int]] = {"moe": {"rows": 1, "length": 32}, "tree": {"max_nodes": 48}}


@pytest.mark.parametrize("network", zoo.NETWORKS)
@pytest.mark.parametrize("bf16", [False, True])
def test_recording_changes_no_bit(network: str, bf16: bool) -> None:
    left: list[Any] = []
    for record in (False, True):
        torch.manual_seed(0)
        model = zoo.build(network, "tiny")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=bf16, foreach=not bf16)
        losses = []
        with recording(model, optimizer) if record else nullcontext([]) as traces:
            for sample in itertools.islice(zoo.samples(network, **SHAPES[network]), 2):
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    losses.append(model(*sample.args).loss)
                losses[-1].backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        assert len(traces) == 2 * record
        state = dict(model.named_parameters()), optimizer.state_dict(), torch.get_rng_state()
        left.append((losses, *state))
    assert_same(left[1], left[0], network)


def test_nothing_is_left_behind() -> None:
    """No hook stays, no tensor is held, and operators after the block are not recorded."""
    model = Branching()
    traces = _record(model)
    count = len(traces[-1].operators)
    assert not any(map(is_around, model.modules()))
    model(_tokens(1)).backward()
    assert len(traces) == 3
    assert len(traces[-1].operators) == count


def test_forward_and_backward_know_their_module() -> None:
    trace = _record(Branching())[1]  # Token 1: two blocks.
    forward = [op.site for op in _at(trace, Phase.FORWARD, "aten.addmm")]
    assert forward == ["blocks.0", "blocks.1"]
    products = [op.site for op in _at(trace, Phase.BACKWARD, "aten.mm")]
    assert products == ["head"] * 2 + ["blocks.1"] * 2 + ["blocks.0"] * 2
    activations = _at(trace, Phase.BACKWARD, "aten.tanh_backward")
    assert [op.site for op in activations] == ["act", "act"]
    assert len({op.call for op in activations}) == 2  # One module, two calls, told apart.
    assert [op.site for op in _at(trace, Phase.BACKWARD, "aten.embedding_dense")] == ["embedding"]


def test_the_calls_of_a_step_are_nested() -> None:
    for step, trace in enumerate(_record(Branching())):
        root, *inner = trace.calls
        assert root.path == ""
        blocks = [call.path for call in inner if call.path.startswith("blocks.")]
        assert blocks == [f"blocks.{i}" for i in range(step + 1)]
        assert {call.parent for call in inner} == {0}
        assert all(root.start <= call.start <= call.stop <= root.stop for call in inner)
        assert {op.phase for op in trace.operators[root.start : root.stop]} == {Phase.FORWARD}


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_belongs_to_the_call_it_repeats(reentrant: bool) -> None:
    """Each block is called twice; what checkpointing runs again is found under the right call."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = checkpoint(self.block, x, use_reentrant=reentrant)
            return x.sum()

    model = Twice()
    with recording(model) as traces:
        model(torch.ones(2, 4, requires_grad=True)).backward()
    (trace,) = traces
    once = ["block", "block.0", "block.1"]
    assert [call.path for call in trace.calls] == ["", *once, *once]
    again = _at(trace, Phase.BACKWARD, "aten.addmm")
    assert [op.site for op in again] == ["block.0", "block.0"]
    assert all(op.site != "" for op in _at(trace, Phase.BACKWARD, "aten.tanh_backward"))
    assert len(_at(trace, Phase.BACKWARD, "aten.tanh_backward")) == 2


def test_double_backward_keeps_the_site() -> None:
    """A gradient penalty: backward makes nodes of its own, which belong where their maker does."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    with recording(model) as traces:
        x = torch.ones(2, 3, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()
    (trace,) = traces
    second = _at(trace, Phase.BACKWARD, "aten.mm")
    assert {op.site for op in second} == {"0", "2"}
    assert len(second) > 6
    assert {op.site for op in _at(trace, Phase.BACKWARD, "aten.tanh_backward")} == {"1"}
    (penalty,) = [op for op in _at(trace, Phase.FORWARD, "aten.pow") if op.site == ""]
    assert penalty.call == -1  # The loss of the second backward, made after the first.


def test_optimizer_operators_belong_to_the_parameter_they_update() -> None:
    model = Branching()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with recording(model, optimizer) as traces:
        _train(model, optimizer)
    updates = _at(traces[2], Phase.OPTIMIZER, "aten.addcdiv_")
    assert [op.site for op in updates] == ["embedding"] + [f"blocks.{i // 2}" for i in range(6)]
    norms = _at(traces[2], Phase.OPTIMIZER, "aten._foreach_norm")
    assert [op.site for op in norms] == [""]


def test_tied_weights_are_one_region() -> None:
    trace = _record(Branching())[0]
    parameters = [r.name for r in trace.regions if r.kind == "parameter"]
    assert "embedding.weight" in parameters
    assert "head.weight" not in parameters
    (product,) = [op for op in _at(trace, Phase.FORWARD, "aten.mm") if op.site == "head"]
    assert "embedding.weight" in _names(trace, product.reads)


def test_state_is_named_in_the_step_that_makes_it_and_gradients_that_stay_later() -> None:
    first, _, later = _record(Branching(), keep=True)
    (momentum,) = [r for r in first.regions if r.name == "blocks.0.bias:momentum_buffer"]
    assert momentum.kind == "state"
    assert momentum.born >= 0
    for name in ("blocks.0.bias:momentum_buffer", "blocks.0.weight:grad"):
        assert [region.born for region in later.regions if region.name == name] == [-1]


def test_a_lookup_reads_the_rows_it_selects() -> None:
    model = nn.Embedding(1000, 4)
    with recording(model) as traces:
        model(torch.tensor([1, 2, 3])).sum().backward()
    (lookup,) = _at(traces[0], Phase.FORWARD, "aten.embedding.")
    assert lookup.bytes_written == 3 * 4 * 4
    assert lookup.bytes_read == lookup.bytes_written + 3 * 8


def test_gradients_are_known_without_an_optimizer_and_beside_hooks() -> None:
    """They are gone when the step ends, and a hook's own tensors are not taken for them."""
    model = nn.Linear(4, 3)
    norms: list[float] = []
    model.weight.register_hook(lambda g: norms.append(float(g.norm())))
    model.bias.register_hook(lambda g: g * 2)
    with recording(model) as traces:
        model(torch.ones(2, 4)).sum().backward()
        model.zero_grad()
    gradients = [(r.name, r.nbytes) for r in traces[0].regions if r.kind == "gradient"]
    assert sorted(gradients) == [("bias:grad", 12), ("weight:grad", 48)]


def test_sparse_gradients_are_seen_by_their_parts() -> None:
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(model, optimizer) as traces:
        for _ in range(2):
            model(torch.tensor([1, 2])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert "weight:grad" in {region.name for region in traces[1].regions}


def test_memory_follows_what_lives() -> None:
    """x -> a -> b -> c with each predecessor dropped: never more than two alive."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                for _ in range(5):
                    x = x + 1
            return (x.sum() * self.weight).sum()

    model = Chain()
    with recording(model) as traces:
        model(torch.zeros(1024)).backward()
    additions = _at(traces[0], Phase.FORWARD, "aten.add.")
    base = 4096 + 4  # The input, which the caller's frame holds, and the parameter.
    assert [op.memory for op in additions] == [base + 4096] + [base + 2 * 4096] * 4
    lives = [traces[0].regions[op.writes[0]] for op in additions]
    assert [(life.born, life.died) for life in lives[:4]] == [(i, i + 1) for i in range(4)]


def test_evaluation_between_and_inside_steps_is_not_recorded() -> None:
    reference = _record(Branching())
    model = Branching()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ones, tokens = torch.ones(1, 4), _tokens(2)
    with recording(model, optimizer) as traces:
        for step in range(3):
            with torch.no_grad():
                model(tokens)
            loss = model(_tokens(step))
            with torch.inference_mode():
                model.blocks[0](ones)
                model(tokens)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
    assert len(traces) == 3
    for trace, wanted in zip(traces, reference, strict=True):
        assert [op.name for op in trace.operators] == [op.name for op in wanted.operators]
        assert trace.sample == wanted.sample


def test_accumulation_is_one_step() -> None:
    model = Branching()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(model, optimizer) as traces:
        for first in (0, 1):
            model(_tokens(first)).backward()
        optimizer.step()
    (trace,) = traces
    assert trace.sample.values["samples"] == 2
    assert trace.sample.elements.tolist() == [0, 3, 5, 1, 3, 5]
    phases = [phase for phase, _ in itertools.groupby(op.phase for op in trace.operators)]
    assert phases == [Phase.FORWARD, Phase.BACKWARD] * 2 + [Phase.OPTIMIZER]
    added = [op for op in _at(trace, Phase.BACKWARD, "aten.add_") if op.writes]
    assert "blocks.0.weight:grad" in {n for op in added for n in _names(trace, op.writes)}


def test_a_step_that_fails_is_dropped_and_the_next_is_whole() -> None:
    class Failing(Branching):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            if int(tokens[0]) == 9:
                self.blocks[0](torch.ones(1, 4))
                raise ValueError("bad batch")
            return super().forward(tokens)

    model = Failing()
    good, bad = _tokens(0), _tokens(9)
    traces: list[Trace] = []

    def loop() -> None:
        with Recorder(model, on_step=traces.append):
            model(good).backward()
            model(bad)

    with pytest.raises(ValueError, match="bad batch"):
        loop()
    assert len(traces) == 1
    model.zero_grad()
    with Recorder(model, on_step=traces.append):
        model(good).backward()
    assert [op.name for op in traces[1].operators] == [op.name for op in traces[0].operators]


def test_a_copy_of_the_model_is_not_the_model() -> None:
    """An exponential moving average copied inside the block carries hooks that stay silent."""
    model = Branching()
    with recording(model) as traces:
        average = copy.deepcopy(model)
        average(_tokens(2))
        model(_tokens(0)).backward()
    (trace,) = traces
    assert [call.path for call in trace.calls] == ["", "embedding", "blocks.0", "act", "head"]


def test_modules_called_without_the_root_are_one_step() -> None:
    """Loops that call parts of the model, as for two-player training."""
    model = Branching()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(model, optimizer) as traces:
        model.head(model.blocks[0](model.embedding(_tokens(1)))).sum().backward()
        optimizer.step()
    (trace,) = traces
    assert [call.path for call in trace.calls] == ["embedding", "blocks.0", "head"]
    assert {call.parent for call in trace.calls} == {-1}


def test_a_recorder_is_used_once_at_a_time() -> None:
    recorder = Recorder(Branching(), on_step=lambda trace: None)
    with recorder, pytest.raises(TraceError, match="already in use"), recorder:
        pass
