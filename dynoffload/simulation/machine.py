"""The simulated machine: a fast tier, a link to the tier below, and compute.

Units are bytes, seconds and bytes per second. Machines are read from TOML; `dynoffload.doctor`
measures the current one.

[Note: one direction and both]  A link moves ``read_bps`` while only reads are in progress and
``write_bps`` while only writes are. With both in progress it moves ``mixed_bps`` in total, half of
it each way, but no more in one direction than that direction's own rate. Transfers in one direction
share its rate evenly. A full-duplex link's ``mixed_bps`` is the sum of both rates; that of a link
that alternates is their harmonic mean.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from dynoffload.errors import ConfigError
from dynoffload.profiler.costs import CostModel
from dynoffload.units import parse_bytes


@dataclass(frozen=True)
class Link:
    """The link between fast memory and the tier below.

    Attributes:
        read_bps: bytes per second into fast memory.
        write_bps: bytes per second out of it.
        mixed_bps: bytes per second of both directions together; by default the link is
            full-duplex. See [Note: one direction and both].
        latency_s: seconds before the first byte of a transfer.
        fault_s: additional seconds of a demand fetch: trap, service, wake-up.
    """

    read_bps: float
    write_bps: float
    mixed_bps: float = math.inf
    latency_s: float = 0.0
    fault_s: float = 0.0

    def __post_init__(self) -> None:
        if self.mixed_bps == math.inf:
            object.__setattr__(self, "mixed_bps", self.read_bps + self.write_bps)
        for name in ("read_bps", "write_bps", "mixed_bps"):
            _require(self, name, getattr(self, name) > 0, "above 0 bytes per second")
        for name in ("latency_s", "fault_s"):
            _require(self, name, 0 <= getattr(self, name) < float("inf"), "seconds from 0 on")

    @property
    def in_turns(self) -> bool:
        """Whether reads and writes alternate: both at once are no faster than one after the
        other."""
        return self.mixed_bps <= 2 / (1 / self.read_bps + 1 / self.write_bps)

    def times(self, factor: float) -> Link:
        """Return the same link, ``factor`` times as fast, with the same latency."""
        return replace(
            self,
            read_bps=factor * self.read_bps,
            write_bps=factor * self.write_bps,
            mixed_bps=factor * self.mixed_bps,
        )

    def rates(self, *, reads: bool, writes: bool) -> tuple[float, float]:
        """Return the total bytes per second of reads and of writes, given which are in progress."""
        if reads and writes:
            half = self.mixed_bps / 2
            return min(half, self.read_bps), min(half, self.write_bps)
        return self.read_bps * reads, self.write_bps * writes


@dataclass(frozen=True)
class Machine:
    """Description of a machine for simulations.

    Attributes:
        link: the link to the tier below.
        fast_bytes: capacity of fast memory.
        slow_bytes: capacity of the tier below; None for no limit.
        overlap: whether transfers overlap with compute; otherwise each waits for the other.
        workers: most transfers in progress at one time.
        compute: speed of compute relative to the workload's seconds, which are recorded or come
            from the cost model that the workload was made with.
        interference: share of its speed that compute loses while a transfer is in progress.
    """

    link: Link
    fast_bytes: int
    slow_bytes: int | None = None
    overlap: bool = True
    workers: int = 2
    compute: float = 1.0
    interference: float = 0.0

    def __post_init__(self) -> None:
        _require(self, "fast_bytes", self.fast_bytes > 0, "above 0 bytes")
        _require(self, "workers", self.workers >= 1, "at least 1")
        _require(self, "compute", self.compute > 0, "above 0")
        _require(self, "interference", 0 <= self.interference < 1, "from 0 up to below 1")
        if self.slow_bytes is not None:
            _require(self, "slow_bytes", self.slow_bytes >= 0, "from 0 bytes on")

    def with_fast(self, nbytes: int) -> Machine:
        """Return the same machine with other ``fast_bytes``."""
        return replace(self, fast_bytes=nbytes)


def _require(owner: object, name: str, holds: bool, wanted: str) -> None:
    if not holds:
        raise ConfigError(
            f"{type(owner).__name__.lower()}: {name} is {getattr(owner, name)!r}; it must be "
            f"{wanted}"
        )


_KINDS: dict[str, tuple[str, Any]] = {
    "bool": ("true or false", bool),
    "int": ("whole number", int),
    "int | None": ("whole number", int),
}
_BYTES = frozenset(("fast_bytes", "slow_bytes", "read_bps", "write_bps", "mixed_bps"))


def load_machines(path: Path) -> dict[str, Machine]:
    """Return the machines that a TOML file describes, by the name of their tier.

    The file has the attributes of `Machine` at the top, and those of `Link` in a table ``[link]``,
    or in tables ``[links.NAME]`` for alternative tiers. Such a table may also have its own
    ``slow_bytes``. Bytes and bytes per second may be strings such as ``"80GiB"``. Without
    ``mixed_bps`` a link is full-duplex. A table ``[compute]`` in place of the factor ``compute`` is
    for `load_costs`.

    Raises:
        ConfigError: the file cannot be read, a key is unknown or missing, or a value out of range.
    """
    document = _read(path)
    if isinstance(document.get("compute"), dict):
        del document["compute"]
    tables = document.pop("links", {})
    if "link" in document:
        tables = {"link": document.pop("link"), **tables}
    if not tables or not all(isinstance(table, dict) for table in tables.values()):
        raise ConfigError(f"{path} has no table [link] or [links.NAME] with read_bps and write_bps")
    found = {}
    for name, table in tables.items():
        where = f"{path} [{'link' if name == 'link' else f'links.{name}'}]"
        own = {key: table.pop(key) for key in ("slow_bytes",) if key in table}
        link = _made(Link, table, where)
        found[name] = _made(Machine, {**document, **own}, str(path), link=link)
    return found


def load_costs(path: Path) -> CostModel | None:
    """Return the cost model of the machine in a TOML file, None if it has none.

    It is a table ``[compute]`` with the keys of `CostModel.of`, for values from a data sheet, or
    with only the key ``model``: the path of a file written by `CostModel.save`, relative to the
    TOML file.

    Raises:
        ConfigError: the file cannot be read, a key is unknown or missing, or a value out of range.
    """
    table = _read(path).get("compute")
    if not isinstance(table, dict):
        return None
    where = f"{path} [compute]"
    if "model" not in table:
        return CostModel.of(table, where)
    if len(table) > 1 or not isinstance(table["model"], str):
        raise ConfigError(f"{where}: give either model, the path of a file, or the keys themselves")
    return CostModel.load(Path(path).parent / table["model"])


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read the machine of {path}: {why}") from error


def _made(kind: Any, table: dict[str, Any], where: str, **values: Any) -> Any:
    """Return a ``kind`` made of a table's checked entries and of ``values``."""
    known = {field.name: field for field in fields(kind) if field.name not in values}
    for key, value in table.items():
        if key not in known:
            raise ConfigError(
                f"{where}: {key!r} is no key of a {kind.__name__.lower()}: {', '.join(known)}"
            )
        if key in _BYTES and isinstance(value, str):
            value = parse_bytes(value)
        name, wanted = _KINDS.get(str(known[key].type), ("number", (int, float)))
        if wanted is int and isinstance(value, float) and value.is_integer():
            value = int(value)  # such as 1e12
        if not isinstance(value, wanted) or isinstance(value, bool) is not (wanted is bool):
            raise ConfigError(f"{where}: {key} is {value!r}, which is no {name}")
        values[key] = value
    lacking = [key for key, one in known.items() if one.default is MISSING and key not in table]
    if lacking:
        raise ConfigError(f"{where} lacks {' and '.join(lacking)}")
    try:
        return kind(**values)
    except ConfigError as error:
        said = str(error).removeprefix(f"{kind.__name__.lower()}: ")
        raise ConfigError(f"{where}: {said}") from None
