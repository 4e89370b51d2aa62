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
_TYPES = ("i1", "i2", "i4", "i8", "f2", "f4", "f8", "u1")
_EXTREMES = (0, 1, -1, 2, 127, -128, 255, 2**31, 2**62, -(2**62), 65_504.0, 3e38, -3e38, 1e-45)
_NO_NUMBERS = (math.nan, math.inf, -math.inf, 1.7e308)


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
    if lie is None:
        described = json.dumps(header).encode("utf-8", "surrogatepass")
    else:
        described = text_of(lie, mutate_json(lie, header))
    length = len(described)
    if lie is not None and lie.random() < 0.1:
        length = lie.choice((0, 1, length - 1, length + 1, 2**20 + 1, 2**40, 2**63, 2**64 - 1))
    return length.to_bytes(8, "little") + described + body


class Mutator:
    """Makes mutated files.

    Args:
        files: undamaged files, by name.
        of: their kind and version.
    """

    def __init__(self, files: dict[str, Path], of: tuple[str, int]) -> None:
        self._of = of
        self._raw = {name: path.read_bytes() for name, path in files.items()}
        self._parts = {name: read_file(path, *of) for name, path in files.items()}

    def make(self, chance: random.Random) -> tuple[str, str, bytes]:
        """Return the name of what was mutated, the kind of mutation, and the file."""
        name = chance.choice(list(self._raw))
        kind = chance.choices(
            ("bytes", "header", "document", "arrays", "both", "swap", "bomb"),
            (12, 12, 35, 35, 8, 4, 0.5),
        )[0]
        if kind == "bytes":
            return name, kind, damage(chance, self._raw[name])
        document, arrays = self._parts[name]
        arrays = dict(arrays)
        if kind in ("document", "both"):
            for _ in range(chance.choice((1, 1, 1, 2, 4))):
                document = mutate_json(chance, document)
        if kind in ("arrays", "both"):
            for _ in range(chance.choice((1, 1, 2, 4))):
                _mutate_arrays(chance, arrays)
        if kind == "swap":
            other, others = self._parts[chance.choice(list(self._raw))]
            if chance.random() < 0.5:
                arrays = dict(others)
            else:
                key = chance.choice(list(document))
                document = {**document, key: other.get(key)}
        if kind == "bomb":
            document = _bomb(chance, document, arrays)
        lie = chance if kind == "header" else None
        return name, kind, pack(text_of(chance, document), arrays, self._of, lie)


def damage(chance: random.Random, data: bytes) -> bytes:
    """Return bytes damaged without regard to what they mean."""
    how = chance.choice(("flip", "splice", "truncate", "duplicate", "insert", "zero"))
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
    elif how == "insert":
        made[start:start] = chance.randbytes(chance.randint(1, 40))
    else:
        made[start:stop] = bytes(stop - start)
    return bytes(made)


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
    value = holder[key]
    how = chance.randrange(7)
    if how == 0 and isinstance(holder, dict):
        del holder[key]
    elif how == 1 and isinstance(holder, list):
        holder[key:key] = [value] * chance.choice((1, 2, 100))
    elif how == 2 and isinstance(holder, list):
        del holder[key]
    elif how == 3 and isinstance(value, list) and value:
        holder[key] = chance.sample(value, len(value))
    elif how == 4 and isinstance(value, int | float) and abs(value) < 1e30:
        holder[key] = chance.choice((value + 1, value - 1, -value, value * 10**9, str(value)))
    elif how == 5:
        holder[key] = [value] * chance.choice((1, 40))
    else:
        holder[key] = chance.choice(HOSTILE)
    return made


