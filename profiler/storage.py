"""Traces on disk: one Parquet file each.

What it is: `save_trace` and `load_trace`. The rows of the table are the operators, so that any
Parquet reader shows them; the rest of the trace (header, sample, regions, calls) is JSON in the
file's metadata. What it is not: a place for anything that could be executed; nothing is unpickled,
and pyarrow is imported only when a file is read or written.

[Note: seals]
Some damage to a Parquet file's footer ends the process of whoever reads it with pyarrow. So a trace
carries a digest of all its bytes, which is compared before pyarrow sees any. It stands between the
last column and the footer, where no Parquet reader looks. It tells damage, not malice: anybody can
make one.

[Note: what a trace can claim]
Before a table is read, the file's size, its schema, its number of rows and, for each column, codec
and declared sizes are compared with what this module writes. Files are written without compression,
and columns of text or bytes are read as dictionaries: no byte in the file can stand for many in
memory, other than by repetition that stays shared. Lists of regions are packed bytes, not Parquet
lists, whose lengths a file could claim at will. What is decoded is checked again: every index in
range, every number finite.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dynoffload.errors import TraceError
from dynoffload.profiler.hints import MAX_HINTED, Hint
from dynoffload.profiler.idioms import Idioms
from dynoffload.profiler.sample import MAX_ELEMENTS, Sample
from dynoffload.profiler.trace import ModuleCall, Operator, Phase, RegionInfo, Trace

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]

SCHEMA_VERSION = 3
"""Version of the layout that is written. Version 1 had neither FLOPs nor dtypes, which are unknown
then, and version 2 no hints; both are read. Any other version is refused."""
MAX_FILE_BYTES = 128 * 1024**2
"""The largest file that is read."""
MAX_OPERATORS = 1_000_000
"""The most operators a file may hold."""

_MAGIC = b"PAR1"
_SEAL = b"dynoffload.seal\n"
_DIGEST_BYTES = hashlib.sha256().digest_size
_VERSIONS = {str(version).encode(): version for version in (1, 2, SCHEMA_VERSION)}  # that are read
_UNKNOWN = -1  # FLOPs in a column
_VERSION_KEY = b"dynoffload.trace_version"
_HEADER_KEY = b"dynoffload.trace"
_PHASES = tuple(Phase)
_KINDS = frozenset(("parameter", "gradient", "state", "activation", "buffer", "input"))
_TEXT = ("name", "site", "reads", "writes", "dtype")
_AGAIN = "record it again with `dynoffload profile`"
_LARGEST = 2**62
_MAX_VALUES = 100_000
_MAX_CONTAINER = 1_000_000  # Items in one list of the file's metadata.
_MAX_MODULE_CALLS = 1_000_000
_MAX_HEADER_BYTES = 64 * 1024**2


def save_trace(trace: Trace, path: Path) -> None:
    """Write ``trace`` to ``path``; a file that is there is replaced only when all is written.

    Raises:
        TraceError: if the directory is missing or cannot be written, or the trace is too large.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    if len(trace.operators) > MAX_OPERATORS:
        raise TraceError(
            f"{path}: a trace holds at most {MAX_OPERATORS} operators, this step has"
            f" {len(trace.operators)}; record a smaller batch"
        )
    columns = _columns(trace.operators)
    schema = _schema().with_metadata(
        {
            _VERSION_KEY: str(SCHEMA_VERSION).encode(),
            _HEADER_KEY: json.dumps(_header(trace), separators=(",", ":")).encode(),
        }
    )
    table = pa.table(columns, schema=schema)
    written = io.BytesIO()
    pq.write_table(table, written, compression="NONE", use_dictionary=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        partial.write_bytes(seal(written.getvalue()))
        os.replace(partial, path)
    except OSError as error:
        if path.parent.is_dir():
            partial.unlink(missing_ok=True)
        raise TraceError(
            f"{path}: the trace cannot be written ({error.strerror or error}); make the directory"
            " or choose another"
        ) from error


def load_trace(path: Path) -> Trace:
    """Read the trace in ``path``.

    Raises:
        TraceError: if the file is missing, truncated, foreign, of another version, larger than a
            trace can be, or inconsistent in itself.
    """
    try:
        size = path.stat().st_size
    except OSError as error:
        raise TraceError(f"{path}: no trace can be read there ({error.strerror})") from error
    if not path.is_file():
        raise TraceError(f"{path}: is not a file; name one trace in it")
    if size > MAX_FILE_BYTES:
        raise TraceError(f"{path}: {size} bytes is larger than any trace ({MAX_FILE_BYTES})")
    try:
        return _read(path, path.read_bytes())
    except TraceError:
        raise
    except Exception as error:
        # pyarrow raises many kinds for a damaged file, OSError and ValueError among them.
        what = f"{type(error).__name__}: {str(error)[:200]}"
        raise TraceError(f"{path} is truncated or damaged ({what}); {_AGAIN}") from error


def load_traces(paths: Sequence[Path]) -> Iterator[Trace]:
    """Yield the traces in ``paths``, each read as it is asked for.

    Raises:
        TraceError: one cannot be read, or they are of several networks.
    """
    network = ""
    for path in paths:
        trace = load_trace(path)
        if network and trace.network != network:
            raise TraceError(
                f"{paths[0]} is of network {network[:12]}, {path.name} of {trace.network[:12]}: "
                "keep the traces of each network in their own directory"
            )
        network = trace.network
        yield trace


def seal(file: bytes) -> bytes:
    """Return a Parquet file's bytes with a digest of them; see [Note: seals]."""
    start = _footer(file)
    return file[:start] + _SEAL + hashlib.sha256(file).digest() + file[start:]


def _footer(file: bytes) -> int:
    """Return where the footer of a Parquet file begins; a wrong place if it is damaged."""
    length = int.from_bytes(file[-8:-4], "little")
    return max(0, len(file) - 8 - length)


def _check_seal(path: Path, file: bytes) -> None:
    """Refuse a file whose bytes are not those that were written."""
    stop = _footer(file)
    start = max(0, stop - len(_SEAL) - _DIGEST_BYTES)
    found = file[start:stop]
    _require(file[:4] == file[-4:] == _MAGIC, "it is no whole Parquet file")
    if not found.startswith(_SEAL):
        raise TraceError(f"{path} is not a dynoffload trace, or is truncated or damaged; {_AGAIN}")
    digest = hashlib.sha256(memoryview(file)[:start])
    digest.update(memoryview(file)[stop:])
    _require(digest.digest() == found[len(_SEAL) :], "its bytes are not those that were written")


def _schema(version: int = SCHEMA_VERSION) -> pa.Schema:
    import pyarrow as pa

    fields = [
        ("name", pa.string()),
        ("phase", pa.int8()),
        ("site", pa.string()),
        ("call", pa.int32()),
        *[(idiom, pa.int16()) for idiom in Idioms._fields],
        ("bytes_read", pa.int64()),
        ("bytes_written", pa.int64()),
        ("seconds", pa.float64()),
        ("reads", pa.binary()),
        ("writes", pa.binary()),
        ("memory", pa.int64()),
    ]
    if version > 1:
        fields += [("flops", pa.int64()), ("dtype", pa.string())]
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in fields])


