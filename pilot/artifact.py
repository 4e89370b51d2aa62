"""The `.pilot` file: named arrays and one JSON document, checked before anything is believed.

What it is: `write_artifact` and `read_artifact`. A file is one safetensors file, so it can be
opened anywhere and holds no code; its header's metadata says what it is, of which version, and the
SHA-256 of its arrays. The JSON document is the array ``document`` of bytes. What it is not: the
meaning of the parts; see `dynoffload.pilot.pilot`.

Nothing is compressed: arrays take at most thrice the memory that they take on disk (those of half
precision are widened), and the document some thirty times as much. No file larger than `MAX_FILE`
is read, and no document above `MAX_DOCUMENT`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dynoffload.errors import PilotError
from dynoffload.units import MiB, format_bytes

FORMAT = "dynoffload.pilot"
VERSION = 2
MAX_FILE = 128 * MiB
MAX_HEADER = 1 * MiB
MAX_DOCUMENT = 16 * MiB
MAX_ARRAYS = 64
MAX_DEPTH = 32
LARGEST_WEIGHT = 65_504.0
"""The largest number of a model: what half precision holds, in which weights are stored."""

Arrays = Mapping[str, npt.NDArray[Any]]

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

_DTYPES: dict[str, np.dtype[Any]] = {
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "I64": np.dtype("<i8"),
    "U8": np.dtype("u1"),
}


def write_artifact(path: Path, document: Mapping[str, Any], arrays: Arrays) -> None:
    """Write a pilot file, by way of a temporary file beside it.

    Raises:
        PilotError: if the file cannot be written, or would be too large to be read again.
    """
    from safetensors.numpy import save

    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    if len(text) > MAX_DOCUMENT:
        raise PilotError(
            f"{path}: the blocks and rules of this pilot take {format_bytes(len(text))}, more "
            f"than the {format_bytes(MAX_DOCUMENT)} that are read again; train it on fewer kinds "
            "of block"
        )
    parts = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    parts["document"] = np.frombuffer(text.encode(), dtype=np.uint8)
    # One entry: safetensors writes several in no fixed order, and equal pilots are equal files.
    seal = json.dumps({"sha256": _digest(parts), "version": VERSION}, sort_keys=True)
    data = save(parts, {FORMAT: seal})
    if len(data) > MAX_FILE or len(parts) > MAX_ARRAYS:
        raise PilotError(
            f"{path}: a pilot of {format_bytes(len(data))} is more than {format_bytes(MAX_FILE)}, "
            "which no pilot needs; train it on fewer kinds of block"
        )
    try:
        write_whole(path, data)
    except OSError as error:
        raise PilotError(
            f"{path}: cannot be written ({error.strerror or error}); name another place"
        ) from error


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that it is there as a whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read_artifact(path: Path) -> tuple[Any, dict[str, npt.NDArray[Any]]]:
    """Read a pilot file.

    Returns:
        its JSON document and its arrays.

    Raises:
        PilotError: if there is no such file, or it is not an undamaged pilot file of this version.
    """
    try:
        if not path.is_file():
            raise PilotError(
                f"{path}: there is no such pilot file; train one with 'dynoffload pilot train', or "
                "let the session learn one: pilot='auto'"
            )
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_FILE:
                raise _refusal(path, f"it is larger than {format_bytes(MAX_FILE)}")
            data = file.read(MAX_FILE + 1)
    except OSError as error:
        raise PilotError(f"{path}: cannot be read ({error.strerror or error})") from error
    header, start = _header(path, data)
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not isinstance(metadata.get(FORMAT), str):
        raise _refusal(path, "it is some other safetensors file")
    seal = _json(path, metadata[FORMAT].encode("utf-8", "replace"))
    version = seal.get("version") if isinstance(seal, dict) else None
    if version != VERSION:
        raise _refusal(path, f"it is of version {version!r:.20}, and this release reads {VERSION}")
    arrays = _arrays(path, header, memoryview(data)[start:])
    if seal.get("sha256") != _digest(arrays):
        raise _refusal(path, "its checksum does not match; it was damaged or changed")
    document = arrays.pop("document", None)
    if document is None or document.dtype != np.uint8:
        raise _refusal(path, "it has no document")
    if document.size > MAX_DOCUMENT:
        raise _refusal(path, f"its document is larger than {format_bytes(MAX_DOCUMENT)}")
    return _json(path, document.tobytes()), arrays


def checked_weights(name: str, array: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return an array as float32.

    Raises:
        ValueError: if it holds what is no number, or one that products of it could overflow by.
    """
    weights = np.asarray(array, dtype=np.float32)
    if not (np.abs(weights) <= LARGEST_WEIGHT).all():
        raise ValueError(f"{name} is not finite, or too large")
    return weights


