"""Mutated pilot files: of the bytes, and of what is in them with seal and offsets made right."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from fuzz_values import damage, mutate_json, text_of

from dynoffload.pilot import artifact
from dynoffload.pilot.artifact import read_artifact

_NAMES = {"<f2": "F16", "<f4": "F32", "<f8": "F64", "<i4": "I32", "<i8": "I64", "|u1": "U8"}
_EXTREMES = (0, 1, -1, 255, 2**31, 2**62, -(2**62), 65_504.0, 3e38, -3e38, 1e-45)


def pack(text: bytes, arrays: dict[str, Any], lie: random.Random | None = None) -> bytes:
    """Return a pilot file with a right seal; with ``lie`` its header lies in one place."""
    parts = {**arrays, "document": np.frombuffer(text, np.uint8)}
    parts = {name: np.ascontiguousarray(array) for name, array in parts.items()}
    header: dict[str, Any] = {}
    body = b""
    for name, array in parts.items():
        data = array.tobytes()
        header[name] = {
            "dtype": _NAMES.get(array.dtype.str, "C64"),
            "shape": list(array.shape),
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    seal: Any = {"sha256": artifact.digest_of(parts), "version": artifact.VERSION}
    header["__metadata__"] = {artifact.FORMAT: json.dumps(seal)}
    if lie is None:
        described = json.dumps(header).encode("utf-8", "surrogatepass")
    else:
        described = text_of(lie, mutate_json(lie, header))
    length = len(described)
    if lie is not None and lie.random() < 0.1:
        length = lie.choice(
            (0, 1, length - 1, length + 1, 2**20, 2**20 + 1, 2**40, 2**63, 2**64 - 1)
        )
    return length.to_bytes(8, "little") + described + body


class PilotMutator:
    """Makes mutated pilots.

    Args:
        pilots: undamaged pilot files, by name.
    """

    def __init__(self, pilots: dict[str, Path]) -> None:
        self._raw = {name: path.read_bytes() for name, path in pilots.items()}
        self._parts = {name: read_artifact(path) for name, path in pilots.items()}

    def make(self, chance: random.Random) -> tuple[str, str, bytes]:
        """Return the name of what was mutated, the kind of mutation, and the file."""
        name = chance.choice(list(self._raw))
        document, arrays = self._parts[name]
        kind = chance.choices(
            ("bytes", "document", "arrays", "header", "both", "trees", "swap", "bomb"),
            (12, 39, 22, 8, 8, 6, 4, 0.3),
        )[0]
        if kind == "trees":
            name = chance.choice([n for n, (_, a) in self._parts.items() if "tree_left" in a])
            document, arrays = self._parts[name]
        if kind == "bytes":
            how, data = damage(chance, self._raw[name])
            return name, f"pilot bytes: {how}", data
        arrays = dict(arrays)
        lie = None
        if kind in ("document", "both"):
            for _ in range(chance.choice((1, 1, 1, 2, 4))):
                document = mutate_json(chance, document)
        if kind in ("arrays", "both"):
            for _ in range(chance.choice((1, 1, 2))):
                _mutate_arrays(chance, arrays)
        if kind == "trees":
            of_trees = {part: array for part, array in arrays.items() if part.startswith("tree_")}
            _mutate_arrays(chance, of_trees)
            arrays = {n: a for n, a in arrays.items() if not n.startswith("tree_")} | of_trees
        if kind == "swap":
            other = self._parts[chance.choice(list(self._raw))]
            mixed = {**document, chance.choice(list(document)): None}
            key = next(key for key, value in mixed.items() if value is None or key == "model")
            document = {**document, key: other[0][key]}
            if chance.random() < 0.5:
                arrays |= other[1]
        if kind == "header":
            lie = chance
        if kind == "bomb":
            how, document = _bomb(chance, document)
            return name, f"pilot bomb: {how}", pack(text_of(chance, document), arrays)
        return name, f"pilot {kind}", pack(text_of(chance, document), arrays, lie)


def _mutate_arrays(chance: random.Random, arrays: dict[str, Any]) -> None:
    if not arrays:
        return
    name = chance.choice(list(arrays))
    array = np.array(arrays[name])
    how = chance.randrange(9)
    if how <= 2 and array.size:
        flat = array.reshape(-1)
        for _ in range(chance.choice((1, 1, 5, array.size))):
            _set(flat, chance.randrange(array.size), chance.choice(_EXTREMES))
    elif how == 3 and array.size and array.dtype.kind == "f":
        _set(
            array.reshape(-1),
            chance.randrange(array.size),
            chance.choice((np.nan, np.inf, -np.inf)),
        )
    elif how == 4:
        dtype = chance.choice((np.float16, np.float32, np.float64, np.int32, np.int64, np.uint8))
        with np.errstate(all="ignore"):
            array = array.astype(dtype)
    elif how == 5:
        shape = [*array.shape]
        if shape:
            place = chance.randrange(len(shape))
            shape[place] = chance.choice((0, 1, shape[place] + 1, shape[place] * 2))
        array = np.resize(array, shape) if 0 not in shape else np.zeros(shape, array.dtype)
    elif how == 6:
        array = chance.choice((array.reshape(-1), array[None], array.T, array[::-1]))
    elif how == 7:
        del arrays[name]
        return
    elif array.size > 1:
        flat = array.reshape(-1)
        np.random.default_rng(chance.randrange(2**32)).shuffle(flat)
    arrays[name] = array


def _set(flat: Any, place: int, value: float) -> None:
    """Put a number into an array, as near to it as its type comes."""
    if flat.dtype.kind in "iu":
        info = np.iinfo(flat.dtype)
        flat[place] = min(max(int(value), info.min), info.max)
    else:
        with np.errstate(all="ignore"):
            flat[place] = value


def _bomb(chance: random.Random, document: Any) -> tuple[str, Any]:
    """Return a document that takes far more than its size, if nothing stops it."""
    document = dict(document)
    size = chance.choice((20_000, 100_000))
    how = chance.choice(("lists", "slots", "rule", "keys", "text", "families", "segments", "stops"))
    if how == "lists":
        document["card"] = {"x": [[]] * size}
    elif how == "slots":
        document["slots"] = [*document["slots"], *([0, 9 + i] for i in range(size))]
    elif how == "rule":
        run = [0] * size
        rule = {"fidelity": 1.0, "columns": [0], "table": [[[0], run], [[1], run]]}
        document["slots"] = [*document["slots"], [-2, 0]]
        document["families"] = [[0]]
        document["segments"] = [rule]
    elif how == "segments":
        count = size // 100
        rule = {"fidelity": 1.0, "columns": [0], "table": [[[0], [0] * 60]]}
        document["slots"] = [*document["slots"], *([-2, i] for i in range(count))]
        document["families"] = [[0]]
        document["segments"] = [rule] * count
    elif how == "keys":
        document["card"] = {str(i): i for i in range(size // 4)}
    elif how == "text":
        document["vocabulary"] = {**document["vocabulary"], "network": "n" * size}
    elif how == "families":
        document["families"] = [[0]] * size
    else:
        document["model"] = {**(document["model"] or {}), "stops": list(range(1, size))}
    return how, document
