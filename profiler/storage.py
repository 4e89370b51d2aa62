"""Trace files: columns as arrays, the rest as one JSON document (`dynoffload.profiler.safefile`).

docs/traces.md describes the format. In addition to the checks of [Note: what a file can claim], the
nesting of module calls is limited, because readers walk from each call to the root.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dynoffload.errors import TraceError
from dynoffload.profiler.columns import PHASES, Columns
from dynoffload.profiler.idioms import Idioms
from dynoffload.profiler.input_features import MAX_ELEMENTS, InputFeatures
from dynoffload.profiler.routing import MAX_HINTED, RoutingHint
from dynoffload.profiler.safefile import BadFileError, pack, read_file, write_whole
from dynoffload.profiler.trace import ModuleCall, Operator, RegionInfo, Trace

FORMAT = "dynoffload.trace"
"""Metadata key in the safetensors header."""
SCHEMA_VERSION = 6
"""Version of the layout; any other is refused."""
SUFFIX = ".trace"
"""Suffix of trace files."""
MAX_ROWS = 1_000_000
"""The most operators, regions or module calls of a trace."""
MAX_USES = 16 * MAX_ROWS
"""The most region uses (reads and writes) of all operators together."""

_AGAIN = "record it again with `dynoffload profile`"
_LARGEST = 2**62  # exclusive limit of counts and sizes
_LONGEST_S = 1e9  # of one operator
_MAX_VALUES = 100_000
_MAX_WIDTH = 1024  # of a sample's elements
_UNKNOWN = -1  # FLOPs
_KINDS = ("parameter", "gradient", "state", "activation", "buffer", "input")
_TEXTS = (
    *("operators.name", "operators.dtype", "operators.site"),
    *("calls.path", "calls.shape_key", "regions.name"),
)
_SIZES = (
    *("operators.bytes_read", "operators.bytes_written", "operators.memory", "operators.flops"),
    "regions.nbytes",
)


def most_nesting(calls: int) -> int:
    """Return the largest allowed sum of the depths of this many module calls."""
    return 1_000_000 + 24 * calls


def save_trace(trace: Trace, path: str | Path) -> None:
    """Write ``trace`` to ``path`` atomically, replacing an existing file.

    Raises:
        TraceError: if the directory is missing or cannot be written, or the trace is too large.
    """
    path = Path(path)
    rows = max(map(len, (trace.operators, trace.regions, trace.calls)))
    for what, most, found in (
        ("operators, regions or calls", MAX_ROWS, rows),
        ("uses of regions", MAX_USES, sum(len(o.reads) + len(o.writes) for o in trace.operators)),
        ("depths of calls together", most_nesting(len(trace.calls)), _nesting(trace.calls)),
    ):
        if found > most:
            raise TraceError(
                f"{path}: this step has {found} {what}, a trace at most {most}: record a smaller"
                " batch"
            )
    try:
        write_whole(path, pack(*_parts_of(trace), FORMAT, SCHEMA_VERSION))
    except BadFileError as error:
        raise TraceError(f"{path}: {error}: record a smaller batch") from error
    except OSError as error:
        raise TraceError(
            f"{path}: the trace cannot be written ({error.strerror or error}); make the directory"
            " or choose another"
        ) from error


def load_trace(path: str | Path) -> Trace:
    """Read the trace in ``path``.

    Raises:
        TraceError: if the file is missing, truncated, not a trace, of another version, too large
            or inconsistent.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise TraceError(f"{path}: is not a file; name one trace in it")
    try:
        return _trace(path, *read_file(path, FORMAT, SCHEMA_VERSION))
    except OSError as error:
        raise TraceError(f"{path}: no trace can be read there ({error.strerror})") from error
    except BadFileError as error:
        raise TraceError(f"{path}: is no trace of this release: {error}; {_AGAIN}") from error
    except (ValueError, TypeError, LookupError, OverflowError, AttributeError) as error:
        what = f"{type(error).__name__}: {str(error)[:200]}"
        raise TraceError(f"{path} is damaged ({what}); {_AGAIN}") from error


def trace_files(folder: str | Path) -> list[Path]:
    """Return the trace files of a directory in order of name.

    Raises:
        TraceError: if there are none.
    """
    folder = Path(folder)
    paths = sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []
    if not paths:
        what = f"holds no trace (*{SUFFIX})" if folder.is_dir() else "is not a directory"
        raise TraceError(f"{folder}: {what}; record some with 'dynoffload profile -o {folder}'")
    return paths


