"""Reports of a run: the HTML page and the Perfetto trace.

matplotlib and Jinja2 are imported only when something is drawn.
"""

from __future__ import annotations

from dynoffload.reporting.perfetto import write_perfetto
from dynoffload.reporting.report import ReportFiles, write_report, write_run

__all__ = ["ReportFiles", "write_perfetto", "write_report", "write_run"]
