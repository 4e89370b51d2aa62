"""Structs of Thrift's compact protocol, taken apart and put together again with one thing changed.

What it is: `parse`, `encode` and `mutate` over fields that keep their types. What it is not: the
reader that is tested, which is `dynoffload.profiler.compact_thrift`.
"""

from __future__ import annotations

import random
from typing import Any

Field = list[Any]  # [number, type, value]; a list's value is [type, items]
_NUMBERS = (
    0,
    1,
    -1,
    2,
    4,
    7,
    127,
    1000,
    2**20,
    2**31 - 1,
    2**31,
    -(2**31),
    2**40,
    2**62,
    2**63 - 1,
)


def parse(data: bytes, at: int) -> tuple[list[Field], int]:
    """Return the fields of the struct at ``at``, and where it ends."""
    fields: list[Field] = []
    number = 0
    while data[at]:
        delta, kind = data[at] >> 4, data[at] & 15
        at += 1
        if delta:
            number += delta
        else:
            number, at = _signed(data, at)
        if kind in (1, 2):
            fields.append([number, 1, kind == 1])
        else:
            value, at = _value(data, at, kind)
            fields.append([number, kind, value])
    return fields, at + 1


def _value(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    if kind in (1, 2, 3):
        return data[at], at + 1
    if kind in (4, 5, 6):
        return _signed(data, at)
    if kind == 7:
        return data[at : at + 8], at + 8
    if kind == 8:
        size, at = _unsigned(data, at)
        return data[at : at + size], at + size
    if kind == 9:
        size, inner = data[at] >> 4, data[at] & 15
        at += 1
        if size == 15:
            size, at = _unsigned(data, at)
        items = []
        for _ in range(size):
            item, at = _value(data, at, inner)
            items.append(item)
        return [inner, items], at
    assert kind == 12, kind
    return parse(data, at)


def encode(fields: list[Field]) -> bytes:
    """Return the bytes of a struct; fields are written with their numbers in full."""
    made = b""
    for number, kind, value in fields:
        shown = (1 if value else 2) if kind == 1 else kind
        made += bytes([shown]) + varint(number * 2 if number >= 0 else -number * 2 - 1)
        made += b"" if kind == 1 else _encoded(kind, value)
    return made + b"\0"


def _encoded(kind: int, value: Any) -> bytes:
    if kind in (1, 2, 3):
        return bytes([int(value) & 255])
    if kind in (4, 5, 6):
        return varint((value << 1) ^ (value >> 63))
    if kind == 7:
        return bytes(value)
    if kind == 8:
        return varint(len(value)) + value
    if kind == 9:
        inner, items = value
        size = len(items)
        head = bytes([size << 4 | inner]) if size < 15 else bytes([0xF0 | inner]) + varint(size)
        return head + b"".join(_encoded(inner, item) for item in items)
    return encode(value)


def mutate(chance: random.Random, fields: list[Field]) -> None:
    """Change one thing in a struct, in place."""
    while True:
        place = chance.randrange(len(fields))
        number, kind, value = fields[place]
        if kind == 12 and value and chance.random() < 0.8:
            fields = value
            continue
        if kind == 9 and value[1] and chance.random() < 0.85:
            inner, items = value
            item = chance.randrange(len(items))
            if inner == 12 and items[item] and chance.random() < 0.9:
                fields = items[item]
                continue
            how = chance.randrange(4)
            if how == 0:
                del items[item]
            elif how == 1:
                items[item:item] = [items[item]] * chance.choice((1, 2, 50))
            elif how == 2:
                chance.shuffle(items)
            elif inner in (4, 5, 6):
                items[item] = chance.choice(_NUMBERS)
            return
        break
    how = chance.randrange(6)
    if how == 0:
        del fields[place]
    elif how == 1:
        fields.insert(place, [number, kind, value])
    elif how == 2:
        fields[place][0] = chance.choice((0, 1, 2, 3, 8, 9, 30, -1))
    elif kind in (4, 5, 6):
        near = (value + 1, value - 1, value * 2, -value, value + 7)
        fields[place][2] = max(-(2**63), min(2**63 - 1, chance.choice((*_NUMBERS, *near))))
    elif kind == 8:
        fields[place][2] = chance.choice((b"", b"\xff\xfe", b"x" * 3000, value[:-1], value + b"x"))
    elif kind == 1:
        fields[place][2] = not value
    else:
        fields[place] = [number, 5, chance.choice(_NUMBERS)]


def varint(value: int) -> bytes:
    """Return an unsigned number in groups of seven bits."""
    value &= 2**64 - 1
    made = bytearray()
    while value > 127:
        made.append(value & 127 | 128)
        value >>= 7
    made.append(value)
    return bytes(made)


def _unsigned(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


def _signed(data: bytes, at: int) -> tuple[int, int]:
    value, at = _unsigned(data, at)
    return (value >> 1) ^ -(value & 1), at
