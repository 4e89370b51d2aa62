"""Syntax trees of Python source, for networks whose structure depends on the sample.

An endless, seeded stream of trees, one per function or class definition, in post-order. Each node's
label is the kind of its parent. Names and values are not part of a tree. Each tree records its
file, so that samples can be split by file.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dynoffload.datasets.sources import SourceFile, Split, draw_items, source_files

# The grammar of Python 3.11 to 3.14. The list is fixed, not read from the running Python, so that a
# network over these kinds is the same in every version.
KINDS: tuple[str, ...] = tuple(
    """
    Other Module
    FunctionDef AsyncFunctionDef ClassDef Lambda arguments arg keyword
    Return Delete Assign AugAssign AnnAssign TypeAlias For AsyncFor While If With AsyncWith withitem
    Match match_case MatchValue MatchSingleton MatchSequence MatchMapping MatchClass MatchStar
    MatchAs MatchOr Raise Try TryStar ExceptHandler Assert Import ImportFrom alias Global Nonlocal
    Expr Pass Break Continue
    BoolOp NamedExpr BinOp UnaryOp IfExp Dict Set ListComp SetComp DictComp GeneratorExp
    comprehension Await Yield YieldFrom Compare Call FormattedValue JoinedStr TemplateStr
    Interpolation Constant Attribute Subscript Starred Name List Tuple Slice
    And Or Add Sub Mult MatMult Div Mod Pow LShift RShift BitOr BitXor BitAnd FloorDiv
    Invert Not UAdd USub Eq NotEq Lt LtE Gt GtE Is IsNot In NotIn
    TypeVar ParamSpec TypeVarTuple
    """.split()
)
"""The kinds of nodes, in the order of their numbers; ``Other`` is any kind of a later grammar."""

_KIND_OF = {name: number for number, name in enumerate(KINDS)}
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True, eq=False)
class Tree:
    """One definition's syntax tree, nodes in post-order: children before parents, the root last.

    Attributes:
        kinds: int64 ``[nodes]``: indices into `KINDS`.
        labels: int64 ``[nodes]``: the kind of each node's parent; for the root, the kind of the
            scope that defines it.
        children: for each node the indices of its children, left to right; all are smaller than its
            own.
        name: the definition's qualified name.
        source: the name of its file.
    """

    kinds: Tensor
    labels: Tensor
    children: tuple[tuple[int, ...], ...]
    name: str
    source: str

    def __len__(self) -> int:
        """Return the number of nodes."""
        return len(self.children)


def trees(
    split: Split | str = Split.TRAIN,
    *,
    min_nodes: int = 16,
    max_nodes: int = 192,
    seed: int = 0,
    root: Path | None = None,
) -> Iterator[Tree]:
    """Yield trees endlessly, the same ones for the same arguments.

    A file is drawn in proportion to its bytes, then one of its definitions uniformly.

    Args:
        split: training or held-out files.
        min_nodes: size of the smallest tree.
        max_nodes: size of the largest tree.
        seed: seed of the draws.
        root: the folder of source files; the standard library by default.

    Raises:
        DataError: if a file is not Python source, or no file has a definition of such a size.
        ValueError: if the bounds leave no size.
    """
    if not 1 <= min_nodes <= max_nodes:
        raise ValueError(f"trees of {min_nodes} to {max_nodes} nodes do not exist")
    files, wanted = source_files(split, root), f"a definition of {min_nodes} to {max_nodes} nodes"

    def usable(source: SourceFile) -> list[Tree]:
        return [tree for tree in parse(source) if min_nodes <= len(tree) <= max_nodes]

    return (tree for _, tree in draw_items(files, usable, wanted, seed))


def parse(source: SourceFile) -> list[Tree]:
    """Return a tree for every function and class definition of a file, in source order.

    Raises:
        DataError: if the file cannot be read or is not Python source.
    """
    module = source.parse(source.read())
    found: list[Tree] = []
    open_scopes: list[tuple[ast.AST, str, ast.AST]] = [(module, "", module)]
    while open_scopes:
        node, scope_name, scope = open_scopes.pop()
        name = scope_name
        if isinstance(node, _DEFINITIONS):
            name = f"{scope_name}.{node.name}" if scope_name else node.name
            found.append(_tree(node, scope, name, source.name))
            scope = node
        below = [(child, name, scope) for child in ast.iter_child_nodes(node)]
        open_scopes.extend(reversed(below))
    return found


def _kind(node: ast.AST) -> int:
    """Return the number of a node's kind."""
    return _KIND_OF.get(type(node).__name__, 0)


def _tree(definition: ast.AST, scope: ast.AST, name: str, source: str) -> Tree:
    """Return a definition's tree; uses an explicit stack, as trees can be deep."""
    kinds: list[int] = []
    labels: list[int] = []
    children: list[tuple[int, ...]] = []
    # Each entry: a node, its parent's kind, the indices of its children (None until they are
    # pushed), and the list that receives its own index.
    collected: list[int] = []
    stack: list[tuple[ast.AST, int, list[int] | None, list[int]]] = [
        (definition, _kind(scope), None, collected)
    ]
    while stack:
        node, parent, below, siblings = stack.pop()
        if below is None:
            below = []
            # Whether a name is read or written is left out of the tree.
            parts = [
                part
                for part in ast.iter_child_nodes(node)
                if not isinstance(part, ast.expr_context)
            ]
            stack.append((node, parent, below, siblings))
            stack.extend((part, _kind(node), None, below) for part in reversed(parts))
            continue
        siblings.append(len(kinds))
        kinds.append(_kind(node))
        labels.append(parent)
        children.append(tuple(below))
    return Tree(
        kinds=torch.tensor(kinds, dtype=torch.int64),
        labels=torch.tensor(labels, dtype=torch.int64),
        children=tuple(children),
        name=name,
        source=source,
    )
