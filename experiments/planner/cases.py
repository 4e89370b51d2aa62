"""Small problems for the planner: drawn at random, and read from recorded steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from dynoffload.experiments.planner.blocks import partition
from dynoffload.experiments.planner.problem import Problem, recomputable
from dynoffload.experiments.planner.step import Step, extent, step_of
from dynoffload.experiments.zoo import NETWORKS, build, samples
from dynoffload.planning.schedule import Use
from dynoffload.profiler import Trace, resolve

_CALL_S, _BYTE_S = 5e-6, 1e-10
STEP_S = 1.0
"""Seconds that the uses of a drawn step take together, about."""


@dataclass
class _Net:
    """Layers in the order of forward: the parameters and the earlier results that each reads."""

    weights: list[int] = field(default_factory=list)
    reads: list[tuple[int, ...]] = field(default_factory=list)
    blocks: list[tuple[str, int, int]] = field(default_factory=list)

    def add(self, weight: int, *reads: int) -> int:
        self.weights.append(weight)
        self.reads.append(reads)
        return len(self.weights) - 1


def _chain(chance: random.Random) -> _Net:
    net = _Net()
    for layer in range(chance.randint(3, 6)):
        net.add(layer, *([layer - 1] if layer else []))
    return net


def _u_net(chance: random.Random) -> _Net:
    net = _Net()
    depth = 2
    for level in range(depth):
        net.add(level, *([level - 1] if level else []))
    below = net.add(depth, depth - 1)
    for level in reversed(range(depth)):
        below = net.add(len(net.weights), below, level)
    return net


def _branches(chance: random.Random) -> _Net:
    net = _Net()
    last = net.add(0)
    for _ in range(chance.randint(1, 2)):
        arms = [net.add(len(net.weights), last) for _ in range(2)]
        last = net.add(len(net.weights), *arms)
    return net


def _tied(chance: random.Random) -> _Net:
    net = _Net()
    count = chance.randint(2, 3)
    for layer in range(chance.randint(4, 5)):
        net.add(layer % count, *([layer - 1] if layer else []))
    return net


def _nested(chance: random.Random) -> _Net:
    net = _Net()
    for block in range(2):
        start = len(net.weights)
        for _ in range(2):
            layer = len(net.weights)
            net.add(layer, *([layer - 1] if layer else []))
        net.blocks.append((f"block {block}", start, len(net.weights)))
    return net


SHAPES: dict[str, Callable[[random.Random], _Net]] = {
    "chain": _chain,
    "U-net": _u_net,
    "branches": _branches,
    "tied": _tied,
    "nested": _nested,
}
BUDGETS = {"tight": 0.0, "middle": 0.35, "loose": 0.7}
"""How far the budget lies between the least that runs and all that is ever alive."""
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Visits of a recorded step that a block may have, so that it comes to a few blocks."""
LINKS = {"slow": 0.3, "even": 1.0, "fast": 4.0}
"""How often the link could move all that is ever alive while the step computes."""


@dataclass(frozen=True)
class Case:
    """A problem and where it is from."""

    name: str
    family: str
    budget: str
    link: str
    problem: Problem


