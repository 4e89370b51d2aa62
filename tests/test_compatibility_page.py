"""docs/compatibility.md claims nothing without a test, and quotes no message that no code has."""

from __future__ import annotations

import ast
import re
from difflib import SequenceMatcher
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")

PHRASE = 20
"""Characters of a message that nobody has in common with another by chance."""


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


def test_each_quoted_message_stands_in_the_code() -> None:
    """Texts that a line break parts in the source are joined by the parser."""
    texts: list[str] = []
    for file in sorted((ROOT / "dynoffload").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    for message, _ in refusals():
        assert any(message in text for text in texts), message


def test_each_quoted_message_is_asserted_by_its_test() -> None:
    """By a phrase of it at least, in the test or in what of its own file the test uses."""
    for message, tests in refusals():
        told = [text for file, name in tests for text in texts_of(file, name)]
        assert any(is_phrase(text, message) for text in told), (message, tests)


def refusals() -> list[tuple[str, list[tuple[str, str]]]]:
    """Return each message of the rows of what is refused, with the files and names of its tests."""
    found = [
        (cells[2].strip("`"), re.findall(r"`(tests/\w+\.py)::(\w+)`", cells[3]))
        for cells in rows()
        if len(cells) == 4
    ]
    assert len(found) == PAGE[PAGE.index("## Refused") :].count("| `tests/")
    return found


def texts_of(file: str, name: str) -> list[str]:
    """Return the texts in a test, but for docstrings, and in what it names of its own file."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    known: dict[str, ast.stmt] = {}
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            known[statement.name] = statement
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            known.update((t.id, statement) for t in targets if isinstance(t, ast.Name))
    wanted, seen, texts = [name], set(), []
    while wanted:
        statement = known.pop(wanted.pop(), None)
        for node in () if statement is None else ast.walk(statement):
            if isinstance(node, ast.Expr):
                seen.add(node.value)  # a docstring, if it is a text
            elif isinstance(node, ast.Name):
                wanted.append(node.id)
            elif isinstance(node, ast.Constant) and node not in seen:
                texts.append(str(node.value))
    return texts


def is_phrase(text: str, message: str) -> bool:
    """Return whether ``message`` and a literal part of ``text``, maybe a pattern, have a phrase in
    common."""
    parts = re.split(r"\.[*+]|\[[^]]*\]|\\[dw]", text)
    literal = [re.sub(r"\\(.)", r"\1", part) for part in parts]
    common = (SequenceMatcher(None, part, message, autojunk=False) for part in literal)
    return max(c.find_longest_match().size for c in common) >= min(PHRASE, len(message))
