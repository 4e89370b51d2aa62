"""Random graphs: networks drawn node by node, and what happens to them between and within steps.

What it is: `graphs`, a strategy of `Plan`s, and `Graph`, the module that runs one. A node reads one
or two earlier results of shape ``[rows, 16]`` and gives one more. Fused experts, which are paged by
slices, are reached by indexing, through transformers' registry of implementations, and as a whole.
What it is not: a test. What happens in a day is told by days.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 16
EXPERTS = 4
INNER = 128  # a slice of a fused parameter takes 8 KiB, in half precision 4: whole pages


class Stop(Exception):
    """Raised in the middle of a forward or of a backward."""


class Scale(torch.autograd.Function):
    """A function that saves a parameter and its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.sigmoid()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        gate = weight.sigmoid()
        return gradient @ gate.t(), (x.t() @ gradient) * gate * (1 - gate)


class Fused(nn.Module):
    """Fused experts: those that are hit run on all rows, one after the other."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(EXPERTS, INNER, WIDTH))
        self.down = nn.Parameter(torch.zeros(EXPERTS, WIDTH, INNER))

    def forward(self, x: Tensor, hit: Sequence[int]) -> Tensor:
        """Return ``[rows, 16]`` for the same."""
        out = x * 0.5
        for number in hit:
            out = out + F.linear(F.linear(x, self.up[number]).tanh(), self.down[number])
        return out


@cache
def _registered() -> type[nn.Module]:
    """Return `Fused` as a class of transformers, whose eager loop is paged by parts."""
    from transformers.integrations.moe import use_experts_implementation

    class Registered(Fused):
        forward = Fused.forward

    registered: type[nn.Module] = use_experts_implementation(Registered)
    return registered


@dataclass(frozen=True)
class Node:
    """One operation: its kind, the results and the weights it uses, counted from the last."""

    kind: str
    read: tuple[int, int]
    weight: int


@dataclass(frozen=True)
class Plan:
    """A graph and its days.

    Attributes:
        nodes: in order.
        weights: how many matrices the nodes choose from.
        days: what is done in each step beside training.
    """

    nodes: Sequence[Node]
    weights: int
    days: Sequence[str]


KINDS = (
    "linear",
    "tied",
    "experts",
    "sometimes",
    "relu in place",
    "add",
    "multiply",
    "halves",
    "transposed",
    "function",
    "checkpoint",
    "reentrant",
    "dropout",
    "detached",
    "buffer",
    "norm",
    "softmax",
    "parameter view",
    "repeat",
    "indexed",
    "parts",
    "checkpointed parts",
    "fused whole",
)
FUSED = ("indexed", "parts", "checkpointed parts", "fused whole")
DAYS = (
    "plain",
    "plain",
    "two backwards",
    "retained",
    "evaluation",
    "state read",
    "state loaded",
    "gradients read",
    "weights moved",
    "error in forward",
    "error in backward",
    "no step",
    "gradient penalty",
    "zeroed in place",
    "clipped by norm",
    "clipped by value",
    "gradients kept",
    "gradients kept",
    "gradients dropped",
    "hooks give zeros",
    "hooks give parts",
)


@st.composite
def graphs(draw: st.DrawFn) -> Plan:
    """Draw a plan of up to a dozen nodes and five days."""
    weights = draw(st.integers(2, 8))
    node = st.builds(
        Node,
        st.sampled_from(KINDS),
        st.tuples(st.integers(0, 3), st.integers(0, 3)),
        st.integers(0, weights - 1),
    )
    nodes = draw(st.lists(node, min_size=2, max_size=12))
    return Plan(nodes, weights, draw(st.lists(st.sampled_from(DAYS), min_size=2, max_size=5)))


class Graph(nn.Module):
    """The network of a plan; `fail` makes its next forward or backward raise `Stop`."""

    def __init__(self, plan: Plan, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.plan = plan
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(plan.weights))
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.unused = nn.Parameter(torch.ones(40, WIDTH))
        kinds = {node.kind for node in plan.nodes}
        if kinds & {"indexed", "fused whole"}:
            self.indexed = Fused()
        if kinds & {"parts", "checkpointed parts"}:
            self.parts = _registered()(SimpleNamespace(_experts_implementation="eager"))
        self.fail = ""
        self.held: list[Tensor] = []
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[rows, 16]`` for the same."""
        results = [x * 1.0]
        for number, node in enumerate(self.plan.nodes):
            if self.fail == "forward" and number == len(self.plan.nodes) // 2:
                raise Stop
            a = results[-1 - node.read[0] % len(results)]
            b = results[-1 - node.read[1] % len(results)]
            results.append(self._node(node, a, b))
        out = results[-1]
        for result in results[-3:-1]:
            out = out + result
        if self.fail == "backward":
            middle = results[len(results) // 2]
            if middle.requires_grad:
                middle.register_hook(_stop)
        return out

    def _node(self, node: Node, a: Tensor, b: Tensor) -> Tensor:
        layer: Any = self.layers[node.weight]
        match node.kind:
            case "linear":
                return layer(a)
            case "tied":
                return F.linear(a, layer.weight.t())
            case "experts":
                out = torch.zeros_like(a)
                chosen = a.detach().sum(1).ge(0).long() + node.weight
                for index in chosen.unique().tolist():
                    rows = (chosen == index).nonzero()[:, 0]
                    expert = self.layers[index % len(self.layers)]
                    out = out.index_add(0, rows, expert(a[rows]).to(out.dtype))
                return out
            case "sometimes":
                return layer(a).tanh() if bool(a.detach().sum() > 0) else a * 0.5
            case "relu in place":
                return layer(a).relu_()
            case "add":
                return a + b
            case "multiply":
                return a.sigmoid() * b
            case "halves":
                left, right = layer(a).chunk(2, dim=1)
                return torch.cat([right.exp().clamp(max=2.0), left], dim=1)
            case "transposed":
                return layer(a.t().contiguous().t()[:, torch.arange(WIDTH - 1, -1, -1)])
            case "function":
                return Scale.apply(a, layer.weight)
            case "checkpoint":
                return checkpoint(lambda y: layer(y).tanh(), a, use_reentrant=False)
            case "reentrant":
                return checkpoint(lambda y: layer(y).tanh(), a, use_reentrant=True)
            case "dropout":
                return F.dropout(a, 0.3, self.training)
            case "detached":
                return a.detach() * layer.weight[0]
            case "buffer":
                with torch.no_grad():
                    self.mean.mul_(0.9).add_(a.detach().float().mean(0), alpha=0.1)
                return a - self.mean
            case "norm":
                return self.norm(a)
            case "softmax":
                return (a @ b.t()).softmax(-1) @ b
            case "parameter view":
                return a + layer.weight[2:10].reshape(-1)[5 : 5 + WIDTH]
            case "repeat":
                return a.repeat(6, 1).tanh()[: len(a)]
            case "indexed":
                return self.indexed(a, _hit(a, node))
            case "parts":
                return self.parts(a, _hit(a, node))
            case "checkpointed parts":
                return checkpoint(self.parts, a, _hit(a, node), use_reentrant=False)
            case "fused whole":
                return (
                    a + torch.bmm(a.expand(EXPERTS, *a.shape), self.indexed.down).sum(0)[:, :WIDTH]
                )
        raise AssertionError(node.kind)


def _hit(a: Tensor, node: Node) -> list[int]:
    """Return the experts that rows choose, none to two of them."""
    chosen = a.detach().sum(1).ge(0).long()
    return [(node.weight + n) % EXPERTS for n in chosen.unique().tolist()[: node.read[0]]]


def _stop(gradient: Tensor) -> None:
    raise Stop