def drawn(seed: int) -> Case:
    """Return the problem of a seed; shapes, budgets, links and phases alternate with it."""
    chance = random.Random(seed)
    shape = list(SHAPES)[seed % len(SHAPES)]
    budget = list(BUDGETS)[seed // len(SHAPES) % len(BUDGETS)]
    link = list(LINKS)[seed // (len(SHAPES) * len(BUDGETS)) % len(LINKS)]
    net = SHAPES[shape](chance)
    step = _step(net, chance, optimizer=len(net.weights) <= 4 and chance.random() < 0.7)
    problem = _squeezed(step, chance.uniform(0.8, 1.2) * LINKS[link], BUDGETS[budget], chance)
    return Case(f"drawn {seed}", shape, budget, link, problem)


def _squeezed(step: Problem, ratio: float, share: float, chance: random.Random) -> Problem:
    """Return ``step`` under a budget and on a link.

    Args:
        step: with room for everything.
        ratio: how often the link moves all that is ever alive while the step computes.
        share: of what lies between the least that runs and all that is ever alive.
        chance: decides what is in fast memory to begin with, and the bandwidths of both directions.
    """
    least, most = extent(step.uses, step.sizes)
    capacity = least + int(share * (most - least))
    bandwidth = ratio * most / step.compute_s
    skew = chance.choice((1.0, 1.0, 1.6))
    resident: set[int] = set()
    dirty: set[int] = set()
    if chance.random() < 0.5:
        left = capacity
        for life in step.lives:
            size = step.sizes[life.region]
            if not life.born and size <= left and chance.random() < 0.7:
                resident.add(life.region)
                left -= size
                if chance.random() < 0.3:
                    dirty.add(life.region)
    return replace(
        step,
        capacity=capacity,
        read_bps=bandwidth * skew,
        write_bps=bandwidth / skew,
        resident=frozenset(resident),
        dirty=frozenset(dirty),
    )


def _step(net: _Net, chance: random.Random, *, optimizer: bool) -> Problem:
    """Return the training step of ``net`` with room for everything."""
    sizes: list[int] = []

    def region(low: int, high: int) -> int:
        sizes.append(chance.randint(low, high))
        return len(sizes) - 1

    heavy = chance.choice((0.5, 1.0, 3.0))  # activations against parameters
    count = max(net.weights) + 1
    weight = [region(10, 60) for _ in range(count)]
    gradient = [len(sizes) + index for index in range(count)]
    sizes += [sizes[index] for index in weight]
    state = [len(sizes) + index for index in range(count)]
    sizes += [2 * sizes[index] for index in weight]
    layers = range(len(net.weights))
    out = [region(int(10 * heavy), int(50 * heavy)) for _ in layers]
    inner = [
        region(int(10 * heavy), int(90 * heavy)) if chance.random() < 0.8 else -1 for _ in layers
    ]
    scratch = [region(5, 30) if chance.random() < 0.4 else -1 for _ in layers]
    flows = [region(int(10 * heavy), int(50 * heavy)) for _ in layers]  # gradients of results
    readers = {layer: [n for n in layers if layer in net.reads[n]] for layer in layers}
    cost = [chance.uniform(0.3, 1.7) for _ in layers]
    uses: list[Use] = []
    for layer in layers:
        made = [r for r in (out[layer], inner[layer], scratch[layer]) if r >= 0]
        frees = (scratch[layer],) if scratch[layer] >= 0 else ()
        reads = (weight[net.weights[layer]], *(out[n] for n in net.reads[layer]))
        uses.append(Use((*reads, *made), tuple(made), frees, cost[layer]))
    backward = len(uses)
    begun: set[int] = set()
    flowing: set[int] = set()
    for layer in reversed(layers):
        own = net.weights[layer]
        regions = [weight[own], gradient[own], *(out[n] for n in net.reads[layer])]
        if inner[layer] >= 0:
            regions.append(inner[layer])
        creates = [] if own in begun else [gradient[own]]
        writes = [gradient[own]]
        begun.add(own)
        if layer not in flowing:  # the loss begins here
            creates.append(flows[layer])
            flowing.add(layer)
        regions.append(flows[layer])
        for source in net.reads[layer]:
            regions.append(flows[source])
            writes.append(flows[source])
            if source not in flowing:
                creates.append(flows[source])
                flowing.add(source)
        dead = [flows[layer], out[layer]] + ([inner[layer]] if inner[layer] >= 0 else [])
        if not readers[layer]:
            regions.append(out[layer])
        if not optimizer and own not in net.weights[:layer]:
            dead.append(gradient[own])
        named = tuple(dict.fromkeys(regions))
        # What is read last by the backward of its reader is freed there, at the latest here.
        uses.append(
            Use(named, tuple(creates), tuple(dead), 2 * cost[layer], tuple(dict.fromkeys(writes)))
        )
    if optimizer:
        order = list(range(count))
        if chance.random() < 0.5:
            order.reverse()
        uses += [
            Use(
                (weight[own], gradient[own], state[own]),
                frees=(gradient[own],),
                seconds=chance.uniform(0.05, 0.5),
                writes=(weight[own], state[own]),
            )
            for own in order
        ]
    total = sum(use.seconds for use in uses)
    uses = [replace(use, seconds=use.seconds * STEP_S / total) for use in uses]
    calls = [*net.blocks, *((f"layer {layer}", layer, layer + 1) for layer in layers)]
    return Problem(
        uses=tuple(uses),
        sizes=tuple(sizes),
        capacity=sum(sizes) * 2,
        read_bps=1.0,
        write_bps=1.0,
        again=recomputable(uses, sizes, calls, backward),
    )


def recorded(name: str) -> Step:
    """Return a step of a network as its visits: one of `NETWORKS` or of `ARCHITECTURES`.

    Operators take the seconds that their bytes would at a fixed rate, and not those recorded, so
    that it is the same step on every machine.
    """
    from dynoffload.experiments.architectures import ARCHITECTURES
    from dynoffload.experiments.idioms import trained

    zoo = name in NETWORKS
    trace = _of_the_zoo(name) if zoo else trained(ARCHITECTURES[name], 2)[-1]
    trace.operators = [
        operator._replace(
            seconds=_CALL_S + _BYTE_S * (operator.bytes_read + operator.bytes_written)
        )
        for operator in trace.operators
    ]
    return step_of(trace, resolve(trace)).at_visits()


def _of_the_zoo(name: str) -> Trace:
    import torch

    from dynoffload.profiler import Recorder

    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    shape: dict[str, Any] = (
        {"min_nodes": 4, "max_nodes": 9} if name == "tree" else {"rows": 1, "length": 16}
    )
    drawn_samples = samples(name, **shape)
    traces: list[Trace] = []
    with Recorder(model, optimizer, on_step=traces.append):
        for _ in range(2):
            model(*next(drawn_samples).args).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return traces[-1]


def read(name: str, step: Step, budget: str, link: str) -> Case:
    """Return the problem of a recorded step in execution blocks, with nothing resident at first.

    The blocks are those for a loose budget, as a program for the exact optimum has to be small.
    """
    least, most = step.extent()
    seconds = sum(use.seconds for use in step.uses)
    bandwidth = LINKS[link] * most / seconds
    roomy = step.on(least + int(BUDGETS["loose"] * (most - least)), bandwidth)
    blocks = step.fused(partition(roomy, step.backward, LENGTHS))
    least, most = blocks.extent()
    capacity = least + int(BUDGETS[budget] * (most - least))
    problem = blocks.on(capacity, bandwidth)
    return Case(f"{name} {budget} {link}", "recorded", budget, link, problem)
