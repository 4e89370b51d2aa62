"""The static structure: each sample is a path through it, which gives its operators back."""

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

from dynoffload.cli import app
from dynoffload.errors import TraceError
from dynoffload.experiments import zoo
from dynoffload.experiments.architectures import ARCHITECTURES
from dynoffload.planning import Path, Size, Structure
from dynoffload.planning.flow import Flow
from dynoffload.profiler import Phase, Recorder, Trace, profile, resolve

WIDTH = 4


def _record(
    model: nn.Module, samples: Iterable[Any], foreach: bool | None = None, steps: bool = True
) -> list[Trace]:
    """Return a trace of each sample's step; samples are positional arguments or named ones."""
    traces: list[Trace] = []
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach) if steps else None
    with Recorder(model, optimizer, on_step=traces.append):
        for sample in samples:
            output = model(**sample) if isinstance(sample, dict) else model(*sample)
            getattr(output, "loss", output).sum().backward()
            if optimizer is not None:
                optimizer.step()
            model.zero_grad()
    return traces


def _assert_gives_back(structure: Structure, trace: Trace) -> Path:
    path = structure.path_of(trace)
    assert [tuple(step) for step in structure.operators(path)] == [
        (operator.name, operator.phase, operator.site) for operator in trace.operators
    ]
    return path


# -- recorded networks --------------------------------------------------------------------------


@cache
def _zoo(name: str, foreach: bool) -> tuple[Trace, ...]:
    torch.manual_seed(0)
    model = zoo.build(name, "tiny")
    samples = [sample.args for sample in itertools.islice(zoo.samples(name), 2)]
    return tuple(_record(model, samples, foreach))


@pytest.mark.parametrize(
    ("name", "foreach"), [("moe", True), ("moe", False), ("tree", True), (zoo.FUSED, False)]
)
def test_the_zoo_is_given_back(name: str, foreach: bool) -> None:
    traces = _zoo(name, foreach)
    structure = Structure(traces)
    for trace in traces:
        path = _assert_gives_back(structure, trace)
        assert len(path.decisions) < len(trace.operators)
        steps = list(structure.operators(path))
        for visit in resolve(trace).visits:  # A program groups the same operators.
            assert {step.phase for step in steps[slice(*visit.operators)]} == {visit.phase}


def test_a_structure_is_smaller_than_its_traces() -> None:
    """A mixture of experts runs most of its network each time; a tree runs one cell many times."""
    moe, tree = Structure(_zoo("moe", True)).size, Structure(_zoo("tree", True)).size
    assert moe.compression > 1
    assert tree.compression > 30
    assert tree.loops > 0
    assert min(moe.choices, tree.choices) > 0
    model = zoo.build("tree", "tiny")
    assert tree.sites == len([path for path, _ in model.named_modules()])


@pytest.mark.parametrize("name", ["mixtral", "t5", "bert", "mamba"])
def test_transformers_are_given_back(name: str) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    architecture = ARCHITECTURES[name]
    model = architecture.build()
    traces = _record(model, [architecture.sample(model, seed) for seed in range(2)])
    structure = Structure(traces)
    for trace in traces:
        _assert_gives_back(structure, trace)


# -- control flow -------------------------------------------------------------------------------


class Mixture(nn.Module):
    """Runs the experts it is told to, in the order it is told."""

    def __init__(self, count: int = 5) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(count)])

    def forward(self, chosen: Sequence[int]) -> Tensor:
        x = self.enter(torch.ones(2, WIDTH))
        out = torch.zeros_like(x)
        for number in chosen:
            out = out + self.experts[number](x).relu()
        return out + x


def _mixtures(model: nn.Module, *subsets: Sequence[int]) -> list[Trace]:
    return _record(model, [(subset,) for subset in subsets], steps=False)


@pytest.mark.parametrize("subset", [(0, 3), (1, 2), (0, 2, 3), (3,), (0, 1, 2, 3), (2, 0), (3, 1)])
def test_experts_that_never_ran_together_are_known(subset: tuple[int, ...]) -> None:
    model = Mixture()
    structure = Structure(_mixtures(model, (0, 1), (2, 3), (1,), (3, 0, 2), (2, 1)))
    (trace,) = _mixtures(model, subset)
    assert all(trace.operators != known.operators for known in _mixtures(model, (0, 1), (2, 3)))
    _assert_gives_back(structure, trace)


def test_two_pairs_are_enough_to_know_a_third() -> None:
    """Each expert was seen in its place, even where nothing tells that the places are a loop."""
    model = Mixture()
    structure = Structure(_mixtures(model, (0, 1), (2, 3)))
    _assert_gives_back(structure, *_mixtures(model, (0, 3)))


def test_an_expert_that_never_ran_is_named() -> None:
    model = Mixture()
    structure = Structure(_mixtures(model, (0, 1), (2,), (1, 2)))
    (trace,) = _mixtures(model, (0, 4))
    with pytest.raises(TraceError, match=r"aten\.t\.default at site 'experts\.4'.*merge"):
        structure.path_of(trace)
    structure.merge(trace)
    _assert_gives_back(structure, trace)


