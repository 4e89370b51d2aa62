"""Mixtures of experts without routed buffers, alone and in transformers.

`MoE` is a layer, `experts` its computation over a router's choice, `route` the index structures of
that choice. `register` offers transformers the same for its own mixtures.
"""

from __future__ import annotations

from dynoffload.moe.activations import Activation, SiLU, SwiGLU, Traced
from dynoffload.moe.computation import experts
from dynoffload.moe.indices import Routing, route
from dynoffload.moe.layer import MoE, MoEOutput
from dynoffload.moe.registered import register

__all__ = [
    "Activation",
    "MoE",
    "MoEOutput",
    "Routing",
    "SiLU",
    "SwiGLU",
    "Traced",
    "experts",
    "register",
    "route",
]
