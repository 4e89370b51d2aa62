"""A Child-Sum Tree-LSTM: one call of a cell per node of the sample's tree.

The network of Tai, Socher and Manning (2015, arXiv 1503.00075, equations 2 to 8) from the leaves
up, without Python recursion or batching. The shapes of a node's call depend on its arity. All nodes
share one cell or, in syntactically untied form, each uses one of several by its kind (after Socher
et al., 2013, "Parsing with Compositional Vector Grammars").
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dynoffload.datasets.trees import KINDS, Tree, trees
from dynoffload.experiments.zoo.building import Output, singly
from dynoffload.profiler.input_features import MAX_ELEMENTS, InputFeatures

PRESETS: dict[str, dict[str, int]] = {
    "tiny": {"embedding": 32, "hidden": 48},
    "tiny-untied": {"embedding": 32, "hidden": 32, "cells": 12},
    "small": {"embedding": 256, "hidden": 384},
    "base": {"embedding": 512, "hidden": 1024},
}
"""Sizes by name; in the ``untied`` one no tensor exceeds a twenty-fourth of the weights."""
samples = singly(trees)


class ChildSumCell(nn.Module):
    """One node's step: computes its state from its kind's vector and its children's states."""

    def __init__(self, embedding: int, hidden: int) -> None:
        super().__init__()
        self.input = nn.Linear(embedding, 4 * hidden)
        self.gates = nn.Linear(hidden, 3 * hidden, bias=False)
        self.forget = nn.Linear(hidden, hidden, bias=False)
        self.hidden = hidden

    def forward(self, x: Tensor, child_h: Tensor, child_c: Tensor) -> tuple[Tensor, Tensor]:
        """Return the node's ``h`` and ``c``, each ``[1, hidden]``.

        Args:
            x: the vector of the node's kind, ``[1, embedding]``.
            child_h: the children's ``h``, stacked, ``[arity, hidden]``.
            child_c: the children's ``c``, stacked, ``[arity, hidden]``.
        """
        from_input, from_input_forget = self.input(x).split((3 * self.hidden, self.hidden), dim=-1)
        gates = from_input + self.gates(child_h.sum(dim=0, keepdim=True))
        enter, leave, update = gates.chunk(3, dim=-1)
        forget = torch.sigmoid(from_input_forget + self.forget(child_h))
        kept = (forget * child_c).sum(dim=0, keepdim=True)
        c = torch.sigmoid(enter) * torch.tanh(update) + kept
        return torch.sigmoid(leave) * torch.tanh(c), c


class TreeLSTM(nn.Module):
    """Predicts for every node the kind of its parent, from its subtree.

    Args:
        embedding: width of a node kind's vector.
        hidden: width of a node's state.
        kinds: number of node kinds, which are also the labels.
        cells: number of cells, among which the kinds are divided; 1 ties the weights of all nodes.
    """

    def __init__(
        self, embedding: int, hidden: int, kinds: int = len(KINDS), cells: int = 1
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(kinds, embedding)
        made = [ChildSumCell(embedding, hidden) for _ in range(cells)]
        self.cell = made[0] if cells == 1 else nn.ModuleList(made)
        self.head = nn.Linear(hidden, kinds)
        self.hidden = hidden

    def forward(self, tree: Tree) -> Output:
        """Run the cell for each node, children first, and predict each node's label."""
        inputs = self.embedding(tree.kinds).split(1)
        no_child = inputs[0].new_zeros((0, self.hidden))
        states: list[tuple[Tensor, Tensor]] = []
        cells = list(self.cell) if isinstance(self.cell, nn.ModuleList) else [self.cell]
        for x, kind, children in zip(inputs, tree.kinds.tolist(), tree.children, strict=True):
            child_h = torch.cat([states[child][0] for child in children]) if children else no_child
            child_c = torch.cat([states[child][1] for child in children]) if children else no_child
            states.append(cells[kind % len(cells)](x, child_h, child_c))
        logits: Tensor = self.head(torch.cat([h for h, _ in states]))
        return Output(F.cross_entropy(logits.float(), tree.labels), logits)

    def sample_features(self, tree: Tree) -> InputFeatures:
        """Describe a tree by its nodes, in the order of the cell's calls.

        Returns:
            A sample whose elements are int64 ``[nodes, 3]``: arity, kind, parent's kind.
        """
        arity = np.fromiter(map(len, tree.children), dtype=np.int64, count=len(tree))
        columns = (arity, tree.kinds.cpu().numpy(), tree.labels.cpu().numpy())
        values = {
            "nodes": float(len(tree)),
            "leaves": float((arity == 0).sum()),
            "widest": float(arity.max()),
        }
        return InputFeatures(values=values, elements=np.stack(columns, axis=1)[:MAX_ELEMENTS])
