"""Expert-parallel mixture-of-experts layers that overlap exchanges with expert computation.

Batches are split into parts. Source: MPipeMoE (arXiv 2506.22175).
"""

from __future__ import annotations

from dynoffload.moe.parallel.data_parallel import clip_grad_norm_, keep_apart
from dynoffload.moe.parallel.layer import ExpertParallel
from dynoffload.moe.parallel.strategies import Strategy

__all__ = ["ExpertParallel", "Strategy", "clip_grad_norm_", "keep_apart"]
