"""What a session did, as plain data: the `RunLog` that the runtime fills and the reports read.

What it is: frozen records of transfers, stalls, phases, memory, blocks and steps, and the one file
format that carries them from a training run to ``dynoffload report``. What it is not: measuring;
the runtime measures and appends. It imports nothing above the errors, so that reports can be made
where there is no model at hand.

All times are seconds since the session began; all quantities of memory are bytes.

[Note: run log files] A run log is one JSON object, compressed if its name ends in ``.gz``. Records
of one kind are stored by columns, which is several times smaller than a list of objects. JSON has
no NaN: an accuracy that does not exist is ``null`` in the file and NaN in memory. A file is read as
foreign data: nothing in it is executed, its size is bounded, each value is checked.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

from dynoffload.errors import TraceError
from dynoffload.units import GiB, format_bytes

if TYPE_CHECKING:
    import pandas as pd

FORMAT = "dynoffload-runlog"
VERSION = 5
MAX_FILE_BYTES = GiB
"""Largest run log, unpacked, that `RunLog.load` reads."""

TRANSFER_KINDS = ("fetch", "evict")
TRANSFER_CAUSES = ("plan", "fault", "room")
PHASES = ("forward", "backward", "optimizer")

_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True)
class Transfer:
    """One region on its way between the fast tier and the file.

    Attributes:
        start: seconds.
        end: seconds.
        kind: ``"fetch"`` (into fast memory) or ``"evict"`` (out of it).
        region: name of the region.
        nbytes: bytes moved; 0 for the eviction of a clean region, which is only dropped.
        cause: ``"plan"`` (ahead of use), ``"fault"`` (the step was waiting for it) or ``"room"``
            (to make room for something else).
    """

    start: float
    end: float
    kind: str
    region: str
    nbytes: int
    cause: str


@dataclass(frozen=True, slots=True)
class Stall:
    """A time in which the step waited for ``region``; seconds."""

    start: float
    end: float
    region: str


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """One phase (``"forward"``, ``"backward"`` or ``"optimizer"``) of one step; seconds."""

    start: float
    end: float
    step: int
    name: str


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Bytes of the fast tier by the ledger, and of the whole process by the kernel, at ``time``."""

    time: float
    fast_bytes: int
    rss_bytes: int


