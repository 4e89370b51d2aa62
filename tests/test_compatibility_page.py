"""docs/compatibility.md claims nothing without a test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")


def rows() -> list[list[str]]:
    """Return the cells of each row of the page's tables, headings left out."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| ") and "::" in line]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_each_line_names_a_test_that_exists() -> None:
    named = re.findall(r"`(tests/\w+\.py)::(\w+)`", PAGE)
    assert len(named) > 40
    for file, name in named:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        known = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in known, f"{file} has no {name}"


def test_each_row_ends_with_its_test() -> None:
    tables = [line for line in PAGE.splitlines() if line.startswith("| ")]
    heads = [line for line in tables if line.endswith("| test |")]
    assert len(rows()) + len(heads) == len(tables)
    for cells in rows():
        assert re.search(r"`tests/\w+\.py::\w+`", cells[-1]), cells
