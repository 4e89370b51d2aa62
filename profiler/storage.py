"""Trace files: columns as arrays, the rest as one JSON document (`dynoffload.profiler.safefile`).

`save_trace` and `load_trace` write and read one file, `trace_files` and `load_traces` a directory.
docs/traces.md describes the format. Besides what [Note: what a file can claim] says, module calls
are limited in depth, because readers climb from each call to the root.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, starmap
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
"""Key of the metadata of the safetensors header."""
SCHEMA_VERSION = 5
"""Version of the layout; any other is refused."""
SUFFIX = ".trace"
"""Suffix of trace files."""
MAX_ROWS = 1_000_000
"""The most operators, regions or module calls of a trace."""
MAX_USES = 16 * MAX_ROWS
"""How often all operators together may use a region."""

_AGAIN = "record it again with `dynoffload profile`"
_LARGEST = 2**62  # counts and sizes stay below
_LONGEST_S = 1e9  # of one operator
_MAX_VALUES = 100_000
_MAX_WIDTH = 1024  # of a sample's elements
_UNKNOWN = -1  # FLOPs
_KINDS = ("parameter", "gradient", "state", "activation", "buffer", "input")
_SIZES = ("bytes_read", "bytes_written", "memory", "flops")
_TABLES = {"operators": "phase", "calls": "path", "regions": "name"}  # with a column of each

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
    document, arrays = _parts_of(trace)
    try:
        write_whole(path, pack(document, arrays, FORMAT, SCHEMA_VERSION))
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
        TraceError: if the file is missing, truncated, foreign, of another version, larger than a
            trace can be, or inconsistent in itself.
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
    """Return the traces of a directory in order of name.

    Raises:
        TraceError: if there is none.
    """
    folder = Path(folder)
    paths = sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []
    if not paths:
        what = f"holds no trace (*{SUFFIX})" if folder.is_dir() else "is not a directory"
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


def _limit(path: Path, what: str, most: int, *found: int) -> None:
    if max(found) > most:
        raise TraceError(
            f"{path}: this step has {max(found)} {what}, a trace at most {most}: record a smaller"
            " batch"
        )


def _parts_of(trace: Trace) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Return the document and the arrays of a trace's file."""
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
    hints = [(hint.call, hinted[hint.blocks]) for hint in trace.hints]
    stored["hints"] = _smallest(np.array(hints, np.int64).reshape(-1, 2))
    stored["hint_values"] = np.array([v for h in trace.hints for v in h.values], np.float64)
    document = {
        "network": trace.network,
        "model": trace.model,
        "step": trace.step,
        # A file's name need not be text.
        "source": trace.source.encode(errors="backslashreplace").decode(),
        "values": {k: v if math.isfinite(v) else str(v) for k, v in values.items()},
        "texts": list(texts),
        "hinted": [list(blocks) for blocks in hinted],
    }
    return document, stored


def _smallest(numbers: Any) -> npt.NDArray[Any]:
    """Return whole numbers in the smallest type that holds them."""
    array = np.ascontiguousarray(numbers, dtype=np.int64)
    low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
    for kind in (np.int8, np.int16, np.int32):
        limits = np.iinfo(kind)
        if limits.min <= low and high <= limits.max:
            return array.astype(kind)
    return array


