"""Trace files: one safetensors file each, columns as arrays and the rest as one JSON document.

`save_trace` and `load_trace` write and read one file, `trace_files` and `load_traces` a directory.
docs/traces.md describes the format.

[Note: what a file can claim]
A file may come from a stranger, so nothing in it is executed and every value is checked: sizes and
counts against limits, indices against their tables, numbers against their range. The digest detects
damage only, as anybody can compute one. Each row takes bytes in every column of its table, so what
a file makes of memory is in proportion to its size; module calls are limited in depth as well,
because readers climb from each call to the root.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dynoffload.errors import TraceError
from dynoffload.profiler.columns import PHASES, Columns, Operators
from dynoffload.profiler.hints import MAX_HINTED, Hint
from dynoffload.profiler.idioms import Idioms
from dynoffload.profiler.sample import MAX_ELEMENTS, Sample
from dynoffload.profiler.trace import ModuleCall, Operator, RegionInfo, Trace

FORMAT = "dynoffload.trace"
"""Key of the document in the metadata of the safetensors header."""
SCHEMA_VERSION = 4
"""Version of the layout; any other is refused. Versions 1 to 3 were Parquet files."""
SUFFIX = ".trace"
"""Suffix of trace files."""
MAX_FILE_BYTES = 128 * 1024**2
"""The largest file that is read."""
MAX_HEADER_BYTES = 64 * 1024**2
"""The largest safetensors header, which holds the document."""
MAX_ROWS = 1_000_000
"""The most operators, regions or module calls of a trace."""
MAX_USES = 16 * MAX_ROWS
"""How often all operators together may use a region."""

_AGAIN = "record it again with `dynoffload profile`"
_BLANK = "0" * 64  # what stands in for the digest while it is computed
_LARGEST = 2**62  # counts and sizes stay below
_LONGEST_S = 1e9  # of one operator
_MAX_CONTAINERS = 200_000  # lists and objects in the header
_MAX_VALUES = 100_000
_MAX_WIDTH = 1024  # of a sample's elements
_UNKNOWN = -1  # FLOPs
_KINDS = ("parameter", "gradient", "state", "activation", "buffer", "input")
_SIZES = ("bytes_read", "bytes_written", "memory", "flops")
_DTYPES = {"I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8", "F64": "<f8"}

_Ints = npt.NDArray[np.int64]


def most_nesting(calls: int) -> int:
    """Return the most that the depths of so many module calls may add up to."""
    return 1_000_000 + 24 * calls


def save_trace(trace: Trace, path: Path) -> None:
    """Write ``trace`` to ``path``; a file that is there is replaced only when all is written.

    Raises:
        TraceError: if the directory is missing or cannot be written, or the trace is too large.
    """
    rows = max(len(trace.operators), len(trace.regions), len(trace.calls))
    depths = _nesting(trace.calls)
    if rows > MAX_ROWS or depths > most_nesting(len(trace.calls)):
        raise TraceError(
            f"{path}: a trace holds at most {MAX_ROWS} operators, regions or module calls, and"
            f" calls whose depths add up to {most_nesting(len(trace.calls))}; this step has {rows}"
            f" and {depths}: record a smaller batch"
        )
    uses = sum(len(op.reads) + len(op.writes) for op in trace.operators)
    data = b"" if uses > MAX_USES else _file_of(trace)
    header = int.from_bytes(data[:8], "little")
    if uses > MAX_USES or len(data) > MAX_FILE_BYTES or header > MAX_HEADER_BYTES:
        raise TraceError(
            f"{path}: this step takes {len(data)} bytes with a header of {header}, and its"
            f" operators use regions {uses} times; a trace holds {MAX_FILE_BYTES}, "
            f"{MAX_HEADER_BYTES} and {MAX_USES}: record a smaller batch"
        )
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        partial.write_bytes(data)
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
    from safetensors import SafetensorError

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
    except (
        SafetensorError,
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


def trace_files(folder: str | Path) -> list[Path]:
    """Return the traces of a directory in order of name.

    Raises:
        TraceError: if there is none.
    """
    folder = Path(folder)
    paths = sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []
    if not paths:
        what = f"holds no trace (*{SUFFIX})" if folder.is_dir() else "is not a directory"
        if any(folder.glob("*.parquet")):
            what += ", and the Parquet files of older releases cannot be read"
        raise TraceError(f"{folder}: {what}; record some with 'dynoffload profile -o {folder}'")
    return paths


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


def seal(data: bytes, found: str = _BLANK) -> bytes:
    """Return a file's bytes with their digest in place of ``found``, the one that stands there."""
    blank = data.replace(found.encode(), _BLANK.encode(), 1)
    digest = hashlib.sha256(blank).hexdigest()
    return blank.replace(_BLANK.encode(), digest.encode(), 1)


