"""The data a session recorded: the `RunLog` that the runtime fills and the reports read.

All times are seconds since the session began; all quantities of memory are bytes.

[Note: run log files] A run log is one JSON object, compressed if its name ends in ``.gz``. Records
of one kind are stored by columns, which is several times smaller than a list of objects. JSON has
no NaN: a missing accuracy is ``null`` in the file and NaN in memory. A file is read as untrusted
data: its size is bounded, and each value is checked by the type of its field.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from dynoffload.errors import TraceError
from dynoffload.units import GiB, format_bytes

if TYPE_CHECKING:
    import pandas as pd

FORMAT = "dynoffload-runlog"
VERSION = 6
MAX_FILE_BYTES = GiB
"""Largest run log, unpacked, that `RunLog.load` reads."""

PHASES = ("forward", "backward", "optimizer")
Kind: TypeAlias = str  # `_CHECKS` lists the values of Kind, Cause and Phase
Cause: TypeAlias = str
Phase: TypeAlias = str
Share: TypeAlias = float  # 0 to 1; NaN where there is none


@dataclass(frozen=True, slots=True)
class Transfer:
    """A transfer of one region between the fast tier and the file.

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
    kind: Kind
    region: str
    nbytes: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class Stall:
    """A time in which the step stalled on ``region``; seconds."""

    start: float
    end: float
    region: str


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """One phase (``"forward"``, ``"backward"`` or ``"optimizer"``) of one step; seconds."""

    start: float
    end: float
    step: int
    name: Phase


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Bytes of the fast tier as counted, and of the whole process by the kernel, at ``time``."""

    time: float
    fast_bytes: int
    rss_bytes: int


@dataclass(frozen=True, slots=True)
class StepBlocks:
    """The blocks that one step was predicted to run (``None``: no prediction) and those it ran."""

    step: int
    predicted: tuple[str, ...] | None
    actual: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepStats:
    """Statistics of one step.

    Attributes:
        step: number of the step, from 0.
        seconds: from one commit of the optimizer to the next.
        stalls: number of times the step waited for a region.
        stall_s: seconds it waited.
        bytes_in: bytes read from the file tier.
        bytes_out: bytes written to it.
        prefetched_bytes: bytes read ahead of use.
        used_bytes: prefetched bytes that were used before they were evicted.
        wasted_bytes: prefetched bytes that were not.
        accuracy: block-order accuracy of the prediction, 0 to 1; NaN if there was none.
        peak_fast_bytes: most bytes in the fast tier at any moment of the step. In resident mode:
            parameters, gradients, optimizer state and buffers as counted at the step's end, and
            activations as last measured while paging.
        peak_allocated_bytes: most bytes that an accelerator's own allocator had allocated at any
            moment of the step, for regions and everything else; 0 on the CPU.
        predicting_s: seconds of the host's time that prediction took.
        replanning_s: those that new plans took, after predictions changed within the step.
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
    accuracy: Share
    peak_fast_bytes: int
    peak_allocated_bytes: int = 0
    predicting_s: float = 0.0
    replanning_s: float = 0.0


def table_of(steps: Sequence[StepStats]) -> pd.DataFrame:
    """Return one row per step; columns are the fields of `StepStats`."""
    import pandas

    columns = [field.name for field in fields(StepStats)]
    rows = [asdict(step) for step in steps]
    return pandas.DataFrame(rows, columns=columns).set_index("step", drop=False)


