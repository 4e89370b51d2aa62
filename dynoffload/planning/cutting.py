"""Cutting programs into blocks: where no sample decides anything, and small enough to move.

What it is: `build_vocabulary`, which finds the *atomic* modules of a network in the programs of its
samples and makes their calls the blocks. What it is not: aware of how samples follow one another,
or of transfer times.

[Note: Atomic]
The outline of a call is the sequence of modules with parameters that it runs. A module is atomic if

* all its calls have one outline; where one sample calls it many times, all calls of one variant.
  A variant is the shape key of the call; of more than `MAX_VARIANTS` the rarest share one, ``""``;
* what it uses (parameters, gradients, optimizer state, buffers) fits in an eighth of the budget,
  so that a block can be worked on while the ones after it arrive; in half of it if one forward
  calls the module many times, as then the next block most likely uses the same regions;
* it is not the root.

Blocks are the calls of the highest atomic modules. So a mixture of experts of which any sample
skipped one expert is never one block: its outline differs. A module that is not atomic but has
parameters of its own gets a block for those alone, and so does one without inner modules, however
large it is: it cannot be cut.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dynoffload.errors import PilotError
from dynoffload.planning.blocks import Block, Vocabulary
from dynoffload.profiler.idioms import Idioms
from dynoffload.profiler.program import Program
from dynoffload.profiler.trace import Phase, owner_of

MAX_VARIANTS = 16
"""The most variants of one module that are told apart."""
BUDGET_SHARE = 8
"""A block's regions fit in the budget divided by this, ..."""
LOOP_SHARE = 2
"""... or by this if one forward calls the module many times."""

_Outline = tuple[str, ...]


@dataclass
class _Module:
    """What the calls of one module showed over all programs."""

    keys: Counter[str] = field(default_factory=Counter)
    """shape key -> number of calls"""
    outlines: dict[str, set[_Outline]] = field(default_factory=lambda: defaultdict(set))
    """shape key -> the outlines its calls had"""
    inner: set[str] = field(default_factory=set)
    """modules with parameters that some call ran, itself included"""
    repeated: bool = False
    """whether one forward called it more than once"""

    @property
    def share(self) -> int:
        """What the budget is divided by to give the limit of its size."""
        return LOOP_SHARE if self.repeated else BUDGET_SHARE

    def variants(self) -> dict[str, str]:
        """Return the variant of each shape key."""
        if not self.repeated:
            return dict.fromkeys(self.keys, "")
        ranked = sorted(self.keys, key=lambda key: (-self.keys[key], key))
        apart = len(ranked) if len(ranked) <= MAX_VARIANTS else MAX_VARIANTS - 1
        return {key: key if rank < apart else "" for rank, key in enumerate(ranked)}

    def decides_nothing(self) -> bool:
        """Return whether all calls of one variant have one outline."""
        by_variant: dict[str, set[_Outline]] = defaultdict(set)
        for key, variant in self.variants().items():
            by_variant[variant] |= self.outlines[key]
        return all(len(outlines) == 1 for outlines in by_variant.values())


@dataclass
class _Seen:
    """What the calls of one block showed."""

    visits: tuple[str, ...]
    programs: set[int] = field(default_factory=set)
    calls: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    activation_bytes: int = 0
    idioms: Counter[Idioms] = field(default_factory=Counter)