def _columns(operators: list[Operator]) -> dict[str, Any]:
    columns: dict[str, Any] = {
        "name": [op.name for op in operators],
        "phase": np.array([_PHASES.index(op.phase) for op in operators], np.int8),
        "site": [op.site for op in operators],
        "call": np.array([op.call for op in operators], np.int32),
        "bytes_read": np.array([op.bytes_read for op in operators], np.int64),
        "bytes_written": np.array([op.bytes_written for op in operators], np.int64),
        "seconds": np.array([op.seconds for op in operators], np.float64),
        "reads": [np.array(op.reads, "<i4").tobytes() for op in operators],
        "writes": [np.array(op.writes, "<i4").tobytes() for op in operators],
        "memory": np.array([op.memory for op in operators], np.int64),
        "flops": np.array(
            [_UNKNOWN if op.flops is None else op.flops for op in operators], np.int64
        ),
        "dtype": [op.dtype for op in operators],
    }
    for position, idiom in enumerate(Idioms._fields):
        columns[idiom] = np.array([op.idioms[position] for op in operators], np.int16)
    return {name: columns[name] for name in _schema().names}


def _header(trace: Trace) -> dict[str, Any]:
    regions, calls, elements = trace.regions, trace.calls, trace.sample.elements
    hinted = [list(blocks) for blocks in dict.fromkeys(hint.blocks for hint in trace.hints)]
    return {
        "network": trace.network,
        "model": trace.model,
        "step": trace.step,
        "source": trace.source,
        "values": {k: v if math.isfinite(v) else str(v) for k, v in trace.sample.values.items()},
        "elements": elements.reshape(-1).tolist(),
        "width": elements.shape[1] if elements.ndim == 2 else 0,
        "regions": [[getattr(r, f) for r in regions] for f in RegionInfo.__dataclass_fields__],
        "calls": [[getattr(c, f) for c in calls] for f in ModuleCall.__dataclass_fields__],
        "hinted": hinted,
        "hints": [[h.call, hinted.index(list(h.blocks)), list(h.values)] for h in trace.hints],
    }