def _file_of(trace: Trace) -> bytes:
    """Return the bytes of a trace's file."""
    from safetensors.numpy import save

    texts: dict[str, int] = {}

    def coded(words: Iterable[str]) -> list[int]:
        return [texts.setdefault(word, len(texts)) for word in words]

    operators, regions, calls = trace.operators, trace.regions, trace.calls
    columns = Columns.of(operators)
    vectors: dict[Idioms, int] = {}
    idiom = [vectors.setdefault(op.idioms, len(vectors)) for op in operators]
    wide = [np.array([getattr(op, name) for op in operators], np.int64) for name in _SIZES[:-1]]
    flops = [_UNKNOWN if op.flops is None else op.flops for op in operators]
    wide += [np.array(flops, np.int64), np.array([region.nbytes for region in regions], np.int64)]
    sizes, places = np.unique(np.concatenate(wide), return_inverse=True)
    size = np.split(places, np.cumsum([len(column) for column in wide])[:-1])
    arrays: dict[str, Any] = {
        "sizes": sizes,
        "idioms": np.array([*vectors], np.int64).reshape(-1, len(Idioms._fields)),
        "elements": trace.sample.elements,
        "operators.name": coded(op.name for op in operators),
        "operators.dtype": coded(op.dtype for op in operators),
        "operators.site": coded(op.site for op in operators),
        "operators.phase": columns.phase,
        "operators.call": columns.call,
        "operators.idiom": idiom,
        "operators.reads": [len(op.reads) for op in operators],
        "operators.writes": [len(op.writes) for op in operators],
        "operators.used": columns.used,
        **{f"operators.{name}": codes for name, codes in zip(_SIZES, size, strict=False)},
        "calls.path": coded(call.path for call in calls),
        "calls.shape_key": coded(call.shape_key for call in calls),
        **{f"calls.{name}": [getattr(c, name) for c in calls] for name in ModuleCall._fields[2:]},
        "regions.name": coded(region.name for region in regions),
        "regions.kind": [_KINDS.index(region.kind) for region in regions],
        "regions.nbytes": size[-1],
        "regions.born": [region.born for region in regions],
        "regions.died": [region.died for region in regions],
    }
    stored = {name: _smallest(array) for name, array in arrays.items()}
    stored["operators.seconds"] = columns.seconds
    values = trace.sample.values
    hinted: dict[tuple[str, ...], int] = {}
    for hint in trace.hints:
        hinted.setdefault(hint.blocks, len(hinted))
    document = {
        "version": SCHEMA_VERSION,
        "sha256": _BLANK,
        "network": trace.network,
        "model": trace.model,
        "step": trace.step,
        # A file's name need not be text.
        "source": trace.source.encode(errors="backslashreplace").decode(),
        "values": {k: v if math.isfinite(v) else str(v) for k, v in values.items()},
        "texts": list(texts),
        "hinted": [list(blocks) for blocks in hinted],
        "hints": [[h.call, hinted[h.blocks], list(h.values)] for h in trace.hints],
    }
    return seal(save(stored, {FORMAT: json.dumps(document, separators=(",", ":"))}))


def _smallest(numbers: Any) -> npt.NDArray[Any]:
    """Return whole numbers in the smallest type that holds them."""
    array = np.ascontiguousarray(numbers, dtype=np.int64)
    low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
    for kind in (np.int8, np.int16, np.int32):
        limits = np.iinfo(kind)
        if limits.min <= low and high <= limits.max:
            return array.astype(kind)
    return array


