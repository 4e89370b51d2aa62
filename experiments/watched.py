"""Training steps watched by hooks: which units ran, in what order, and what routers hinted.

A *unit* is a module that owns parameters, or one expert of a fused layer. `watch` trains a network
as plain PyTorch does. The *oracle* is what the network, with its weights before the latest update,
runs on a sample: a ceiling for who predicts without its newest weights.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count, islice
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from dynoffload.experiments import zoo
from dynoffload.experiments.architectures import ARCHITECTURES
from dynoffload.experiments.graph_idioms import GraphIdioms
from dynoffload.experiments.pilot_recording import CASES, DATA, STRUCTURE, Case
from dynoffload.experiments.predictors import watching, with_parameters
from dynoffload.experiments.ways import Spec, adamw, network
from dynoffload.experiments.zoo.building import ZooSample
from dynoffload.experiments.zoo.fused_moe import FAMILIES
from dynoffload.pilot.evaluate import varying_blocks
from dynoffload.pilot.features import BlockHint, Example
from dynoffload.pilot.progress import Report
from dynoffload.planning.blocks import Block, Vocabulary
from dynoffload.profiler.experts import slices_in, split_path, unit_path
from dynoffload.profiler.idioms import Idioms
from dynoffload.profiler.input_features import describe_input
from dynoffload.profiler.network import fingerprint
from dynoffload.profiler.routing import RoutingHint, hinted, probes_of

MIXTURES, OTHERS = "mixtures", "architectures"
"""Families of transformers' networks: mixtures of experts, and those in no other family."""
_FAMILIES = {
    "tree": "tree",
    "tree_untied": "tree",
    "evoformer": "fold",
    "esmfold": "fold",
    "switch_32": "switch",
    "switch_128": "switch",
    "moe_8": "moe",
    "moe_64": "moe",
    "moe_512": "moe",
}
"""Families of the zoo's cases that have another name than their case."""
_EXPERTS = (
    *("mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "granitemoe", "deepseek-v3", "gpt-oss"),
    *("switch", "nllb-moe", "jamba"),
)
_TRAINED = 400  # steps before a mixture is watched, of 16 rows of 64 bytes
COUNTED = 3
"""First steps whose idioms are counted."""


class Training(NamedTuple):
    """A network in training.

    Attributes:
        model: the network, in training mode.
        optimizer: its optimizer.
        samples: what it is trained on next, without end.
        loss: returns the loss of the network's output.
    """

    model: nn.Module
    optimizer: Optimizer
    samples: Iterator[ZooSample]
    loss: Callable[[Any], Tensor] = attrgetter("loss")

    def backward(self, sample: ZooSample) -> Any:
        """Compute the gradients of a sample; return the network's output."""
        output = self.model(*sample.args, **sample.kwargs)
        self.loss(output).backward()  # type: ignore[no-untyped-call]
        return output

    def update(self) -> None:
        """Update the weights by the gradients, and drop these."""
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass(frozen=True)
class Subject:
    """A network that can be watched.

    Attributes:
        key: its name.
        family: of networks alike, which are left out together.
        title: in tables.
        origin: what determines its paths: `STRUCTURE` or `DATA`.
        begin: given a seed and a report, returns the training to watch.
    """

    key: str
    family: str
    title: str
    origin: str
    begin: Callable[[int, Report], Training]


@dataclass(frozen=True)
class Watched:
    """Watched steps of one network.

    Attributes:
        vocabulary: one block per unit.
        shaped: the same, where the idioms of blocks are replaced; see `_by_shapes`.
        examples: every step, in order.
        oracle: the oracle's order of every step, for the first what it ran; empty unless asked for.
    """

    vocabulary: Vocabulary
    shaped: Vocabulary
    examples: list[Example]
    oracle: list[list[int]]

    @cached_property
    def varying(self) -> frozenset[int]:
        """The blocks whose presence or place varies between the steps, and those never run."""
        return varying_blocks([one.blocks for one in self.examples], len(self.vocabulary))


def watch(
    subject: Subject,
    steps: int,
    seed: int,
    *,
    oracle: bool = False,
    report: Report = lambda doing, done=None, total=None: None,
) -> Watched:
    """Train a network, and return what its steps ran.

    Args:
        subject: the network.
        steps: number of watched steps, of one sample each.
        seed: of the weights and of the samples.
        oracle: whether to run the oracle; a step then has two forwards.
        report: called with the progress.
    """
    training = subject.begin(seed, report)
    model = training.model
    samples = list(islice(training.samples, steps))
    older = copy.deepcopy(model) if oracle else None
    foreseen = watching(older) if older is not None else []
    idioms: dict[str, Idioms] = {}
    starts: list[Callable[[Sequence[str]], None]] = []
    visited = watching(model, lambda paths: starts[-1](paths))
    hints = _hinting(model, visited)
    orders, told, oracles, features = [], [], [], []
    for number, sample in enumerate(samples[:steps]):
        report(f"{subject.key}: watching steps", number, steps)
        for found in (foreseen, visited, hints):
            found.clear()
        features.append(describe_input(model, sample.args, sample.kwargs))
        if older is not None:
            with torch.random.fork_rng(devices=[]):
                older(*sample.args, **sample.kwargs)  # with gradients: the same kernels
            oracles.append(foreseen.copy())
        counter = GraphIdioms()
        starts.append(counter.begin if number < COUNTED else lambda blocks: None)
        output = training.backward(sample)
        if number < COUNTED:
            idioms |= counter.count(output)
        del output
        orders.append(visited.copy())
        told.append(hints.copy())
        if older is not None:
            older.load_state_dict(model.state_dict())
        training.update()
    vocabulary = _vocabulary(model, {path for order in orders + oracles for path in order}, idioms)
    inside = _units_inside(vocabulary)

    def encoded(order: Sequence[str]) -> list[int]:
        return [vocabulary.index_of(path) for path in order]

    examples = [
        Example(sample, encoded(order), one.source, [_in_blocks(hint, inside) for hint in given])
        for sample, order, one, given in zip(features, orders, samples[:steps], told, strict=True)
    ]
    shaped = _by_shapes(model, vocabulary, examples[:COUNTED])
    return Watched(vocabulary, shaped, examples, [encoded(order) for order in oracles])


def _hinting(model: nn.Module, visited: list[str]) -> list[RoutingHint]:
    """Return a list to which hooks append hints, with the number of ``visited`` units as call."""
    hints: list[RoutingHint] = []
    table = probes_of(model)

    def ask(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        place = len(visited)
        hints.extend(hinted(table, path, args, place))
        del visited[place:]  # what probes called

    for path in table:
        module = model.get_submodule(path)
        # A fused layer lists its experts as it begins, after the hint.
        module.register_forward_pre_hook(
            partial(ask, path), with_kwargs=True, prepend=bool(slices_in(module))
        )
    return hints


def _vocabulary(model: nn.Module, ran: set[str], idioms: Mapping[str, Idioms]) -> Vocabulary:
    """Return a vocabulary of a network's units; fused layers are those that named experts."""
    fused = {site for site, part in map(split_path, ran) if part is not None}
    units: list[tuple[str, int, object]] = []  # path, bytes, class and shapes
    for path, module in with_parameters(model).items():
        own = [p for p in module._parameters.values() if p is not None]
        kind: object = type(module).__name__, *(p.shape for p in own)
        nbytes = sum(p.nbytes for p in own)
        if path in fused:
            parts = max(slices_in(module).values())
            units += [(unit_path(path, n), nbytes // parts, kind) for n in range(parts)]
        if path in ran or path not in fused:
            units.append((path, nbytes, kind))
    alike = {like: idioms[path] for path, _, like in units if path in idioms}
    nothing = Idioms()
    blocks = (
        Block(number, path, "", (path,), nbytes, 0, alike.get(like, nothing))
        for number, (path, nbytes, like) in enumerate(units)
    )
    return Vocabulary(fingerprint(model), tuple(blocks))


def _by_shapes(model: nn.Module, vocabulary: Vocabulary, examples: Sequence[Example]) -> Vocabulary:
    """Return a vocabulary with six other numbers in place of the idioms: the longest and the next
    side of a block's largest parameter, its dimensions, the number of parameters, the limit of the
    arithmetic intensity of a product with it, and the blocks until the block runs again."""
    again: dict[int, list[int]] = defaultdict(list)
    for example in examples:
        last: dict[int, int] = {}
        for place, block in enumerate(example.blocks):
            if block in last:
                again[block].append(place - last[block])
            last[block] = place
    found: dict[str, tuple[int, ...]] = {}
    for path, module in with_parameters(model).items():
        own = [p for p in module._parameters.values() if p is not None]
        largest = max(own, key=Tensor.numel)
        sides = sorted([1, 1, *largest.shape])
        intensity = largest.numel() // sum(sides[-2:])
        found[path] = (sides[-1], sides[-2], largest.ndim, len(own), intensity)

    def shaped(block: Block) -> Block:
        gaps = again.get(block.index, [len(vocabulary)])
        numbers = (*found[split_path(block.path)[0]], sum(gaps) // len(gaps))
        return replace(block, idioms=Idioms(*numbers))

    return replace(vocabulary, blocks=tuple(map(shaped, vocabulary.blocks)))


def _units_inside(vocabulary: Vocabulary) -> dict[str, list[int]]:
    """Return the blocks of each module's units: its own, and those of modules inside."""
    inside: dict[str, list[int]] = defaultdict(list)
    for block in vocabulary.blocks:
        path = block.path
        while path:
            inside[path].append(block.index)
            path = path.rpartition(".")[0]
    return inside


def _in_blocks(hint: RoutingHint, inside: Mapping[str, Sequence[int]]) -> BlockHint:
    """Return a hint in blocks: what it says of a module holds for the units inside."""
    pairs = [
        (block, value)
        for path, value in zip(hint.blocks, hint.values, strict=True)
        for block in inside.get(path, ())
    ]
    return BlockHint(hint.call, tuple(b for b, _ in pairs), tuple(v for _, v in pairs))


def _of_zoo(case: Case, seed: int, report: Report) -> Training:
    spec = Spec(case.network, case.preset, shape=case.shape, lr=case.lr, seed=seed, data_seed=seed)
    model = network(spec)
    stream = zoo.samples(spec.network, "train", seed=seed, **spec.shape)
    training = Training(model, adamw(model, spec), stream)
    torch.manual_seed(seed)  # of dropout
    return _advanced(training, case.before, case.key, report)


def _of_mixture(family: str, seed: int, report: Report) -> Training:
    spec = Spec("fused", f"{family}-tiny", seed=seed, lr=2e-3)
    model: Any = network(spec)
    model.inner.set_experts_implementation("grouped_mm")  # several times as fast as eager
    torch.manual_seed(seed)
    large = zoo.samples("fused", seed=seed, rows=16, length=64)
    _advanced(Training(model, adamw(model, spec), large), _TRAINED, family, report)
    stream = zoo.samples("fused", seed=seed + 1, rows=1, length=16)
    return Training(model, AdamW(model.parameters(), lr=3e-4, fused=True), stream)


def _of_architecture(name: str, seed: int, report: Report) -> Training:
    torch.manual_seed(seed)
    architecture = ARCHITECTURES[name]
    model = architecture.build()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    numbers = count(seed << 16)
    stream = (ZooSample((), kwargs=architecture.sample(model, number)) for number in numbers)
    return Training(model, optimizer, stream, architecture.loss)


def _advanced(training: Training, steps: int, key: str, report: Report) -> Training:
    """Train for some steps."""
    for number, sample in enumerate(islice(training.samples, steps)):
        report(f"{key}: training", number, steps)
        training.backward(sample)
        training.update()
    return training


def _material(name: str) -> Subject:
    family, origin = _FAMILIES.get(name, OTHERS), STRUCTURE
    if name in _EXPERTS:
        family, origin = MIXTURES, DATA
    return Subject(name, family, name, origin, partial(_of_architecture, name))


SUBJECTS: dict[str, Subject] = {
    subject.key: subject
    for subject in (
        *(
            Subject(
                case.key,
                _FAMILIES.get(case.key, case.key),
                case.title,
                case.origin,
                partial(_of_zoo, case),
            )
            for case in CASES.values()
        ),
        *(
            Subject(
                family.replace("-", "_"),
                MIXTURES,
                f"{FAMILIES[family][0]}, 64 experts",
                DATA,
                partial(_of_mixture, family),
            )
            for family in FAMILIES
        ),
    )
}
"""The networks on which predictors are compared, by key."""
MATERIAL: dict[str, Subject] = {name: _material(name) for name in ARCHITECTURES}
"""The architectures of transformers, by name: material to learn from."""
