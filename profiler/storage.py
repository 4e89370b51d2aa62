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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, starmap
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
_TABLES = {"operators": "phase", "calls": "path", "regions": "name"}  # with a column of each
_DTYPES = {"I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8", "F64": "<f8"}

_Ints = npt.NDArray[np.int64]


def most_nesting(calls: int) -> int:
    """Return the most that the depths of so many module calls may add up to."""
    return 1_000_000 + 24 * calls


def save_trace(trace: Trace, path: str | Path) -> None:
    """Write ``trace`` to ``path``; a file that is there is replaced only when all is written.

    Raises:
        TraceError: if the directory is missing or cannot be written, or the trace is too large.
    """
    path = Path(path)
    operators, regions, calls = map(len, (trace.operators, trace.regions, trace.calls))
    uses = sum(len(op.reads) + len(op.writes) for op in trace.operators)
    _limit(path, "operators, regions or calls", MAX_ROWS, operators, regions, calls)
    _limit(path, "uses of regions", MAX_USES, uses)
    _limit(path, "depths of calls together", most_nesting(calls), _nesting(trace.calls))
    data = _file_of(trace)
    _limit(path, "bytes", MAX_FILE_BYTES, len(data))
    _limit(path, "bytes of header", MAX_HEADER_BYTES, int.from_bytes(data[:8], "little"))
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


def load_trace(path: str | Path) -> Trace:
    """Read the trace in ``path``.

    Raises:
        TraceError: if the file is missing, truncated, foreign, of another version, larger than a
            trace can be, or inconsistent in itself.
    """
    from safetensors import SafetensorError

    path = Path(path)
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


