"""Measured speeds of a rank: how long products, exchanges and copies of any size take.

What it is: piecewise linear tables from volumes to seconds, fitted once for a machine, and their
JSON. What it is not: who measures them.

The JSON is ``{"gemm": [[volume, seconds], ...], "exchange": [...], "copy": [...],
"slowdown": {"compute_beside_link": 1.1, ...}}``. Volumes of ``gemm`` are the multiply-adds of one
matrix product, those of ``exchange`` the bytes that the busiest rank sends or receives in one
all-to-all, to itself included, those of ``copy`` bytes. ``slowdown`` has the attributes of
`Slowdown`; what it leaves out is 1.

[Note: cost models]  The cost model that a pipelined layer fits is read too, as its fields are:
``{"compute": {"points": [[volume, seconds], ...]}, "communication": {...}, "copy": {...},
"compute_beside": 1.2, "communication_beside": 1.1, "copy_beside": 1}``. Its factors were found with
computing beside an all-to-all, so they are those of the two beside each other; that of copies is
theirs beside computing.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from dynoffload.errors import ConfigError
from dynoffload.simulation.hardware import Accelerator
from dynoffload.simulation.streams import Slowdown

_FAR = 1e9  # far enough that a slope is not lost beside a latency


@dataclass(frozen=True)
class Table:
    """Seconds by volume.

    Between two points it is a line, beyond the last the last line goes on, and below the first it
    is what the first says, as that is what starting takes. Nothing takes no time.

    Attributes:
        points: volumes, ascending, and seconds.

    Raises:
        ConfigError: there is none, volumes do not ascend, or a value is negative or not finite.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise ConfigError("a table of speeds needs at least one point [volume, seconds]")
        for volume, seconds in self.points:
            if not (0 <= volume < math.inf and 0 <= seconds < math.inf):
                raise ConfigError(f"[{volume}, {seconds}] is no volume with its seconds")
        volumes = [volume for volume, _ in self.points]
        if any(second <= first for first, second in pairwise(volumes)):
            raise ConfigError(f"volumes of a table of speeds must ascend: {volumes}")

    @staticmethod
    def rate(per_s: float, latency_s: float = 0.0) -> Table:
        """Return a table of one rate, and the seconds of the least volume."""
        return Table(((0.0, latency_s), (_FAR, latency_s + _FAR / per_s)))

    def __call__(self, volume: float) -> float:
        """Return the seconds that ``volume`` takes."""
        if volume <= 0:
            return 0.0
        points = self.points
        place = bisect_left(points, (volume, -1.0))
        if place == 0:
            return points[0][1]
        if len(points) == 1:  # one rate, through nothing
            return points[0][1] * volume / points[0][0] if points[0][0] else points[0][1]
        (left, low), (right, high) = points[min(place, len(points) - 1) - 1 :][:2]
        return max(0.0, low + (high - low) * (volume - left) / (right - left))


