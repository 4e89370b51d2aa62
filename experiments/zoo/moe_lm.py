"""A decoder language model with routed experts: the tokens determine which experts run.

A network like Mixtral (Jiang et al., 2024, arXiv 2401.04088): pre-norm blocks of causal attention
with rotary positions and of top-k routed SwiGLU experts. Each expert is a module. Those that any
token chose are called one by one in ascending order, so the order of blocks differs by sample.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dynoffload.experiments.zoo.building import Output, chosen_by_any, texts
from dynoffload.profiler.input_features import MAX_ELEMENTS, InputFeatures
from dynoffload.profiler.routing import RoutingProbe

PRESETS: dict[str, dict[str, int]] = {
    "tiny": {"hidden": 64, "layers": 2, "heads": 4, "experts": 8, "width": 80},
    "small": {"hidden": 512, "layers": 3, "heads": 8, "experts": 8, "width": 1024},
    "base": {"hidden": 1024, "layers": 6, "heads": 16, "experts": 8, "width": 2048},
    "tiny-wide": {"hidden": 64, "layers": 2, "heads": 4, "experts": 64, "width": 10},
    "small-wide": {"hidden": 512, "layers": 3, "heads": 8, "experts": 64, "width": 128},
    "base-wide": {"hidden": 1024, "layers": 6, "heads": 16, "experts": 64, "width": 256},
}
"""Sizes by name; ``wide`` ones have as many parameters, in 64 experts per layer."""
samples = texts


class Rotary(nn.Module):
    """Rotation angles of rotary positions (Su et al., 2021, arXiv 2104.09864)."""

    frequencies: Tensor

    def __init__(self, head_width: int, base: float = 10_000.0) -> None:
        super().__init__()
        self.head_width = head_width
        self.base = base
        self.register_buffer("frequencies", torch.empty(head_width // 2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Compute the frequencies, which depend only on the width."""
        exponents = torch.arange(0, self.head_width, 2, device=self.frequencies.device)
        with torch.no_grad():
            self.frequencies.copy_(self.base ** (-exponents.float() / self.head_width))

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, each ``[length, head_width // 2]``."""
        places = torch.arange(length, device=self.frequencies.device, dtype=torch.float32)
        angles = torch.outer(places, self.frequencies)
        return angles.cos(), angles.sin()


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + half) of ``[rows, heads, length, head_width]`` by their angles."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        if hidden % (2 * heads):
            raise ValueError(
                f"hidden={hidden} must be a multiple of twice heads={heads}, "
                "as rotary positions turn pairs"
            )
        self.heads = heads
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.value = nn.Linear(hidden, hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return ``[rows, length, hidden]`` for an input of that shape."""
        rows, length, hidden = x.shape

        def split(projected: Tensor) -> Tensor:
            return projected.view(rows, length, self.heads, -1).transpose(1, 2)

        query = _turn(split(self.query(x)), cos, sin)
        key = _turn(split(self.key(x)), cos, sin)
        value = split(self.value(x))
        mixed = F.scaled_dot_product_attention(
            query.to(value.dtype), key.to(value.dtype), value, is_causal=True
        )
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(rows, length, hidden))
        return out


class Expert(nn.Module):
    """A SwiGLU feed-forward network (Shazeer, 2020, arXiv 2002.05202)."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, width, bias=False)
        self.up = nn.Linear(hidden, width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[tokens, hidden]`` for an input of that shape."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Routed(nn.Module):
    """Experts with a router that selects the ``top_k`` likeliest for each token."""

    def __init__(
        self, hidden: int, experts: int, top_k: int, expert: Callable[[], nn.Module]
    ) -> None:
        super().__init__()
        if top_k > experts:
            raise ValueError(f"top_k={top_k} must lie between 1 and experts={experts}")
        self.top_k = top_k
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList(expert() for _ in range(experts))

    def chosen(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Route ``x``, ``[tokens, hidden]``: return the selected experts' probabilities and their
        indices (each ``[tokens, top_k]``) and the balancing loss, a scalar."""
        chances = F.softmax(self.router(x), dim=-1, dtype=torch.float32)
        weights, chosen = chances.topk(self.top_k, dim=-1)
        load = torch.zeros_like(chances).scatter(1, chosen, 1.0).mean(dim=0) / self.top_k
        return weights, chosen, len(self.experts) * (load * chances.mean(dim=0)).sum()

    def predict(self, x: Tensor) -> Tensor:
        """Return each expert's estimated chance to run on ``x``, ``[tokens, hidden]``."""
        return chosen_by_any(F.linear(x, self.router.weight).float(), self.top_k)


class MoE(Routed):
    """SwiGLU experts; a token's output is the mean of its experts', weighted by probability."""

    def __init__(self, hidden: int, width: int, experts: int, top_k: int) -> None:
        super().__init__(hidden, experts, top_k, lambda: Expert(hidden, width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Run the experts that any token chose, in ascending order.

        Args:
            x: ``[tokens, hidden]``.

        Returns:
            The mixed outputs, ``[tokens, hidden]``, and the balancing loss, a scalar.
        """
        weights, chosen, balance = self.chosen(x)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        mixed = torch.zeros_like(x)
        for index in sorted(set(chosen.flatten().tolist())):
            token, place = torch.where(chosen == index)
            out = self.experts[index](x[token]) * weights[token, place, None]
            mixed.index_add_(0, token, out.to(mixed.dtype))
        return mixed, balance


class Layer(nn.Module):
    """Attention, then ``moe`` (experts or one feed-forward network), each after a norm and with a
    residual."""

    def __init__(self, hidden: int, heads: int, moe: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.moe_norm = nn.RMSNorm(hidden)
        self.moe = moe()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return ``[rows, length, hidden]``, the input's shape, and the experts' balancing loss."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out, balance = self.moe(self.moe_norm(x).flatten(0, 1)), None
        if isinstance(self.moe, Routed):
            out, balance = out
        return x + out.view_as(x), balance


class Decoder(nn.Module):
    """A language model with layers of a given kind.

    Args:
        hidden: width of the residual stream.
        layers: number of layers.
        heads: attention heads; divides ``hidden`` into even widths.
        layer: index -> new layer.
        vocabulary: number of different tokens; bytes by default.
        balance: weight of the layers' own losses.
    """

    def __init__(
        self,
        hidden: int,
        layers: int,
        heads: int,
        layer: Callable[[int], nn.Module],
        vocabulary: int = 256,
        balance: float = 0.01,
    ) -> None:
        super().__init__()
        self.vocabulary, self.balance = vocabulary, balance
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.rotary = Rotary(hidden // heads)
        self.layers = nn.ModuleList(layer(number) for number in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Output:
        """Predict each token's successor.

        Args:
            tokens: int64 ``[rows, length]``.
            targets: int64 ``[rows, length]``; without them there is no loss.
        """
        x, balances = self.run(self.embedding(tokens), *self.rotary(tokens.shape[1]))
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return Output(None, logits)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        if balances:
            loss = loss + self.balance * torch.stack(balances).mean()
        return Output(loss, logits)

    def run(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Run the layers on ``[rows, length, hidden]``; return their output and their losses."""
        balances = []
        for layer in self.layers:
            x, balance = layer(x, cos, sin)
            if balance is not None:
                balances.append(balance)
        return x, balances

    def sample_features(self, tokens: Tensor, targets: Tensor | None = None) -> InputFeatures:
        """Describe a sample by its tokens, each with its two predecessors; see `described`."""
        return described(tokens, self.vocabulary)

    def routing_probes(self) -> list[RoutingProbe]:
        """Return the layers' routers in order; each can be run on an earlier router's input."""
        return [
            RoutingProbe(
                f"layers.{number}.moe",
                tuple(f"layers.{number}.moe.experts.{e}" for e in range(len(layer.moe.experts))),
                layer.moe.predict,
            )
            for number, layer in enumerate(self.layers)
            if isinstance(layer, Layer) and isinstance(layer.moe, Routed)
        ]


class MoELM(Decoder):
    """The language model; see `Decoder`.

    Args:
        experts: per layer.
        width: hidden width of an expert.
        top_k: experts per token.
        tied: whether the head shares the embedding's weight.
        balance: weight of the load-balancing loss (Fedus et al., 2022, equation 4).
    """

    def __init__(
        self,
        hidden: int,
        layers: int,
        heads: int,
        experts: int,
        width: int,
        top_k: int = 2,
        vocabulary: int = 256,
        tied: bool = False,
        balance: float = 0.01,
    ) -> None:
        def layer(number: int) -> nn.Module:
            return Layer(hidden, heads, lambda: MoE(hidden, width, experts, top_k))

        super().__init__(hidden, layers, heads, layer, vocabulary, balance)
        if tied:
            self.head.weight = self.embedding.weight


def described(tokens: Tensor, vocabulary: int) -> InputFeatures:
    """Describe texts by their tokens, each with its two predecessors.

    Routing depends on a token and its near context, so this is what a pilot can know before the
    first operator. A missing predecessor is coded as ``vocabulary``.

    Args:
        tokens: int64 ``[rows, length]``.
        vocabulary: number of different tokens.

    Returns:
        A sample whose elements are int64 ``[rows * length, 3]``: token, its predecessor, and the
        predecessor of that.
    """
    codes = tokens.detach().cpu().numpy()
    rows, length = codes.shape
    elements = np.full((rows, length, 3), vocabulary, dtype=np.int64)
    for back in range(min(3, length)):
        elements[:, back:, back] = codes[:, : length - back]
    values = {"rows": float(rows), "length": float(length), "tokens": float(rows * length)}
    return InputFeatures(values=values, elements=elements.reshape(-1, 3)[:MAX_ELEMENTS])
