"""Data that ships with Python: the same for the same seed, apart by split, and of its kind."""

from __future__ import annotations

import ast
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dynoffload.datasets import proteins, statements
from dynoffload.datasets.images import digits
from dynoffload.datasets.proteins import BINS, GAP, LONGEST, MASK, TOKENS, alignments, family
from dynoffload.datasets.sources import (
    MAX_BYTES,
    MIN_BYTES,
    DataError,
    SourceFile,
    Split,
    source_files,
)
from dynoffload.datasets.text import batches
from dynoffload.datasets.trees import KINDS, Tree, parse, trees

Make = Callable[..., Any]
EVERY: list[Make] = [batches, trees, statements.statements, digits, alignments]


def _library(folder: Path, text: str = "") -> Path:
    for index in range(40):
        (folder / f"file{index:02d}.py").write_text(text + "#" * MIN_BYTES)
    return folder


@pytest.mark.parametrize("make", EVERY)
def test_the_seed_alone_decides(make: Make) -> None:
    def draw(seed: int) -> list[list[Any]]:
        found = [vars(sample).values() for sample in islice(make(seed=seed), 4)]
        return [[x.tolist() if hasattr(x, "tolist") else x for x in each] for each in found]

    assert draw(5) == draw(5)
    assert draw(5) != draw(6)


@pytest.mark.parametrize("make", [batches, trees, statements.statements, digits])
def test_splits_share_no_source(make: Make) -> None:
    trained, aside = (
        {one.source for one in islice(make(split), 30)} for split in ("train", "held-out")
    )
    assert not trained & aside


def test_the_split_is_by_file_and_complete() -> None:
    train = source_files("train")
    held_out = source_files(Split.HELD_OUT)
    names = [source.name for source in train]
    assert names == sorted(names)
    assert not {source.name for source in held_out} & set(names)
    assert 0.1 < len(held_out) / (len(held_out) + len(train)) < 0.3
    assert all(MIN_BYTES <= source.nbytes <= MAX_BYTES for source in train)
    assert not any("test" in name.split("/")[:-1] for name in names)


