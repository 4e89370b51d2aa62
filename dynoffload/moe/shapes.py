"""Whether the tensors of a mixture fit each other.

What it is: `check_shapes`, before anything is computed of them, as a matrix of another mixture
could be broadcast or leave experts out. What it is not: a check of a router's choice.
"""

from __future__ import annotations

import torch

from dynoffload.errors import ConfigError
from dynoffload.moe.activations import Activation
from dynoffload.moe.routing import Routing
from dynoffload.moe.slices import Sliced

_Weight = torch.Tensor | Sliced
Weights = tuple[_Weight, _Weight, _Weight | None, _Weight | None]
"""Up, down, and the biases of both."""


def check_shapes(
    tokens: torch.Tensor,
    routing: Routing,
    weights: Weights,
    activation: Activation,
    transposed: bool,
) -> None:
    """Refuse tensors that do not fit each other; what is no tensor is its maker's.

    Raises:
        ConfigError: naming the one that does not.
    """
    down = weights[1]
    if not isinstance(down, torch.Tensor):
        return
    count, width = routing.experts, tokens.shape[1]
    hidden = down.shape[1 if transposed else 2] if down.dim() == 3 else 0
    first = activation.parts * hidden
    matrices = (
        ((width, first), (hidden, width)) if transposed else ((first, width), (width, hidden))
    )
    for name, one, wanted in zip(
        ("up", "down", "up_bias", "down_bias"),
        weights,
        (*matrices, (first,), (width,)),
        strict=True,
    ):
        if isinstance(one, torch.Tensor) and one.shape != (count, *wanted):
            raise ConfigError(
                f"{name} is {tuple(one.shape)} and not {(count, *wanted)}, for {count} experts of "
                f"tokens {width} wide, with {hidden} columns between the products"
            )
