"""Converts traces to a workload: regions, and each step's reference string, operator by operator.

[Note: names across steps]  Parameters, buffers and optimizer state are the same regions in all
steps. So are gradients, which each step creates again and frees at its end. Other regions are
identified by the operator that creates them: its phase, site, name, the number of earlier
occurrences in the step, and which of its results it is. So the same place in two steps is one
region, whose size may differ between steps.

[Note: lists of tensors]  An optimizer's foreach or fused operator works on all parameters in one
call, one after the other. It becomes one use for each parameter, with a share of the seconds by
bytes, since no parameter needs the others to be resident. If such calls create one temporary for
each parameter, each temporary belongs to its parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dynoffload.errors import TraceError
from dynoffload.planning.schedule import Use
from dynoffload.profiler.costs import CostModel
from dynoffload.profiler.trace import Operator, Phase, RegionInfo, Trace

_PERSISTENT = frozenset(("parameter", "buffer", "state"))


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        uses: its operators that touch data, in order.
        sizes: bytes of the regions that this step creates or is given.
        phases: positions of forward, backward and optimizer, as half-open ranges.
        given: regions that exist before the step, such as the sample.
    """

    uses: tuple[Use, ...]
    sizes: Mapping[int, int]
    phases: Mapping[Phase, tuple[int, int]]
    given: tuple[int, ...]


@dataclass
class Workload:
    """Steps of one training run.

    Attributes:
        names: names of the regions, by index.
        kinds: kinds of the regions, as `RegionInfo.kind`.
        sizes: bytes of the regions; the largest, if they vary.
        steps: the steps in order.
    """

    names: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    @property
    def persistent(self) -> list[int]:
        """The regions that exist before the first step and after the last."""
        return [index for index, kind in enumerate(self.kinds) if kind in _PERSISTENT]

    @property
    def seconds(self) -> float:
        """Seconds of all uses together."""
        return sum(use.seconds for step in self.steps for use in step.uses)

    def peak(self, step: Step) -> int:
        """Return the peak bytes alive in ``step`` if nothing were evicted."""
        alive = sum(self.sizes[region] for region in self.persistent)
        alive += sum(step.sizes[region] for region in step.given)
        peak = alive
        here: set[int] = set(step.given)
        for use in step.uses:
            fresh = [region for region in use.creates if region not in here]
            here.update(fresh)
            alive += sum(step.sizes[region] for region in fresh)
            peak = max(peak, alive)
            gone = [region for region in use.frees if region in here]
            here.difference_update(gone)
            alive -= sum(step.sizes[region] for region in gone)
        return peak


def spread(parts: Sequence[Any], whole: float) -> tuple[Any, ...]:
    """Return ``parts`` with their seconds scaled to the sum ``whole``: missing time is added to all
    evenly; excess, as where a recorder slowed them down, is removed proportionally."""
    taken = sum(part.seconds for part in parts)
    shorter = min(1.0, whole / taken) if taken else 1.0
    between = max(0.0, whole - taken) / max(1, len(parts))
    return tuple(replace(part, seconds=part.seconds * shorter + between) for part in parts)


def workload(traces: Iterable[Trace], costs: CostModel | None = None) -> Workload:
    """Return the workload that ``traces`` recorded.

    Args:
        traces: traces of one network.
        costs: cost model of the simulated machine; without it uses take the recorded seconds.

    Raises:
        TraceError: there is no trace, they are of different networks, or ``costs`` are given and
            a trace lacks FLOPs.
        ConfigError: ``costs`` have no peak for a dtype that a trace computes in.
    """
    made = Workload()
    known: dict[Hashable, int] = {}
    network = ""
    for trace in traces:
        if network and trace.network != network:
            raise TraceError(
                f"traces of two networks: step {trace.step} is of {trace.network[:12]}, those "
                f"before it of {network[:12]}; keep the traces of each in a directory of its own"
            )
        network = trace.network
        made.steps.append(_Reader(trace, made, known).step(_seconds(trace, costs)))
    if not network:
        raise TraceError("no traces to make a workload of: profile some samples first")
    return made


def _seconds(trace: Trace, costs: CostModel | None) -> Sequence[float]:
    """Return the seconds of each operator."""
    if costs is None:
        return [operator.seconds for operator in trace.operators]
    return costs.time(trace).operators


def _parameter_of(region: RegionInfo) -> str:
    """Return the parameter that a region belongs to, "" for none."""
    belongs = region.kind in ("parameter", "gradient", "state")
    return region.name.partition(":")[0] if belongs else ""


