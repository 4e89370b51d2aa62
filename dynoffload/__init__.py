"""Train networks with dynamic control flow that are larger than fast memory."""

from __future__ import annotations

from pathlib import Path

__version__ = "0.1.0"

_root = Path(__file__).resolve().parent
if not (_root / "profiler").exists() and (_root.parent / "profiler").is_dir():
    # An archive made without links: the wings lie beside the package.
    __path__.append(str(_root.parent))
