"""Python statements labelled with their kinds, for networks that may stop reading early.

An endless, seeded stream of simple statements (no loops or definitions), each with its bytes and
its kind in Python's grammar. Each records its file, so that samples can be split by file.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dynoffload.datasets.sources import SourceFile, Split, draw_items, source_files

KINDS: tuple[str, ...] = (
    *("Expr", "Assign", "AugAssign", "AnnAssign", "Return", "Raise", "Assert", "Delete"),
    *("Import", "ImportFrom", "Global", "Nonlocal", "Pass", "Break", "Continue"),
)
"""The kinds of statements, in the order of their numbers."""

_KIND_OF = {name: number for number, name in enumerate(KINDS)}


@dataclass(frozen=True, eq=False)
class Statement:
    """One statement.

    Attributes:
        tokens: int64 ``[length]``: its bytes.
        label: int64 scalar: the number of its kind.
        source: the name of its file.
    """

    tokens: Tensor
    label: Tensor
    source: str


def statements(
    split: Split | str = Split.TRAIN,
    *,
    min_bytes: int = 4,
    max_bytes: int = 256,
    seed: int = 0,
    root: Path | None = None,
) -> Iterator[Statement]:
    """Yield statements endlessly, the same ones for the same arguments.

    A file is drawn in proportion to its bytes, then one of its statements uniformly.

    Args:
        split: training or held-out files.
        min_bytes: minimum length.
        max_bytes: maximum length.
        seed: seed of the draws.
        root: the folder of source files; the standard library by default.

    Raises:
        DataError: a file is not Python source, or no file has a statement of such a length.
        ValueError: the bounds leave no length.
    """
    if not 1 <= min_bytes <= max_bytes:
        raise ValueError(f"statements of {min_bytes} to {max_bytes} bytes do not exist")
    files, wanted = source_files(split, root), f"a statement of {min_bytes} to {max_bytes} bytes"

    def usable(source: SourceFile) -> list[tuple[bytes, int]]:
        return [one for one in parse(source) if min_bytes <= len(one[0]) <= max_bytes]

    return (
        Statement(
            torch.from_numpy(np.frombuffer(text, dtype=np.uint8).astype(np.int64)),
            torch.tensor(kind),
            source.name,
        )
        for source, (text, kind) in draw_items(files, usable, wanted, seed)
    )


def parse(source: SourceFile) -> list[tuple[bytes, int]]:
    """Return the text and the kind of every simple statement of a file, in source order.

    Raises:
        DataError: the file cannot be read or is not Python source.
    """
    text = source.read()
    module = source.parse(text)
    encoding, _ = tokenize.detect_encoding(io.BytesIO(text).readline)
    text = text.decode(encoding).encode()  # the parser counts columns in UTF-8
    lines = text.splitlines(keepends=True)
    found = []
    for node in ast.walk(module):
        kind = _KIND_OF.get(type(node).__name__)
        if kind is None or not isinstance(node, ast.stmt):
            continue
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        part = lines[node.lineno - 1 : node.end_lineno]
        part[-1] = part[-1][: node.end_col_offset]
        part[0] = part[0][node.col_offset :]
        found.append((node.lineno, node.col_offset, b"".join(part), kind))
    return [(text, kind) for _, _, text, kind in sorted(found)]