def _trace(path: Path, document: Any, arrays: dict[str, npt.NDArray[Any]]) -> Trace:
    """Return the trace of a file's parts; ValueError and the like where they contradict."""
    texts = document["texts"]
    _require(isinstance(texts, list) and set(map(type, texts)) <= {str}, "a name is not text")
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
        hints=_hints(document, arrays, len(calls)),
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
    others = {"idioms", "elements", "operators.seconds", "hints", "hint_values"}
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
) -> list[Operator]:
    """Return the operators."""
    phase, call, idiom, reads, writes, used = (
        columns[f"operators.{name}"]
        for name in ("phase", "call", "idiom", "reads", "writes", "used")
    )
    _require(seconds.shape == phase.shape and seconds.dtype.kind == "f", "it has no times")
    seconds = seconds.astype(np.float64)
    inside = bool(((seconds >= 0) & (seconds < _LONGEST_S)).all())
    _require(inside, "a time is not a time")
    width = len(Idioms._fields)
    _require(idioms.ndim == 2 and idioms.shape[1] == width, "its idioms are not six counts")
    _require(idioms.dtype.kind == "i" and len(idioms) <= MAX_ROWS, "its idioms are no counts")
    good = not len(idioms) or (idioms.min() >= 0 and idioms.max() < 2**15)
    _require(bool(good), "an idiom is counted below zero or too often")
    _require(len(used) == int((reads + writes).sum()), "operators use another number of regions")
    read, written, memory, flops = (
        columns["sizes"][columns[f"operators.{name}"]] for name in _SIZES
    )
    below = any(column.min(initial=0) < 0 for column in (read, written, memory))
    _require(not below, "an operator moves less than nothing")
    shared = [Idioms(*row) for row in idioms.tolist()]
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


def _sample(values: Any, elements: npt.NDArray[Any]) -> InputFeatures:
    """Return what the sample showed."""
    _require(isinstance(values, dict) and len(values) <= _MAX_VALUES, "the sample has no values")
    _require(elements.dtype.kind == "i" and elements.ndim in (1, 2), "elements are no codes")
    width = elements.shape[1] if elements.ndim == 2 else 1
    _require(0 < width <= _MAX_WIDTH, "the sample's elements have an impossible width")
    _require(len(elements) <= MAX_ELEMENTS, "the sample has too many elements")
    numbers = {_text(name): float(value) for name, value in values.items()}
    return InputFeatures(numbers, elements.astype(np.int64))


def _hints(document: Any, arrays: Mapping[str, npt.NDArray[Any]], calls: int) -> list[RoutingHint]:
    """Return the hints, each at one of so many module calls."""
    sets = [tuple(map(_text, blocks)) for blocks in document["hinted"]]
    rows, values = arrays["hints"], arrays["hint_values"]
    _require(rows.dtype.kind == "i" and rows.ndim == 2 and rows.shape[1] == 2, "hints are no rows")
    _require(len(rows) <= MAX_ROWS, "it has too many hints")
    good = values.dtype.kind == "f" and values.ndim == 1 and ((values >= 0) & (values <= 1)).all()
    _require(bool(good), "a hint is no chance")
    told = iter(values.tolist())
    hints: list[RoutingHint] = []
    for call, number in rows.tolist():
        _require(0 <= call < calls, "a hint belongs to no module call")
        _require(0 <= number < len(sets), "a hint is about nothing")
        _require(len(sets[number]) <= MAX_HINTED, "a hint is about too many blocks")
        hints.append(RoutingHint(call, sets[number], tuple(islice(told, len(sets[number])))))
    _require(sum(len(hint.values) for hint in hints) == len(values), "hints of the wrong length")
    _require(all(len(h.values) == len(h.blocks) for h in hints), "a hint is of the wrong length")
    return hints


def _nesting(calls: Sequence[ModuleCall]) -> int:
    """Return the sum, over the calls, of how many enclose each."""
    depths: list[int] = []
    for call in calls:
        depths.append(depths[call.parent] + 1 if call.parent >= 0 else 0)
    return sum(depths)


def _text(value: object) -> str:
    """Return a text."""
    _require(isinstance(value, str), "a name is not text")
    return str(value)


def _integer(value: object) -> int:
    """Return a whole number of 64 bits."""
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**63:
        raise ValueError(f"expected a whole number, found {str(value)[:40]!r}")
    return value


def _require(condition: bool, complaint: str) -> None:
    """Raise ValueError unless a condition holds."""
    if not condition:
        raise ValueError(complaint)
