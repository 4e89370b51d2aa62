"""Recomputation in place of paging: `policy="dtr"`."""
