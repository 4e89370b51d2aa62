"""Source files of the Python standard library, used as data available on every machine.

The files have a fixed order and are split by the hash of their names, so that adding files does not
change the split of others. `text` yields byte sequences of them, `trees` syntax trees and
`statements` single statements.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import numpy as np

from dynoffload.errors import DynOffloadError

MIN_BYTES = 2_048
"""Smaller files are left out: they are too short for samples."""
MAX_BYTES = 256 * 1_024
"""Larger files are left out: in the standard library they are tables, not programs."""
HELD_OUT_OF_TEN = 2
"""Files held out, of ten."""
KEPT_FILES = 64
"""Files whose items a stream caches, to avoid parsing a file at each draw."""
_LEFT_OUT = {"__pycache__", "dist-packages", "site-packages", "test", "tests", "idle_test"}


Item = TypeVar("Item")


class DataError(DynOffloadError, ValueError):
    """A source file or a folder of them cannot be used as data."""


class Split(str, Enum):
    """Which files a sample may come from."""

    TRAIN = "train"
    HELD_OUT = "held-out"


def split_of(name: str) -> Split:
    """Return the split that a name belongs to, by its hash alone."""
    digest = hashlib.sha256(name.encode()).digest()
    return Split.HELD_OUT if digest[0] % 10 < HELD_OUT_OF_TEN else Split.TRAIN


@dataclass(frozen=True)
class SourceFile:
    """One file of Python source.

    Attributes:
        name: the path below the folder of the library, with forward slashes: ``"json/decoder.py"``.
        path: its path in the file system.
        nbytes: its size in bytes.
    """

    name: str
    path: Path
    nbytes: int

    @property
    def split(self) -> Split:
        """The split it belongs to."""
        return split_of(self.name)

    def read(self) -> bytes:
        """Return the file's bytes.

        Raises:
            DataError: if it cannot be read.
        """
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise DataError(
                f"cannot read the source file {self.path}: {error.strerror or error}; "
                "point root at a folder of readable Python files"
            ) from error

    def parse(self, text: bytes | str) -> ast.Module:
        """Return the syntax tree of ``text``, the file's content.

        Raises:
            DataError: if it is not Python source.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                warnings.simplefilter("ignore", DeprecationWarning)
                return ast.parse(text, filename=str(self.path))
        except (SyntaxError, ValueError) as error:
            raise DataError(
                f"the file {self.path} is no Python source that this Python can parse: {error}; "
                "take it out of the folder"
            ) from error


def source_files(split: Split | str = Split.TRAIN, root: Path | None = None) -> list[SourceFile]:
    """Return the source files of one split, ordered by name.

    Files below ``test``, ``tests`` and ``site-packages`` are left out, as are those smaller than
    `MIN_BYTES` and larger than `MAX_BYTES`.

    Args:
        split: training or held-out.
        root: the folder to look in; the standard library of the running Python by default.

    Raises:
        DataError: if the folder does not exist or holds no such file.
    """
    wanted = Split(split)
    folder = Path(sysconfig.get_path("stdlib")) if root is None else Path(root)
    found = [source for source in _all_files(folder) if source.split is wanted]
    if not found:
        raise DataError(
            f"no {wanted.value} Python file of {MIN_BYTES} to {MAX_BYTES} bytes below {folder}; "
            "point root at a folder with more source files"
        )
    return found


@lru_cache(maxsize=8)
def _all_files(folder: Path) -> tuple[SourceFile, ...]:
    """Return the usable files below a folder in the order of their names."""
    if not folder.is_dir():
        raise DataError(f"the folder of source files {folder} does not exist; point root at one")
    files = []
    for directory, below, names in os.walk(folder):
        below[:] = set(below) - _LEFT_OUT
        for path in (Path(directory, name) for name in names if name.endswith(".py")):
            if path.is_file() and MIN_BYTES <= (nbytes := path.stat().st_size) <= MAX_BYTES:
                files.append(SourceFile(path.relative_to(folder).as_posix(), path, nbytes))
    return tuple(sorted(files, key=lambda source: source.name))


def draw_items(
    files: Sequence[SourceFile],
    items_of: Callable[[SourceFile], Sequence[Item]],
    wanted: str,
    seed: int,
) -> Iterator[tuple[SourceFile, Item]]:
    """Yield items endlessly: a file is drawn in proportion to its bytes, then its item uniformly.

    Raises:
        DataError: no file has an item; the message calls it ``wanted``.
    """
    generator = np.random.default_rng(seed)
    weights = np.array([source.nbytes for source in files], dtype=np.float64)
    usable = lru_cache(maxsize=KEPT_FILES)(items_of)
    while weights.any():
        pick = int(generator.choice(len(files), p=weights / weights.sum()))
        found = usable(files[pick])
        if found:
            yield files[pick], found[int(generator.integers(len(found)))]
        else:
            weights[pick] = 0.0
    raise DataError(
        f"none of {len(files)} source files, {files[0].path} among them, has {wanted}; widen the "
        "bounds"
    )