def text_of(chance: random.Random, document: Any) -> bytes:
    """Return a document as text, now and then with what a parser may trip over."""
    text = json.dumps(document, separators=(",", ":"))
    if chance.random() < 0.5:
        text = text.replace("Infinity", "1e999")
    if chance.random() < 0.05:
        at = chance.randrange(len(text))
        pieces = ("NaN", "1e999", "\\ud800", '"', "[" * 3000, "9" * 5000, "-", "{")
        text = text[:at] + chance.choice(pieces) + text[at:]
    return text.encode("utf-8", "surrogatepass")


def _mutate_arrays(chance: random.Random, arrays: dict[str, Any]) -> None:
    """Change values, type, shape or presence of one array."""
    if not arrays:
        return
    name = chance.choice(list(arrays))
    array = np.array(arrays[name])
    how = chance.randrange(9)
    if how <= 3 and array.size:
        made = array if chance.random() < 0.5 else array.astype(f"{array.dtype.kind}8"[-2:])
        flat = made.reshape(-1)
        pool = (*_EXTREMES, array.size, array.size - 1)
        pool = (*pool, *_NO_NUMBERS) if made.dtype.kind == "f" else pool
        for _ in range(chance.choice((1, 1, 5, array.size))):
            _set(flat, chance.randrange(array.size), chance.choice(pool))
        array = made
    elif how == 4:
        with np.errstate(all="ignore"):
            array = array.astype(chance.choice(_TYPES))
    elif how == 5 and array.shape:
        shape = [*array.shape]
        place = chance.randrange(len(shape))
        shape[place] = chance.choice((0, 1, shape[place] + 1, shape[place] * 2))
        array = np.resize(array, shape) if 0 not in shape else np.zeros(shape, array.dtype)
    elif how == 6:
        array = chance.choice((array.reshape(-1), array[None], array.T, array[::-1]))
    elif how == 7:
        other = chance.choice(list(arrays))
        arrays[other] = array
        if chance.random() < 0.5:
            del arrays[name]
        return
    elif array.size > 1:
        np.random.default_rng(chance.randrange(2**32)).shuffle(array.reshape(-1))
    arrays[name] = array


def _set(flat: Any, place: int, value: float) -> None:
    """Put a number into an array, as near to it as its type comes."""
    if flat.dtype.kind in "iu":
        info = np.iinfo(flat.dtype)
        flat[place] = min(max(int(value), info.min), info.max)
    else:
        with np.errstate(all="ignore"):
            flat[place] = value


def _bomb(chance: random.Random, document: Any, arrays: dict[str, Any]) -> Any:
    """Make what takes far more memory or time than bytes, if nothing stops it."""
    many = chance.choice((20_000, 60_000))
    how = chance.choice(("lists", "keys", "arrays", "rows", "uses", "calls", "rule", "slots"))
    if how == "lists":
        return {**document, "card": {"x": [[]] * (20 * many)}}
    if how == "keys":
        return {**document, "values": {str(i): i for i in range(many)}}
    if how == "arrays":
        arrays.update({f"a{number}": np.zeros(0, np.int8) for number in range(many)})
    elif how == "rows":
        table = chance.choice(("operators.", "regions.", "calls."))
        for name in [one for one in arrays if one.startswith(table)]:
            arrays[name] = np.resize(arrays[name], 1_100_000)
    elif how == "uses":
        arrays["operators.used"] = np.zeros(17_000_000, np.int8)
    elif how == "calls":
        zeros = np.zeros(many, np.int8)
        for name in ("path", "shape_key", "start", "stop"):
            arrays[f"calls.{name}"] = zeros
        arrays["calls.parent"] = np.arange(-1, many - 1, dtype=np.int32)
    elif how == "rule":
        rule = {"fidelity": 1.0, "columns": [0], "table": [[[0], [0] * many], [[1], [0] * many]]}
        slots = [*document.get("slots", []), *([-2, i] for i in range(many // 100))]
        rules = [rule] * (many // 100)
        return {**document, "slots": slots, "families": [[0]], "loops": rules}
    else:
        return {**document, "slots": [[0, i] for i in range(4 * many)]}
    return document
