"""Mixtures of experts without routed buffers, alone and in transformers.

What it is: `MoE`, a layer; `experts`, its computation over a router's choice; `route`, the index
structures that it goes by; and `register`, which offers transformers the same for the mixtures that
it has. transformers is imported only when `register` is called.
"""

from __future__ import annotations

from dynoffload.moe.activations import Activation, SiLU, SwiGLU, Traced
from dynoffload.moe.computation import experts
from dynoffload.moe.indices import route
from dynoffload.moe.layer import MoE, MoEOutput
from dynoffload.moe.registered import register
from dynoffload.moe.routing import Routing

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