def load_traces(paths: Sequence[Path]) -> Iterator[Trace]:
    """Yield the traces in ``paths``, each read on demand.

    Raises:
        TraceError: one cannot be read, or they are of several networks.
    """
    network = ""
    for path in paths:
        trace = load_trace(path)
        check_network(paths[0], network or trace.network, path, trace.network)
        network = trace.network
        yield trace


def check_network(first: Path, network: str, path: Path, found: str) -> None:
    """Refuse a trace whose network differs from that of ``first``.

    Raises:
        TraceError: the networks differ.
    """
    if found != network:
        raise TraceError(
            f"{first} is of network {network[:12]}, {path.name} of {found[:12]}: "
            "keep the traces of each network in their own directory"
        )


def _parts_of(trace: Trace) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Return the document and the arrays of a trace's file."""
    columns = Columns.of(trace.operators)
    rows = {"operators": trace.operators, "calls": trace.calls, "regions": trace.regions}

    def column(name: str) -> list[Any]:
        table, _, field = name.partition(".")
        return [getattr(row, field) for row in rows[table]]

    texts, vectors, hinted = _Codes(), _Codes(), _Codes()
    arrays: dict[str, Any] = {name: texts.of(column(name)) for name in _TEXTS}
    wide = [[_UNKNOWN if n is None else n for n in column(name)] for name in _SIZES]
    flat = np.array([number for numbers in wide for number in numbers], np.int64)
    arrays["sizes"], places = np.unique(flat, return_inverse=True)
    stops = np.cumsum([len(numbers) for numbers in wide])[:-1]
    arrays |= zip(_SIZES, np.split(places, stops), strict=True)
    about = hinted.of(hint.blocks for hint in trace.hints)
    hints = [(hint.call, code) for hint, code in zip(trace.hints, about, strict=True)]
    arrays |= {
        "elements": trace.sample.elements,
        "operators.phase": columns.phase,
        "operators.call": columns.call,
        "operators.idiom": vectors.of(op.idioms for op in trace.operators),
        "operators.reads": [len(op.reads) for op in trace.operators],
        "operators.writes": [len(op.writes) for op in trace.operators],
        "operators.used": columns.used,
        **{f"calls.{name}": column(f"calls.{name}") for name in ModuleCall._fields[2:]},
        "regions.kind": [_KINDS.index(region.kind) for region in trace.regions],
        "regions.born": column("regions.born"),
        "regions.died": column("regions.died"),
        "idioms": np.array([*vectors], np.int64).reshape(-1, len(Idioms._fields)),
        "hints": np.array(hints, np.int64).reshape(-1, 2),
    }
    stored = {name: _smallest(array) for name, array in arrays.items()}
    stored["operators.seconds"] = columns.seconds
    stored["hint_values"] = np.array([v for h in trace.hints for v in h.values], np.float64)
    values = trace.sample.values
    document = {
        "network": trace.network,
        "model": trace.model,
        "step": trace.step,
        # A file name may hold surrogates (bytes that are not valid text).
        "source": trace.source.encode(errors="backslashreplace").decode(),
        "values": {k: v if math.isfinite(v) else str(v) for k, v in values.items()},
        "texts": list(texts),
        "hinted": [list(blocks) for blocks in hinted],
        "slices": trace.slices,
    }
    return document, stored


class _Codes(dict[Any, int]):
    """Assigns numbers to values, in order of first occurrence."""

    def of(self, values: Iterable[Any]) -> list[int]:
        return [self.setdefault(value, len(self)) for value in values]


def _smallest(numbers: Any) -> npt.NDArray[Any]:
    """Return integers in the smallest integer type that holds them."""
    array = np.ascontiguousarray(numbers, dtype=np.int64)
    low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
    kinds = (np.int8, np.int16, np.int32, np.int64)
    return array.astype(
        next(k for k in kinds if np.iinfo(k).min <= low and high <= np.iinfo(k).max)
    )