def _limit(path: Path, what: str, most: int, *found: int) -> None:
    if max(found) > most:
        raise TraceError(
            f"{path}: this step has {max(found)} {what}, a trace at most {most}: record a smaller"
            " batch"
        )


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
    arrays = {
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
    texts = document["texts"]
    _require(isinstance(texts, list) and set(map(type, texts)) <= {str}, "a name is not text")
    _text("".join(texts))
    columns = _checked(path, arrays, len(texts))
    sizes = columns["sizes"]

    def named(column: str) -> list[str]:
        return [texts[code] for code in columns[column].tolist()]

    regions = list(
        map(
            RegionInfo,
            named("regions.name"),
            [_KINDS[code] for code in columns["regions.kind"].tolist()],
            sizes[columns["regions.nbytes"]].tolist(),
            columns["regions.born"].tolist(),
            columns["regions.died"].tolist(),
        )
    )
    total = sum(region.nbytes for region in regions)
    low = min((region.nbytes for region in regions), default=0)
    _require(low >= 0 and total < _LARGEST, "regions of an impossible size")
    parents, starts, stops = (columns[f"calls.{name}"] for name in ModuleCall._fields[2:])
    _require(bool((parents < np.arange(len(parents))).all()), "a module call encloses itself")
    _require(bool((starts <= stops).all()), "a module call ends before it begins")
    numbers = (parents.tolist(), starts.tolist(), stops.tolist())
    calls = list(map(ModuleCall, named("calls.path"), named("calls.shape_key"), *numbers))
    _require(_nesting(calls) <= most_nesting(len(calls)), "module calls nested too deeply")
    return Trace(
        network=_text(document["network"]),
        model=_text(document["model"]),
        step=_integer(document["step"]),
        source=_text(document["source"]),
        sample=_sample(document["values"], arrays["elements"]),
        regions=regions,
        calls=calls,
        operators=_operators(columns, arrays["operators.seconds"], arrays["idioms"], named),
        hints=_hints(document, len(calls)),
    )


def _checked(path: Path, arrays: Mapping[str, npt.NDArray[Any]], texts: int) -> dict[str, _Ints]:
    """Return the columns of whole numbers, each in its range and as long as its table."""
    size = {table: len(arrays[f"{table}.{first}"]) for table, first in _TABLES.items()}
    for table, rows in size.items():
        if rows > MAX_ROWS:
            raise TraceError(f"{path}: claims {rows} {table}; a trace has at most {MAX_ROWS}")
    operators, calls, regions = size.values()
    code, wide, place = (0, texts), (0, len(arrays["sizes"])), (-1, operators + 1)
    bounds = {
        "sizes": (_UNKNOWN, _LARGEST),
        **dict.fromkeys(("operators.name", "operators.dtype", "operators.site"), code),
        "operators.phase": (0, len(PHASES)),
        "operators.call": (-1, calls),
        "operators.idiom": (0, len(arrays["idioms"])),
        **dict.fromkeys((f"operators.{name}" for name in _SIZES), wide),
        **dict.fromkeys(("operators.reads", "operators.writes"), (0, MAX_USES)),
        "operators.used": (0, regions),
        **dict.fromkeys(("calls.path", "calls.shape_key"), code),
        "calls.parent": (-1, calls),
        **dict.fromkeys(("calls.start", "calls.stop"), (0, operators + 1)),
        "regions.name": code,
        "regions.kind": (0, len(_KINDS)),
        "regions.nbytes": wide,
        **dict.fromkeys(("regions.born", "regions.died"), place),
    }
    others = {"idioms", "elements", "operators.seconds"}
    _require(arrays.keys() == bounds.keys() | others, "its arrays are not those of a trace")
    columns = {}
    for name, (low, stop) in bounds.items():
        array = arrays[name]
        _require(array.ndim == 1 and array.dtype.kind == "i", f"{name} is no column of numbers")
        free = name in ("sizes", "operators.used")
        rows = MAX_USES if free else size[name.partition(".")[0]]
        fits = len(array) <= rows if free else len(array) == rows
        _require(fits, f"{name} has {len(array)} rows, which are not {rows}")
        inside = not len(array) or (array.min() >= low and array.max() < stop)
        _require(bool(inside), f"{name} is out of range")
        columns[name] = array.astype(np.int64)
    return columns


def _operators(
    columns: Mapping[str, _Ints],
    seconds: npt.NDArray[Any],
    idioms: npt.NDArray[Any],
    named: Callable[[str], list[str]],
) -> Operators:
    """Return the operators: checked now, made when they are asked for."""
    phase, call, idiom, reads, writes, used = (
        columns[f"operators.{name}"]
        for name in ("phase", "call", "idiom", "reads", "writes", "used")
    )
    _require(seconds.shape == phase.shape and seconds.dtype.kind == "f", "it has no times")
    inside = bool(((seconds >= 0) & (seconds < _LONGEST_S)).all())
    _require(inside, "a time is not a time")
    width = len(Idioms._fields)
    _require(idioms.ndim == 2 and idioms.shape[1] == width, "its idioms are not six counts")
    _require(idioms.dtype.kind == "i" and len(idioms) <= MAX_ROWS, "its idioms are no counts")
    good = not len(idioms) or (idioms.min() >= 0 and idioms.max() < 2**15)
    _require(bool(good), "an idiom is counted below zero or too often")
    vectors = idioms.astype(np.int64)
    stops = np.concatenate((np.zeros(1, np.int64), np.cumsum(reads + writes)))
    _require(len(used) == stops[-1], "operators use another number of regions")
    read, written, memory, flops = (
        columns["sizes"][columns[f"operators.{name}"]] for name in _SIZES
    )
    below = any(column.min(initial=0) < 0 for column in (read, written, memory))
    _require(not below, "an operator moves less than nothing")

    def make() -> list[Operator]:
        shared = [Idioms(*row) for row in vectors.tolist()]
        flat = iter(used.tolist())
        both = zip(reads.tolist(), writes.tolist(), strict=True)
        uses = [(tuple(islice(flat, first)), tuple(islice(flat, then))) for first, then in both]
        rows = zip(
            named("operators.name"),
            [PHASES[code] for code in phase.tolist()],
            named("operators.site"),
            call.tolist(),
            [shared[code] for code in idiom.tolist()],
            read.tolist(),
            written.tolist(),
            seconds.tolist(),
            [first for first, _ in uses],
            [then for _, then in uses],
            memory.tolist(),
            [None if number == _UNKNOWN else number for number in flops.tolist()],
            named("operators.dtype"),
            strict=True,
        )
        return list(starmap(Operator, rows))

    return Operators(Columns(phase, call, seconds, vectors[idiom], used, stops), make)


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