def test_an_operator_that_never_ran_is_named() -> None:
    traces = _mixtures(Mixture(), (0, 1), (2,))
    structure = Structure(traces)
    strange = list(traces[0].operators)
    place = next(i for i, op in enumerate(strange) if op.site == "experts.1")
    strange[place] = strange[place]._replace(name="aten.sin.default")
    with pytest.raises(TraceError, match=rf"operator {place}, aten\.sin.*'experts\.1'.*forward"):
        structure.path_of(replace(traces[0], operators=strange))
    with pytest.raises(TraceError, match=r"at the end.*which no merged sample did"):
        structure.path_of(replace(traces[0], operators=traces[0].operators[:-1]))


class Recursive(nn.Module):
    """One cell that calls itself for each child of a nested tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf = nn.Linear(WIDTH, WIDTH)
        self.join = nn.Linear(WIDTH, WIDTH)

    def forward(self, tree: Any) -> Tensor:
        x = torch.ones(1, WIDTH)
        if not tree:
            return self.leaf(x)
        for child in tree:
            x = x + self(child)
        return self.join(x).tanh()


def test_a_module_that_calls_itself_is_a_procedure_that_calls_itself() -> None:
    model, leaf = Recursive(), ()
    trees = [leaf, (leaf,), (leaf, leaf), ((leaf,), leaf, (leaf, leaf))]
    structure = Structure(_record(model, [(tree,) for tree in trees]))
    deep: Any = leaf
    for _ in range(60):
        deep = (deep, leaf)
    for tree in [(leaf,) * 7, ((leaf, leaf), (leaf,), leaf, leaf), deep]:
        (trace,) = _record(model, [(tree,)], steps=False)
        with pytest.raises(TraceError, match="the step ends"):  # As it has no optimizer.
            structure.path_of(trace)
        forward = [op for op in trace.operators if op.phase is Phase.FORWARD]
        only = Structure(
            replace(t, operators=[op for op in t.operators if op.phase is Phase.FORWARD])
            for t in _record(model, [(tree,) for tree in trees])
        )
        _assert_gives_back(only, replace(trace, operators=forward))


class Early(nn.Module):
    """Layers of which the sample says how many run; each loops over operators of its own."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Looping() for _ in range(5)])
        self.recompute = recompute

    def forward(self, depth: int, turns: int) -> Tensor:
        x = torch.ones(2, WIDTH)
        for layer in self.layers[:depth]:
            if self.recompute:
                x = checkpoint(layer, x, turns, use_reentrant=False)
            else:
                x = layer(x, turns)
        return x


