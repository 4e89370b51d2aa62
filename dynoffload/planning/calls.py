"""The summary of a program: its calls, what each left alive, and the regions of each module.

Cutting a program into blocks, and reading it as blocks, need no more. Outlines are arrays:
thousands fit where dozens of programs do.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import count

import numpy as np
import numpy.typing as npt

from dynoffload.profiler.idioms import Idioms
from dynoffload.profiler.program import Program
from dynoffload.profiler.trace import Phase, owner_of

Ints = npt.NDArray[np.int64]
Small = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class CallSummary:
    """What a program ran, as arrays; C calls, R regions, P pairs of a module and a region.

    Attributes:
        network: the model's fingerprint.
        source: which file or document the sample came from.
        step: number of the step.
        names: all names, each once; the arrays below name by their place here.
        call_path: the module of each call, int32 ``[C]``.
        call_key: the shape key of each call, int32 ``[C]``.
        call_parent: the enclosing call of each, -1 for none, int32 ``[C]``.
        call_activations: bytes that forward left alive, calls inside not counted, int64 ``[C]``.
        call_idioms: of forward, int64 ``[C, 6]``.
        owners: modules that used parameters of their own in forward, int32.
        region: parameters, buffers, gradients and optimizer state, int32 ``[R]``.
        region_bytes: their sizes, int64 ``[R]``.
        owned: a module and a region that belongs to it, int32 ``[P, 2]``.
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
        """The modules that used parameters of their own in forward."""
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


_LARGEST = 2**62


def summarize_calls(program: Program) -> CallSummary:
    """Return the summary of a program.

    A visit of forward belongs to the last call of its module that began before the visit ended.
    """
    numbers: dict[str, int] = defaultdict(count().__next__)
    number = numbers.__getitem__

    calls = program.calls
    activations = [0] * len(calls)
    idioms = np.zeros((len(calls), len(Idioms._fields)), dtype=np.int64)
    calls_of: dict[str, list[int]] = defaultdict(list)
    for index, call in enumerate(calls):
        calls_of[call.path].append(index)
    owners: dict[str, None] = {}
    owned: dict[tuple[str, str], None] = {}
    for visit in program.visits:
        if visit.phase is Phase.OPTIMIZER:
            continue
        owned.update(dict.fromkeys((visit.path, region) for region in visit.regions))
        if visit.phase is not Phase.FORWARD:
            continue
        owners[visit.path] = None
        of_module = calls_of.get(visit.path)
        if of_module is None:
            continue
        began = bisect_left(of_module, visit.operators[1], key=lambda i: calls[i].start)
        index = of_module[max(began - 1, 0)]
        activations[index] += visit.activation_bytes
        idioms[index] += visit.idioms
    for name, region in program.regions.items():
        owner = owner_of(region)
        if owner is not None:
            owned[owner, name] = None

    def small(values: Iterable[int]) -> Small:
        return np.fromiter(values, dtype=np.int32)

    return CallSummary(
        network=program.network,
        source=program.source,
        step=program.step,
        call_path=small(number(call.path) for call in calls),
        call_key=small(number(call.shape_key) for call in calls),
        call_parent=small(call.parent for call in calls),
        # Of a trace that is not right, they may be more than a number holds.
        call_activations=np.array([min(nbytes, _LARGEST) for nbytes in activations], np.int64),
        call_idioms=idioms,
        owners=small(number(path) for path in owners),
        region=small(number(name) for name in program.regions),
        region_bytes=np.array([r.nbytes for r in program.regions.values()], dtype=np.int64),
        owned=small(number(name) for pair in owned for name in pair).reshape(-1, 2),
        names=tuple(numbers),
    )
