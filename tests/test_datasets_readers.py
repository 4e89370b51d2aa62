"""Files of one's own: trees, sequences, alignments, images; bad ones are named with their line."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dynoffload.datasets.images import digits, folder
from dynoffload.datasets.proteins import GAP, RESIDUES
from dynoffload.datasets.sequences import read_a3m, read_fasta
from dynoffload.datasets.sources import DataError
from dynoffload.datasets.statements import KINDS, statements
from dynoffload.datasets.treebanks import UNKNOWN, read_brackets, read_jsonl

SST = "(3 (2 It) (4 (4 (2 's) (4 (3 (2 a) (4 (3 lovely) (2 film))) (3 (2 with)))) (2 .)))\n"


def _file(folder: Path, text: str | bytes) -> Path:
    path = folder / "file"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# Trees


def test_a_line_of_the_sentiment_treebank(tmp_path: Path) -> None:
    bank = read_brackets(_file(tmp_path, SST + "\n(0 (1 bad) (1 film))\n"))
    first, second = bank.trees
    words = {number: word for word, number in bank.words.items()}
    leaves = [words[int(k)] for k, c in zip(first.kinds, first.children, strict=True) if not c]
    assert leaves == ["It", "'s", "a", "lovely", "film", "with", "."]
    assert first.children[-1] == (0, len(first.children) - 2)
    assert bank.labels["3"] == int(first.labels[-1])
    assert second.children == ((), (), (0, 1))
    assert second.source == "file:3"


nodes = st.recursive(
    st.tuples(st.integers(0, 4), st.text("abcé'.", min_size=1, max_size=5)),
    lambda inner: st.tuples(st.integers(0, 4), st.lists(inner, min_size=1, max_size=4)),
    max_leaves=25,
)


def _brackets(node: Any) -> str:
    label, rest = node
    inner = rest if isinstance(rest, str) else " ".join(map(_brackets, rest))
    return f"({label} {inner})"


def _json(node: Any) -> dict[str, Any]:
    label, rest = node
    if isinstance(rest, str):
        return {"label": label, "word": rest}
    return {"label": label, "children": [_json(child) for child in rest]}


def _nested(tree: Any, place: int, words: dict[int, str], labels: dict[int, str]) -> Any:
    label = int(labels[int(tree.labels[place])])
    if not tree.children[place]:
        return label, words[int(tree.kinds[place])]
    return label, [_nested(tree, child, words, labels) for child in tree.children[place]]


@settings(max_examples=60, deadline=None)
@given(drawn=st.lists(nodes, min_size=1, max_size=4))
def test_both_formats_give_back_the_trees(
    drawn: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    home = tmp_path_factory.mktemp("trees")
    made: list[tuple[Callable[[Path], Any], str]] = [
        (read_brackets, "\n".join(map(_brackets, drawn))),
        (read_jsonl, "\n".join(json.dumps(_json(node)) for node in drawn)),
    ]
    for read, text in made:
        bank = read(_file(home, text))
        words = {number: word for word, number in bank.words.items()}
        labels = {number: label for label, number in bank.labels.items()}
        found = [_nested(tree, len(tree.kinds) - 1, words, labels) for tree in bank.trees]
        assert found == [_lists(node) for node in drawn]


def _lists(node: Any) -> Any:
    label, rest = node
    return label, rest if isinstance(rest, str) else [_lists(child) for child in rest]


def test_another_file_is_read_with_the_same_numbers(tmp_path: Path) -> None:
    bank = read_brackets(_file(tmp_path, "(0 (1 good) (1 film))"))
    again = read_brackets(_file(tmp_path, "(1 (0 film) (1 unheard))"), like=bank)
    assert again.words == bank.words
    assert again.trees[0].kinds.tolist() == [bank.words["film"], UNKNOWN, UNKNOWN]
    with pytest.raises(DataError, match=r"line 1: the label '7' is not among 0, 1"):
        read_brackets(_file(tmp_path, "(7 film)"), like=bank)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("(1 a)\n(2 (1 b)", r"line 2: 1 brackets are not closed"),
        ("(1 a))", r"line 1: '\)' stands after the end"),
        ("(1 a) (1 b)", r"line 1: '\(' stands after the end"),
        ("a", r"line 1: 'a' stands outside"),
        ("\n\n(1)", r"line 3: the node labelled '1' has neither"),
        ("( (1 a))", r"line 1: a bracket is opened without a label"),
        ("(1 a b)", r"line 1: 'b' is a second word"),
        ("(1 a (1 b))", r"line 1: the node of 'a' has a word and children"),
        (b"(1 a)\n(1 \xff)", r"line 2: it is not UTF-8"),
        (b"(1 a)\n" * 5000 + b"(1 \xff)", r"line 5001: it is not UTF-8"),
        ("(1 " * 20_000, r"line 1: it is deeper than"),
        ("", r"holds no tree"),
    ],
)
def test_bad_brackets_are_named_with_their_line(
    text: str | bytes, said: str, tmp_path: Path
) -> None:
    path = _file(tmp_path, text)
    with pytest.raises(DataError, match=said) as caught:
        read_brackets(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"label": 1, "word": "a"}\n{"label": 1', r"line 2: "),
        ("[1]", r"line 1: a node is an object, not list"),
        ('{"word": "a"}', r'line 1: a node has no "label"'),
        ('{"label": 1.5}', r"line 1: a label and a word are"),
        ('{"label": 1, "children": {}}', r"line 1: children are a list, not dict"),
        ('{"label": 1, "children": [3]}', r"line 1: a node is an object, not int"),
        ("[" * 100_000, r"line 1: it is nested too deeply"),
    ],
)
def test_bad_json_is_named_with_its_line(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=said):
        read_jsonl(_file(tmp_path, text))


# Sequences


def test_fasta_and_a3m(tmp_path: Path) -> None:
    path = _file(tmp_path, ">query one\nACD\nEFX*\n\n>second\nWYBZJU\n")
    found = read_fasta(path)
    assert list(found) == ["query", "second"]
    assert found["query"].tolist() == [*(RESIDUES.index(r) for r in "ACDEF"), GAP]
    assert found["second"].tolist() == [RESIDUES.index(r) for r in "WYDELC"]
    path = _file(tmp_path, ">query\nACDE\n>hit\nA-abcDE\n>other\n.CD-\n")
    aligned = read_a3m(path)
    assert aligned.names == ("query", "hit", "other")
    assert aligned.codes.dtype == np.int8
    assert aligned.codes[1].tolist() == [RESIDUES.index("A"), GAP, *map(RESIDUES.index, "DE")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ACD\n", r"line 1: 'ACD' stands before"),
        (">\nACD", r"line 1: a sequence has no name"),
        (">a\n>b\nACD", r"line 2: a has no letters"),
        (">a\nAC\n>a\nAC", r"line 3: a is there twice"),
        (">a\nAC1D", r"line 2: '1' is no residue"),
        (b">a\nAC\n>b\n\xff", r"line 4: it is not ASCII"),
        ("", r"holds no sequence"),
    ],
)
def test_bad_sequences_are_named_with_their_line(
    text: str | bytes, said: str, tmp_path: Path
) -> None:
    for read in (read_fasta, read_a3m):
        with pytest.raises(DataError, match=said):
            read(_file(tmp_path, text))


def test_an_alignment_has_rows_of_one_length(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 4: hit has 3 columns, and the query, query, 4"):
        read_a3m(_file(tmp_path, ">query\nACDE\n>hit\nACD\n"))


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    for read in (read_brackets, read_jsonl, read_fasta, read_a3m):
        with pytest.raises(DataError, match=r"cannot read .*gone"):
            read(tmp_path / "gone")


# Images


def test_digits_are_the_same_for_the_same_seed_and_apart_by_split() -> None:
    first, again = (next(digits(rows=3, seed=4)) for _ in range(2))
    assert torch.equal(first.images, again.images)
    assert first.images.shape == (3, 1, 8, 8)
    assert 0 <= float(first.images.min()) <= float(first.images.max()) <= 1
    trained, aside = (
        {one.source for one in islice(digits(split), 400)} for split in ("train", "held-out")
    )
    assert not trained & aside
    assert len({int(one.labels) for one in islice(digits(), 100)}) == 10


def test_a_folder_of_images(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for label, level in (("dark", 30), ("light", 220)):
        (tmp_path / label).mkdir()
        for number in range(20):
            pixels = np.clip(rng.normal(level, 5, size=(9, 7, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / label / f"{number}.png")
    for one in islice(folder(tmp_path, rows=2, side=6), 20):
        assert one.images.shape == (2, 3, 6, 6)
        assert ((one.images.mean(dim=(1, 2, 3)) > 0.5).long() == one.labels).all()


def test_what_is_no_image_or_no_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"folder of images .*gone does not exist"):
        folder(tmp_path / "gone")
    with pytest.raises(DataError, match=r"no train image below the 0 folders"):
        folder(tmp_path)
    (tmp_path / "class").mkdir()
    for number in range(20):
        (tmp_path / "class" / f"{number}.png").write_bytes(b"\x89PNG\r\n\x1a\nnot quite")
    with pytest.raises(DataError, match=r"class/\d+\.png cannot be read as an image"):
        next(folder(tmp_path))
    with pytest.raises(ValueError, match="at least one image"):
        digits(rows=0)


# Statements


def test_statements_are_whole_and_of_their_kind() -> None:
    import ast

    for one in islice(statements(max_bytes=80), 60):
        text = bytes(one.tokens.tolist()).decode()
        (parsed,) = ast.parse(text).body if KINDS[int(one.label)] not in _INSIDE else _inside(text)
        assert type(parsed).__name__ == KINDS[int(one.label)]


_INSIDE = {"Return", "Break", "Continue", "Nonlocal"}


def _inside(text: str) -> list[Any]:
    import ast

    loop = "def f():\n x = 0\n def g():\n  while True:\n   " + text.replace("\n", "\n   ")
    function: Any = ast.parse(loop).body[0]
    return list(function.body[1].body[0].body)


def test_statements_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="do not exist"):
        statements(min_bytes=9, max_bytes=8)
    for number in range(20):
        (tmp_path / f"{number}.py").write_text("#" * 4000 + "\ndef broken(:\n")
    with pytest.raises(DataError, match=r"\d+\.py"):
        next(statements(root=tmp_path))
