"""The file format of traces and pilots: named arrays and one JSON document in a safetensors file.

The file contains no code. Its header's metadata holds its kind, its version and the SHA-256 of its
arrays; the JSON document is stored as the byte array ``document``.

[Note: what a file can claim]
A file may be untrusted, so nothing in it is executed. The digest detects damage only, since anyone
can compute one. Readers check sizes and counts against limits, indices against their tables, and
numbers against their range. Nothing is compressed: arrays take memory in proportion to the file,
and the document about thirty times its size on disk. Files larger than `MAX_FILE` and documents
larger than `MAX_DOCUMENT` are not read.
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

from dynoffload.units import MiB, format_bytes

MAX_FILE = 128 * MiB
MAX_HEADER = 1 * MiB
MAX_DOCUMENT = 16 * MiB
MAX_ARRAYS = 64
MAX_DEPTH = 32
LARGEST_WEIGHT = 65_504.0
"""The largest weight of a model: the float16 maximum, as weights are stored in half precision."""

Arrays = Mapping[str, npt.NDArray[Any]]

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_TYPES = frozenset(map(np.dtype, ("<f2", "<f4", "<f8", "<i1", "<i2", "<i4", "<i8", "u1")))


class BadFileError(ValueError):
    """Bytes are damaged or not made by `pack`, or the parts are too large for `pack`."""


def read_file(path: Path, kind: str, version: int) -> tuple[Any, dict[str, npt.NDArray[Any]]]:
    """Return the document and the arrays of a file.

    Raises:
        BadFileError: if it is larger than `MAX_FILE`, or its bytes are not those of such a file.
        OSError: if it cannot be read.
    """
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size > MAX_FILE:
            raise BadFileError(f"it is larger than {format_bytes(MAX_FILE)}")
        data = file.read(MAX_FILE + 1)
    return unpack(data, kind, version)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically, by renaming a temporary one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def pack(document: Mapping[str, Any], arrays: Arrays, kind: str, version: int) -> bytes:
    """Return a safetensors file of a JSON document and arrays; equal inputs give equal bytes.

    Raises:
        BadFileError: if it would be too large to be read again.
    """
    from safetensors.numpy import save

    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    if len(text) > MAX_DOCUMENT:
        raise BadFileError(f"its document would take {format_bytes(len(text))}, more than is read")
    parts = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    parts["document"] = np.frombuffer(text.encode(), dtype=np.uint8)
    # A single entry, as safetensors writes several in arbitrary order.
    seal = json.dumps({"sha256": digest_of(parts), "version": version}, sort_keys=True)
    data: bytes = save(parts, {kind: seal})
    if len(data) > MAX_FILE or len(parts) > MAX_ARRAYS:
        raise BadFileError(f"it would take {format_bytes(len(data))}, more than is read")
    return data


def unpack(data: bytes, kind: str, version: int) -> tuple[Any, dict[str, npt.NDArray[Any]]]:
    """Return the document and the arrays passed to `pack`.

    Raises:
        BadFileError: if the bytes are not those of such a file, with the reason.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    length = int.from_bytes(data[:8], "little")
    if len(data) < 10 or not 2 <= length <= MAX_HEADER:
        raise BadFileError("it is not a file of this kind")
    if 8 + length > len(data):
        raise BadFileError("it is cut short")
    header = _json(data[8 : 8 + length])
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not isinstance(metadata.get(kind), str):
        raise BadFileError("it is some other safetensors file")
    seal = _json(metadata[kind].encode("utf-8", "replace"))
    found = seal.get("version") if isinstance(seal, dict) else None
    if found != version:
        raise BadFileError(f"it is of version {found!r:.20}, and this release reads {version}")
    try:
        arrays = load(data)
    except (SafetensorError, LookupError, TypeError, ValueError) as error:
        raise BadFileError(f"its arrays are damaged ({str(error)[:200]})") from error
    if len(arrays) > MAX_ARRAYS or not all(_is_allowed(array) for array in arrays.values()):
        raise BadFileError("its arrays are too many, or of an impossible shape or type")
    if seal.get("sha256") != digest_of(arrays):
        raise BadFileError("its checksum does not match; it was damaged or changed")
    document = arrays.pop("document", None)
    if document is None or document.dtype != np.uint8:
        raise BadFileError("it has no document")
    if document.size > MAX_DOCUMENT:
        raise BadFileError(f"its document is larger than {format_bytes(MAX_DOCUMENT)}")
    return _json(document.tobytes()), arrays


def digest_of(arrays: Arrays) -> str:
    """Return the SHA-256 over the arrays' names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        described = f"{name}\0{array.dtype.str}\0{array.shape}\0"
        digest.update(described.encode("utf-8", "backslashreplace"))
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def checked_weights(name: str, array: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return an array as float32.

    Raises:
        ValueError: if it holds NaN or a value larger in magnitude than `LARGEST_WEIGHT`.
    """
    if not ((array >= -LARGEST_WEIGHT) & (array <= LARGEST_WEIGHT)).all():
        raise ValueError(f"{name} is not finite, or too large")
    return array.astype(np.float32)


def checked_integers(name: str, array: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return an array if it is int64.

    Raises:
        ValueError: otherwise.
    """
    if array.dtype != np.int64:
        raise ValueError(f"{name} is of {array.dtype}, not int64")
    return array


def _is_allowed(array: npt.NDArray[Any]) -> bool:
    """Return whether an array has an allowed type and shape; 0 extents do not hide huge ones."""
    extents = math.prod(max(extent, 1) for extent in array.shape)
    return array.dtype in _TYPES and array.ndim <= 4 and extents <= MAX_FILE


def _json(text: bytes) -> Any:
    """Parse JSON; refuse deep nesting, NaN, infinities and unpaired surrogates."""
    if _nesting(text) > MAX_DEPTH:
        raise BadFileError("its document is nested too deeply")

    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is not JSON")

    try:
        parsed = json.loads(text.decode("utf-8"), parse_constant=refuse, parse_float=_finite)
        if _SURROGATE.search(text):
            json.dumps(parsed, ensure_ascii=False).encode()
        return parsed
    except (ValueError, RecursionError) as error:
        raise BadFileError("it is not a file of this kind, or it is damaged") from error


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:40]} is too large a number")
    return number


def _nesting(text: bytes) -> int:
    """Return the nesting depth of brackets, counting those within strings too."""
    steps = np.zeros(256, dtype=np.int8)
    steps[list(b"[{")] = 1
    steps[list(b"]}")] = -1
    deepest = depth = 0
    for start in range(0, len(text), 1 << 16):
        part = np.cumsum(steps[np.frombuffer(text[start : start + (1 << 16)], dtype=np.uint8)])
        deepest = max(deepest, depth + int(part.max()))
        depth += int(part[-1])
    return deepest
