"""The doctor: measures the machine's tiers and advises on budget and backend.

`measure_tiers` measures bandwidth, `examine` does everything.
"""

from __future__ import annotations

from dynoffload.doctor.moves import measure_moves
from dynoffload.doctor.system import System, inspect
from dynoffload.doctor.tiers import Measurement, Tiers, measure_tiers
from dynoffload.doctor.verdict import Advice, Examination, advise, examine

__all__ = [
    "Advice",
    "Examination",
    "Measurement",
    "System",
    "Tiers",
    "advise",
    "examine",
    "inspect",
    "measure_moves",
    "measure_tiers",
]