@dataclass(frozen=True, slots=True)
class StepBlocks:
    """The blocks one step was predicted to run (``None``: no prediction) and those it ran."""

    step: int
    predicted: tuple[str, ...] | None
    actual: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step in numbers.

    Attributes:
        step: number of the step, from 0.
        seconds: from one commit of the optimizer to the next.
        stalls: how often the step waited for a region.
        stall_s: seconds it waited.
        bytes_in: bytes read from the file tier.
        bytes_out: bytes written to it.
        prefetched_bytes: bytes read ahead of use.
        used_bytes: bytes of those that were used before they were evicted.
        wasted_bytes: bytes of those that were not.
        accuracy: block-order accuracy of the prediction, 0 to 1; NaN where there was none.
        peak_fast_bytes: most bytes in the fast tier at any moment of the step. While paging has
            stepped aside: parameters, gradients, optimizer state and buffers as counted at the
            step's end, and activations as last measured before it stepped aside.
        peak_allocated_bytes: most bytes of an accelerator that its own allocator had given at any
            moment of the step, to regions and all else; 0 on the CPU.
    """

    step: int
    seconds: float
    stalls: int
    stall_s: float
    bytes_in: int
    bytes_out: int
    prefetched_bytes: int
    used_bytes: int
    wasted_bytes: int
    accuracy: float
    peak_fast_bytes: int
    peak_allocated_bytes: int = 0


def table_of(steps: Sequence[StepStats]) -> pd.DataFrame:
    """Return one row per step; columns are the fields of `StepStats`."""
    import pandas

    columns = [field.name for field in fields(StepStats)]
    rows = [asdict(step) for step in steps]
    return pandas.DataFrame(rows, columns=columns).set_index("step", drop=False)


@dataclass
class RunLog:
    """All that one session recorded.

    Attributes:
        model: class name of the managed model.
        backend: ``"pager"``, ``"mapped"`` or the accelerator's.
        policy: as `OffloadConfig.policy`.
        budget: bytes, the cap on the fast tier.
        headroom: bytes that the ledger cannot count (operator temporaries), as measured.
        steps: every step's numbers; totals of a run are sums over these.
        transfers, stalls, phases, memory, blocks: single records, of the latest steps only.
        dropped: how many single records were dropped to bound the memory that a log takes, those
            that the device itself had no room for included.
        first_detailed: the first step whose single records were not dropped with it.
    """

    model: str
    backend: str
    policy: str
    budget: int
    headroom: int
    steps: list[StepStats] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)
    phases: list[PhaseSpan] = field(default_factory=list)
    memory: list[MemorySample] = field(default_factory=list)
    blocks: list[StepBlocks] = field(default_factory=list)
    dropped: int = 0
    first_detailed: int = 0

    def save(self, path: str | Path) -> Path:
        """Write the log to ``path`` (compressed if it ends in ``.gz``) and return the path."""
        path = Path(path)
        document: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        for name in _HEADER:
            document[name] = getattr(self, name)
        for name, (_, columns) in _TABLES.items():
            records = getattr(self, name)
            document[name] = {
                column: [_to_json(getattr(record, column)) for record in records]
                for column in columns
            }
        partial = path.with_name(path.name + ".partial")
        try:
            with _open_text(partial, "wt", packed=path.suffix == ".gz") as stream:
                json.dump(document, stream, separators=(",", ":"), allow_nan=False)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        return path

    @classmethod
    def load(cls, path: str | Path) -> RunLog:
        """Read a log that `save` wrote.

        Raises:
            TraceError: if the file is missing, truncated, too large, not a run log, or of a version
                that this release does not read; the message names the file and the remedy.
        """
        path = Path(path)
        document = _read_document(path)
        header: dict[str, Any] = {
            name: check(document.get(name), _Place(path, name)) for name, check in _HEADER.items()
        }
        tables: dict[str, Any] = {
            name: _records(document.get(name), kind, columns, _Place(path, name))
            for name, (kind, columns) in _TABLES.items()
        }
        return cls(**header, **tables)


@dataclass(frozen=True)
class _Place:
    """Where in which file a value stands, for the message of an error."""

    path: Path
    name: str

    def bad(self, expected: str, found: object) -> TraceError:
        shown = repr(found)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return TraceError(
            f"{self.path}: {self.name} is not {expected} but {shown}; the file is damaged: "
            f"write the run log again with 'dynoffload run --report'"
        )


_Check = Callable[[Any, _Place], Any]


def _count(value: Any, place: _Place) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise place.bad("a count", value)
    return value


def _step(value: Any, place: _Place) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value < 2**63:
        raise place.bad("the number of a step", value)
    return value


def _seconds(value: Any, place: _Place) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e15:
        raise place.bad("a finite number of seconds", value)
    return float(value)


def _share(value: Any, place: _Place) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise place.bad("a share between 0 and 1", value)
    return float(value)


def _text(value: Any, place: _Place) -> str:
    if not isinstance(value, str):
        raise place.bad("a text", value)
    return value


def _one_of(known: Sequence[str]) -> _Check:
    def check(value: Any, place: _Place) -> str:
        if value not in known:
            raise place.bad(f"one of {', '.join(known)}", value)
        return cast(str, value)

    return check


def _names(value: Any, place: _Place) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise place.bad("a list of block names", value)
    return tuple(value)


def _names_or_none(value: Any, place: _Place) -> tuple[str, ...] | None:
    return None if value is None else _names(value, place)


_HEADER: dict[str, _Check] = {
    "model": _text,
    "backend": _text,
    "policy": _text,
    "budget": _count,
    "headroom": _count,
    "dropped": _count,
    "first_detailed": _count,
}
_TABLES: dict[str, tuple[type[Any], dict[str, _Check]]] = {
    "steps": (
        StepStats,
        {
            "step": _step,
            "seconds": _seconds,
            "stalls": _count,
            "stall_s": _seconds,
            "bytes_in": _count,
            "bytes_out": _count,
            "prefetched_bytes": _count,
            "used_bytes": _count,
            "wasted_bytes": _count,
            "accuracy": _share,
            "peak_fast_bytes": _count,
            "peak_allocated_bytes": _count,
        },
    ),
    "transfers": (
        Transfer,
        {
            "start": _seconds,
            "end": _seconds,
            "kind": _one_of(TRANSFER_KINDS),
            "region": _text,
            "nbytes": _count,
            "cause": _one_of(TRANSFER_CAUSES),
        },
    ),
    "stalls": (Stall, {"start": _seconds, "end": _seconds, "region": _text}),
    "phases": (
        PhaseSpan,
        {"start": _seconds, "end": _seconds, "step": _step, "name": _one_of(PHASES)},
    ),
    "memory": (
        MemorySample,
        {"time": _seconds, "fast_bytes": _count, "rss_bytes": _count},
    ),
    "blocks": (
        StepBlocks,
        {"step": _step, "predicted": _names_or_none, "actual": _names},
    ),
}
assert all(
    tuple(columns) == tuple(f.name for f in fields(kind)) for kind, columns in _TABLES.values()
)


def _to_json(value: Any) -> Any:
    if isinstance(value, float) and math.isnan(value):
        return None
    return value


def _open_text(path: Path, mode: str, *, packed: bool) -> IO[str]:
    if packed:
        return cast(IO[str], gzip.open(path, mode, encoding="utf-8", compresslevel=5))
    return cast(IO[str], open(path, mode, encoding="utf-8"))


def _read_document(path: Path) -> Mapping[str, Any]:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with cast(IO[bytes], opener(path, "rb")) as stream:
            # Bounded while it is unpacked: a few kilobytes of gzip can stand for terabytes.
            raw = stream.read(MAX_FILE_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise TraceError(
            f"{path}: cannot read the run log: {why}; 'dynoffload run --report PATH' writes one "
            "beside the page"
        ) from error
    if len(raw) > MAX_FILE_BYTES:
        raise TraceError(
            f"{path}: the run log unpacks to more than {format_bytes(MAX_FILE_BYTES)}; record "
            "fewer steps"
        )
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise TraceError(
            f"{path}: not a run log, or a truncated one ({error}); "
            f"'dynoffload run --report PATH' writes one beside the page"
        ) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise TraceError(
            f"{path}: this is not a run log of dynoffload; "
            f"'dynoffload run --report PATH' writes one beside the page"
        )
    if document.get("version") != VERSION:
        raise TraceError(
            f"{path}: run log of version {document.get('version')!r}, this release reads version "
            f"{VERSION}; write a new one with 'dynoffload run --report', or make the report with "
            "the release that wrote this one"
        )
    return document


def _records(
    table: Any, kind: Callable[..., _Record], columns: Mapping[str, _Check], place: _Place
) -> list[_Record]:
    if not isinstance(table, dict) or set(table) != set(columns):
        raise place.bad(f"a table with the columns {', '.join(columns)}", table)
    checked: list[list[Any]] = []
    for name, check in columns.items():
        column, here = table[name], _Place(place.path, f"{place.name}.{name}")
        if not isinstance(column, list):
            raise here.bad("a list", column)
        checked.append([check(value, here) for value in column])
    if len({len(column) for column in checked}) > 1:
        raise place.bad("a table of columns of one length", [len(column) for column in checked])
    return [kind(*row) for row in zip(*checked, strict=True)]
