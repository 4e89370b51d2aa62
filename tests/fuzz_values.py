"""Mutations of plain data and of bytes, which those of pilots and traces are made of.

What it is: `damage` for bytes, `mutate_json` for documents, `text_of` for writing them as JSON that
Python's own writer would not write. What it is not: aware of what the data means.
"""

from __future__ import annotations

import copy
import json
import math
import random
from typing import Any

HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 255, 65_536, 2**31 - 1, 2**31, 2**62, 2**63, -(2**63)),
    *(10**30, 10**4000, 0.5, -0.5, 1e-300, 1e38, 1e300, math.nan, math.inf, -math.inf),
    *("", "x", "0", "1", "-1", "nan", "1e400", "\ud800", "\x00\x1b[2J", "é𝒳", "a" * 5000),
    *([], {}, [[]], [0], [-1], [None], {"a": 1}, [[[[[[[[[0]]]]]]]]], [0] * 300),
    {str(i): i for i in range(100)},
)
"""What stands where something else should."""


def deep(levels: int) -> Any:
    """Return lists in lists."""
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


def damage(chance: random.Random, data: bytes) -> tuple[str, bytes]:
    """Return bytes damaged without regard to what they mean, and what was done."""
    how = chance.choice(("flip", "splice", "truncate", "duplicate", "move", "insert", "zero"))
    made = bytearray(data)
    size = len(made)
    start = chance.randrange(size)
    stop = min(size, start + 1 + int(chance.expovariate(1 / 60)))
    if how == "flip":
        for _ in range(chance.randint(1, 8)):
            made[chance.randrange(size)] ^= 1 << chance.randrange(8)
    elif how == "splice":
        other = chance.randrange(size)
        made[start:stop] = data[other : other + stop - start]
    elif how == "truncate":
        del made[start:]
    elif how == "duplicate":
        made[stop:stop] = data[start:stop] * chance.choice((1, 1, 30))
    elif how == "move":
        piece = data[start:stop]
        del made[start:stop]
        to = chance.randrange(len(made) + 1)
        made[to:to] = piece
    elif how == "insert":
        made[start:start] = chance.randbytes(chance.randint(1, 40))
    else:
        made[start:stop] = bytes(stop - start)
    return how, bytes(made)


def mutate_json(chance: random.Random, document: Any) -> Any:
    """Return a document with one thing in it changed; what is not changed is shared."""
    if not document or not isinstance(document, dict | list):
        return document
    made = holder = copy.copy(document)
    while True:
        key = (
            chance.choice(list(holder))
            if isinstance(holder, dict)
            else chance.randrange(len(holder))
        )
        inner = holder[key]
        if not inner or not isinstance(inner, dict | list) or chance.random() < 0.15:
            break
        holder[key] = holder = copy.copy(inner)
    _change(chance, holder, key)
    return made


def _change(chance: random.Random, holder: Any, key: Any) -> None:
    value = holder[key]
    how = chance.randrange(8)
    if how == 0 and isinstance(holder, dict):
        del holder[key]
        if chance.random() < 0.3:
            holder["other"] = value
    elif how == 1 and isinstance(holder, list):
        holder[key:key] = [value] * chance.choice((1, 1, 2, 100))
    elif how == 2 and isinstance(holder, list):
        del holder[key]
    elif how == 3 and isinstance(value, list) and value:
        holder[key] = chance.sample(value, len(value))
    elif how == 4 and isinstance(value, int | float) and abs(value) < 1e30:
        holder[key] = chance.choice(
            (value + 1, value - 1, -value, value * 10**9, value + 0.5, str(value))
        )
    elif how == 5:
        holder[key] = [value]
    elif how == 6 and chance.random() < 0.2:
        holder[key] = deep(chance.choice((20, 40, 2000)))
    else:
        holder[key] = chance.choice(HOSTILE)


def text_of(chance: random.Random, document: Any) -> bytes:
    """Return a document as text, now and then with what a parser may trip over."""
    text = _dumps(document)
    if chance.random() < 0.5:
        text = text.replace("Infinity", "1e999")
    if chance.random() < 0.05:
        at = chance.randrange(len(text))
        piece = chance.choice(
            ("NaN", "1e999", "\\ud800", '"', "[" * 3000, "9" * 5000, "\u2028", "-", "{")
        )
        text = text[:at] + piece + text[at:]
    if chance.random() < 0.05 and '":' in text:
        parts = text.split('"')
        name = chance.choice(parts[1::2])
        text = text.replace("{", '{"' + name + '":' + _dumps(chance.choice(HOSTILE)) + ",", 1)
    return text.encode("utf-8", "surrogatepass")


def _dumps(value: Any) -> str:
    try:
        return json.dumps(value, separators=(",", ":"))
    except RecursionError:
        return "[" * 100_000
