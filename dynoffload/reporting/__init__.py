"""What a run was like, for people: the HTML page, the Perfetto trace, comparison tables.

What it is: everything that reads a `RunLog`. What it is not: measuring, or steering. Nothing here
imports matplotlib, Jinja2 or rich before something is drawn or printed.
"""

from __future__ import annotations

from dynoffload.reporting.perfetto import write_perfetto
from dynoffload.reporting.report import ReportFiles, write_report, write_run
from dynoffload.reporting.tables import Comparison, ComparisonRow, comparison_table

__all__ = [
    "Comparison",
    "ComparisonRow",
    "ReportFiles",
    "comparison_table",
    "write_perfetto",
    "write_report",
    "write_run",
]
