"""The doctor: what this machine gives to training beyond memory, measured and said plainly.

What it is: `measure_tiers` for whoever needs bandwidth, `examine` for the whole picture. What it is
not: a benchmark of training.
"""

from __future__ import annotations

from dynoffload.doctor.moves import measure_moves
from dynoffload.doctor.system import System, inspect, probe_userfaultfd
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
    "probe_userfaultfd",
]