def _header(path: Path, data: bytes) -> tuple[dict[str, Any], int]:
    """Return the safetensors header and where the arrays begin."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 10 or not 2 <= length <= MAX_HEADER:
        raise _refusal(path, "it is not a pilot file")
    if 8 + length > len(data):
        raise _refusal(path, "it is cut short")
    header = _json(path, data[8 : 8 + length])
    if not isinstance(header, dict) or len(header) > MAX_ARRAYS + 1:
        raise _refusal(path, "it is not a pilot file")
    return header, 8 + length


def _arrays(path: Path, header: dict[str, Any], data: memoryview) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays a header describes; they must lie one after the other and fill the file."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    spans: list[tuple[int, int]] = []
    for name, entry in header.items():
        try:
            dtype = _DTYPES[entry["dtype"]]
            shape = tuple(entry["shape"])
            start, stop = entry["data_offsets"]
        except (KeyError, TypeError, ValueError) as error:
            raise _refusal(path, f"its array {name[:40]!r} is not described") from error
        numbers = (*shape, start, stop)
        if not all(type(n) is int and 0 <= n <= MAX_FILE for n in numbers) or len(shape) > 4:
            raise _refusal(path, f"its array {name[:40]!r} has an impossible shape")
        if math.prod(max(extent, 1) for extent in shape) > MAX_FILE:
            raise _refusal(path, f"its array {name[:40]!r} has an impossible shape")
        count = math.prod(shape)
        if not start <= stop <= len(data) or count * dtype.itemsize != stop - start:
            raise _refusal(path, f"it is cut short in its array {name[:40]!r}")
        arrays[name] = (
            np.frombuffer(data, dtype, count, start).reshape(shape)
            if count
            else (np.zeros(shape, dtype))
        )
        spans.append((start, stop))
    at = 0
    for start, stop in sorted(spans):
        if start != at:
            raise _refusal(path, "its arrays overlap or leave gaps")
        at = stop
    if at != len(data):
        raise _refusal(path, "it has something after its end")
    return arrays


def _json(path: Path, text: bytes) -> Any:
    """Parse JSON without deep nesting, NaN, infinities, or half of a surrogate pair in a text."""
    if _nesting(text) > MAX_DEPTH:
        raise _refusal(path, "its document is nested too deeply")

    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is not JSON")

    try:
        parsed = json.loads(text.decode("utf-8"), parse_constant=refuse, parse_float=_finite)
        if _SURROGATE.search(text):
            json.dumps(parsed, ensure_ascii=False).encode()
        return parsed
    except (ValueError, RecursionError) as error:
        raise _refusal(path, "it is not a pilot file, or it is damaged") from error


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:40]} is too large a number")
    return number


def _nesting(text: bytes) -> int:
    """Return how deep brackets nest, those within texts counted too."""
    steps = np.zeros(256, dtype=np.int8)
    steps[list(b"[{")] = 1
    steps[list(b"]}")] = -1
    deepest = depth = 0
    for start in range(0, len(text), 1 << 16):
        part = np.cumsum(steps[np.frombuffer(text[start : start + (1 << 16)], dtype=np.uint8)])
        deepest = max(deepest, depth + int(part.max()))
        depth += int(part[-1])
    return deepest


def _digest(arrays: Arrays) -> str:
    """Return the SHA-256 over names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        described = f"{name}\0{array.dtype.str}\0{array.shape}\0"
        digest.update(described.encode("utf-8", "backslashreplace"))
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _refusal(path: Path, reason: str) -> PilotError:
    return PilotError(f"{path}: cannot be used as a pilot: {reason}. Train the pilot again.")