def _read(path: Path, data: bytes) -> Trace:
    import pyarrow as pa
    import pyarrow.parquet as pq

    _check_seal(path, data)
    limits = {
        "thrift_string_size_limit": MAX_FILE_BYTES,
        "thrift_container_size_limit": _MAX_CONTAINER,
    }
    with pq.ParquetFile(pa.BufferReader(data), **limits) as file:
        metadata = file.metadata.metadata or {}
        version = metadata.get(_VERSION_KEY)
        if version is None:
            raise TraceError(f"{path}: is a Parquet file, but not a dynoffload trace; {_AGAIN}")
        if version not in _VERSIONS:
            raise TraceError(
                f"{path}: is a trace of version {version[:16]!r}; this release reads versions"
                f" 1 to {SCHEMA_VERSION}: {_AGAIN}, or install the release that wrote it"
            )
        _require(len(metadata[_HEADER_KEY]) <= _MAX_HEADER_BYTES, "its header is too long")
        _check_layout(file, path, _VERSIONS[version])
        words = [name for name in _TEXT if name in file.schema.names]
    columns = {"read_dictionary": words}
    with pq.ParquetFile(pa.BufferReader(data), **columns, **limits) as file:
        table = file.read(use_threads=False)
    header = json.loads(metadata[_HEADER_KEY])
    regions = _regions(header["regions"], table.num_rows)
    calls = _calls(header["calls"], table.num_rows)
    operators = _operators(table, len(regions), len(calls))
    return Trace(
        network=_text(header["network"]),
        model=_text(header["model"]),
        step=_integer(header["step"]),
        source=_text(header["source"]),
        sample=_sample(header),
        regions=regions,
        calls=calls,
        operators=operators,
        hints=_hints(header, len(calls)),
    )


def _check_layout(file: Any, path: Path, version: int) -> None:
    """Refuse a file whose layout is not the one this module writes, before any column is read."""
    import pyarrow as pa

    expected = _schema(version)
    found = file.schema_arrow
    _require(found.names == expected.names, "its columns are not those of a trace")
    for field, wanted in zip(found, expected, strict=True):
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        _require(kind == wanted.type, f"column {field.name} has type {field.type}")
    metadata = file.metadata
    if metadata.num_rows > MAX_OPERATORS:
        raise TraceError(
            f"{path}: claims {metadata.num_rows} operators; a trace has at most {MAX_OPERATORS}"
        )
    for group in range(metadata.num_row_groups):
        for position in range(metadata.num_columns):
            column = metadata.row_group(group).column(position)
            _require(column.compression == "UNCOMPRESSED", f"column {position} is compressed")
            _require(
                0 <= column.total_uncompressed_size <= MAX_FILE_BYTES
                and 0 <= column.num_values <= MAX_OPERATORS,
                f"column {position} claims more than the file can hold",
            )


def _regions(columns: Any, operators: int) -> list[RegionInfo]:
    names, kinds, sizes, born, died = columns
    _require(set(kinds) <= _KINDS, "a region is of no known kind")
    _require(set(map(type, (*names, *kinds))) <= {str}, "a name is not text")
    _require(set(map(type, (*sizes, *born, *died))) <= {int}, "a region is not told in numbers")
    _require(
        min(sizes, default=0) >= 0 and max(sizes, default=0) < _LARGEST,
        "a region has an impossible size",
    )
    lives = (*born, *died)
    _require(
        min(lives, default=0) >= -1 and max(lives, default=0) <= operators,
        "a region's life lies outside the step",
    )
    return [RegionInfo(*row) for row in zip(names, kinds, sizes, born, died, strict=True)]


def _calls(columns: Any, operators: int) -> list[ModuleCall]:
    calls = [ModuleCall(*row) for row in zip(*columns, strict=True)]
    _require(len(calls) <= _MAX_MODULE_CALLS, "too many module calls")
    for index, call in enumerate(calls):
        _text(call.path)
        _text(call.shape_key)
        _require(-1 <= _integer(call.parent) < index, "a module call encloses itself")
        _require(
            0 <= _integer(call.start) <= _integer(call.stop) <= operators,
            "a module call lies outside the step",
        )
    return calls


