"""Trees of one's own: Penn Treebank brackets, as the Stanford Sentiment Treebank has, and JSON.

What it is: readers that make `dynoffload.datasets.trees.Tree` of a file, one tree a line, with a
vocabulary for what stands at the nodes. What it is not: a parser of sentences.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dynoffload.datasets.sources import DataError
from dynoffload.datasets.trees import Tree

UNKNOWN = 0
"""The number of a word that the vocabulary does not have, and of an inner node without one."""
_DEEPEST = 10_000  # levels of a tree
_LONGEST = 10_000_000  # bytes of a line


@dataclass(frozen=True)
class Treebank:
    """Trees and what their numbers stand for.

    Attributes:
        trees: in the order of the file.
        words: word -> number, from 1 on; kinds of nodes are these.
        labels: label -> number.
    """

    trees: tuple[Tree, ...]
    words: Mapping[str, int]
    labels: Mapping[str, int]


@dataclass(eq=False)
class _Node:
    label: str
    word: str
    children: list[_Node]


def read_brackets(path: str | Path, like: Treebank | None = None) -> Treebank:
    """Read a file of trees in brackets, one a line: ``(3 (2 It) (4 (2 's) (4 good)))``.

    Args:
        path: of the file, in UTF-8.
        like: whose numbers to use; its words and labels are all there are then.

    Raises:
        DataError: the file cannot be read, or a line is no tree; the error names both.
    """
    return _bank(Path(path), _bracketed, like)


def read_jsonl(path: str | Path, like: Treebank | None = None) -> Treebank:
    """Read a file of trees as JSON, one a line: ``{"word": …, "label": …, "children": [...]}``.

    Args:
        path: of the file, in UTF-8.
        like: whose numbers to use; its words and labels are all there are then.

    Raises:
        DataError: the file cannot be read, or a line is no tree; the error names both.
    """
    return _bank(Path(path), _from_json, like)


def _bank(path: Path, parse: Any, like: Treebank | None) -> Treebank:
    words: dict[str, int] = {} if like is None else dict(like.words)
    labels: dict[str, int] = {} if like is None else dict(like.labels)
    trees = []
    for number, line in _lines(path):
        try:
            root = parse(line)
            trees.append(_tree(root, words, labels, f"{path.name}:{number}", like is None))
        except ValueError as error:
            raise DataError(f"{path}, line {number}: {error}") from error
    if not trees:
        raise DataError(f"{path} holds no tree: write one a line")
    return Treebank(tuple(trees), words, labels)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file that are not empty, with their numbers from 1 on."""
    number = 0
    try:
        with path.open("rb") as file:
            while line := file.readline(_LONGEST):
                number += 1
                if len(line) >= _LONGEST:
                    raise DataError(
                        f"{path}, line {number}: more than {_LONGEST} bytes: write one tree a line"
                    )
                if line.strip():
                    yield number, line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line {number}: it is not UTF-8: {error.reason}") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _bracketed(line: str) -> _Node:
    tokens = line.replace("(", " ( ").replace(")", " ) ").split()
    open_nodes: list[_Node] = []
    root: _Node | None = None
    index = 0
    while index < len(tokens):
        token = tokens[index]
        if root is not None:
            raise ValueError(f"{token!r} stands after the end of the tree")
        if token == "(":
            if index + 1 >= len(tokens) or tokens[index + 1] in "()":
                raise ValueError("a bracket is opened without a label behind it")
            node = _Node(tokens[index + 1], "", [])
            if open_nodes:
                if open_nodes[-1].word:
                    raise ValueError(f"the node of {open_nodes[-1].word!r} has a word and children")
                open_nodes[-1].children.append(node)
            open_nodes.append(node)
            if len(open_nodes) > _DEEPEST:
                raise ValueError(f"it is deeper than {_DEEPEST} levels")
            index += 1
        elif not open_nodes:
            raise ValueError(f"{token!r} stands outside of any bracket")
        elif token == ")":
            closed = open_nodes.pop()
            if not closed.word and not closed.children:
                raise ValueError(
                    f"the node labelled {closed.label!r} has neither word nor children"
                )
            if not open_nodes:
                root = closed
        elif open_nodes[-1].word or open_nodes[-1].children:
            raise ValueError(f"{token!r} is a second word of its node")
        else:
            open_nodes[-1].word = token
        index += 1
    if root is None:
        raise ValueError(f"{len(open_nodes)} brackets are not closed")
    return root


def _from_json(line: str) -> _Node:
    try:
        found = json.loads(line)
    except RecursionError as error:
        raise ValueError("it is nested too deeply for JSON") from error
    root = _node(found)
    stack = [(root, found)]
    while stack:
        node, data = stack.pop()
        children = data.get("children", [])
        if not isinstance(children, list):
            raise ValueError(f"children are a list, not {type(children).__name__}")
        node.children = [_node(child) for child in children]
        stack += zip(node.children, children, strict=True)
    return root


def _node(data: Any) -> _Node:
    if not isinstance(data, dict):
        raise ValueError(f"a node is an object, not {type(data).__name__}")
    if "label" not in data:
        raise ValueError('a node has no "label"')
    label, word = data["label"], data.get("word", "")
    if not isinstance(label, str | int) or not isinstance(word, str | int):
        raise ValueError("a label and a word are texts or whole numbers")
    return _Node(str(label), str(word), [])


def _tree(
    root: _Node, words: dict[str, int], labels: dict[str, int], source: str, grow: bool
) -> Tree:
    """Return a tree's nodes in post-order."""
    kinds: list[int] = []
    numbers: list[int] = []
    children: list[tuple[int, ...]] = []
    places: dict[_Node, int] = {}
    stack: list[tuple[_Node, bool]] = [(root, False)]
    while stack:
        node, ready = stack.pop()
        if not ready:
            stack.append((node, True))
            stack += [(child, False) for child in reversed(node.children)]
            continue
        if grow:
            labels.setdefault(node.label, len(labels))
            if node.word:
                words.setdefault(node.word, len(words) + 1)
        if node.label not in labels:
            raise ValueError(f"the label {node.label!r} is not among {', '.join(sorted(labels))}")
        places[node] = len(kinds)
        kinds.append(words.get(node.word, UNKNOWN))
        numbers.append(labels[node.label])
        children.append(tuple(places[child] for child in node.children))
    return Tree(torch.tensor(kinds), torch.tensor(numbers), tuple(children), source, source)
