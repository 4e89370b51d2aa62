"""Mutated traces and pilots: of the bytes, and of what is in them with digests made right."""

from __future__ import annotations

import copy
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np

from dynoffload.profiler.safefile import digest_of, read_file

HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 255, 65_536, 2**31 - 1, 2**31, 2**62, 2**63, -(2**63)),
    *(10**30, 10**4000, 0.5, -0.5, 1e-300, 1e38, 1e300, math.nan, math.inf, -math.inf),
    *("", "x", "0", "1", "-1", "nan", "1e400", "\ud800", "\x00\x1b[2J", "é𝒳", "a" * 5000),
    *([], {}, [[]], [0], [-1], [None], {"a": 1}, [[[[[[[[[0]]]]]]]]], [0] * 300),
    {str(i): i for i in range(100)},
)
"""What stands where something else should."""
_NAMES = {"f2": "F16", "f4": "F32", "f8": "F64", "u1": "U8"} | {
    f"i{size}": f"I{8 * size}" for size in (1, 2, 4, 8)
}
_EXTREMES = (0, 1, -1, 2, 127, -128, 255, 2**31, 2**62, -(2**62), 65_504.0, 3e38, -3e38, 1e-45)


def pack(
    text: bytes, arrays: dict[str, Any], of: tuple[str, int], lie: random.Random | None = None
) -> bytes:
    """Return a file with a right digest; with ``lie`` its header lies in one place.

    Args:
        text: the document.
        arrays: the others.
        of: the kind of file, and its version.
        lie: draws the lie.
    """
    parts = {**arrays, "document": np.frombuffer(text, np.uint8)}
    parts = {
        name: np.ascontiguousarray(array).reshape(np.shape(array)) for name, array in parts.items()
    }
    header: dict[str, Any] = {}
    body = b""
    for name, array in parts.items():
        data = array.tobytes()
        header[name] = {
            "dtype": _NAMES.get(array.dtype.str[1:], "C64"),
            "shape": list(array.shape),
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    seal = {"sha256": digest_of(parts), "version": of[1]}
    header["__metadata__"] = {of[0]: json.dumps(seal)}
    described = text_of(header if lie is None else mutate_json(lie, header))
    length = len(described)
    if lie is not None and lie.random() < 0.1:
        length = lie.choice((0, 1, length - 1, length + 1, 2**20 + 1, 2**40, 2**63, 2**64 - 1))
    return length.to_bytes(8, "little") + described + body


def text_of(document: Any) -> bytes:
    """Return a document as text."""
    return json.dumps(document, separators=(",", ":")).encode("utf-8", "surrogatepass")


def mutated(chance: random.Random, path: Path, of: tuple[str, int]) -> tuple[str, bytes]:
    """Return the kind of mutation, and a file made from an undamaged one."""
    kind = chance.choices(("bytes", "header", "document", "arrays"), (12, 12, 38, 38))[0]
    if kind == "bytes":
        return kind, damage(chance, path.read_bytes())
    document, arrays = read_file(path, *of)
    if kind == "document":
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            document = mutate_json(chance, document)
    if kind == "arrays":
        for _ in range(chance.choice((1, 1, 2, 4))):
            _mutate_arrays(chance, arrays)
    text = text_of(document)
    if chance.random() < 0.5:
        text = text.replace(b"Infinity", b"1e999")
    return kind, pack(text, arrays, of, chance if kind == "header" else None)


def damage(chance: random.Random, data: bytes) -> bytes:
    """Return bytes damaged without regard to what they mean."""
    made = bytearray(data)
    start = chance.randrange(len(made))
    stop = min(len(made), start + 1 + int(chance.expovariate(1 / 60)))
    how = chance.randrange(4)
    if how == 0:
        for _ in range(chance.randint(1, 8)):
            made[chance.randrange(len(made))] ^= 1 << chance.randrange(8)
    elif how == 1:
        del made[start:]
    elif how == 2:
        made[stop:stop] = data[start:stop] * chance.choice((1, 1, 30))
    else:
        made[start:stop] = bytes(stop - start)
    return bytes(made)


def mutate_json(chance: random.Random, document: Any) -> Any:
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
        holder[key] = chance.choice(HOSTILE)
    return made


def _mutate_arrays(chance: random.Random, arrays: dict[str, Any]) -> None:
    """Change values, type, shape or presence of one array."""
    if not arrays:
        return
    name = chance.choice(list(arrays))
    array = np.array(arrays[name])
    how = chance.randrange(7)
    with np.errstate(all="ignore"):
        if how <= 2 and array.size:
            if chance.random() < 0.5:
                array = array.astype(f"{array.dtype.kind}8"[-2:])
            flat, extremes = array.reshape(-1), [*_EXTREMES, array.size, array.size - 1]
            if array.dtype.kind == "f":
                extremes += [math.nan, math.inf, -math.inf, 1.7e308]
            for _ in range(chance.choice((1, 1, 5, array.size))):
                value = chance.choice(extremes)
                if array.dtype.kind != "f":
                    info = np.iinfo(array.dtype)
                    value = min(max(int(value), info.min), info.max)
                flat[chance.randrange(array.size)] = value
        elif how == 3:
            array = array.astype(chance.choice(("i1", "i2", "i4", "i8", "f2", "f4", "f8", "u1")))
        elif how == 4 and array.size:
            array = np.resize(array, [max(1, n * chance.choice((1, 2))) for n in array.shape])
        elif how == 5:
            array = chance.choice((array.reshape(-1), array[None], array.T, array[:0]))
        else:
            del arrays[name]  # another has its place, if there is one
            for other in chance.sample(list(arrays), min(1, len(arrays))):
                arrays[other] = array
            return
    arrays[name] = array
