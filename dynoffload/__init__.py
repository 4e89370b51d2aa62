"""Train networks with dynamic control flow that are larger than fast memory.

    with dynoffload.offload(model, optimizer, budget="8GiB") as session:
        ...  # the training loop as it was

What is named here is the public surface; it is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynoffload.version import __version__

_root = Path(__file__).resolve().parent
if not (_root / "profiler").exists() and (_root.parent / "profiler").is_dir():
    # An archive made without links: the wings lie beside the package.
    __path__.append(str(_root.parent))

_HOMES = {
    "offload": "dynoffload.runtime.offload",
    "materialize": "dynoffload.runtime.offload",
    "save_checkpoint": "dynoffload.runtime.checkpointing",
    "load_checkpoint": "dynoffload.runtime.checkpointing",
    "HostOptimizer": "dynoffload.host_optimizer",
    "Session": "dynoffload.runtime.session",
    "OffloadConfig": "dynoffload.config",
    "tile": "dynoffload.tiling.splitting",
    "untile": "dynoffload.tiling.splitting",
    "whole_state_dict": "dynoffload.tiling.splitting",
    "TiledLinear": "dynoffload.tiling.modules",
    "TiledEmbedding": "dynoffload.tiling.modules",
    "profile": "dynoffload.profiler",
    "Pilot": "dynoffload.pilot",
    "DynOffloadError": "dynoffload.errors",
    "ConfigError": "dynoffload.errors",
    "BudgetError": "dynoffload.errors",
    "SpillError": "dynoffload.errors",
    "CorruptionError": "dynoffload.errors",
    "StepLostError": "dynoffload.errors",
    "ThreadError": "dynoffload.errors",
    "CheckpointError": "dynoffload.errors",
    "TraceError": "dynoffload.errors",
    "PilotError": "dynoffload.errors",
    "RankError": "dynoffload.errors",
    "BackendError": "dynoffload.errors",
    "ClientError": "dynoffload.errors",
    "ExchangeError": "dynoffload.errors",
}

__all__ = [
    "BackendError",
    "BudgetError",
    "CheckpointError",
    "ClientError",
    "ConfigError",
    "CorruptionError",
    "DynOffloadError",
    "ExchangeError",
    "HostOptimizer",
    "OffloadConfig",
    "Pilot",
    "PilotError",
    "RankError",
    "Session",
    "SpillError",
    "StepLostError",
    "ThreadError",
    "TiledEmbedding",
    "TiledLinear",
    "TraceError",
    "__version__",
    "load_checkpoint",
    "materialize",
    "offload",
    "profile",
    "save_checkpoint",
    "tile",
    "untile",
    "whole_state_dict",
]

if TYPE_CHECKING:
    from dynoffload.config import OffloadConfig
    from dynoffload.errors import (
        BackendError,
        BudgetError,
        CheckpointError,
        ClientError,
        ConfigError,
        CorruptionError,
        DynOffloadError,
        ExchangeError,
        PilotError,
        RankError,
        SpillError,
        StepLostError,
        ThreadError,
        TraceError,
    )
    from dynoffload.host_optimizer import HostOptimizer
    from dynoffload.pilot import Pilot
    from dynoffload.profiler import profile
    from dynoffload.runtime.checkpointing import load_checkpoint, save_checkpoint
    from dynoffload.runtime.offload import materialize, offload
    from dynoffload.runtime.session import Session
    from dynoffload.tiling.modules import TiledEmbedding, TiledLinear
    from dynoffload.tiling.splitting import tile, untile, whole_state_dict


def __getattr__(name: str) -> Any:
    if name in ("moe", "host_optimizer"):
        return importlib.import_module(f"dynoffload.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'dynoffload' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
