"""Compact summary of a trace: its calls, their activations, and the regions of each module.

It suffices for cutting a step into blocks and encoding it as blocks. Summaries are arrays:
thousands of them take as much memory as dozens of traces.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import count

import numpy as np
import numpy.typing as npt

from dynoffload.profiler.columns import Columns
from dynoffload.profiler.experts import split_path
from dynoffload.profiler.idioms import Idioms
from dynoffload.profiler.owners import forward_owners
from dynoffload.profiler.trace import Trace, owner_of

Ints = npt.NDArray[np.int64]
Small = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class CallSummary:
    """One step as arrays: C calls, R regions, P (module, region) pairs.

    Attributes:
        network: the model's fingerprint.
        source: the file or document the sample came from.
        step: number of the step.
        names: all names, each once; the arrays below hold indices into it.
        call_path: the module of each call, int32 ``[C]``.
        call_key: the shape key of each call, int32 ``[C]``.
        call_parent: the enclosing call of each, -1 for none, int32 ``[C]``.
        call_activations: bytes that forward left alive, without inner calls, int64 ``[C]``.
        call_idioms: idiom counts of forward, int64 ``[C, 6]``.
        owners: modules of owning calls (they used parameters in forward), int32.
        region: parameters, buffers, gradients and optimizer state, int32 ``[R]``.
        region_bytes: their sizes, int64 ``[R]``.
        owned: pairs of a module and a region that belongs to it, int32 ``[P, 2]``.
    """

    network: str
    source: str
    step: int
    names: tuple[str, ...]
    call_path: Small
    call_key: Small
    call_parent: Small
    call_activations: Ints
    call_idioms: Ints
    owners: Small
    region: Small
    region_bytes: Ints
    owned: Small

    @property
    def paths(self) -> list[str]:
        """The module of each call."""
        return [self.names[number] for number in self.call_path.tolist()]

    @property
    def keys(self) -> list[str]:
        """The shape key of each call."""
        return [self.names[number] for number in self.call_key.tolist()]

    @property
    def parents(self) -> list[int]:
        """The enclosing call of each, -1 for none."""
        return [int(parent) for parent in self.call_parent.tolist()]

    @cached_property
    def owner_paths(self) -> frozenset[str]:
        """The modules of owning calls."""
        return frozenset(self.names[number] for number in self.owners.tolist())

    def ran(self) -> list[tuple[str, ...]]:
        """Return, for each call, the modules with parameters that it ran, in order."""
        owners, paths, parents = self.owner_paths, self.paths, self.parents
        found: list[list[str]] = [[] for _ in paths]
        for index, path in enumerate(paths):
            if path in owners:
                above = index
                while above >= 0:
                    found[above].append(path)
                    above = parents[above]
        return [tuple(modules) for modules in found]


def summarize_calls(trace: Trace) -> CallSummary:
    """Return the summary of a trace.

    Forward operators count for the call they belong to; see `dynoffload.profiler.owners`. An
    activation is left alive if it outlives the run of consecutive operators, belonging to the same
    call, in which it was made. The experts of a fused layer share what its call cost, in equal
    parts, and each has one region: its slices of the parameters, gradients and state.
    """
    numbers: dict[str, int] = defaultdict(count().__next__)
    number = numbers.__getitem__

    calls, columns = trace.calls, Columns.of(trace.operators)
    owner = forward_owners(trace, columns)
    is_owned = owner >= 0
    idioms = np.zeros((len(calls), len(Idioms._fields)), dtype=np.int64)
    np.add.at(idioms, owner[is_owned], columns.idioms[is_owned])
    bounds = np.array([0, *(np.flatnonzero(np.diff(owner)) + 1).tolist(), len(owner)])
    row_ends = np.repeat(bounds[1:], np.diff(bounds))
    activations = np.zeros(len(calls), dtype=np.int64)
    for region in trace.regions:
        born, died = region.born, region.died
        if region.kind != "activation" or not 0 <= born < len(owner) or not is_owned[born]:
            continue
        if died < 0 or died >= row_ends[born]:
            activations[owner[born]] += region.nbytes
    regions = {r.name: r.nbytes for r in trace.regions if r.kind not in ("activation", "input")}
    fused = {name: trace.slices.get(name.partition(":")[0], 0) for name in regions}
    owners = {calls[index].path: None for index in np.unique(owner[is_owned]).tolist()}
    user = np.repeat(owner, np.diff(columns.stops))
    pairs = np.unique(np.stack((user, columns.used), axis=1)[user >= 0], axis=0).tolist()
    owned = {(calls[call].path, trace.regions[used].name): None for call, used in pairs}
    owned = {pair: None for pair in owned if pair[1] in regions}
    for region in trace.regions:
        path = owner_of(region)
        if path is not None:
            owned[path, region.name] = None
    _split_experts(trace, fused, regions, owners, owned, activations, idioms)

    def small(values: Iterable[int]) -> Small:
        return np.fromiter(values, dtype=np.int32)

    return CallSummary(
        network=trace.network,
        source=trace.source,
        step=trace.step,
        call_path=small(number(call.path) for call in calls),
        call_key=small(number(call.shape_key) for call in calls),
        call_parent=small(call.parent for call in calls),
        call_activations=activations,
        call_idioms=idioms,
        owners=small(number(path) for path in owners),
        region=small(number(name) for name in regions),
        region_bytes=np.array([*regions.values()], dtype=np.int64),
        owned=small(number(name) for pair in owned for name in pair).reshape(-1, 2),
        names=tuple(numbers),
    )


def _split_experts(
    trace: Trace,
    fused: Mapping[str, int],
    regions: dict[str, int],
    owners: dict[str, None],
    owned: dict[tuple[str, str], None],
    activations: Ints,
    idioms: Ints,
) -> None:
    """Put the experts that ran in the place of fused layers, in what is known of a step.

    Args:
        trace: of the step.
        fused: region -> number of its slices, 0 if it is not fused.
        regions: region -> bytes.
        owners: modules of owning calls.
        owned: pairs of a module and a region.
        activations: of each call.
        idioms: of each call.
    """
    slice_bytes: dict[str, int] = defaultdict(int)  # layer -> bytes of one expert
    for path, name in [pair for pair in owned if fused[pair[1]]]:
        slice_bytes[path] += regions[name] // fused[name]
        del owned[path, name]
    for name in filter(fused.get, fused):
        del regions[name]
    others = {path for path, _ in owned}
    for path in slice_bytes.keys() - others:
        owners.pop(path, None)
    ran: dict[int, list[int]] = defaultdict(list)
    for index, call in enumerate(trace.calls):
        site = split_path(call.path)[0]
        if site in slice_bytes and call.parent >= 0 and trace.calls[call.parent].path == site:
            ran[call.parent].append(index)
            regions[call.path] = slice_bytes[site]
            owners[call.path] = owned[call.path, call.path] = None
    for layer, experts in ran.items():
        for costs in (activations, idioms):
            costs[experts] = costs[layer] // len(experts)
            costs[layer] = 0
