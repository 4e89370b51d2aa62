"""Thrift's compact protocol, as far as Parquet's footers and page headers need it.

What it is: `read_struct`, which reads one struct into plain data without believing any length in
it: what a struct may hold at most is given by the caller, and no list is longer than the bytes that
are left. What it is not: an implementation of Thrift: maps are refused, and what a field means is
for `dynoffload.profiler.plain_parquet`, which says why traces are not read by a library.

Source: https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
"""

from __future__ import annotations

import struct
from typing import Any

MAX_DEPTH = 12
"""How deep structs and lists may nest; Parquet's own nest 6 deep."""

_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = (
    *range(1, 11),
    12,
)

Struct = dict[int, Any]
"""The fields of a struct by number: bool, int, float, bytes, list or another struct."""


def read_struct(data: bytes, start: int, *, most: int) -> tuple[Struct, int]:
    """Read a struct.

    Args:
        data: of which it is a part.
        start: where it begins.
        most: how many values it may hold, those inside others counted.

    Returns:
        the struct, and where it ends.

    Raises:
        ValueError: if there is none, or more than that.
    """
    reader = _Reader(data, start, most)
    try:
        return reader.struct(MAX_DEPTH), reader.at
    except IndexError as error:
        raise ValueError("cut short") from error


class _Reader:
    def __init__(self, data: bytes, start: int, most: int) -> None:
        self.at = start
        self._data = data
        self._left = most

    def struct(self, depth: int) -> Struct:
        if not depth:
            raise ValueError("structs nested too deeply")
        fields: Struct = {}
        number = 0
        while True:
            head = self._byte()
            if not head:
                return fields
            delta, kind = head >> 4, head & 15
            number = number + delta if delta else self._signed()
            if number in fields:
                raise ValueError("a field given twice")
            if kind in (_TRUE, _FALSE):
                fields[number] = kind == _TRUE
            else:
                fields[number] = self._value(kind, depth - 1)

    def _value(self, kind: int, depth: int) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ValueError("more values than there can be")
        if kind in (_I16, _I32, _I64):
            unsigned = self._unsigned()
            return (unsigned >> 1) ^ -(unsigned & 1)
        if kind == _BINARY:
            return self._take(self._unsigned())
        if kind == _STRUCT:
            return self.struct(depth)
        if kind in (_LIST, _SET):
            return self._list(depth)
        if kind in (_TRUE, _FALSE, _BYTE):
            return self._byte()
        if kind == _DOUBLE:
            return struct.unpack("<d", self._take(8))[0]
        raise ValueError(f"a value of the unknown kind {kind}")

    def _list(self, depth: int) -> list[Any]:
        if not depth:
            raise ValueError("lists nested too deeply")
        head = self._byte()
        size, kind = head >> 4, head & 15
        if size == 15:
            size = self._unsigned()
        if size > len(self._data) - self.at:
            raise ValueError("a list longer than its bytes")
        return [self._value(kind, depth - 1) for _ in range(size)]

    def _byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]

    def _take(self, size: int) -> bytes:
        if size > len(self._data) - self.at:
            raise ValueError("bytes beyond the end")
        self.at += size
        return self._data[self.at - size : self.at]

    def _unsigned(self) -> int:
        data, at = self._data, self.at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                self.at = at
                return value
            shift += 7
            if shift > 63:
                raise ValueError("a number of more than 64 bits")

    def _signed(self) -> int:
        value = self._unsigned()
        return (value >> 1) ^ -(value & 1)