@dataclass
class RunLog:
    """Everything that one session recorded.

    Attributes:
        model: class name of the managed model.
        backend: ``"pager"``, ``"mapped"`` or the accelerator's.
        policy: as `OffloadConfig.policy`.
        budget: bytes, the cap on the fast tier.
        headroom: bytes that cannot be counted (operator temporaries), as measured.
        steps: every step's statistics; totals of a run are sums over these.
        transfers, stalls, phases, memory, blocks: single records, of the latest steps only.
        dropped: number of single records dropped to bound the log's memory, including those that
            the device itself had no room for.
        first_detailed: the first step whose single records were kept.
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
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name in _TABLES:
                columns = [column.name for column in fields(_TABLES[one.name])]
                value = {name: [_to_json(getattr(r, name)) for r in value] for name in columns}
            document[one.name] = value
        partial = path.with_name(path.name + ".partial")
        opener = gzip.open if path.suffix == ".gz" else open
        try:
            with opener(partial, "wt", encoding="utf-8") as stream:
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
        document = _read_document(Path(path))
        values: dict[str, Any] = {}
        try:
            for one in fields(cls):
                value, kind = document.get(one.name), _TABLES.get(one.name)
                values[one.name] = (
                    _checked(one.name, str(one.type), value)
                    if kind is None
                    else _records(one.name, value, kind)
                )
        except _BadValue as bad:
            raise TraceError(
                f"{path}: {bad}; the file is damaged: write the run log again with 'dynoffload "
                "run --report'"
            ) from None
        return cls(**values)


_TABLES: dict[str, type[Any]] = {
    "steps": StepStats,
    "transfers": Transfer,
    "stalls": Stall,
    "phases": PhaseSpan,
    "memory": MemorySample,
    "blocks": StepBlocks,
}


class _BadValue(ValueError):
    """Names a value that is not one of a run log."""


def _is_number(value: Any, least: float, most: float) -> bool:
    return type(value) in (int, float) and least <= value <= most


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "int": lambda value: type(value) is int and 0 <= value < 2**63,
    "float": lambda value: _is_number(value, -1e15, 1e15),
    "Share": lambda value: value is None or _is_number(value, 0, 1),
    "str": lambda value: isinstance(value, str),
    "Kind": lambda value: value in ("fetch", "evict"),
    "Cause": lambda value: value in ("plan", "fault", "room"),
    "Phase": lambda value: value in PHASES,
    "tuple[str, ...]": _are_names,
    "tuple[str, ...] | None": lambda value: value is None or _are_names(value),
}
"""By the type of a field, as annotated above: a check of its values in files."""


def _checked(name: str, kind: str, value: Any) -> Any:
    if not _CHECKS[kind](value):
        raise _BadValue(f"{name} is {value!r:.60}")
    if kind == "Share" and value is None:
        return math.nan
    if kind in ("Share", "float"):
        return float(value)
    return tuple(value) if isinstance(value, list) else value


def _records(name: str, table: Any, kind: type[Any]) -> list[Any]:
    columns = {one.name: str(one.type) for one in fields(kind)}
    lists: list[Any] = (
        list(table.values()) if isinstance(table, dict) and set(table) == set(columns) else [0]
    )
    if not all(isinstance(one, list) for one in lists) or len({len(one) for one in lists}) > 1:
        raise _BadValue(f"{name} is no table of columns of one length: {', '.join(columns)}")
    checked = [
        [_checked(f"{name}.{column}", type_, value) for value in table[column]]
        for column, type_ in columns.items()
    ]
    return [kind(*row) for row in zip(*checked, strict=True)]


def _to_json(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


def _read_document(path: Path) -> dict[str, Any]:
    remedy = "'dynoffload run --report PATH' writes one beside the page"
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as stream:
            # Bounded while unpacking: a few kilobytes of gzip can expand to terabytes.
            raw = stream.read(MAX_FILE_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise TraceError(f"{path}: cannot read the run log: {why}; {remedy}") from error
    if len(raw) > MAX_FILE_BYTES:
        raise TraceError(
            f"{path}: the run log unpacks to more than {format_bytes(MAX_FILE_BYTES)}; record "
            "fewer steps"
        )
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise TraceError(
            f"{path}: not a run log, or a truncated one ({error}); {remedy}"
        ) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise TraceError(f"{path}: this is not a run log of dynoffload; {remedy}")
    if document.get("version") != VERSION:
        raise TraceError(
            f"{path}: run log of version {document.get('version')!r}, this release reads version "
            f"{VERSION}; write a new one with 'dynoffload run --report', or make the report with "
            "the release that wrote this one"
        )
    return document