@pytest.mark.parametrize(
    ("make", "arguments", "said"),
    [
        (batches, {"rows": 0}, "at least one row of one token"),
        (batches, {"length": 0}, "at least one row of one token"),
        (trees, {"min_nodes": 9, "max_nodes": 8}, "do not exist"),
        (statements.statements, {"min_bytes": 9, "max_bytes": 8}, "do not exist"),
        (digits, {"rows": 0}, "at least one image"),
        (alignments, {"min_depth": 9, "max_depth": 4}, "9 to 4 sequences"),
        (alignments, {"max_length": 4096}, "16 to 4096 residues"),
        (alignments, {"rows": 0}, "rows=0"),
        (alignments, {"split": "test"}, "'test'"),
        (lambda: family(256), {}, "no family 256"),
    ],
)
def test_what_cannot_be_drawn_is_refused_at_the_call(
    make: Make, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        make(**arguments)


@pytest.mark.parametrize(
    ("make", "text", "said"),
    [
        (trees, "def broken(:\n", r"file\d\d\.py is no Python source"),
        (trees, "def f(): pass\n", "widen the bounds"),
        (statements.statements, "def broken(:\n", r"file\d\d\.py is no Python source"),
    ],
)
def test_files_that_give_nothing_are_named(
    tmp_path: Path, make: Make, text: str, said: str
) -> None:
    with pytest.raises(DataError, match=said):
        next(make(root=_library(tmp_path, text)))


def test_a_folder_without_sources_and_files_that_changed_are_named(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text("pass\n")
    with pytest.raises(DataError, match=str(tmp_path)):
        batches(root=tmp_path)
    library = tmp_path / "library"
    library.mkdir()
    stream = batches(length=16, root=_library(library))
    for path in library.glob("*.py"):
        path.write_text("pass\n")
    with pytest.raises(DataError, match=r"file\d\d\.py shrank from \d+ to 5 bytes"):
        next(stream)
    stream = batches(length=16, root=_library(library))
    for path in library.glob("*.py"):
        path.unlink()
    with pytest.raises(DataError, match=r"cannot read the source file .*file\d\d\.py"):
        next(stream)


def test_targets_are_the_next_tokens_of_the_named_file() -> None:
    contents = {source.name: source.read() for source in source_files("train")}
    for batch in islice(batches("train", rows=3, length=64, seed=1), 5):
        assert batch.tokens.shape == batch.targets.shape == (3, 64)
        assert batch.tokens.dtype == batch.targets.dtype == torch.int64
        assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
        for row, after in zip(batch.tokens, batch.targets, strict=True):
            assert bytes([*row.tolist(), after[-1].item()]) in contents[batch.source]


def test_digits_are_images_of_all_classes() -> None:
    first = next(digits(rows=3, seed=4))
    assert first.images.shape == (3, 1, 8, 8)
    assert 0 <= float(first.images.min()) <= float(first.images.max()) <= 1
    assert len({int(one.labels) for one in islice(digits(), 100)}) == 10


def test_statements_are_whole_and_of_their_kind() -> None:
    for one in islice(statements.statements(max_bytes=80), 20):
        text = bytes(one.tokens.tolist()).decode()
        inside = "\n   ".join(["def f():\n x = 0\n def g():\n  while True:", *text.split("\n")])
        function: Any = ast.parse(inside).body[0]  # where return, break and nonlocal may stand
        (parsed,) = function.body[1].body[0].body
        assert type(parsed).__name__ == statements.KINDS[int(one.label)]


# Syntax trees -------------------------------------------------------------------------------------


def _parse(folder: Path, text: str) -> list[Tree]:
    path = folder / "sample.py"
    path.write_text(text)
    return parse(SourceFile("sample.py", path, len(text)))


def _names(numbers: torch.Tensor) -> list[str]:
    return [KINDS[number] for number in numbers.tolist()]


def test_kinds_are_named_once_and_cover_this_python() -> None:
    assert len(set(KINDS)) == len(KINDS)
    unknown = {
        type(node).__name__
        for source in source_files("held-out")[::5]
        for node in ast.walk(ast.parse(source.read()))
        if not isinstance(node, ast.expr_context) and type(node).__name__ not in KINDS
    }
    assert unknown == set()


def test_every_definition_is_a_tree_in_source_order(tmp_path: Path) -> None:
    found = _parse(
        tmp_path,
        """
class Box:
    def add(self, other):
        return self.size + other

    async def wait(self):
        def inner():
            pass
        await inner()
""",
    )
    assert [tree.name for tree in found] == ["Box", "Box.add", "Box.wait", "Box.wait.inner"]
    roots = [_names(tree.kinds)[-1] for tree in found]
    assert roots == ["ClassDef", "FunctionDef", "AsyncFunctionDef", "FunctionDef"]
    scopes = [_names(tree.labels)[-1] for tree in found]
    assert scopes == ["Module", "ClassDef", "ClassDef", "AsyncFunctionDef"]


def test_nodes_are_in_post_order_with_their_parents_as_labels(tmp_path: Path) -> None:
    (tree,) = _parse(tmp_path, "def f(a):\n    return a + 1\n")
    kinds = ["arg", "arguments", "Name", "Add", "Constant", "BinOp", "Return", "FunctionDef"]
    assert _names(tree.kinds) == kinds
    parents = ["arguments", "FunctionDef", "BinOp", "BinOp", "BinOp", "Return", "FunctionDef"]
    assert _names(tree.labels) == [*parents, "Module"]
    assert tree.children == ((), (0,), (), (), (), (2, 3, 4), (5,), (1, 6))


def test_trees_hold_together() -> None:
    for tree in islice(trees(min_nodes=8, max_nodes=64), 12):
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


# Protein families ---------------------------------------------------------------------------------


def test_alignments_are_what_they_say() -> None:
    bounds = {"min_depth": 2, "max_depth": 9, "min_length": 20, "max_length": 33, "max_cycles": 3}
    drawn = list(islice(alignments(rows=2, **bounds), 24))
    for sample in drawn:
        rows, depth, length = sample.tokens.shape
        assert rows == 2
        assert 2 <= depth <= 9
        assert 20 <= length <= 33
        masked = sample.tokens == MASK
        assert torch.equal(masked, sample.hidden != -100)
        assert masked.flatten(1).any(dim=1).all()
        told = torch.where(masked, sample.hidden, sample.tokens)
        assert 0 <= told.min() <= told.max() < TOKENS - 1
        assert not (told[:, 0] == GAP).any()  # the query is whole
        assert torch.equal(sample.distances, sample.distances.transpose(1, 2))
        assert 0 == sample.distances.min() <= sample.distances.max() < BINS
        assert (sample.distances.diagonal(dim1=1, dim2=2) == 0).all()
    assert {sample.cycles for sample in drawn} == {1, 2, 3}
    hidden, entries = (sum(map(int, n)) for n in zip(*(_counts(s) for s in drawn), strict=True))
    assert 0.13 < hidden / entries < 0.18


def _counts(sample: Any) -> tuple[int, int]:
    return int((sample.hidden != -100).sum()), sample.tokens.numel()


def test_partners_touch_and_covary() -> None:
    """A changed residue takes its partner along; places without a partner go their own ways."""
    complement = proteins._COMPLEMENT
    together, apart = [], []
    for number in range(6):
        drawn = family(number)
        at = np.flatnonzero(drawn.partner >= 0)
        other = drawn.partner[at]
        assert np.array_equal(drawn.partner[other], at)
        assert (abs(at - other) >= proteins.SEPARATION).all()
        distances = np.linalg.norm(drawn.places[at] - drawn.places[other], axis=1)
        assert (distances <= proteins.CONTACT).all()
        residues = np.where(drawn.sequences == GAP, -1, drawn.sequences)
        mirrored = np.append(complement, -2)[residues]
        together.append((mirrored[:, at] == residues[:, other]).mean())
        apart.append((mirrored[:, at] == np.roll(residues[:, other], 7, axis=1)).mean())
    assert np.mean(together) > 0.7
    assert np.mean(apart) < 0.15


def test_splits_share_no_family() -> None:
    first, held_out = family(3), family(3, Split.HELD_OUT)
    assert len(first) != len(held_out) or (first.sequences[0] != held_out.sequences[0]).any()
    long = next(alignments("held-out", min_length=LONGEST, max_length=LONGEST, max_depth=4))
    assert long.tokens.shape[2] == LONGEST