def _read(path: Path, data: bytes) -> Trace:
    from safetensors import deserialize

    if data[:4] == b"PAR1":
        raise TraceError(f"{path}: is a Parquet file, as older releases wrote traces; {_AGAIN}")
    header = memoryview(data)[8 : 8 + int.from_bytes(data[:8], "little")].tobytes()
    _require(len(header) <= MAX_HEADER_BYTES, "its header is too long")
    _require(header.count(b"[") + header.count(b"{") <= _MAX_CONTAINERS, "it is too intricate")
    stored = {
        name: np.frombuffer(entry["data"], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in deserialize(data)  # type: ignore[no-untyped-call]
    }
    metadata = json.loads(header).get("__metadata__") or {}
    if FORMAT not in metadata:
        raise TraceError(f"{path}: is not a dynoffload trace; {_AGAIN}")
    document = json.loads(metadata[FORMAT])
    if document["version"] != SCHEMA_VERSION:
        raise TraceError(
            f"{path}: is a trace of version {str(document['version'])[:16]}; this release reads"
            f" version {SCHEMA_VERSION}: {_AGAIN}, or install the release that wrote it"
        )
    found = _text(document["sha256"])
    _require(len(found) == len(_BLANK), "it has no digest")
    _require(seal(data, found) == data, "its bytes are not those that were written")
    for table in ("operators.phase", "regions.kind", "calls.path"):
        if len(stored[table]) > MAX_ROWS:
            raise TraceError(
                f"{path}: claims {len(stored[table])} rows of {table}; a trace has at most"
                f" {MAX_ROWS}"
            )
    arrays = _Arrays(stored)
    texts: list[str] = document["texts"]
    _require(isinstance(texts, list) and set(map(type, texts)) <= {str}, "a name is not text")
    _text("".join(texts))
    sizes = arrays.column("sizes", _UNKNOWN, _LARGEST)
    count = len(stored["operators.phase"])
    regions = _regions(arrays, texts, sizes, count)
    calls = _calls(arrays, texts, count)
    trace = Trace(
        network=_text(document["network"]),
        model=_text(document["model"]),
        step=_integer(document["step"]),
        source=_text(document["source"]),
        sample=_sample(document["values"], stored.pop("elements")),
        regions=regions,
        calls=calls,
        operators=_operators(arrays, texts, sizes, len(regions), len(calls)),
        hints=_hints(document, len(calls)),
    )
    _require(not stored, "it holds arrays that no trace has")
    return trace


class _Arrays:
    """Arrays of a file, each taken out and checked once."""

    def __init__(self, stored: dict[str, npt.NDArray[Any]]) -> None:
        self._stored = stored

    def column(self, name: str, low: int, stop: int, rows: int | None = None) -> _Ints:
        """Return a column of whole numbers from ``low`` to below ``stop``."""
        array = self._stored.pop(name)
        _require(array.ndim == 1 and array.dtype.kind == "i", f"{name} is no column of numbers")
        _require(rows is None or len(array) == rows, f"{name} has another number of rows")
        _require(len(array) <= MAX_USES, f"{name} has too many rows")
        inside = not len(array) or (array.min() >= low and array.max() < stop)
        _require(bool(inside), f"{name} is out of range")
        return array.astype(np.int64)

    def table(self, name: str, width: int, stop: int) -> _Ints:
        """Return a table of counts below ``stop``."""
        array = self._stored.pop(name)
        _require(array.ndim == 2 and array.shape[1] == width, f"{name} has another shape")
        flat = self._stored[name] = array.reshape(-1)
        return self.column(name, 0, stop, flat.size).reshape(-1, width)

    def seconds(self, name: str, rows: int) -> npt.NDArray[np.float64]:
        """Return a column of times."""
        array = self._stored.pop(name)
        _require(
            array.shape == (rows,) and array.dtype.kind == "f", f"{name} is no column of times"
        )
        _require(bool(((array >= 0) & (array < _LONGEST_S)).all()), "a time is not a time")
        return array.astype(np.float64)


def _regions(arrays: _Arrays, texts: list[str], sizes: _Ints, operators: int) -> list[RegionInfo]:
    """Return the regions of a step of so many operators."""
    names = arrays.column("regions.name", 0, len(texts))
    count = len(names)
    kinds = arrays.column("regions.kind", 0, len(_KINDS), count)
    size = sizes[arrays.column("regions.nbytes", 0, len(sizes), count)].tolist()
    _require(min(size, default=0) >= 0 and sum(size) < _LARGEST, "regions of an impossible size")
    born = arrays.column("regions.born", -1, operators + 1, count)
    died = arrays.column("regions.died", -1, operators + 1, count)
    named = [texts[code] for code in names.tolist()]
    kind = [_KINDS[code] for code in kinds.tolist()]
    return list(map(RegionInfo, named, kind, size, born.tolist(), died.tolist()))


def _calls(arrays: _Arrays, texts: list[str], operators: int) -> list[ModuleCall]:
    """Return the module calls of a step of so many operators."""
    paths = arrays.column("calls.path", 0, len(texts))
    count = len(paths)
    keys = arrays.column("calls.shape_key", 0, len(texts), count)
    parents = arrays.column("calls.parent", -1, count, count)
    starts = arrays.column("calls.start", 0, operators + 1, count)
    stops = arrays.column("calls.stop", 0, operators + 1, count)
    _require(bool((parents < np.arange(count)).all()), "a module call encloses itself")
    _require(bool((starts <= stops).all()), "a module call ends before it begins")
    path = [texts[code] for code in paths.tolist()]
    key = [texts[code] for code in keys.tolist()]
    calls = list(map(ModuleCall, path, key, parents.tolist(), starts.tolist(), stops.tolist()))
    _require(_nesting(calls) <= most_nesting(count), "module calls nested too deeply")
    return calls


def _operators(
    arrays: _Arrays, texts: list[str], sizes: _Ints, regions: int, calls: int
) -> Operators:
    """Return the operators: checked now, made when they are asked for."""
    phase = arrays.column("operators.phase", 0, len(PHASES))
    count = len(phase)
    names, dtypes, sites = (
        arrays.column(f"operators.{name}", 0, len(texts), count)
        for name in ("name", "dtype", "site")
    )
    reads = arrays.column("operators.reads", 0, MAX_USES, count)
    writes = arrays.column("operators.writes", 0, MAX_USES, count)
    used = arrays.column("operators.used", 0, regions)
    stops = np.concatenate((np.zeros(1, np.int64), np.cumsum(reads + writes)))
    _require(len(used) == stops[-1] <= MAX_USES, "operators use another number of regions")
    read, written, memory, flops = (
        sizes[arrays.column(f"operators.{name}", 0, len(sizes), count)] for name in _SIZES
    )
    for column in (read, written, memory):
        _require(not count or bool(column.min() >= 0), "an operator moves less than nothing")
    vectors = arrays.table("idioms", len(Idioms._fields), 2**15)
    idiom = arrays.column("operators.idiom", 0, len(vectors), count)
    call = arrays.column("operators.call", -1, calls, count)
    seconds = arrays.seconds("operators.seconds", count)
    columns = Columns(phase, call, seconds, vectors[idiom], used, stops)

    def make() -> list[Operator]:
        shared = [Idioms(*row) for row in vectors.tolist()]
        flat = iter(used.tolist())
        both = zip(reads.tolist(), writes.tolist(), strict=True)
        uses = [(tuple(islice(flat, first)), tuple(islice(flat, then))) for first, then in both]
        rows = zip(
            [texts[code] for code in names.tolist()],
            [PHASES[code] for code in phase.tolist()],
            [texts[code] for code in sites.tolist()],
            call.tolist(),
            [shared[code] for code in idiom.tolist()],
            read.tolist(),
            written.tolist(),
            seconds.tolist(),
            [first for first, _ in uses],
            [then for _, then in uses],
            memory.tolist(),
            [None if number == _UNKNOWN else number for number in flops.tolist()],
            [texts[code] for code in dtypes.tolist()],
            strict=True,
        )
        return [Operator(*row) for row in rows]

    return Operators(columns, make)


def _sample(values: Any, elements: npt.NDArray[Any]) -> Sample:
    """Return what the sample showed."""
    _require(isinstance(values, dict) and len(values) <= _MAX_VALUES, "the sample has no values")
    _require(elements.dtype.kind == "i" and elements.ndim in (1, 2), "elements are no codes")
    width = elements.shape[1] if elements.ndim == 2 else 1
    _require(0 < width <= _MAX_WIDTH, "the sample's elements have an impossible width")
    _require(len(elements) <= MAX_ELEMENTS, "the sample has too many elements")
    numbers = {_text(name): float(value) for name, value in values.items()}
    return Sample(numbers, elements.astype(np.int64))


def _hints(document: dict[str, Any], calls: int) -> list[Hint]:
    """Return the hints, each at one of so many module calls."""
    sets = [tuple(map(_text, blocks)) for blocks in document["hinted"]]
    hints: list[Hint] = []
    for call, number, values in document["hints"]:
        _require(0 <= _integer(call) < calls, "a hint belongs to no module call")
        _require(0 <= _integer(number) < len(sets), "a hint is about nothing")
        told = tuple(float(value) for value in values)
        _require(len(told) == len(sets[number]) <= MAX_HINTED, "a hint is of the wrong length")
        _require(all(0 <= value <= 1 for value in told), "a hint is no chance")
        hints.append(Hint(call, sets[number], told))
    return hints


def _nesting(calls: Sequence[ModuleCall]) -> int:
    """Return the sum, over the calls, of how many enclose each."""
    depths: list[int] = []
    for call in calls:
        depths.append(depths[call.parent] + 1 if call.parent >= 0 else 0)
    return sum(depths)


def _text(value: object) -> str:
    """Return a text that can be written as UTF-8: half of a surrogate pair cannot."""
    _require(isinstance(value, str), "a name is not text")
    text = str(value)
    text.encode()
    return text


def _integer(value: object) -> int:
    """Return a whole number of 64 bits."""
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**63:
        raise ValueError(f"expected a whole number, found {str(value)[:40]!r}")
    return value


def _require(condition: bool, complaint: str) -> None:
    """Raise ValueError unless a condition holds."""
    if not condition:
        raise ValueError(complaint)