def _trace(path: Path, document: Any, arrays: dict[str, npt.NDArray[Any]]) -> Trace:
    """Return the trace of a file's parts; raises ValueError and similar if inconsistent."""
    texts = document["texts"]
    _require(isinstance(texts, list) and set(map(type, texts)) <= {str}, "a name is not text")
    columns = _checked(path, arrays, len(texts))
    for name in _TEXTS:
        columns[name] = [texts[code] for code in columns[name]]
    regions = list(
        map(
            RegionInfo,
            columns["regions.name"],
            [_KINDS[code] for code in columns["regions.kind"]],
            *(columns[f"regions.{name}"] for name in RegionInfo._fields[2:]),
        )
    )
    _require(sum(region.nbytes for region in regions) < _LARGEST, "regions of an impossible size")
    calls = list(map(ModuleCall, *(columns[f"calls.{name}"] for name in ModuleCall._fields)))
    for index, call in enumerate(calls):
        _require(call.parent < index, "a module call encloses itself")
        _require(call.start <= call.stop, "a module call ends before it begins")
    _require(_nesting(calls) <= most_nesting(len(calls)), "module calls nested too deeply")
    return Trace(
        network=_text(document["network"]),
        model=_text(document["model"]),
        step=_integer(document["step"]),
        source=_text(document["source"]),
        sample=_sample(document["values"], arrays["elements"]),
        regions=regions,
        calls=calls,
        operators=_operators(columns, arrays["operators.seconds"], arrays["idioms"]),
        hints=_hints(document, arrays, len(calls)),
        slices=_slices(document["slices"]),
    )


def _checked(path: Path, arrays: Mapping[str, npt.NDArray[Any]], texts: int) -> dict[str, Any]:
    """Return the integer columns after checking range and length, with indices into ``sizes``
    replaced by the sizes."""
    first = {"operators": "operators.phase", "calls": "calls.path", "regions": "regions.name"}
    size = {table: len(arrays[column]) for table, column in first.items()}
    for table, rows in size.items():
        if rows > MAX_ROWS:
            raise TraceError(f"{path}: claims {rows} {table}; a trace has at most {MAX_ROWS}")
    operators, calls, regions = size.values()
    bounds = {
        "sizes": (_UNKNOWN, _LARGEST),
        **dict.fromkeys(_TEXTS, (0, texts)),
        **dict.fromkeys(_SIZES, (0, len(arrays["sizes"]))),
        "operators.phase": (0, len(PHASES)),
        "operators.call": (-1, calls),
        "operators.idiom": (0, len(arrays["idioms"])),
        **dict.fromkeys(("operators.reads", "operators.writes"), (0, MAX_USES)),
        "operators.used": (0, regions),
        "calls.parent": (-1, calls),
        **dict.fromkeys(("calls.start", "calls.stop"), (0, operators + 1)),
        "regions.kind": (0, len(_KINDS)),
        **dict.fromkeys(("regions.born", "regions.died"), (-1, operators + 1)),
    }
    others = {"idioms", "elements", "operators.seconds", "hints", "hint_values"}
    _require(arrays.keys() == bounds.keys() | others, "its arrays are not those of a trace")
    columns: dict[str, Any] = {}
    for name, (low, stop) in bounds.items():
        array = arrays[name]
        _require(array.ndim == 1 and array.dtype.kind == "i", f"{name} is no column of numbers")
        free = name in ("sizes", "operators.used")
        rows = MAX_USES if free else size[name.partition(".")[0]]
        fits = len(array) <= rows if free else len(array) == rows
        _require(fits, f"{name} has {len(array)} rows, which are not {rows}")
        inside = not len(array) or (array.min() >= low and array.max() < stop)
        _require(bool(inside), f"{name} is out of range")
        if name in _SIZES:
            array = arrays["sizes"][array]
            known = name == "operators.flops" or array.min(initial=0) >= 0
            _require(bool(known), f"{name} is below zero")
        columns[name] = array.tolist()
    return columns


