"""Syntax trees: post-order, labels, every definition once, determinism, errors."""

from __future__ import annotations

import ast
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynoffload.datasets.sources import MIN_BYTES, DataError, SourceFile, source_files
from dynoffload.datasets.trees import KINDS, Tree, parse, trees

SOURCE = """
class Box:
    def add(self, other):
        return self.size + other

    async def wait(self):
        def inner():
            pass
        await inner()
"""


def _parse(folder: Path, text: str) -> list[Tree]:
    path = folder / "sample.py"
    path.write_text(text)
    return parse(SourceFile("sample.py", path, len(text)))


def _names(tree: Tree, numbers: torch.Tensor) -> list[str]:
    return [KINDS[number] for number in numbers.tolist()]


def test_kinds_are_named_once_and_cover_this_python() -> None:
    assert len(set(KINDS)) == len(KINDS)
    unknown = {
        type(node).__name__
        for source in source_files("held-out")
        for node in ast.walk(ast.parse(source.read()))
        if not isinstance(node, ast.expr_context) and type(node).__name__ not in KINDS
    }
    assert unknown == set()


def test_every_definition_is_a_tree_in_source_order(tmp_path: Path) -> None:
    found = _parse(tmp_path, SOURCE)
    assert [tree.name for tree in found] == ["Box", "Box.add", "Box.wait", "Box.wait.inner"]
    assert {tree.source for tree in found} == {"sample.py"}
    roots = [KINDS[int(tree.kinds[-1])] for tree in found]
    assert roots == ["ClassDef", "FunctionDef", "AsyncFunctionDef", "FunctionDef"]
    scopes = [KINDS[int(tree.labels[-1])] for tree in found]
    assert scopes == ["Module", "ClassDef", "ClassDef", "AsyncFunctionDef"]


def test_nodes_are_in_post_order_with_their_parents_as_labels(tmp_path: Path) -> None:
    (tree,) = _parse(tmp_path, "def f(a):\n    return a + 1\n")
    kinds = ["arg", "arguments", "Name", "Add", "Constant", "BinOp", "Return", "FunctionDef"]
    assert _names(tree, tree.kinds) == kinds
    parents = ["arguments", "FunctionDef", "BinOp", "BinOp", "BinOp", "Return", "FunctionDef"]
    assert _names(tree, tree.labels) == [*parents, "Module"]
    assert tree.children == ((), (0,), (), (), (), (2, 3, 4), (5,), (1, 6))


@settings(deadline=None, max_examples=30)  # the first draw from a file parses it
@given(seed=st.integers(0, 2**32))
def test_trees_hold_together(seed: int) -> None:
    tree = next(trees("train", seed=seed, min_nodes=8, max_nodes=64))
    assert 8 <= len(tree) <= 64
    assert tree.kinds.shape == tree.labels.shape == (len(tree),)
    below = [child for children in tree.children for child in children]
    assert sorted(below) == list(range(len(tree) - 1))
    for node, children in enumerate(tree.children):
        assert list(children) == sorted(children)
        assert all(child < node for child in children)
        assert all(tree.labels[child] == tree.kinds[node] for child in children)


def test_a_deep_tree_needs_no_recursion(tmp_path: Path) -> None:
    (tree,) = _parse(tmp_path, "def f(a):\n    return " + "a." * 600 + "a\n")
    assert len(tree) == 605


def test_the_seed_alone_decides_and_the_split_holds() -> None:
    def draw(seed: int) -> list[str]:
        return [f"{tree.source}:{tree.name}" for tree in islice(trees(seed=seed), 6)]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    held_out = {source.name for source in source_files("held-out")}
    assert {tree.source for tree in islice(trees("held-out"), 6)} <= held_out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def broken(:\n", r"file\d\d\.py is no Python source"),
        ("def f(): pass\n", "widen the bounds"),
    ],
)
def test_files_that_give_no_tree_are_named(tmp_path: Path, text: str, said: str) -> None:
    for index in range(20):
        (tmp_path / f"file{index:02d}.py").write_text(text + "#" * MIN_BYTES)
    with pytest.raises(DataError, match=said):
        next(trees(root=tmp_path, min_nodes=100))
