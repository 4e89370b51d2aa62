"""Statements of Python source with their kinds, for networks that read until they know.

An endless, seeded stream of simple statements (no loops or definitions), each as its bytes and the
kind that Python's grammar gives it. Each knows its file, so that samples can be split by file.
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
        label: int64, a scalar: the number of its kind.
        source: the name of the file.
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
    """Yield statements for ever, the same ones for the same arguments.

    A file is drawn in proportion to its bytes, and one of its statements uniformly.

    Args:
        split: training or held-out files.
        min_bytes: of the shortest.
        max_bytes: of the longest.
        seed: of the draws.
        root: the folder of source files; the standard library by default.

    Raises:
        DataError: a file is no Python source, or no file has a statement of such a length.
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
        DataError: the file cannot be read or is no Python source.
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
