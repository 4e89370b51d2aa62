"""Which bytes of a training step lie in which tier, and how many they are.

What it is: the two strategies of Heo et al. (2023), and the capacity that a placement needs in
local and remote memory. What it is not: when bytes move (`movement`).

[Note: what local memory holds]  Besides what a placement keeps there, each kind of what one layer
needs has an area of its own, as large as the largest layer's, at fixed addresses and without reuse
between phases: its weights if they come from remote memory, their gradient as backward makes it,
the optimizer state and gradient that its update reads and writes, its activations and as much for
their gradients, the gathered input of a block and its gradient, and tokens sent to experts and
received for them, with their gradients. The embedding, its gradient, the logits and their gradient
are always there.
"""

from __future__ import annotations

from dataclasses import dataclass

from dynoffload.simulation.moe_cluster import MoeShard


@dataclass(frozen=True)
class Placement:
    """What is remote besides optimizer state and gradients, which always are.

    Attributes:
        name: of the strategy.
        weights: of the layers.
        checkpoints: the inputs of layers, kept from forward to recomputation.
        activations: what recomputation saves for backward.
    """

    name: str
    weights: bool
    checkpoints: bool
    activations: bool


CONSERVATIVE = Placement("conservative", weights=False, checkpoints=False, activations=True)
AGGRESSIVE = Placement("aggressive", weights=True, checkpoints=True, activations=True)
STRATEGIES = (CONSERVATIVE, AGGRESSIVE)


def local_areas(shard: MoeShard, placement: Placement) -> dict[str, float]:
    """Return the bytes of local memory by what they hold; see [Note: what local memory holds]."""
    element, layers, head = shard.precision.element, shard.layers, shard.head
    resident = {
        "embedding, its gradient, logits": 2 * element * head.dense + 2 * shard.logits,
    }
    if not placement.weights:
        resident["weights"] = sum(element * layer.parameters for layer in layers)
    if not placement.checkpoints:
        resident["checkpoints"] = len(layers) * shard.own
    areas = {
        "a layer's gradients": max(element * layer.parameters for layer in layers),
        "a layer's optimizer state": max(shard.state_bytes(layer) for layer in layers),
        "a layer's activations": max(layer.saved for layer in layers),
        "gradients of a layer's activations": max(layer.saved for layer in layers),
        "a gathered input, its gradient": 2 * shard.gathered,
        "tokens to experts, their gradients": 2 * (shard.sent + shard.routed),
    }
    if placement.weights:
        areas["a layer's weights"] = max(element * layer.parameters for layer in layers)
    if placement.checkpoints:
        areas["a layer's checkpoint"] = shard.own
    return resident | areas


def remote_areas(shard: MoeShard, placement: Placement) -> dict[str, float]:
    """Return a device's bytes of remote memory by what they hold."""
    layers = shard.layers
    areas = {
        "optimizer state and gradients": sum(
            shard.state_bytes(layer) for layer in (*layers, shard.head)
        )
    }
    if placement.activations:
        areas["activations"] = sum(layer.saved for layer in layers)
    if placement.weights:
        areas["weights"] = sum(shard.precision.element * layer.parameters for layer in layers)
    if placement.checkpoints:
        areas["checkpoints"] = len(layers) * shard.own
    return areas