def build_vocabulary(programs: Sequence[Program], budget: int | None = None) -> Vocabulary:
    """Return the blocks of the network that ``programs`` ran.

    Args:
        programs: one or more samples of one network.
        budget: bytes of fast memory; without it blocks are limited by decisions alone.

    Raises:
        PilotError: if there are no programs, or they are of different networks.
    """
    if not programs:
        raise PilotError("no programs to build a vocabulary from: profile some samples first")
    network = programs[0].network
    for program in programs:
        if program.network != network:
            raise PilotError(
                f"programs of two networks, {network[:12]} and {program.network[:12]} "
                f"(source {program.source!r}, step {program.step}): give traces of one"
            )
    outlines = [_outlines(program) for program in programs]
    modules = _modules(programs, outlines)
    sizes, owned = _regions(programs)
    atomic = {
        path
        for path, module in modules.items()
        if path
        and module.inner
        and module.decides_nothing()
        and (budget is None or _bytes(module.inner, owned, sizes) <= budget // module.share)
    }
    variants = {path: module.variants() for path, module in modules.items()}
    seen: dict[tuple[str, str], _Seen] = {}
    for number, program in enumerate(programs):
        _look(program, number, outlines[number], atomic, variants, seen)
    blocks = []
    for index, ((path, variant), block) in enumerate(seen.items()):
        regions = dict.fromkeys(name for owner in block.visits for name in owned[owner])
        blocks.append(
            Block(
                index=index,
                path=path,
                variant=variant,
                visits=block.visits,
                regions=tuple(regions),
                nbytes=sum(sizes[name] for name in regions),
                activation_bytes=block.activation_bytes,
                forward_s=block.forward_s / block.calls,
                backward_s=block.backward_s / block.calls,
                idioms=block.idioms.most_common(1)[0][0],
                optional=len(block.programs) < len(programs),
            )
        )
    repeated = {path for path, _ in seen if modules[path].repeated}
    return Vocabulary(network, tuple(blocks), frozenset(repeated))


def _owners(program: Program) -> set[str]:
    """Return the modules that used parameters of their own in forward."""
    return {visit.path for visit in program.visits if visit.phase is Phase.FORWARD}


def _outlines(program: Program) -> list[_Outline]:
    """Return the outline of each call, see [Note: Atomic]."""
    owners = _owners(program)
    found: list[list[str]] = [[] for _ in program.calls]
    for index, call in enumerate(program.calls):
        if call.path in owners:
            above = index
            while above >= 0:
                found[above].append(call.path)
                above = program.calls[above].parent
    return [tuple(outline) for outline in found]


def _modules(
    programs: Sequence[Program], outlines: Sequence[Sequence[_Outline]]
) -> dict[str, _Module]:
    """Gather what the calls of each module showed."""
    modules: dict[str, _Module] = {}
    for program, found in zip(programs, outlines, strict=True):
        times: Counter[tuple[int, str]] = Counter()
        roots: list[int] = []
        for index, (call, outline) in enumerate(zip(program.calls, found, strict=True)):
            roots.append(index if call.parent < 0 else roots[call.parent])
            times[roots[-1], call.path] += 1
            module = modules.setdefault(call.path, _Module())
            module.keys[call.shape_key] += 1
            module.outlines[call.shape_key].add(outline)
            module.inner.update(outline)
        for (_, path), count in times.items():
            modules[path].repeated |= count > 1
    return modules


def _regions(programs: Iterable[Program]) -> tuple[dict[str, int], dict[str, dict[str, None]]]:
    """Return the largest size of each region, and the regions of each module with parameters.

    To a module belong its parameters with their gradients and state, and what its visits used:
    buffers, and parameters of others that it is tied to.
    """
    sizes: dict[str, int] = {}
    owned: dict[str, dict[str, None]] = defaultdict(dict)
    for program in programs:
        for visit in program.visits:
            if visit.phase is not Phase.OPTIMIZER:
                owned[visit.path].update(dict.fromkeys(visit.regions))
        for name, region in program.regions.items():
            sizes[name] = max(region.nbytes, sizes.get(name, 0))
            owner = owner_of(region)
            if owner is not None:
                owned[owner][name] = None
    return sizes, owned


def _bytes(
    paths: Iterable[str], owned: Mapping[str, Mapping[str, None]], sizes: Mapping[str, int]
) -> int:
    """Return the bytes of all regions of some modules."""
    return sum(sizes[name] for name in {name for path in paths for name in owned.get(path, ())})


@dataclass
class _Cost:
    """What one call cost, the calls inside it not counted."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    activation_bytes: int = 0
    idioms: Idioms = field(default_factory=Idioms)


def _look(
    program: Program,
    number: int,
    outlines: Sequence[_Outline],
    atomic: set[str],
    variants: Mapping[str, Mapping[str, str]],
    seen: dict[tuple[str, str], _Seen],
) -> None:
    """Add what the calls of one program show of the blocks."""
    owners = _owners(program)
    opened: dict[int, _Seen] = {}
    totals: dict[int, _Cost] = {}
    opener: list[int] = []  # the call that opened the atomic block around this one, or -1
    for index, (call, cost) in enumerate(zip(program.calls, _costs(program), strict=True)):
        within = opener[call.parent] if call.parent >= 0 else -1
        if within < 0 and outlines[index] and (call.path in atomic or call.path in owners):
            whole = call.path in atomic
            key = (call.path, variants[call.path][call.shape_key])
            visits = outlines[index] if whole else (call.path,)
            opened[index] = seen.setdefault(key, _Seen(visits))
            totals[index] = cost
            opener.append(index if whole else -1)
            continue
        opener.append(within)
        if within >= 0:
            total = totals[within]
            total.forward_s += cost.forward_s
            total.backward_s += cost.backward_s
            total.activation_bytes += cost.activation_bytes
            total.idioms = total.idioms.plus(cost.idioms)
    for index, block in opened.items():
        total = totals[index]
        block.programs.add(number)
        block.calls += 1
        block.forward_s += total.forward_s
        block.backward_s += total.backward_s
        block.activation_bytes = max(block.activation_bytes, total.activation_bytes)
        block.idioms[total.idioms] += 1


def _costs(program: Program) -> list[_Cost]:
    """Return the cost of each call.

    A visit of forward belongs to the last call of its module that began before the visit ended.
    Visits of backward do not say to which call they belong; those of one module and variant are
    shared out evenly.
    """
    costs = [_Cost() for _ in program.calls]
    calls_of: dict[str, list[int]] = defaultdict(list)
    for index, call in enumerate(program.calls):
        calls_of[call.path].append(index)
    backward: dict[tuple[str, str], float] = defaultdict(float)
    for visit in program.visits:
        calls = calls_of.get(visit.path)
        if calls is None or visit.phase is Phase.OPTIMIZER:
            continue
        if visit.phase is Phase.BACKWARD:
            backward[visit.path, visit.variant] += visit.seconds
            continue
        began = bisect_left(calls, visit.operators[1], key=lambda i: program.calls[i].start)
        cost = costs[calls[max(began - 1, 0)]]
        cost.forward_s += visit.seconds
        cost.activation_bytes += visit.activation_bytes
        cost.idioms = cost.idioms.plus(visit.idioms)
    for (path, variant), seconds in backward.items():
        alike = [i for i in calls_of[path] if program.calls[i].shape_key == variant]
        for index in alike or calls_of[path]:
            costs[index].backward_s += seconds / len(alike or calls_of[path])
    return costs
