"""A reader of the plain part of Parquet, for files from strangers.

What it is: `ParquetFile`, which reads flat tables of required columns, neither compressed nor
encrypted, in pages of the first version: what `dynoffload.profiler.storage` writes. Each offset,
length and count is compared with the bytes there are before it is used. What it is not: a reader of
Parquet; anything else is refused, and pyarrow, which reads all of it, writes our files and reads
them for whoever wants to.

[Note: why not pyarrow]
pyarrow believes what it reads: some footers end the process, and a digest in the file does not
help, as anybody can make one. A guard before it would have to read footers, pages and runs just as
this does; then the numbers may as well be taken from them.

Source: https://parquet.apache.org/docs/file-format/ (metadata, data pages, encodings).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dynoffload.profiler.compact_thrift import Struct, read_struct

MAGIC = b"PAR1"
MAX_FOOTER_VALUES = 100_000
"""The most values in a footer: one row group of twenty columns has about a thousand."""
MAX_PAGE_VALUES = 64
MAX_PAGES = 10_000
"""The most pages of a file."""

_SIZE = struct.Struct("<I")
_DATA_PAGE, _DICTIONARY_PAGE = 0, 2
_PLAIN, _PLAIN_DICTIONARY, _RLE_DICTIONARY = 0, 2, 8
_BYTE_ARRAY = 6
_NUMBERS: dict[int, np.dtype[Any]] = {
    1: np.dtype("<i4"),
    2: np.dtype("<i8"),
    5: np.dtype("<f8"),
}
TYPES = {"int32": 1, "int64": 2, "double": 5, "binary": _BYTE_ARRAY}
"""Physical types that are read, by name."""

Numbers = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Words:
    """A column of bytes.

    Attributes:
        words: those of each dictionary, one after the other, and those that stand for themselves.
        indices: the word of each row, int64 ``[rows]``.
    """

    words: list[bytes]
    indices: Indices


class ParquetFile:
    """A file's footer, and its columns when they are asked for.

    Attributes:
        rows: how many there are, by the footer: not yet compared with anything.
        names: of the columns.
        types: of the columns, keys of `TYPES`.
        metadata: the file's own keys and values.

    Raises:
        ValueError: if it is no such file.
    """

    def __init__(self, data: bytes) -> None:
        length = int.from_bytes(data[-8:-4], "little")
        start = len(data) - 8 - length
        if len(data) < 12 or start < 4 or not data[:4] == data[-4:] == MAGIC:
            raise ValueError("no whole Parquet file")
        footer, stop = read_struct(data, start, most=MAX_FOOTER_VALUES)
        if stop != len(data) - 8:
            raise ValueError("a footer of another length than it says")
        self._data = data
        self._stop = start  # of the pages
        self._pages = 0
        self.rows = _count(footer, 3)
        self.names, self.types = _schema(_structs(footer, 2))
        self.metadata = {
            _bytes(entry, 1): entry[2]
            for entry in _structs(footer, 5)
            if isinstance(entry.get(2), bytes)
        }
        self._groups = _structs(footer, 4)
        if sum(_count(group, 3) for group in self._groups) != self.rows:
            raise ValueError("row groups of another number of rows than the file")
        chunks = [_structs(group, 1) for group in self._groups]
        if any(len(group) != len(self.names) for group in chunks):
            raise ValueError("a row group with columns missing")
        self._chunks = [
            [self._chunk(entry, place) for place, entry in enumerate(group)] for group in chunks
        ]

    def numbers(self, name: str) -> Numbers:
        """Return a column of numbers, ``[rows]``; ValueError if its pages do not hold that."""
        place = self.names.index(name)
        dtype = _NUMBERS[TYPES[self.types[place]]]
        parts: list[Numbers] = [np.zeros(0, dtype)]
        for values, indices in self._read(place):
            numbers = np.frombuffer(values, dtype)
            parts.append(numbers if indices is None else numbers[indices])
        return np.concatenate(parts)

    def words(self, name: str) -> Words:
        """Return a column of bytes; ValueError if its pages do not hold that."""
        place = self.names.index(name)
        if self.types[place] != "binary":
            raise ValueError(f"column {name} is of type {self.types[place]}")
        words: list[bytes] = []
        parts: list[Indices] = [np.zeros(0, np.int64)]
        for values, indices in self._read(place):
            own = np.arange(len(values)) if indices is None else indices
            parts.append(own + len(words))
            words += values
        return Words(words, np.concatenate(parts))

    def _chunk(self, entry: Struct, place: int) -> Struct:
        """Return what describes a column chunk, if it is one of a plain column."""
        found = entry.get(3)
        name = self.names[place]
        if not isinstance(found, dict) or entry.keys() & {1, 8, 9}:
            raise ValueError(f"column {name} lies elsewhere, or is encrypted")
        if found.get(4) != 0:
            raise ValueError(f"column {name} is compressed")
        if found.get(1) != TYPES[self.types[place]] or found.get(3) != [name.encode()]:
            raise ValueError(f"column {name} is not where it should be")
        return found

    def _read(self, place: int) -> list[tuple[Any, Indices | None]]:
        """Return the values of each page or dictionary of a column, with the indices into them."""
        parts: list[tuple[Any, Indices | None]] = []
        for group, chunks in zip(self._groups, self._chunks, strict=True):
            rows = _count(group, 3)
            if rows:
                parts += self._pages_of(chunks[place], rows, self.types[place])
        return parts

    def _pages_of(self, chunk: Struct, rows: int, kind: str) -> list[tuple[Any, Indices | None]]:
        if _count(chunk, 5) != rows:
            raise ValueError("a column of another number of rows than its group")
        at = _count(chunk, 9)
        first = chunk.get(11)
        if first is not None:
            at = min(at, _count(chunk, 11)) or at
        stop = at + _count(chunk, 7)
        if not 4 <= at < stop <= self._stop:
            raise ValueError("a column beyond the end")
        parts: list[tuple[Any, Indices | None]] = []
        dictionary: Any = None
        told: list[Indices] = []  # indices into the dictionary
        seen = 0
        while seen < rows:
            header, at = read_struct(self._data, at, most=MAX_PAGE_VALUES)
            size = _count(header, 3)
            self._pages += 1
            if size != header.get(2) or size > stop - at or self._pages > MAX_PAGES:
                raise ValueError("a page that is compressed or beyond the end, or too many")
            body = self._data[at : at + size]
            at += size
            if header.get(1) == _DICTIONARY_PAGE and dictionary is None and not seen:
                about = _struct(header, 7)
                if about.get(2) not in (_PLAIN, _PLAIN_DICTIONARY):
                    raise ValueError("a dictionary in an unknown encoding")
                dictionary = _plain(body, _count(about, 1), kind)
                continue
            if header.get(1) != _DATA_PAGE:
                raise ValueError("a page of an unknown kind")
            about = _struct(header, 5)
            count = _count(about, 1)
            if not 0 < count <= rows - seen:
                raise ValueError("a page with more rows than its column, or none")
            seen += count
            if about.get(2) == _PLAIN:
                parts.append((_plain(body, count, kind), None))
            elif about.get(2) in (_PLAIN_DICTIONARY, _RLE_DICTIONARY) and dictionary is not None:
                if parts:
                    raise ValueError("a page that goes back to the dictionary")
                told.append(_runs(body, count, _size(dictionary, kind)))
            else:
                raise ValueError("a page in an unknown encoding")
        if told:
            parts.insert(0, (dictionary, np.concatenate(told)))
        return parts


def _size(values: Any, kind: str) -> int:
    return len(values) if kind == "binary" else len(values) // _NUMBERS[TYPES[kind]].itemsize


def _plain(body: bytes, count: int, kind: str) -> Any:
    """Return plain values: bytes of numbers as they are, or the list of words."""
    if kind != "binary":
        if len(body) != count * _NUMBERS[TYPES[kind]].itemsize:
            raise ValueError("a page of another length than its values")
        return body
    if count > len(body) // 4:
        raise ValueError("a page of more words than its bytes")
    words: list[bytes] = []
    at, length = 0, len(body)
    for _ in range(count):
        start = at + 4
        if start > length:
            raise ValueError("a word beyond the end of its page")
        at = start + _SIZE.unpack_from(body, start - 4)[0]
        words.append(body[start:at])
    if at != length:
        raise ValueError("a page whose last word ends elsewhere than it does")
    return words


def _runs(body: bytes, count: int, words: int) -> Indices:
    """Return ``count`` indices below ``words`` from runs, repeated or bit-packed."""
    width = body[0] if body else 99
    if width > 32:
        raise ValueError("indices of an impossible width")
    each = (width + 7) // 8
    taken: list[int] = []  # values of each run
    repeated: list[int] = []  # the value of each run; negative: packed
    packed: list[bytes] = []  # the bytes of the packed runs: whole ones, as groups are of eight
    at, left = 1, count
    while left:
        head = shift = 0
        while True:
            if at >= len(body) or shift > 35:
                raise ValueError("runs cut short")
            head |= (body[at] & 127) << shift
            at += 1
            if body[at - 1] < 128:
                break
            shift += 7
        if head & 1:
            size = (head >> 1) * width  # groups of eight
            taken.append(min(left, (head >> 1) * 8))
            packed.append(body[at : min(at + size, at + -(-taken[-1] * width // 8))])
            repeated.append(-1)
            if not head >> 1 or len(packed[-1]) * 8 < taken[-1] * width:
                raise ValueError("a packed run cut short")
        else:
            size = each
            taken.append(min(left, head >> 1))
            repeated.append(int.from_bytes(body[at : at + each], "little"))
            if not taken[-1] or at + each > len(body):
                raise ValueError("a run of nothing, or cut short")
        at += size
        left -= taken[-1]
    indices = np.repeat(np.array(repeated, np.int64), taken)
    inside = indices < 0
    values = int(inside.sum())
    if values and width:
        bits = np.unpackbits(np.frombuffer(b"".join(packed), np.uint8), bitorder="little")
        powers = np.int64(1) << np.arange(width, dtype=np.int64)
        indices[inside] = bits[: values * width].reshape(values, width) @ powers
    else:
        indices[inside] = 0
    if int(indices.max()) >= words:
        raise ValueError("an index beyond its dictionary")
    return indices


def _schema(elements: list[Struct]) -> tuple[list[str], list[str]]:
    """Return names and types of a flat table of required columns."""
    if not elements or _count(elements[0], 5) != len(elements) - 1:
        raise ValueError("a table that is not flat")
    known = {number: name for name, number in TYPES.items()}
    names, types = [], []
    for element in elements[1:]:
        name = _bytes(element, 4).decode()
        kind = element.get(1)
        if not isinstance(kind, int) or kind not in known or element.get(3) != 0 or 5 in element:
            raise ValueError(f"column {name[:40]!r} is of a type that no trace has, or may be null")
        names.append(name)
        types.append(known[kind])
    return names, types


def _count(fields: Struct, number: int) -> int:
    value = fields.get(number)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**62:
        raise ValueError("a count that is none")
    return value


def _bytes(fields: Struct, number: int) -> bytes:
    value = fields.get(number)
    if not isinstance(value, bytes):
        raise ValueError("a name that is none")
    return value


def _struct(fields: Struct, number: int) -> Struct:
    value = fields.get(number)
    if not isinstance(value, dict):
        raise ValueError("a header that is none")
    return value


def _structs(fields: Struct, number: int) -> list[Struct]:
    value = fields.get(number, [])
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise ValueError("a list of another kind")
    return value