def _operators(table: Any, regions: int, calls: int) -> list[Operator]:
    names, sites = _strings(table["name"]), _strings(table["site"])
    reads, writes = _indices(table["reads"], regions), _indices(table["writes"], regions)
    phases = table["phase"].to_numpy()
    call = table["call"].to_numpy()
    seconds = table["seconds"].to_numpy()
    counts = {name: table[name].to_numpy() for name in ("bytes_read", "bytes_written", "memory")}
    vectors = [table[idiom].to_numpy() for idiom in Idioms._fields]
    if table.num_rows:
        _require(phases.min() >= 0 and phases.max() < len(_PHASES), "an operator has no phase")
        _require(call.min() >= -1 and call.max() < calls, "an operator has no module call")
        _require(bool(np.isfinite(seconds).all()) and seconds.min() >= 0, "a time is not a time")
        for name, column in counts.items():
            _require(column.min() >= 0 and column.max() < _LARGEST, f"{name} is impossible")
        _require(min(vector.min() for vector in vectors) >= 0, "an idiom is counted below zero")
    flops, dtypes = _arithmetic(table)
    shared: dict[tuple[int, ...], Idioms] = {}
    rows = zip(*[vector.tolist() for vector in vectors], strict=True)
    idioms = [shared.setdefault(row, Idioms(*row)) for row in rows]
    phase = [_PHASES[p] for p in phases.tolist()]
    columns = zip(
        names,
        phase,
        sites,
        call.tolist(),
        idioms,
        counts["bytes_read"].tolist(),
        counts["bytes_written"].tolist(),
        seconds.tolist(),
        reads,
        writes,
        counts["memory"].tolist(),
        flops,
        dtypes,
        strict=True,
    )
    return [Operator(*column) for column in columns]


def _arithmetic(table: Any) -> tuple[list[int | None], list[str]]:
    """Return FLOPs and dtype of each row; version 1 knows neither."""
    rows = table.num_rows
    if "flops" not in table.column_names:
        return [None] * rows, [""] * rows
    counted = table["flops"].to_numpy()
    if rows:
        _require(counted.min() >= _UNKNOWN and counted.max() < _LARGEST, "flops is impossible")
    flops = [None if count == _UNKNOWN else count for count in counted.tolist()]
    return flops, _strings(table["dtype"])


def _strings(column: Any) -> list[str]:
    """Return the text of each row; equal text is one object, as it was in the dictionary."""
    texts: list[str] = []
    for chunk in column.chunks:
        words = chunk.dictionary.to_pylist()
        texts.extend([words[i] for i in chunk.indices.to_pylist()])
    return texts


def _indices(column: Any, regions: int) -> list[tuple[int, ...]]:
    """Return the packed region indices of each row."""
    lists: list[tuple[int, ...]] = []
    for chunk in column.chunks:
        packed = chunk.dictionary.to_pylist()
        _require(all(len(data) % 4 == 0 for data in packed), "a list of regions is cut short")
        indices = np.frombuffer(b"".join(packed), "<i4")
        _require(
            not len(indices) or (indices.min() >= 0 and indices.max() < regions),
            "an operator uses a region that is not there",
        )
        flat = iter(indices.tolist())
        rows = [tuple(islice(flat, len(data) // 4)) for data in packed]
        lists.extend([rows[i] for i in chunk.indices.to_pylist()])
    return lists


def _sample(header: dict[str, Any]) -> Sample:
    values = header["values"]
    _require(isinstance(values, dict) and len(values) <= _MAX_VALUES, "the sample has no values")
    width = _integer(header["width"])
    elements = np.array([_integer(code) for code in header["elements"]], dtype=np.int64)
    _require(0 <= width <= 1024, "the sample's elements have an impossible width")
    _require(len(elements) <= MAX_ELEMENTS * max(width, 1), "the sample has too many elements")
    if width:
        elements = elements.reshape(-1, width)
    return Sample({name: float(value) for name, value in values.items()}, elements)


def _hints(header: dict[str, Any], calls: int) -> list[Hint]:
    sets = [tuple(map(_text, blocks)) for blocks in header.get("hinted", [])]
    hints: list[Hint] = []
    for call, number, values in header.get("hints", []):
        _require(0 <= _integer(call) < calls, "a hint belongs to no module call")
        _require(0 <= _integer(number) < len(sets), "a hint is about nothing")
        told = tuple(float(value) for value in values)
        _require(len(told) == len(sets[number]) <= MAX_HINTED, "a hint is of the wrong length")
        _require(all(0 <= value <= 1 for value in told), "a hint is no chance")
        hints.append(Hint(call, sets[number], told))
    return hints


def _text(value: object) -> str:
    _require(isinstance(value, str), "a name is not text")
    return str(value)


def _integer(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"expected a whole number, found {str(value)[:40]!r}")
    return value


def _require(condition: bool, complaint: str) -> None:
    if not condition:
        raise ValueError(complaint)
