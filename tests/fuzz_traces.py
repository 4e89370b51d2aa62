"""Mutated traces: of the bytes, of the header, of arrays and document, sealed again."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from fuzz_values import damage, mutate_json, text_of
from safetensors.numpy import load

from dynoffload.profiler.storage import FORMAT, seal

BLANK = "0" * 64
"""The digest of a file that is not sealed."""
_NAMES = {"i1": "I8", "i2": "I16", "i4": "I32", "i8": "I64", "f8": "F64", "f4": "F32", "u1": "U8"}
_EXTREMES = (0, 1, -1, 2, 3, 99, 127, -128, 2**15 - 1, 2**31 - 1, -(2**31), 2**40, 2**62, 2**63 - 1)
_TIMES = (0.0, -0.0, -1.0, 1e-300, 1e300, 1.7e308, float("nan"), float("inf"), float("-inf"))
_TYPES = ("i1", "i2", "i4", "i8", "f8", "f4", "u1")


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the document of a trace, without its digest, and its arrays."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    document = json.loads(header["__metadata__"][FORMAT])
    return {**document, "sha256": BLANK}, dict(load(data))


def pack(text: bytes, arrays: dict[str, Any], lie: random.Random | None = None) -> bytes:
    """Return a sealed file of a document and arrays; with ``lie`` its header lies in one place."""
    header: dict[str, Any] = {"__metadata__": {FORMAT: text.decode("utf-8", "surrogatepass")}}
    body = b""
    for name, array in arrays.items():
        data = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": _NAMES[array.dtype.str[1:]],
            "shape": list(array.shape),
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    if lie is None:
        described = json.dumps(header).encode()
    else:
        described = text_of(lie, mutate_json(lie, header))
    length = len(described)
    if lie is not None and lie.random() < 0.1:
        length = lie.choice((0, 1, length - 1, length + 1, 2**27, 2**40, 2**63, 2**64 - 1))
    return seal(length.to_bytes(8, "little") + described + body)


def repack(document: dict[str, Any], arrays: dict[str, Any]) -> bytes:
    """Return a sealed file of a document and arrays."""
    return pack(json.dumps(document).encode(), arrays)


class TraceMutator:
    """Makes mutated traces.

    Args:
        traces: undamaged traces, by name.
    """

    def __init__(self, traces: dict[str, Path]) -> None:
        self._raw = {name: path.read_bytes() for name, path in traces.items()}
        self._parts = {name: unpack(data) for name, data in self._raw.items()}

    def make(self, chance: random.Random) -> tuple[str, str, bytes]:
        """Return the name of what was mutated, the kind of mutation, and the file."""
        names = sorted(self._raw, key=lambda name: len(self._raw[name]))
        name = chance.choices(names, range(3 * len(names), 0, -3))[0]  # the small ones rather
        kind = chance.choices(
            ("bytes", "sealed", "header", "document", "columns", "layout", "bomb"),
            (18, 28, 32, 48, 48, 24, 2),
        )[0]
        document, arrays = self._parts[name]
        arrays = dict(arrays)
        if kind == "bytes":
            how, data = damage(chance, self._raw[name])
            return name, f"trace bytes: {how}", data
        if kind == "sealed":
            plain = json.dumps(document, separators=(",", ":")).encode()
            return name, "trace sealed bytes", _damaged(chance, pack(plain, arrays))
        if kind == "document":
            for _ in range(chance.choice((1, 1, 1, 2, 4))):
                document = mutate_json(chance, document)
        elif kind == "columns":
            for _ in range(chance.choice((1, 1, 2, 4))):
                _mutate_column(chance, arrays)
        elif kind == "layout":
            _mutate_layout(chance, arrays)
        elif kind == "bomb":
            how, document = _bomb(chance, document, arrays)
            kind = f"bomb: {how}"
        lie = chance if kind == "header" else None
        text = text_of(chance, document) if kind == "document" else json.dumps(document).encode()
        return name, f"trace {kind}", pack(text, arrays, lie)


def _damaged(chance: random.Random, data: bytes) -> bytes:
    """Damage header or arrays of a file, and seal it again."""
    start = 8 + int.from_bytes(data[:8], "little")
    found = json.loads(json.loads(data[8:start])["__metadata__"][FORMAT])["sha256"]
    blank = data.replace(found.encode(), BLANK.encode(), 1)
    if chance.random() < 0.5:
        made = blank[:start] + damage(chance, blank[start:])[1]
    else:
        described = damage(chance, blank[8:start])[1]
        length = len(described) if chance.random() < 0.9 else start - 8
        made = length.to_bytes(8, "little") + described + blank[start:]
    return seal(made)


def _mutate_column(chance: random.Random, arrays: dict[str, Any]) -> None:
    """Change values of an array, which may become wider."""
    name = chance.choice(sorted(arrays))
    array = arrays[name]
    if not array.size:
        return
    pool = _TIMES if array.dtype.kind == "f" else (*_EXTREMES, array.size, array.size - 1)
    made = array.astype(np.float64 if array.dtype.kind == "f" else np.int64)
    flat = made.reshape(-1)
    how = chance.randrange(5)
    if how <= 2:
        for _ in range(chance.choice((1, 1, 3, flat.size))):
            flat[chance.randrange(flat.size)] = chance.choice(pool)
    elif how == 3:
        flat[:] = chance.choice(pool)
    else:
        np.random.default_rng(chance.randrange(99)).shuffle(flat)
    low, high = (flat.min(), flat.max()) if array.dtype.kind == "i" else (0, 0)
    limits = np.iinfo(array.dtype) if array.dtype.kind == "i" else None
    fits = limits is not None and limits.min <= low and high <= limits.max
    arrays[name] = made.astype(array.dtype) if fits else made


def _mutate_layout(chance: random.Random, arrays: dict[str, Any]) -> None:
    """Change which arrays there are, their types, shapes, or numbers of rows."""
    name = chance.choice(sorted(arrays))
    array = arrays[name]
    how = chance.randrange(7)
    if how == 0:
        del arrays[name]
    elif how == 1:
        other = chance.choice(sorted(arrays))
        arrays[name], arrays[other] = arrays[other], array
    elif how == 2:
        with np.errstate(all="ignore"):
            arrays[name] = array.astype(chance.choice(_TYPES))
    elif how == 3:
        arrays[name] = array.reshape(chance.choice(((1, *array.shape), (*array.shape, 1), (-1,))))
    elif how == 4:
        arrays[name] = array[: chance.choice((0, 1, len(array) // 2))]
    elif how == 5:
        arrays[name] = np.concatenate([array] * chance.choice((2, 3)))
    else:
        arrays["operators.other"] = array


def _bomb(
    chance: random.Random, document: dict[str, Any], arrays: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Make what takes far more memory or time than bytes, if nothing stops it."""
    how = chance.choice(("rows", "uses", "calls", "lists", "regions", "hints", "arrays"))
    many = chance.choice((20_000, 60_000))
    document = dict(document)
    if how in ("rows", "regions"):
        for name in [name for name in arrays if name.startswith(_TABLES[how])]:
            if name != "operators.used":
                arrays[name] = np.resize(arrays[name], 1_100_000)
    elif how == "uses":
        arrays["operators.used"] = np.zeros(17_000_000, np.int8)
    elif how == "calls":
        zeros = np.zeros(many, np.int8)
        for name in ("path", "shape_key", "start", "stop"):
            arrays[f"calls.{name}"] = zeros
        parents = np.arange(-1, many - 1) if chance.random() < 0.5 else zeros - 1
        arrays["calls.parent"] = parents.astype(np.int32)
    elif how == "lists":
        document["other"] = [[]] * (many * 20)
    elif how == "arrays":
        arrays.update({f"a{number}": np.zeros(0, np.int8) for number in range(many)})
    else:
        document["hinted"] = [["a"] * 4096]
        document["hints"] = [[0, 0, [0.5] * 4096]] * (many // 4000)
    return how, document


_TABLES = {"rows": "operators.", "regions": "regions."}
