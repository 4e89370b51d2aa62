"""Traces on disk: one Parquet file each.

What it is: `save_trace` and `load_trace`. The rows of the table are the operators, so that any
Parquet reader shows them; the rest of the trace (header, sample, regions, calls) is JSON in the
file's metadata. What it is not: a place for anything that could be executed; nothing is unpickled,
and pyarrow is imported only when a file is written.

[Note: seals]
A flipped bit in a column is a number like any other. So a trace carries a digest of all its bytes,
which is compared before any is believed. It stands between the last column and the footer, where no
Parquet reader looks. It tells damage, not malice: anybody can make one.

[Note: what a trace can claim]
A file from a stranger is read by `dynoffload.profiler.plain_parquet` alone, not by pyarrow, and its
schema, number of rows and codec are compared with what this module writes. Repetition takes no
bytes in Parquet, but takes memory and time here: so what a file may hold is in proportion to its
size (operators, the regions they use), and so are the module calls' depths, as whoever reads a
trace climbs from each call to the root. Real traces keep well within that: the time of every
operator alone takes eight bytes. Lists of regions are packed bytes. What is decoded is checked
again: every index in range, every number finite but for those of the sample, every name text that
can be written.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dynoffload.errors import TraceError
from dynoffload.profiler.columns import PHASES, Columns, Operators
from dynoffload.profiler.idioms import Idioms
from dynoffload.profiler.plain_parquet import MAGIC, ParquetFile
from dynoffload.profiler.storage_header import (
    LARGEST,
    header_of,
    most_nesting,
    nesting,
    read_calls,
    read_hints,
    read_integer,
    read_regions,
    read_sample,
    read_text,
    require,
)
from dynoffload.profiler.trace import Operator, Trace

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]

SCHEMA_VERSION = 3
"""Version of the layout that is written. Version 1 had neither FLOPs nor dtypes, which are unknown
then, and version 2 no hints; both are read. Any other version is refused."""
MAX_FILE_BYTES = 128 * 1024**2
"""The largest file that is read."""
MAX_OPERATORS = 1_000_000
"""The most operators a file may hold."""

_SEAL = b"dynoffload.seal\n"
_DIGEST_BYTES = hashlib.sha256().digest_size
_VERSIONS = {str(version).encode(): version for version in (1, 2, SCHEMA_VERSION)}  # that are read
_UNKNOWN = -1  # FLOPs in a column
_VERSION_KEY = b"dynoffload.trace_version"
_HEADER_KEY = b"dynoffload.trace"
_AGAIN = "record it again with `dynoffload profile`"
_LONGEST_S = 1e9  # of one operator
_MAX_HEADER_BYTES = 64 * 1024**2
_MAX_CONTAINERS = 1_000_000  # lists and objects in the header
_FIELDS = (
    ("name", "string"),
    ("phase", "int8"),
    ("site", "string"),
    ("call", "int32"),
    *((idiom, "int16") for idiom in Idioms._fields),
    ("bytes_read", "int64"),
    ("bytes_written", "int64"),
    ("seconds", "double"),
    ("reads", "binary"),
    ("writes", "binary"),
    ("memory", "int64"),
    ("flops", "int64"),
    ("dtype", "string"),
)
_OLD_FIELDS = len(_FIELDS) - 2  # that version 1 has
_PHYSICAL = {"string": "binary", "int8": "int32", "int16": "int32"}  # where it is not the name


def most_operators(nbytes: int) -> int:
    """Return the most operators that a file of so many bytes may hold."""
    return min(MAX_OPERATORS, 4096 + nbytes // 2)


def most_uses(nbytes: int) -> int:
    """Return how often operators may use regions in a file of so many bytes."""
    return 65_536 + 8 * nbytes


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
    header = json.dumps(header_of(trace), separators=(",", ":")).encode()
    depths = nesting(trace.calls)
    if len(header) > _MAX_HEADER_BYTES or depths > most_nesting(len(trace.calls)):
        raise TraceError(
            f"{path}: the regions and module calls of this step take {len(header)} bytes, and the"
            f" calls' depths add up to {depths}; a trace holds {_MAX_HEADER_BYTES} bytes and"
            f" {most_nesting(len(trace.calls))}: record a smaller batch"
        )
    columns = _columns(trace.operators)
    schema = _schema().with_metadata(
        {_VERSION_KEY: str(SCHEMA_VERSION).encode(), _HEADER_KEY: header}
    )
    table = pa.table(columns, schema=schema)
    written = io.BytesIO()
    # Times are all different: as words of a dictionary they would take more.
    words = [name for name, _ in _FIELDS if name != "seconds"]
    pq.write_table(table, written, compression="NONE", use_dictionary=words)
    nbytes = len(written.getvalue())
    uses = sum(len(op.reads) + len(op.writes) for op in trace.operators)
    if nbytes > MAX_FILE_BYTES or uses > most_uses(nbytes):
        raise TraceError(
            f"{path}: a trace of {nbytes} bytes whose operators use regions {uses} times is larger"
            f" than can be read again ({MAX_FILE_BYTES} bytes, {most_uses(nbytes)} times); record a"
            " smaller batch"
        )
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
    except (
        ValueError,
        TypeError,
        LookupError,
        OverflowError,
        AttributeError,
        RecursionError,
        OSError,
    ) as error:
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
    require(file[:4] == file[-4:] == MAGIC, "it is no whole Parquet file")
    if not found.startswith(_SEAL):
        raise TraceError(f"{path} is not a dynoffload trace, or is truncated or damaged; {_AGAIN}")
    digest = hashlib.sha256(memoryview(file)[:start])
    digest.update(memoryview(file)[stop:])
    require(digest.digest() == found[len(_SEAL) :], "its bytes are not those that were written")


def _fields(version: int) -> Sequence[tuple[str, str]]:
    """Return name and type of each column of a version."""
    return _FIELDS[:_OLD_FIELDS] if version == 1 else _FIELDS


def _schema() -> pa.Schema:
    import pyarrow as pa

    fields = [(name, pa.type_for_alias(kind)) for name, kind in _FIELDS]
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in fields])


def _columns(operators: Sequence[Operator]) -> dict[str, Any]:
    columns: dict[str, Any] = {
        "name": [op.name for op in operators],
        "phase": np.array([PHASES.index(op.phase) for op in operators], np.int8),
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


def _read(path: Path, data: bytes) -> Trace:
    _check_seal(path, data)
    file = ParquetFile(data)
    version = file.metadata.get(_VERSION_KEY)
    if version is None:
        raise TraceError(f"{path}: is a Parquet file, but not a dynoffload trace; {_AGAIN}")
    if version not in _VERSIONS:
        raise TraceError(
            f"{path}: is a trace of version {version[:16]!r}; this release reads versions"
            f" 1 to {SCHEMA_VERSION}: {_AGAIN}, or install the release that wrote it"
        )
    _check_layout(file, path, _VERSIONS[version], len(data))
    text = file.metadata[_HEADER_KEY]
    require(len(text) <= _MAX_HEADER_BYTES, "its header is too long")
    require(text.count(b"[") + text.count(b"{") <= _MAX_CONTAINERS, "its header is too intricate")
    header = json.loads(text)
    regions = read_regions(header["regions"], file.rows)
    calls = read_calls(header["calls"], file.rows)
    operators = _operators(file, len(regions), len(calls), most_uses(len(data)))
    return Trace(
        network=read_text(header["network"]),
        model=read_text(header["model"]),
        step=read_integer(header["step"]),
        source=read_text(header["source"]),
        sample=read_sample(header),
        regions=regions,
        calls=calls,
        operators=operators,
        hints=read_hints(header, len(calls)),
    )


def _check_layout(file: ParquetFile, path: Path, version: int, nbytes: int) -> None:
    """Refuse a file whose layout is not the one this module writes, before any column is read."""
    expected = _fields(version)
    require(file.names == [name for name, _ in expected], "its columns are not those of a trace")
    for found, (name, kind) in zip(file.types, expected, strict=True):
        require(found == _PHYSICAL.get(kind, kind), f"column {name} has type {found}")
    if file.rows > most_operators(nbytes):
        raise TraceError(
            f"{path}: claims {file.rows} operators; a trace of {nbytes} bytes has at most"
            f" {most_operators(nbytes)}"
        )


def _operators(file: ParquetFile, regions: int, calls: int, uses: int) -> Operators:
    """Return the operators: checked now, made when they are asked for."""
    names, sites = _Texts(file, "name"), _Texts(file, "site")
    reads = _Lists(file, "reads", regions, uses)
    writes = _Lists(file, "writes", regions, uses - reads.count)
    phases = file.numbers("phase")
    call = file.numbers("call")
    seconds = file.numbers("seconds")
    counts = {name: file.numbers(name) for name in ("bytes_read", "bytes_written", "memory")}
    vectors = [file.numbers(idiom) for idiom in Idioms._fields]
    if file.rows:
        require(phases.min() >= 0 and phases.max() < len(PHASES), "an operator has no phase")
        require(call.min() >= -1 and call.max() < calls, "an operator has no module call")
        require(bool(((seconds >= 0) & (seconds < _LONGEST_S)).all()), "a time is not a time")
        for name, column in counts.items():
            require(column.min() >= 0 and column.max() < LARGEST, f"{name} is impossible")
        require(min(vector.min() for vector in vectors) >= 0, "an idiom is counted below zero")
        require(max(vector.max() for vector in vectors) < 2**15, "an idiom is counted too often")
    flops, dtypes = _arithmetic(file)
    used, stops = _joined(reads, writes)
    columns = Columns(
        phases.astype(np.int64),
        call.astype(np.int64),
        seconds,
        np.stack(vectors, axis=1).astype(np.int64),
        used,
        stops,
    )

    def make() -> list[Operator]:
        shared: dict[tuple[int, ...], Idioms] = {}
        idioms = []
        for row in map(tuple, columns.idioms.tolist()):
            known = shared.get(row)
            if known is None:
                known = shared[row] = Idioms(*row)
            idioms.append(known)
        rows = zip(
            names.rows(),
            [PHASES[code] for code in columns.phase.tolist()],
            sites.rows(),
            columns.call.tolist(),
            idioms,
            counts["bytes_read"].tolist(),
            counts["bytes_written"].tolist(),
            columns.seconds.tolist(),
            reads.rows(),
            writes.rows(),
            counts["memory"].tolist(),
            [None if count == _UNKNOWN else count for count in flops.tolist()],
            [""] * file.rows if dtypes is None else dtypes.rows(),
            strict=True,
        )
        return [Operator(*row) for row in rows]

    return Operators(columns, make)


def _arithmetic(file: ParquetFile) -> tuple[npt.NDArray[np.int64], _Texts | None]:
    """Return FLOPs and dtype of each row; version 1 knows neither."""
    if "flops" not in file.names:
        return np.full(file.rows, _UNKNOWN, dtype=np.int64), None
    flops = file.numbers("flops")
    if file.rows:
        require(flops.min() >= _UNKNOWN and flops.max() < LARGEST, "flops is impossible")
    return flops, _Texts(file, "dtype")


class _Texts:
    """A column of text; equal text is one object, as it was in the dictionary."""

    def __init__(self, file: ParquetFile, name: str) -> None:
        column = file.words(name)
        shared: dict[bytes, str] = {}
        self._texts = [shared.setdefault(word, word.decode()) for word in column.words]
        self._indices = column.indices

    def rows(self) -> list[str]:
        """Return the text of each row."""
        return [self._texts[i] for i in self._indices.tolist()]


class _Lists:
    """A column of packed region indices.

    Args:
        file: the trace.
        name: of the column.
        regions: how many there are.
        most: indices that all rows may have together.

    Attributes:
        flat: the indices of each distinct list, one after the other.
        lengths: of the distinct lists.
        indices: the distinct list of each row, ``[rows]``.
        count: of the indices of all rows.
    """

    def __init__(self, file: ParquetFile, name: str, regions: int, most: int) -> None:
        column = file.words(name)
        self.indices = column.indices
        self.lengths = np.array([len(word) // 4 for word in column.words], np.int64)
        self.count = int(self.lengths[self.indices].sum())
        require(self.count <= most, "operators use more regions than a file of this size can say")
        require(all(len(word) % 4 == 0 for word in column.words), "a list of regions is cut short")
        self.flat = np.frombuffer(b"".join(column.words), "<i4").astype(np.int64)
        require(
            not len(self.flat) or (self.flat.min() >= 0 and self.flat.max() < regions),
            "an operator uses a region that is not there",
        )

    def rows(self) -> list[tuple[int, ...]]:
        """Return the indices of each row; equal lists are one object."""
        flat = iter(self.flat.tolist())
        distinct = [tuple(islice(flat, length)) for length in self.lengths.tolist()]
        return [distinct[i] for i in self.indices.tolist()]


def _joined(reads: _Lists, writes: _Lists) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return what each row reads, then writes, one row after the other, and where rows begin."""
    flat = np.concatenate((reads.flat, writes.flat))
    lengths = np.concatenate((reads.lengths, writes.lengths))
    starts = np.cumsum(lengths) - lengths
    chosen = np.stack((reads.indices, writes.indices + len(reads.lengths)), axis=1).reshape(-1)
    taken = lengths[chosen]
    ends = np.cumsum(taken)
    places = np.repeat(starts[chosen] - (ends - taken), taken) + np.arange(int(taken.sum()))
    return flat[places], np.concatenate((np.zeros(1, np.int64), ends[1::2]))
