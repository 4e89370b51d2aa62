"""Implementations of one MoE layer's experts, sharing weights.

transformers' own loop and its ``grouped_mm``, a reference with routed buffers in plain torch, and
`dynoffload.moe`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

import dynoffload.moe
from dynoffload.errors import ConfigError

OURS, ROUTED = "dynoffload", "routed buffers"
ACTIVATIONS = ("swiglu", "silu")

Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Layer:
    """The weights of a layer.

    Attributes:
        up: (E, p·h, d), p = 2 for SwiGLU.
        down: (E, d, h).
        activation: ``"swiglu"`` or ``"silu"``.
    """

    up: torch.nn.Parameter
    down: torch.nn.Parameter
    activation: str

    @property
    def parameters(self) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
        """`up` and `down`."""
        return self.up, self.down


def make_layer(
    experts: int, width: int, activation: str, dtype: torch.dtype, device: torch.device
) -> Layer:
    """Return weights initialized like `torch.nn.Linear`'s, h = 4·d."""
    parts, hidden = (2 if activation == "swiglu" else 1), 4 * width

    def drawn(rows: int, columns: int) -> torch.nn.Parameter:
        whole = torch.empty(experts, rows, columns, dtype=dtype, device=device)
        return torch.nn.Parameter(whole.uniform_(-(columns**-0.5), columns**-0.5))

    return Layer(drawn(parts * hidden, width), drawn(width, hidden), activation)


def ways_of(layer: Layer) -> dict[str, Way]:
    """Return name -> function of tokens (L, d), expert indices (L, k) and gate weights (L, k).

    Raises:
        ConfigError: transformers is not installed.
    """
    return {
        "eager": _transformers(layer, "eager"),
        "grouped_mm": _transformers(layer, "grouped_mm"),
        ROUTED: lambda tokens, chosen, gates: routed(layer, tokens, chosen, gates),
        OURS: lambda tokens, chosen, gates: _ours(layer, tokens, chosen, gates),
    }


def _ours(
    layer: Layer, tokens: torch.Tensor, chosen: torch.Tensor, gates: torch.Tensor
) -> torch.Tensor:
    activation = dynoffload.moe.SiLU() if layer.activation == "silu" else dynoffload.moe.SwiGLU()
    return dynoffload.moe.experts(
        tokens, chosen, gates, layer.up, layer.down, activation=activation
    )


def routed(
    layer: Layer, tokens: torch.Tensor, chosen: torch.Tensor, gates: torch.Tensor
) -> torch.Tensor:
    """Return the layer's output, computed on (L·k, d) token copies sorted by expert."""
    count, k = len(layer.up), chosen.shape[1]
    order = chosen.reshape(-1).argsort(stable=True)
    sizes = torch.bincount(chosen.reshape(-1), minlength=count).tolist()
    rows = tokens[order // k]
    up, down = layer.up.unbind(0), layer.down.unbind(0)
    first = torch.cat([F.linear(r, w) for r, w in zip(torch.split(rows, sizes), up, strict=True)])
    if layer.activation == "swiglu":
        a, b = first.chunk(2, -1)
        made = F.silu(a) * b
    else:
        made = F.silu(first)
    last = torch.cat([F.linear(r, w) for r, w in zip(torch.split(made, sizes), down, strict=True)])
    weighted = last * gates.reshape(-1)[order].unsqueeze(1)
    return weighted[order.argsort()].view(len(tokens), k, -1).sum(1)  # index_add needs no copy


def _transformers(layer: Layer, implementation: str) -> Way:
    try:
        from transformers import MixtralConfig, NemotronHConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts
        from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
    except ImportError as error:
        raise ConfigError(
            f"transformers' experts cannot be compared with ({error}): "
            "in a checkout of dynoffload, pip install '.[transformers]'"
        ) from error
    count, width, hidden = layer.down.shape
    module: Any
    with torch.device("meta"):
        if layer.activation == "swiglu":
            config: Any = MixtralConfig(
                hidden_size=width, intermediate_size=hidden, num_local_experts=count
            )
            module = MixtralExperts(config)
            module.gate_up_proj = layer.up
        else:
            config = NemotronHConfig(
                hidden_size=width,
                moe_intermediate_size=hidden,
                n_routed_experts=count,
                mlp_hidden_act="silu",
            )
            module = NemotronHExperts(config)
            module.up_proj = layer.up
    module.down_proj = layer.down
    config._experts_implementation = implementation
    return module  # type: ignore[no-any-return]
