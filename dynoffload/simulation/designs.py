"""Four designs of remote memory for accelerators and two placements, after Heo et al. (2023).

It has the designs' rates, our own design of a pool shared by many devices, and the capacity that a
placement needs in local and remote memory. `movement` models when bytes move.

[Note: what local memory holds]  In addition to what a placement keeps there, each kind of data of
one layer has its own area, as large as the largest layer's, at fixed addresses and without reuse
between phases. These are: its weights, if they are remote; their gradient; the optimizer state and
gradient of its update; its activations and as much for their gradients; the gathered input of a
block and its gradient; tokens sent to and received for experts, with their gradients. The
embedding, its gradient, the logits and their gradient are always local.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dynoffload.simulation.moe_cluster import MoeShard
from dynoffload.simulation.roofline import ELEMENT, Accelerator, SharedLink

GB_PER_S = 1e9
DEVICES_PER_NODE = 4


def _design(name: str, remote: SharedLink, network_gb: float) -> Accelerator:
    return Accelerator(name, 2048e12, 4096 * GB_PER_S, remote, SharedLink(network_gb * GB_PER_S))


DESIGNS: dict[int, Accelerator] = {
    1: _design("memory per node", SharedLink(128 * GB_PER_S, DEVICES_PER_NODE), 900),
    2: _design("CXL memory per GPU", SharedLink(512 * GB_PER_S), 900),
    3: _design("integrated, network by CPU", SharedLink(900 * GB_PER_S), 512),
    4: _design("integrated, network by GPU", SharedLink(900 * GB_PER_S), 900),
}
"""Designs by their number in the paper."""


def pooled(sharers: int) -> Accelerator:
    """Return design 2 with one pool, as fast as four such memories, for ``sharers`` devices."""
    private = DESIGNS[2]
    rate = private.remote.bytes_per_s
    pool = SharedLink(4 * rate, sharers, rate)
    return replace(private, name=f"pool of 4 links for {sharers} GPUs", remote=pool)


@dataclass(frozen=True)
class Placement:
    """What is remote, in addition to optimizer state and gradients, which always are.

    Attributes:
        name: name of the strategy.
        weights: whether the layers' weights are remote.
        checkpoints: whether the layers' inputs, kept from forward to recomputation, are remote.
        activations: whether the activations that recomputation saves for backward are remote.
    """

    name: str
    weights: bool
    checkpoints: bool
    activations: bool


CONSERVATIVE = Placement("conservative", weights=False, checkpoints=False, activations=True)
AGGRESSIVE = Placement("aggressive", weights=True, checkpoints=True, activations=True)
STRATEGIES = (CONSERVATIVE, AGGRESSIVE)


def local_areas(shard: MoeShard, placement: Placement) -> dict[str, float]:
    """Return the bytes of local memory by purpose; see [Note: what local memory holds]."""
    layers, head = shard.layers, shard.head
    resident = {
        "embedding, its gradient, logits": 2 * ELEMENT * head.dense + 2 * shard.logits,
    }
    if not placement.weights:
        resident["weights"] = sum(ELEMENT * layer.parameters for layer in layers)
    if not placement.checkpoints:
        resident["checkpoints"] = len(layers) * shard.own
    areas = {
        "a layer's gradients": max(ELEMENT * layer.parameters for layer in layers),
        "a layer's optimizer state": max(shard.state_bytes(layer) for layer in layers),
        "a layer's activations": max(layer.saved for layer in layers),
        "gradients of a layer's activations": max(layer.saved for layer in layers),
        "a gathered input, its gradient": 2 * shard.gathered,
        "tokens to experts, their gradients": 2 * (shard.sent + shard.routed),
    }
    if placement.weights:
        areas["a layer's weights"] = max(ELEMENT * layer.parameters for layer in layers)
    if placement.checkpoints:
        areas["a layer's checkpoint"] = shard.own
    return resident | areas


def remote_areas(shard: MoeShard, placement: Placement) -> dict[str, float]:
    """Return a device's bytes of remote memory by purpose."""
    layers = shard.layers
    areas = {
        "optimizer state and gradients": sum(
            shard.state_bytes(layer) for layer in (*layers, shard.head)
        )
    }
    if placement.activations:
        areas["activations"] = sum(layer.saved for layer in layers)
    if placement.weights:
        areas["weights"] = sum(ELEMENT * layer.parameters for layer in layers)
    if placement.checkpoints:
        areas["checkpoints"] = len(layers) * shard.own
    return areas
