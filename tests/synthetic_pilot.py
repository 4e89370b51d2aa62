"""Samples with a known rule from elements to blocks, and a small recorded step.

The samples are of a network of two routed layers in which each token code has its experts, and of
a tree network with one cell block per arity.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from dynoffload.pilot.features import Example
from dynoffload.pilot.labels import Label
from dynoffload.planning.blocks import Block, Vocabulary
from dynoffload.planning.calls import summarize_calls
from dynoffload.profiler.idioms import Idioms
from dynoffload.profiler.input_features import InputFeatures
from dynoffload.profiler.recorder import Recorder
from dynoffload.profiler.trace import Trace


def block(index: int, path: str, variant: str = "", nbytes: int = 1024) -> Block:
    """Return a block of which only its name and size matter."""
    idioms = Idioms(0, 1, 0, 1, 2, 0)
    return Block(index, path, variant, (path,), nbytes, 64, idioms)


def label_of(trace: Trace) -> Label:
    """Return what a pilot learns from a trace without a file."""
    return Label(summarize_calls(trace), trace.sample, tuple(trace.hints), "")


def vocabulary(names: Sequence[tuple[str, str]], network: str = "n" * 64) -> Vocabulary:
    """Return a vocabulary of blocks named (path, variant)."""
    blocks = tuple(block(i, path, variant) for i, (path, variant) in enumerate(names))
    return Vocabulary(network, blocks, frozenset(path for path, variant in names if variant))


def routed(
    count: int,
    *,
    tokens: int = 6,
    experts: int = 12,
    layers: int = 2,
    codes: int = 40,
    noise: float = 0.0,
    seed: int = 0,
    route: int = 0,
) -> tuple[Vocabulary, list[Example]]:
    """Return samples of a routed network: a token's code and layer give its two experts.

    Args:
        count: samples.
        tokens: elements per sample.
        experts: per layer.
        layers: routed layers.
        codes: different tokens.
        noise: share of the choices that are made by chance instead.
        seed: of the samples.
        route: seed of the rule from codes to experts.
    """
    rule = np.random.default_rng(1000 + route).integers(experts, size=(layers, codes, 2))
    rng = np.random.default_rng(seed)
    names = [("embedding", "")]
    for layer in range(layers):
        names.append((f"layers.{layer}.attention", ""))
        names += [(f"layers.{layer}.experts.{expert}", "") for expert in range(experts)]
    names.append(("head", ""))
    number = {path: i for i, (path, _) in enumerate(names)}
    examples = []
    for step in range(count):
        elements = rng.integers(codes, size=tokens)
        order = [number["embedding"]]
        for layer in range(layers):
            order.append(number[f"layers.{layer}.attention"])
            chosen = rule[layer, elements].ravel()
            by_chance = rng.random(chosen.size) < noise
            chosen = np.where(by_chance, rng.integers(experts, size=chosen.size), chosen)
            order += [number[f"layers.{layer}.experts.{e}"] for e in np.unique(chosen).tolist()]
        order.append(number["head"])
        examples.append(Example(InputFeatures({}, elements), order, f"file{step % 10}"))
    return vocabulary(names), examples


def trees(count: int, *, seed: int = 0, largest: int = 60) -> tuple[Vocabulary, list[Example]]:
    """Return samples of a tree network: embedding, one cell per node by its arity, head."""
    rng = np.random.default_rng(seed)
    names = [("embedding", ""), ("head", ""), *(("cell", f"{arity}x8") for arity in range(5))]
    examples = []
    for step in range(count):
        nodes = int(rng.integers(3, largest))
        arity = rng.integers(0, 5, size=nodes)
        elements = np.stack([arity, rng.integers(9, size=nodes), rng.integers(9, size=nodes)], 1)
        order = [0, *(arity + 2).tolist(), 1]
        examples.append(
            Example(InputFeatures({"nodes": float(nodes)}, elements), order, f"f{step % 7}")
        )
    return vocabulary(names), examples


def recorded_step() -> Trace:
    """Return the trace of one step of two layers under AdamW."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    traces: list[Trace] = []
    with Recorder(model, optimizer, on_step=traces.append, source=lambda: "lib/a.py"):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return traces[0]
