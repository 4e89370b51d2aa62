"""Reports of a run: the HTML page, the Perfetto trace, comparison tables.

matplotlib, Jinja2 and rich are imported only when something is drawn or printed.
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
