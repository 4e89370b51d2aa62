"""A tree-based convolutional network: a window over every node and what hangs from it.

TBCNN (Mou et al., 2016, arXiv 1409.5718): layers of windows over syntax trees, each over a node and
its children, whose weights are mixed by where a child stands ("continuous binary tree", section
3.3). Leaves, which have no window, go through a matrix of their own, and a layer is called node by
node, so that what runs follows the tree. Every node is predicted, as by the Tree-LSTM; the paper
pools them into one vector.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dynoffload.datasets.trees import KINDS, Tree, trees
from dynoffload.experiments.zoo.building import Output, singly
from dynoffload.experiments.zoo.tree_lstm import described
from dynoffload.profiler.input_features import InputFeatures

PRESETS: dict[str, dict[str, int]] = {
    "tiny": {"hidden": 48},
    "small": {"hidden": 384, "layers": 3},
    "base": {"hidden": 1024, "layers": 4},
}
samples = singly(trees)


class Window(nn.Module):
    """One window: a node and its children (equation 3 of the paper)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.top = nn.Linear(hidden, hidden)
        self.left = nn.Linear(hidden, hidden, bias=False)
        self.right = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, children: Tensor) -> Tensor:
        """Return ``[1, hidden]`` for a node, ``[1, hidden]``, and its children ``[arity, hidden]``.

        The first child is all left and the last all right; an only child is half of each.
        """
        arity = len(children)
        right = torch.linspace(0, 1, arity, device=x.device, dtype=x.dtype)[:, None]
        if arity == 1:
            right = right + 0.5
        below = self.left(((1 - right) * children).sum(dim=0, keepdim=True))
        below = below + self.right((right * children).sum(dim=0, keepdim=True))
        return torch.tanh(self.top(x) + below)


class Layer(nn.Module):
    """Windows over all nodes of a tree."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.window = Window(hidden)
        self.leaf = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, children: tuple[tuple[int, ...], ...]) -> Tensor:
        """Return ``[nodes, hidden]`` for the same."""
        rows = x.split(1)  # type: ignore[no-untyped-call]
        return torch.cat(
            [
                self.window(row, x[list(below)]) if below else torch.tanh(self.leaf(row))
                for row, below in zip(rows, children, strict=True)
            ]
        )


class TreeCNN(nn.Module):
    """Says for every node what kind of node it is part of, from what is below it.

    Args:
        hidden: width of a node's features.
        layers: of windows; a node sees so many generations below it.
        kinds: how many kinds of nodes, and of labels.
    """

    def __init__(self, hidden: int, layers: int = 2, kinds: int = len(KINDS)) -> None:
        super().__init__()
        self.embedding = nn.Embedding(kinds, hidden)
        self.layers = nn.ModuleList(Layer(hidden) for _ in range(layers))
        self.head = nn.Linear(hidden, kinds)

    def forward(self, tree: Tree) -> Output:
        """Run every layer over the nodes, and predict each node's label."""
        x = self.embedding(tree.kinds)
        for layer in self.layers:
            x = x + layer(x, tree.children)
        logits: Tensor = self.head(x)
        return Output(F.cross_entropy(logits.float(), tree.labels), logits)

    def sample_features(self, tree: Tree) -> InputFeatures:
        """Describe a tree by its nodes in the order in which they are visited; see `described`."""
        return described(tree)
