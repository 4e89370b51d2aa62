"""Train networks with dynamic control flow that are larger than fast memory.

    with dynoffload.offload(model, optimizer, budget="8GiB") as session:
        ...  # the training loop as it was

The names below are the public API; each is loaded at first use.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynoffload.version import __version__

_root = Path(__file__).resolve().parent
if not (_root / "profiler").exists() and (_root.parent / "profiler").is_dir():
    # An archive made without links: the subpackages are stored next to the package.
    __path__.append(str(_root.parent))

_NAMES = {
    "config": "OffloadConfig",
    "host_optimizer": "HostOptimizer",
    "pilot": "Pilot",
    "profiler": "profile",
    "runtime.checkpointing": "load_checkpoint save_checkpoint",
    "runtime.offload": "materialize offload",
    "runtime.session": "Session",
    "tiling.modules": "TiledEmbedding TiledLinear",
    "tiling.splitting": "tile untile whole_state_dict",
}
"""The public names of each module; all other public names are errors."""
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

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
    if name not in __all__:
        raise AttributeError(f"module 'dynoffload' has no attribute {name!r}")
    home = _HOMES.get(name, "errors")
    value = getattr(importlib.import_module(f"dynoffload.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
