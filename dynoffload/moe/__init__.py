"""Mixture-of-experts layers without routed buffers, standalone and for transformers.

`MoE` is a layer, `experts` its computation for given routing decisions, and `route` builds the
index structures of those decisions. `register` makes the same available to transformers' models.
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
