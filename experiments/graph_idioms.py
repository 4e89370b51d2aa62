"""Idioms of a forward that has run, read from its autograd graph.

Nothing watches the operators as they run, so nothing changes in how they do: autograd numbers the
nodes of a thread in the order in which forward makes them, and a node is named after its operator.
Operators without a gradient, and those below a compiled or custom function, are not seen.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dynoffload.profiler.idioms import Idioms, idioms_of

MAX_NODES = 50_000
"""The most nodes of a graph that are read."""
_DEPTH = 4  # of dataclasses in each other that are looked into
_NODE = re.compile(r"([A-Z]\w*?)Backward\d+")
_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z0-9])(?=[A-Z][a-z])")


class GraphIdioms:
    """Counts the idioms of the blocks of one forward."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._blocks: list[Sequence[Hashable]] = []

    def begin(self, blocks: Sequence[Hashable]) -> None:
        """Record that ``blocks``, by number or path, run from now until others do."""
        self._starts.append(torch._C._autograd._get_sequence_nr())
        self._blocks.append(blocks)

    def count(self, output: Any) -> dict[Any, Idioms]:
        """Return the mean idiom counts of a call of each block, from the graph of ``output``."""
        totals: defaultdict[Any, Any] = defaultdict(lambda: np.zeros(len(Idioms._fields)))
        waiting: list[Any] = [_node_of(one) for one in _tensors(output, _DEPTH)]
        seen: set[Any] = {None}
        while waiting and len(seen) <= MAX_NODES:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            waiting += [after for after, _ in node.next_functions]
            place = bisect_right(self._starts, node._sequence_nr()) - 1
            counts = idioms_of_node(node.name())
            if place < 0 or not any(counts):
                continue
            blocks = self._blocks[place]
            for block in blocks:
                totals[block] += np.array(counts) / len(blocks)
        calls = Counter(block for blocks in self._blocks for block in blocks)
        return {
            block: Idioms(*np.ceil(total / calls[block]).astype(int).tolist())
            for block, total in totals.items()
        }


def _node_of(tensor: Tensor) -> Any:
    try:
        return tensor.grad_fn
    except RuntimeError:  # for some views that have none
        return None


def _tensors(output: Any, depth: int) -> Iterator[Tensor]:
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors([getattr(leaf, one.name, None) for one in fields(leaf)], depth - 1)


@cache
def idioms_of_node(name: str) -> Idioms:
    """Return the counts of a node's operator, by names such as ``"AddmmBackward0"``; all zero if it
    is not one of PyTorch's."""
    match = _NODE.fullmatch(name)
    base = _WORD.sub("_", match[1]).lower() if match else ""
    for operator in (base, f"_{base}") if base else ():
        packet = getattr(torch.ops.aten, operator, None)
        if packet is not None:
            return idioms_of(getattr(packet, packet.overloads()[0]))
    return Idioms()
