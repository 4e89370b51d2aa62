"""Cost model: predicts an operator's seconds on a machine from a roofline and an overhead.

It is fitted to traces (`dynoffload.profiler.cost_fitting`) or written from a data sheet, and stored
as JSON. Operators run one after the other; time between operators is not modelled.

[Note: seconds of an operator]
By its `Kind`:

    call      overhead
    memory    overhead + bytes / bandwidth
    product   overhead + max((flops + half_intensity * bytes) / peak, bytes / bandwidth)

This is the roofline of Williams, Waterman and Patterson (2009) with two additions. *Half
intensity*: products with few FLOPs per byte, such as those of few rows, run below the peak although
they are not memory-bound. A product with ``half_intensity`` FLOPs per byte reaches half the peak;
at 0 the model is the plain roofline. *Factors*: kernels of one kind differ; drawing random numbers
takes many times as long as adding. So each operator seen in the fit has two factors, on the
overhead and on the rest; all others have 1 and 1. ``dynoffload experiment costs`` measures the
accuracy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from dynoffload.errors import ConfigError, TraceError
from dynoffload.profiler.trace import Operator, Phase, Trace
from dynoffload.units import parse_bytes

FORMAT = "dynoffload.costs"
VERSION = 1


class Kind(str, Enum):
    """What bounds an operator."""

    CALL = "call"
    """The call itself: it touches no data, such as a view."""
    MEMORY = "memory"
    """The bytes it reads and writes."""
    PRODUCT = "product"
    """Its arithmetic or its bytes: matrix products, convolutions, attention."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one executed operator, independent of the machine.

    Attributes:
        name: as `Operator.name`.
        dtype: as `Operator.dtype`.
        flops: floating-point operations; None if unknown.
        nbytes: bytes it reads and writes.
    """

    name: str
    dtype: str
    flops: int | None
    nbytes: int

    @property
    def kind(self) -> Kind:
        """What bounds it; unknown FLOPs count as nonzero."""
        if self.flops != 0:
            return Kind.PRODUCT
        return Kind.MEMORY if self.nbytes else Kind.CALL


def work_of(operator: Operator) -> Work:
    """Return the work of ``operator``."""
    nbytes = operator.bytes_read + operator.bytes_written
    return Work(operator.name, operator.dtype, operator.flops, nbytes)


class Factors(NamedTuple):
    """Multipliers of one operator, relative to its kind."""

    overhead: float = 1.0
    rest: float = 1.0


_NONE = Factors()


@dataclass(frozen=True)
class Timing:
    """Predicted time of a step.

    Attributes:
        operators: seconds of each operator, in the order of the trace.
        phases: seconds of each phase.
    """

    operators: tuple[float, ...]
    phases: Mapping[Phase, float]

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return sum(self.phases.values())


@dataclass(frozen=True)
class CostModel:
    """Cost parameters of one machine; see [Note: seconds of an operator].

    Attributes:
        peak: FLOP per second of large products, by dtype, such as ``{"float32": 1.5e11}``.
        bandwidth: bytes per second of the memory that operators use.
        overhead: seconds of a call, by kind.
        half_intensity: FLOP per byte at which a product reaches half of the peak.
        operators: factors of individual operators, by name.
        source: free text: what it was fitted to or copied from.
    """

    peak: Mapping[str, float]
    bandwidth: float
    overhead: Mapping[Kind, float]
    half_intensity: float = 0.0
    operators: Mapping[str, Factors] = field(default_factory=dict)
    source: str = ""

    def __post_init__(self) -> None:
        for dtype, value in _table(self.peak, "peak").items():
            _check(value, f"peak of {dtype}", above=True)
        _check(self.bandwidth, "bandwidth", above=True)
        for kind in Kind:
            if kind not in self.overhead:
                raise ConfigError(f"overhead lacks {kind.value!r}: seconds of such a call")
            _check(self.overhead[kind], f"overhead of a {kind.value}")
        _check(self.half_intensity, "half_intensity")
        for name, factors in self.operators.items():
            for factor in factors:
                _check(factor, f"a factor of {name}", above=True)
        if not isinstance(self.source, str):
            raise ConfigError(f"source is {self.source!r}, which is no text")

    def seconds(self, work: Work) -> float:
        """Return the predicted seconds of ``work``.

        Raises:
            TraceError: its FLOPs are unknown.
            ConfigError: the model has no peak for its dtype.
        """
        kind = work.kind
        own = self.operators.get(work.name, _NONE)
        return own.overhead * self.overhead[kind] + own.rest * self.rest(work)

    def rest(self, work: Work) -> float:
        """Return the seconds of ``work`` beyond its overhead, before the operator's factor."""
        moving = work.nbytes / self.bandwidth
        if work.kind is not Kind.PRODUCT:
            return moving
        if work.flops is None:
            raise TraceError(
                f"FLOPs of {work.name} are not known: the trace is of an older release, or the"
                " operator had arguments that have no formula; record it again with"
                " `dynoffload profile`"
            )
        peak = self.peak.get(work.dtype)
        if peak is None:
            known = ", ".join(self.peak) or "no dtype"
            source = f" ({self.source})" if self.source else ""
            raise ConfigError(
                f"the cost model{source} has no peak for {work.dtype or 'no dtype'}, in"
                f" which {work.name} runs; it has one for {known}: fit it to traces with such"
                " products, or write the peak into it"
            )
        return max((work.flops + self.half_intensity * work.nbytes) / peak, moving)

    def time(self, trace: Trace) -> Timing:
        """Return the predicted time of a trace's operators, run one after the other.

        Raises:
            TraceError: FLOPs of a product are unknown; names the trace.
            ConfigError: as for `seconds`.
        """
        operators: list[float] = []
        phases = dict.fromkeys(Phase, 0.0)
        known: dict[Work, float] = {}
        try:
            for operator in trace.operators:
                work = work_of(operator)
                took = known.get(work)
                if took is None:
                    took = known[work] = self.seconds(work)
                operators.append(took)
                phases[operator.phase] += took
        except TraceError as error:
            raise TraceError(f"{described(trace)}: {error}") from None
        return Timing(tuple(operators), phases)

    # As text ----------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write the model to ``path`` as JSON.

        Raises:
            ConfigError: it cannot be written.
        """
        plain = {"format": FORMAT, "version": VERSION, **asdict(self)}
        plain["overhead"] = {kind.value: self.overhead[kind] for kind in Kind}
        plain["operators"] = {name: list(f) for name, f in sorted(self.operators.items())}
        try:
            Path(path).write_text(json.dumps(plain, indent=2, allow_nan=False) + "\n", "utf-8")
        except OSError as error:
            raise ConfigError(
                f"{path}: the cost model cannot be written ({error.strerror or error})"
            ) from error

    @classmethod
    def load(cls, path: Path) -> CostModel:
        """Read a model that `save` wrote, or one written by hand in the same format.

        Raises:
            ConfigError: the file is missing, not a cost model, of another version, or a value is
                out of range.
        """
        try:
            plain = json.loads(Path(path).read_text("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"{path}: no cost model can be read there ({why})") from error
        if not isinstance(plain, dict) or plain.pop("format", None) != FORMAT:
            raise ConfigError(f"{path}: is no cost model; `CostModel.save` writes one")
        version = plain.pop("version", None)
        if version != VERSION:
            raise ConfigError(f"{path}: is of version {version!r}; this release reads {VERSION}")
        return cls.of(plain, str(path))

    @classmethod
    def of(cls, table: Mapping[str, Any], where: str) -> CostModel:
        """Return the model described by a table from JSON or TOML.

        The keys are the attributes. ``overhead`` is a table by kind, or one number for all kinds;
        ``bandwidth`` may be a string such as ``"3.35TB"``. From a data sheet:

            peak = { bfloat16 = 989e12, float32 = 67e12 }
            bandwidth = "3.35TB"
            overhead = 5e-6

        Args:
            table: the table to read.
            where: its name in error messages.

        Raises:
            ConfigError: a key is unknown or missing, or a value is of a wrong type or out of range.
        """
        known = cls.__dataclass_fields__
        kinds = {kind.value: kind for kind in Kind}
        try:
            for key in table:
                if key not in known:
                    raise ConfigError(f"{key!r} is no key of a cost model: {', '.join(known)}")
            for key in ("peak", "bandwidth", "overhead"):
                if key not in table:
                    raise ConfigError(f"it lacks {key}")
            values = dict(table)
            if isinstance(values["bandwidth"], str):
                values["bandwidth"] = parse_bytes(values["bandwidth"])
            overhead = values["overhead"]
            if not isinstance(overhead, Mapping):
                overhead = dict.fromkeys(kinds, overhead)
            if unknown := overhead.keys() - kinds.keys():
                raise ConfigError(f"overhead has {min(unknown)!r}, which is none of {list(kinds)}")
            values["overhead"] = {kinds[name]: value for name, value in overhead.items()}
            factors = _table(values.get("operators", {}), "operators")
            for name, pair in factors.items():
                if not isinstance(pair, list | tuple) or len(pair) != 2:
                    raise ConfigError(
                        f"{name} has {pair!r}; give two factors, of overhead and rest"
                    )
            values["operators"] = {name: Factors(*pair) for name, pair in factors.items()}
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None


def described(trace: Trace) -> str:
    """Return a step's number and source, for messages."""
    return f"step {trace.step}" + (f" of {trace.source}" if trace.source else "")


def _table(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what} is no table, but {value!r}")
    return value


def _check(value: object, what: str, *, above: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and value < 1e300
    if not number or not (value > 0 if above else value >= 0):  # type: ignore[operator]
        least = "above 0" if above else "of 0 or above"
        raise ConfigError(f"{what} is {value!r}; it must be a number {least}")
