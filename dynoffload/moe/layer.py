"""`MoE`: a router, experts without routed buffers, and an optional expert shared by all tokens.

The layer replaces a feed-forward network. Routing is by token choice, k of E, and dropless: there
is no capacity limit, and every token gets its k experts.

Sources: softmax over all experts, then the k largest (Shazeer et al., arXiv 1701.06538), with gates
optionally scaled to a sum of 1 (Mixtral, arXiv 2401.04088); load-balancing loss (Fedus et al.,
arXiv 2101.03961, equation 4); router z-loss (Zoph et al., arXiv 2202.08906, equation 5); a bias on
the choice alone, which balances without a loss (Wang et al., arXiv 2408.15664).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Self

import torch
from torch import nn

from dynoffload.errors import ConfigError
from dynoffload.moe.activations import Activation, SiLU, SwiGLU
from dynoffload.moe.computation import experts as run_experts
from dynoffload.moe.indices import Routing, route
from dynoffload.runtime.experts.parts import stand_ins

_ACTIVATIONS: dict[str, type[Activation]] = {"swiglu": SwiGLU, "silu": SiLU}


class MoEOutput(NamedTuple):
    """The result of a layer.

    Attributes:
        hidden: of the input's shape.
        balance: the load-balancing loss, a scalar; 1 if experts are used equally.
        z: the router's z-loss, a scalar.
        routing: of the tokens.
    """

    hidden: torch.Tensor
    balance: torch.Tensor
    z: torch.Tensor
    routing: Routing


class MoE(nn.Module):
    """A mixture of experts.

    Args:
        width: d, of tokens.
        hidden: h, of an expert.
        experts: E.
        k: number of experts per token.
        activation: ``"swiglu"`` or ``"silu"``.
        shared: hidden width of an additional expert for every token; 0 for none.
        bias: whether experts have biases.
        normalize: whether gates of a token are scaled to a sum of 1; by default if k > 1, since
            with one expert the gate would be 1, and the result would give the router no gradient.
        device: of the parameters.
        dtype: of the parameters; the router computes in float32 at least.
        held: number of experts whose matrices this layer has; all by default. It is for layers
            whose other experts are elsewhere, which override `mix`.

    Attributes:
        experts: E.
        up: (held, p·h, d), p = 2 for SwiGLU: gate, then up.
        down: (held, d, h).
        router: (E, d).
        choice_bias: (E,), added to the router's scores for choosing experts, but not to gates; it
            has no gradient. `balance` updates it.

    Raises:
        ConfigError: a size or option is invalid.
    """

    choice_bias: torch.Tensor
    shared_up: nn.Parameter | None
    shared_down: nn.Parameter | None
    up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    asks_for_parts = True  # so that a session pages the matrices by expert

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        k: int = 2,
        *,
        activation: str = "swiglu",
        shared: int = 0,
        bias: bool = False,
        normalize: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        held: int | None = None,
    ) -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            known = ", ".join(map(repr, _ACTIVATIONS))
            raise ConfigError(f"activation={activation!r} is not one of {known}")
        if not 1 <= k <= experts:
            raise ConfigError(f"k={k} is not from 1 to experts={experts}")
        if min(width, hidden) < 1 or shared < 0:
            raise ConfigError(f"width={width}, hidden={hidden} and shared={shared} must be sizes")
        self.width, self.hidden, self.k = width, hidden, k
        self.normalize = k > 1 if normalize is None else normalize
        self.experts = experts
        held = experts if held is None else held
        self.activation: Activation = _ACTIVATIONS[activation]()
        parts = self.activation.parts

        def made(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.router = made(experts, width)
        self.up, self.down = made(held, parts * hidden, width), made(held, width, hidden)
        self.up_bias = made(held, parts * hidden) if bias else None
        self.down_bias = made(held, width) if bias else None
        self.shared_up = made(1, parts * shared, width) if shared else None
        self.shared_down = made(1, width, shared) if shared else None
        bias_on_choice = torch.empty(experts, device=device, dtype=torch.float32)
        self.register_buffer("choice_bias", bias_on_choice)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights, as `torch.nn.Linear` does; biases become zero."""
        for weight in (self.router, self.up, self.down, self.shared_up, self.shared_down):
            if weight is not None:
                bound = 1 / math.sqrt(weight.shape[-1])
                nn.init.uniform_(weight, -bound, bound)
        for bias in (self.up_bias, self.down_bias):
            if bias is not None:
                nn.init.zeros_(bias)
        nn.init.zeros_(self.choice_bias)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Convert and move as in `nn.Module`, but keep ``choice_bias`` in float32, since fewer bits
        would lose its small updates."""
        kept = self.choice_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.choice_bias.dtype != kept.dtype:
            self.choice_bias = kept.to(self.choice_bias.device)
        return self

    def extra_repr(self) -> str:
        """See `torch.nn.Module.extra_repr`."""
        kind = type(self.activation).__name__
        return f"{self.width}, {self.hidden}, experts={self.experts}, k={self.k}, {kind}"

    def forward(self, hidden: torch.Tensor) -> MoEOutput:
        """Return the layer's result and the router's losses.

        Args:
            hidden: (..., d).

        Raises:
            ConfigError: another width, or tokens on the meta device.
        """
        if hidden.shape[-1] != self.width:
            raise ConfigError(
                f"tokens are {hidden.shape[-1]} wide, and this layer takes {self.width}"
            )
        if hidden.is_meta:
            raise ConfigError(
                "tokens on the meta device choose no experts: give this layer real ones"
            )
        tokens = hidden.reshape(-1, self.width)
        exact = torch.promote_types(tokens.dtype, torch.float32)
        with torch.autocast(tokens.device.type, enabled=False):
            logits = nn.functional.linear(tokens.to(exact), self.router.to(exact))
        scores = logits.softmax(-1)
        chosen = (scores.detach() + self.choice_bias).topk(self.k, -1).indices
        gates = scores.gather(1, chosen)
        if self.normalize:
            gates = gates / gates.sum(-1, keepdim=True)
        routing = route(chosen, self.experts)
        out = self.mix(tokens, routing, gates)
        if self.shared_up is not None and self.shared_down is not None:
            everyone = tokens.new_zeros(len(tokens), 1, dtype=torch.int64)
            ones = tokens.new_ones(len(tokens), 1)
            out = out + run_experts(
                tokens, everyone, ones, self.shared_up, self.shared_down, activation=self.activation
            )
        share = torch.bincount(chosen.reshape(-1), minlength=self.experts) / max(chosen.numel(), 1)
        length = max(len(tokens), 1)  # without tokens the losses are 0
        balance = self.experts * (share * (scores.sum(0) / length)).sum()
        z = logits.logsumexp(-1).square().sum() / length
        return MoEOutput(out.view_as(hidden), balance, z, routing)

    def mix(self, tokens: torch.Tensor, routing: Routing, gates: torch.Tensor) -> torch.Tensor:
        """Return the sum of each token's experts, weighted by their gates.

        Args:
            tokens: (L, d).
            routing: of the tokens, to all E experts.
            gates: (L, k).
        """
        paged = stand_ins(self)
        return run_experts(
            tokens,
            routing,
            gates,
            paged.get("up", self.up),
            paged.get("down", self.down),
            up_bias=self.up_bias,
            down_bias=self.down_bias,
            activation=self.activation,
        )

    @torch.no_grad()
    def balance(self, routing: Routing, rate: float = 1e-3) -> None:
        """Raise the choice bias of experts with fewer tokens than average, and lower the others'.

        Args:
            routing: of the completed step.
            rate: size of each change.
        """
        loads = self.loads(routing)
        self.choice_bias += rate * (loads.mean() - loads).sign()

    def loads(self, routing: Routing) -> torch.Tensor:
        """Return how many tokens each expert had, (E,)."""
        return torch.tensor(routing.starts, device=self.choice_bias.device).diff().double()