class _Reader:
    """Converts one trace to a step."""

    def __init__(self, trace: Trace, made: Workload, known: dict[Hashable, int]) -> None:
        self._trace, self._made, self._known = trace, made, known
        self._index: dict[int, int] = {}  # region of the trace -> region of the workload
        self._sizes: dict[int, int] = {}
        self._given: list[int] = []
        self._parameter: dict[int, str] = {}  # region of the trace -> its parameter

    def step(self, seconds: Sequence[float]) -> Step:
        """Return the step, with these ``seconds`` for each operator."""
        trace = self._trace
        last = self._last_uses()
        alive: set[int] = set()
        seen: Counter[Hashable] = Counter()
        uses: list[Use] = []
        spans: dict[Phase, tuple[int, int]] = {}
        glue = 0.0  # seconds of operators that touch no data
        for number, operator in enumerate(trace.operators):
            touched = tuple(dict.fromkeys((*operator.reads, *operator.writes)))
            if not touched:
                glue += seconds[number]
                continue
            place = (operator.phase, operator.site, operator.name)
            key = (*place, seen[place])
            seen[place] += 1
            for result, region in enumerate(touched):
                self._region(region, key, result)
            parts = self._parts(operator, touched)
            whole = sum(self._bytes(part) for part in parts)
            ends, written = set(last.get(number, ())), set(operator.writes)
            start, _ = spans.setdefault(operator.phase, (len(uses), 0))
            for part in parts:
                indices = tuple(self._index[region] for region in part)
                created = [
                    self._index[region]
                    for region in part
                    if self._index[region] not in alive and not self._was_there(region)
                ]
                alive.update(indices)
                frees = tuple(self._index[region] for region in part if region in ends)
                alive.difference_update(frees)
                share = self._bytes(part) / whole if whole else 1 / len(parts)
                uses.append(
                    Use(
                        regions=indices,
                        creates=tuple(created),
                        frees=frees,
                        seconds=seconds[number] * share + glue,
                        writes=tuple(self._index[r] for r in part if r in written),
                    )
                )
                glue = 0.0
            spans[operator.phase] = start, len(uses)
        return Step(tuple(uses), self._sizes, spans, tuple(self._given))

    def _bytes(self, regions: Iterable[int]) -> int:
        return sum(self._trace.regions[region].nbytes for region in regions)

    def _parts(self, operator: Operator, touched: Sequence[int]) -> list[tuple[int, ...]]:
        """Return ``touched``, divided by parameter if possible; see [Note: lists of tensors]."""
        if "_foreach_" not in operator.name and "_fused_" not in operator.name:
            return [tuple(touched)]
        parts: dict[str, list[int]] = {}
        others = []
        for region in touched:
            name = self._parameter.get(region) or _parameter_of(self._trace.regions[region])
            if name:
                self._parameter[region] = name
                parts.setdefault(name, []).append(region)
            else:
                others.append(region)
        if len(others) == len(parts):  # temporaries, one for each parameter
            for name, region in zip(tuple(parts), others, strict=True):
                self._parameter[region] = name
                parts[name].append(region)
        elif others:
            return [tuple(touched)]
        return [tuple(part) for part in parts.values()]

    def _was_there(self, region: int) -> bool:
        info = self._trace.regions[region]
        return info.kind in _PERSISTENT or info.born < 0

    def _region(self, region: int, key: Hashable, result: int) -> int:
        if region in self._index:
            return self._index[region]
        info = self._trace.regions[region]
        made = self._made
        named = info.kind in _PERSISTENT or info.kind == "gradient"
        name: Hashable = (info.kind, info.name) if named else (key, result)
        index = self._known.get(name)
        if index is None:
            index = self._known[name] = len(made.names)
            made.names.append(info.name)
            made.kinds.append(info.kind)
            made.sizes.append(0)
        made.sizes[index] = max(made.sizes[index], info.nbytes)
        self._index[region] = index
        if info.kind not in _PERSISTENT:
            self._sizes[index] = info.nbytes
            if info.born < 0:
                self._given.append(index)
        return index

    def _last_uses(self) -> dict[int, list[int]]:
        """Return for each operator the regions that are dead after it.

        Regions that outlive the step, but are created again in each, end with their last use.
        """
        trace = self._trace
        last: dict[int, int] = {}
        for number, operator in enumerate(trace.operators):
            for region in (*operator.reads, *operator.writes):
                last[region] = number
        found: dict[int, list[int]] = {}
        for region, number in last.items():
            if trace.regions[region].kind not in _PERSISTENT:
                found.setdefault(number, []).append(region)
        return found


def persistent_part(use: Use, step: Step) -> Use:
    """Return ``use`` of ``step`` without the regions that the step creates or is given."""
    regions = tuple(region for region in use.regions if region not in step.sizes)
    writes = tuple(region for region in use.writes if region not in step.sizes)
    return Use(regions, writes=writes, seconds=use.seconds)
