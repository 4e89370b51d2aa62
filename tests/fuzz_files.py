"""Mutated documents and arrays of traces and pilots, in files with right digests."""

from __future__ import annotations

import copy
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from dynoffload.profiler.safefile import digest_of, read_file

_HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 7, 65_536, 2**31, 2**62, 2**63, -(2**63), 10**30, 10**4000),
    *(0.5, -0.5, 1e-300, 1e38, 1e300, math.nan, math.inf, -math.inf),
    *("", "x", "-1", "nan", "1e400", "\ud800", "\x00\x1b[2J", "é𝒳", "a" * 5000),
    *([], {}, [[]], [0], [-1], [None], {"a": 1}, [[[[[[[[[0]]]]]]]]], [0] * 300),
    {str(i): i for i in range(100)},
)
_EXTREMES = (0, 1, -1, 2, 127, -128, 255, 2**31, 2**62, -(2**62), 65_504.0, 3e38, -3e38, 1e-45)


def pack(document: Any, arrays: dict[str, Any], of: tuple[str, int]) -> bytes:
    """Return a file of a kind and version ``of``; infinity is written as a number too large."""
    text = json.dumps(document).replace("Infinity", "1e999").encode()
    parts = {**arrays, "document": np.frombuffer(text, np.uint8)}
    parts = {
        name: np.ascontiguousarray(array).reshape(np.shape(array)) for name, array in parts.items()
    }
    data: bytes = save(
        parts, {of[0]: json.dumps({"sha256": digest_of(parts), "version": of[1]}, sort_keys=True)}
    )
    return data


def mutated(chance: random.Random, path: Path, of: tuple[str, int]) -> tuple[str, bytes]:
    """Return what was mutated, the document or the arrays, and the file made from a good one."""
    document, arrays = read_file(path, *of)
    kind = chance.choice(("document", "arrays"))
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        if kind == "document":
            document = _mutate_json(chance, document)
        else:
            _mutate_arrays(chance, arrays)
    return kind, pack(document, arrays, of)


def _mutate_json(chance: random.Random, document: Any) -> Any:
    """Return a document with one thing in it changed; what is not changed is shared."""
    if not document or not isinstance(document, dict | list):
        return document
    made = holder = copy.copy(document)
    while True:
        key = chance.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        inner = holder[key]
        if not inner or not isinstance(inner, dict | list) or chance.random() < 0.15:
            break
        holder[key] = holder = copy.copy(inner)
    value = holder[key]
    how = chance.randrange(6)
    if how == 0:
        del holder[key]
    elif how == 1 and isinstance(holder, list):
        holder[key:key] = [value] * chance.choice((1, 2, 100))
    elif how == 2 and isinstance(value, list) and value:
        holder[key] = chance.sample(value, len(value))
    elif how == 3 and isinstance(value, int | float) and abs(value) < 1e30:
        holder[key] = chance.choice((value + 1, value - 1, -value, value * 10**9, str(value)))
    elif how == 4:
        holder[key] = [value] * chance.choice((1, 40))
    else:
        holder[key] = chance.choice(_HOSTILE)
    return made


def _mutate_arrays(chance: random.Random, arrays: dict[str, Any]) -> None:
    """Change values, type, shape or presence of one array."""
    if not arrays:
        return
    name = chance.choice(list(arrays))
    array = np.array(arrays.pop(name))
    how = chance.randrange(7)
    with np.errstate(all="ignore"):
        if how <= 2 and array.size:
            if chance.random() < 0.5:
                array = array.astype(f"{array.dtype.kind}8"[-2:])
            extremes = [*_EXTREMES, array.size, array.size - 1]
            if array.dtype.kind == "f":
                extremes += [math.nan, math.inf, -math.inf, 1.7e308]
            for _ in range(chance.choice((1, 1, 5, array.size))):
                value = chance.choice(extremes)
                if array.dtype.kind != "f":
                    info = np.iinfo(array.dtype)
                    value = min(max(int(value), info.min), info.max)
                array.reshape(-1)[chance.randrange(array.size)] = value
        elif how == 3:
            array = array.astype(chance.choice(("i1", "i2", "i4", "i8", "f2", "f4", "f8", "u1")))
        elif how == 4 and array.size:
            array = np.resize(array, [max(1, n * chance.choice((1, 2))) for n in array.shape])
        elif how == 5:
            array = chance.choice((array.reshape(-1), array[None], array.T, array[:0]))
        elif arrays:
            name = chance.choice(list(arrays))  # in the place of another
        else:
            return
    arrays[name] = array
