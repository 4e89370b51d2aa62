"""What a run was like, for people: the HTML page, the Perfetto trace, comparison tables.

Nothing here imports matplotlib, Jinja2 or rich before something is drawn or printed.
"""

from __future__ import annotations

from dynoffload.reporting.perfetto import write_perfetto
from dynoffload.reporting.report import ReportFiles, write_report, write_run
from dynoffload.reporting.tables import ComparisonRow, comparison_table

__all__ = [
    "ComparisonRow",
    "ReportFiles",
    "comparison_table",
    "write_perfetto",
    "write_report",
    "write_run",
]
