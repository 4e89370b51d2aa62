"""Mixtures of experts over several processes, in parts whose exchanges hide behind their experts.

Source: MPipeMoE (arXiv 2506.22175).
"""

from __future__ import annotations

from dynoffload.moe.parallel.data_parallel import clip_grad_norm_, keep_apart
from dynoffload.moe.parallel.layer import ExpertParallel
from dynoffload.planning.strategies import Strategy

__all__ = ["ExpertParallel", "Strategy", "clip_grad_norm_", "keep_apart"]