def _operators(
    columns: Mapping[str, list[Any]], seconds: npt.NDArray[Any], idioms: npt.NDArray[Any]
) -> list[Operator]:
    """Return the operators."""
    count, used = len(columns["operators.phase"]), columns["operators.used"]
    reads, writes = columns["operators.reads"], columns["operators.writes"]
    _require(seconds.shape == (count,) and seconds.dtype.kind == "f", "it has no times")
    seconds = seconds.astype(np.float64)
    inside = bool(((seconds >= 0) & (seconds < _LONGEST_S)).all())
    _require(inside, "a time is not a time")
    width = len(Idioms._fields)
    _require(idioms.ndim == 2 and idioms.shape[1] == width, "its idioms are not six counts")
    _require(idioms.dtype.kind == "i" and len(idioms) <= MAX_ROWS, "its idioms are no counts")
    good = not len(idioms) or (idioms.min() >= 0 and idioms.max() < 2**15)
    _require(bool(good), "an idiom is counted below zero or too often")
    _require(len(used) == sum(reads) + sum(writes), "operators use another number of regions")
    vectors = [Idioms(*row) for row in idioms.tolist()]
    flat = iter(used)
    read, written = [], []
    for first, then in zip(reads, writes, strict=True):
        read.append(tuple(islice(flat, first)))
        written.append(tuple(islice(flat, then)))
    own = {
        "phase": [PHASES[code] for code in columns["operators.phase"]],
        "idioms": [vectors[code] for code in columns["operators.idiom"]],
        "seconds": seconds.tolist(),
        "reads": read,
        "writes": written,
        "flops": [None if n == _UNKNOWN else n for n in columns["operators.flops"]],
    }
    return list(
        map(
            Operator, *(own[f] if f in own else columns[f"operators.{f}"] for f in Operator._fields)
        )
    )


def _sample(values: Any, elements: npt.NDArray[Any]) -> InputFeatures:
    """Return the input features."""
    _require(isinstance(values, dict) and len(values) <= _MAX_VALUES, "the sample has no values")
    _require(elements.dtype.kind == "i" and elements.ndim in (1, 2), "elements are no codes")
    width = elements.shape[1] if elements.ndim == 2 else 1
    _require(0 < width <= _MAX_WIDTH, "the sample's elements have an impossible width")
    _require(len(elements) <= MAX_ELEMENTS, "the sample has too many elements")
    numbers = {_text(name): float(value) for name, value in values.items()}
    return InputFeatures(numbers, elements.astype(np.int64))


def _hints(document: Any, arrays: Mapping[str, npt.NDArray[Any]], calls: int) -> list[RoutingHint]:
    """Return the hints; each must refer to one of ``calls`` module calls."""
    sets = [tuple(map(_text, blocks)) for blocks in document["hinted"]]
    rows, values = arrays["hints"], arrays["hint_values"]
    _require(rows.dtype.kind == "i" and rows.ndim == 2 and rows.shape[1] == 2, "hints are no rows")
    _require(len(rows) <= MAX_ROWS, "it has too many hints")
    good = values.dtype.kind == "f" and values.ndim == 1 and ((values >= 0) & (values <= 1)).all()
    _require(bool(good), "a hint is no chance")
    _require(all(len(blocks) <= MAX_HINTED for blocks in sets), "a hint is about too many blocks")
    flat_values = iter(values.tolist())
    hints: list[RoutingHint] = []
    for call, number in rows.tolist():
        _require(0 <= call < calls, "a hint belongs to no module call")
        _require(0 <= number < len(sets), "a hint is about nothing")
        hints.append(RoutingHint(call, sets[number], tuple(islice(flat_values, len(sets[number])))))
    needed = sum(len(hint.blocks) for hint in hints)
    _require(needed == len(values), "hints of the wrong length")
    return hints


def _slices(document: Any) -> dict[str, int]:
    """Return the numbers of experts of fused parameters."""
    slices = {_text(name): _integer(count) for name, count in document.items()}
    _require(len(slices) <= MAX_ROWS, "it has too many fused parameters")
    _require(all(1 < count <= MAX_ROWS for count in slices.values()), "a layer of no experts")
    return slices


def _nesting(calls: Sequence[ModuleCall]) -> int:
    """Return the sum of the calls' nesting depths."""
    depths: list[int] = []
    for call in calls:
        depths.append(depths[call.parent] + 1 if call.parent >= 0 else 0)
    return sum(depths)


def _text(value: object) -> str:
    _require(isinstance(value, str), "a name is not text")
    return str(value)


def _integer(value: object) -> int:
    """Return ``value`` if it is a 64-bit integer, else raise ValueError."""
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**63:
        raise ValueError(f"expected a whole number, found {str(value)[:40]!r}")
    return value


def _require(condition: bool, complaint: str) -> None:
    if not condition:
        raise ValueError(complaint)
