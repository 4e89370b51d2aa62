"""Protein sequences and alignments of one's own: FASTA and A3M files.

What it is: readers that make of files the integer codes of `dynoffload.datasets.proteins`. What it
is not: an aligner, nor a source of structures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dynoffload.datasets.proteins import GAP, RESIDUES
from dynoffload.datasets.sources import DataError

_CODES = {residue: code for code, residue in enumerate(RESIDUES)} | {"-": GAP, ".": GAP}
# Ambiguous and rare residues, as they are mostly read: Asx, Glx, Leu or Ile, selenocysteine,
# pyrrolysine; what is unknown says as little as a gap.
_ALIKE = {"B": "D", "Z": "E", "J": "L", "U": "C", "O": "K", "X": "-"}
_LONGEST = 1_000_000  # characters of a sequence


@dataclass(frozen=True)
class Alignment:
    """Sequences of one length.

    Attributes:
        names: of the sequences; the query's first.
        codes: int8 ``[sequences, length]``: numbers of `RESIDUES`, or `GAP`.
    """

    names: tuple[str, ...]
    codes: npt.NDArray[np.int8]


def read_fasta(path: str | Path) -> dict[str, npt.NDArray[np.int8]]:
    """Return the sequences of a FASTA file by name, as codes, int8 ``[length]``.

    Raises:
        DataError: the file cannot be read, or a line is none of such a file; the error names it.
    """
    return {
        name: np.array([_code(letter, Path(path), line) for line, letter in letters], dtype=np.int8)
        for name, letters in _records(Path(path))
    }


def read_a3m(path: str | Path) -> Alignment:
    """Return the alignment of an A3M file: small letters, which are insertions, are left out.

    Raises:
        DataError: the file cannot be read, a line is none of such a file, or a sequence has another
            length than the query; the error names it.
    """
    names: list[str] = []
    rows: list[list[int]] = []
    for name, letters in _records(Path(path)):
        kept = [(line, letter) for line, letter in letters if not letter.islower()]
        row = [_code(letter, Path(path), line) for line, letter in kept]
        if rows and len(row) != len(rows[0]):
            raise DataError(
                f"{path}, line {letters[0][0]}: {name} has {len(row)} columns, and the query, "
                f"{names[0]}, {len(rows[0])}: an A3M file is aligned, insertions in small letters"
            )
        names.append(name)
        rows.append(row)
    return Alignment(tuple(names), np.array(rows, dtype=np.int8))


def _records(path: Path) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """Yield each sequence's name and its letters with their lines."""
    name: str | None = None
    letters: list[tuple[int, str]] = []
    number = 0
    seen: set[str] = set()
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                text = line.decode("ascii").strip()
                if text.startswith(">"):
                    if name is not None:
                        yield _whole(path, name, letters, number)
                    name, letters = text[1:].split(maxsplit=1)[0] if text[1:].strip() else "", []
                    if not name:
                        raise DataError(f"{path}, line {number}: a sequence has no name behind '>'")
                    if name in seen:
                        raise DataError(f"{path}, line {number}: {name} is there twice")
                    seen.add(name)
                elif text and not text.startswith(";"):
                    if name is None:
                        raise DataError(
                            f"{path}, line {number}: {text[:20]!r} stands before the first line "
                            "that begins with '>'"
                        )
                    letters += [(number, letter) for letter in text.rstrip("*")]
                    if len(letters) > _LONGEST:
                        raise DataError(
                            f"{path}, line {number}: {name} has more than {_LONGEST} letters"
                        )
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line {number}: it is not ASCII text") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    if name is None:
        raise DataError(f"{path} holds no sequence: each begins with a line '>name'")
    yield _whole(path, name, letters, number)


def _whole(
    path: Path, name: str, letters: list[tuple[int, str]], number: int
) -> tuple[str, list[tuple[int, str]]]:
    if not letters:
        raise DataError(f"{path}, line {number}: {name} has no letters")
    return name, letters


def _code(letter: str, path: Path, line: int) -> int:
    upper = letter.upper()
    code = _CODES.get(_ALIKE.get(upper, upper))
    if code is None:
        raise DataError(f"{path}, line {line}: {letter!r} is no residue; these are: {RESIDUES}")
    return code