class Looping(nn.Module):
    """A linear layer and a loop of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, turns: int) -> Tensor:
        x = self.linear(x)
        for _ in range(turns):
            x = x.sin() * 2
        return x + 1


@pytest.mark.parametrize("recompute", [False, True])
def test_early_exit_and_counts_of_loops(recompute: bool) -> None:
    model = Early(recompute)
    structure = Structure(_record(model, [(5, 1), (2, 4), (1, 2), (5, 3)], steps=False))
    assert structure.size.loops > 0
    for depth, turns in [(4, 9), (2, 1), (1, 3), (5, 5)]:
        (trace,) = _record(model, [(depth, turns)], steps=False)
        _assert_gives_back(structure, trace)


def test_what_never_varies_takes_no_decision() -> None:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    traces = _record(model, [(torch.ones(2, WIDTH),)] * 3, steps=False)
    structure = Structure(traces)
    assert structure.path_of(traces[2]).decisions == ()
    assert structure.size == Size(
        sites=4,
        procedures=structure.size.procedures,
        slots=structure.size.slots,
        choices=0,
        loops=0,
        traces=3,
        operators=3 * len(traces[0].operators),
    )


# -- merging ------------------------------------------------------------------------------------


def test_the_order_of_merging_does_not_matter() -> None:
    traces = [*_mixtures(Mixture(), (0, 1), (2, 3, 0), (), (4, 1, 1), (3,))]
    orders = itertools.islice(itertools.permutations(traces), 0, None, 11)
    structures = [Structure(order) for order in orders]
    assert len({structure.digest for structure in structures}) == 1
    for trace in traces:
        assert len({structure.path_of(trace).decisions for structure in structures}) == 1
    assert not any(structures[0].merge(trace) for trace in traces)
    assert structures[0].digest == structures[1].digest


def test_a_path_belongs_to_one_structure() -> None:
    first, second = _mixtures(Mixture(), (0, 1), (2,))
    structure = Structure([first])
    path = structure.path_of(first)
    assert structure.merge(second)
    with pytest.raises(TraceError, match="find it again"):
        list(structure.operators(path))
    path = structure.path_of(first)
    for decisions in (path.decisions[:-1], (*path.decisions, 0), (99, *path.decisions[1:])):
        with pytest.raises(TraceError, match="damaged"):
            list(structure.operators(replace(path, decisions=decisions)))


def test_networks_are_not_mixed() -> None:
    structure = Structure(_mixtures(Mixture(2), (0,)))
    (foreign,) = _mixtures(Mixture(3), (0,))
    with pytest.raises(TraceError, match="merge traces of one network"):
        structure.merge(foreign)
    with pytest.raises(TraceError, match="merge traces of one network"):
        structure.path_of(foreign)


# -- one body -----------------------------------------------------------------------------------


def test_a_flow_is_a_function_of_the_set_of_its_bodies() -> None:
    bodies = ["abcd", "abbbcd", "ad", "acbd", "xabcdx"]
    flows = []
    for order in itertools.permutations(bodies):
        flow = Flow()
        for body in order:
            flow.add(body)
        flows.append(list(flow.facts()))
    assert all(facts == flows[0] for facts in flows)


# -- random networks ----------------------------------------------------------------------------


class Random(nn.Module):
    """A network drawn as a program: what each module does, and who its children are."""

    def __init__(self, program: Any) -> None:
        super().__init__()
        self.program = program
        self.weight = nn.Parameter(torch.ones(WIDTH))
        children = [Random(part[1]) for part in program if part[0] == "child"]
        self.inner = nn.ModuleList(children)

    def forward(self, x: Tensor, decide: Any) -> Tensor:
        inner = iter(self.inner)
        for kind, what in self.program:
            if kind == "child":
                child = next(inner)
                for _ in range(decide(3)):
                    x = child(x, decide)
            elif kind == "if":
                x = x * self.weight if decide(2) else x.sin() + 1
            elif kind == "loop":
                for _ in range(decide(4)):
                    x = getattr(x, what)() + self.weight
            else:
                x = getattr(x, what)()
        return x


_OPERATORS = st.sampled_from(["sin", "cos", "tanh", "exp"])


def _programs(depth: int) -> st.SearchStrategy[Any]:
    parts = [
        st.tuples(st.just("op"), _OPERATORS),
        st.tuples(st.just("if"), st.just("")),
        st.tuples(st.just("loop"), _OPERATORS),
    ]
    if depth:
        parts.append(st.tuples(st.just("child"), _programs(depth - 1)))
    return st.lists(st.one_of(parts), min_size=1, max_size=4)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(_programs(2), st.lists(st.integers(0, 1 << 30), min_size=2, max_size=4), st.booleans())
def test_random_networks_are_given_back(program: Any, seeds: list[int], foreach: bool) -> None:
    model = Random(program)

    def sample(seed: int) -> tuple[Tensor, Any]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.ones(WIDTH, requires_grad=True)
        return x, lambda n: int(torch.randint(n, (), generator=generator))

    traces = _record(model, [sample(seed) for seed in seeds], foreach)
    structure = Structure(traces)
    assert Structure(reversed(traces)).digest == structure.digest
    for trace in traces:
        _assert_gives_back(structure, trace)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.text("abcd", max_size=8), min_size=1, max_size=6))
def test_any_bodies_are_given_back(bodies: list[str]) -> None:
    """Bodies that no program has, at that: the method does not rest on their being sensible."""
    (trace,) = _record(nn.Linear(1, 1), [(torch.ones(1, 1),)], steps=False)
    root = next(op for op in trace.operators if op.call == 0)
    traces = [
        replace(trace, operators=[root._replace(name=letter) for letter in body]) for body in bodies
    ]
    structure = Structure(traces)
    for made in traces:
        _assert_gives_back(structure, made)


# -- the command --------------------------------------------------------------------------------


def test_the_command_merges_a_directory_of_traces(tmp_path: pathlib.Path) -> None:
    traces = _mixtures(Mixture(), (0, 1), (2,), (3, 1))
    for number, trace in enumerate(traces):
        trace.save(tmp_path / f"step-{number:06d}.trace")
    done = CliRunner().invoke(app, ["structure", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    size = Structure(traces).size
    numbers = json.loads(done.stdout)
    assert {**asdict(size), "compression": size.compression}.items() <= numbers.items()
    assert 0 < numbers["decisions"] < len(traces[0].operators)
    assert "compression" in CliRunner().invoke(app, ["structure", str(tmp_path)]).stdout
    (other,) = profile(
        nn.Linear(4, 1), [torch.ones(2, 4)], out=tmp_path / "other", loss=lambda out, _: out.sum()
    )
    other.rename(tmp_path / "zzz.trace")
    mixed = CliRunner().invoke(app, ["structure", str(tmp_path)])
    assert mixed.exit_code == 1
    assert "zzz.trace of" in mixed.stderr
    assert "keep the traces of each network in their own directory" in mixed.stderr
    empty = CliRunner().invoke(app, ["structure", str(tmp_path / "..")])
    assert empty.exit_code == 1