@dataclass(frozen=True)
class Speeds:
    """What one rank takes, by volume.

    Attributes:
        gemm: of one matrix product, by multiply-adds.
        exchange: of one all-to-all, by bytes of the busiest rank, those to itself included.
        copy: to the host or from it, by bytes.
        slowdown: of each beside the others.
    """

    gemm: Table
    exchange: Table
    copy: Table
    slowdown: Slowdown = field(default_factory=Slowdown)

    @staticmethod
    def of(device: Accelerator, width: int, inner: int, experts: float, element: int) -> Speeds:
        """Return the roofline of ``device`` for products with an expert's matrix.

        A product reads the matrices of all experts that the rank holds, whatever part of the batch
        it is for.

        Args:
            device: whose rates it takes; copies go to its remote memory.
            width: of the network.
            inner: of an expert, as the rank holds it.
            experts: that the rank holds.
            element: bytes of one.
        """
        held = width * inner
        floor = element * experts * held / device.local_bytes_per_s
        per_row = element * (width + inner) / device.local_bytes_per_s / held
        arithmetic = 2 / device.flops_per_s  # of a multiply-add
        points = [(0.0, floor), (_FAR * held, floor + _FAR * held * per_row)]
        if arithmetic > per_row:
            turn = floor / (arithmetic - per_row)
            points = [(0.0, floor), (turn, turn * arithmetic), (2 * turn, 2 * turn * arithmetic)]
        return Speeds(
            Table(tuple(points)),
            Table.rate(device.network.share),
            Table.rate(device.remote.share),
        )

    @staticmethod
    def load(path: Path) -> Speeds:
        """Return what a JSON file has; see the module.

        Raises:
            ConfigError: it cannot be read, lacks a table, or has a key that means nothing.
        """
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot read speeds of {path}: {getattr(error, 'strerror', None) or error}"
            ) from error
        if not isinstance(document, dict):
            raise ConfigError(f"{path} holds no speeds: it must be an object with three tables")
        try:
            return Speeds.read(document)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    @staticmethod
    def read(document: Mapping[str, Any]) -> Speeds:
        """Return the speeds of a JSON object.

        Raises:
            ConfigError: as for `load`.
        """
        if "communication" in document:
            document = _of_cost_model(document)
        tables = ("gemm", "exchange", "copy")
        _check("speeds", document, (*tables, "slowdown"))
        lacking = [name for name in tables if name not in document]
        if lacking:
            raise ConfigError(f"speeds lack {' and '.join(lacking)}: [[volume, seconds], ...]")
        slowed = document.get("slowdown", {})
        if not isinstance(slowed, Mapping):
            raise ConfigError(f"slowdown is {slowed!r}: give an object of factors")
        _check("slowdown", slowed, [one.name for one in fields(Slowdown)])
        for name, value in slowed.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ConfigError(f"slowdown {name} is {value!r}, which is no number")
        gemm, exchange, copy = (_table(name, document[name]) for name in tables)
        return Speeds(gemm, exchange, copy, Slowdown(**slowed))

    def document(self) -> dict[str, Any]:
        """Return the JSON object; `read` gives the same speeds of it."""
        tables = {name: getattr(self, name).points for name in ("gemm", "exchange", "copy")}
        listed = {name: [list(point) for point in points] for name, points in tables.items()}
        return {**listed, "slowdown": asdict(self.slowdown)}

    def save(self, path: Path) -> None:
        """Write the JSON file."""
        Path(path).write_text(json.dumps(self.document(), indent=2) + "\n", encoding="utf-8")


_COST_MODEL = {"gemm": "compute", "exchange": "communication", "copy": "copy"}
_BESIDE = {
    "compute_beside_link": "compute_beside",
    "link_beside_compute": "communication_beside",
    "copy_beside_compute": "copy_beside",
}


def _of_cost_model(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a cost model as speeds; see [Note: cost models]."""
    _check("a cost model", document, (*_COST_MODEL.values(), *_BESIDE.values()))
    made: dict[str, Any] = {
        ours: table["points"] if isinstance(table, Mapping) and "points" in table else table
        for ours, table in ((key, document.get(theirs)) for key, theirs in _COST_MODEL.items())
    }
    slowed = {ours: document[theirs] for ours, theirs in _BESIDE.items() if theirs in document}
    return {**made, "slowdown": slowed}


def _check(what: str, table: Mapping[str, Any], known: Iterable[str]) -> None:
    known = list(known)
    for key in table:
        if key not in known:
            raise ConfigError(f"{key!r} is no part of {what}: {', '.join(known)}")


def _table(name: str, points: Any) -> Table:
    try:
        pairs = tuple((float(volume), float(seconds)) for volume, seconds in points)
    except (TypeError, ValueError):
        raise ConfigError(f"{name} is {points!r}: give [[volume, seconds], ...]") from None
    try:
        return Table(pairs)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
